"""The schedule that needs the least memory, whatever it costs.

For saying what the smallest feasible budget is, and for a step that must run before anything is known. The budget is
lowered by bisection between what no schedule can go below and what was reached; at each, every family of schedules
is tried. Recomputation may cost several times the program, but not without bound.
"""

from __future__ import annotations

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.explore import Families, lower_bound_bytes, try_all
from torch_odt.planning.problem import Gradients, Problem, forget_problems, problem_of
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.search import Footprint, Search, Trial, Work

_PRECISION = 0.004
_ROUNDS = 14
# A few seconds' worth for a network of a few hundred operators. Ten times as many find one percent at best.
_MOST_STEPS = 50_000
_PACKED_TRIALS = 6
_REMEMBERED = 4
# A refused budget asks for the smallest one right after planning has looked for it.
_RECENT: list[tuple[Problem, list[Trial]]] = []


def smallest(
    graph: TrainingGraph,
    costs: Costs,
    *,
    footprint: Footprint | None = None,
    gradients: Gradients = "keep",
) -> tuple[Schedule, int]:
    """The schedule with the fewest bytes that any planner finds, and those bytes.

    Args:
        graph, costs: the step and what its ops cost.
        footprint: what a schedule really takes, when that is more than its live bytes: an arena with gaps, and what
            leaves the step on top of it.
        gradients: whether this step's gradients stay ("keep") or are added to existing ones ("accumulate").
    """
    problem = problem_of(graph, costs, gradients, apart=footprint is not None)
    trials = _remembered(problem) or smallest_trials(problem)
    _RECENT[:] = [(problem, trials), *(entry for entry in _RECENT if entry[0] is not problem)][:_REMEMBERED]
    if footprint is None:
        return trials[0].built.schedule(problem, "smallest"), trials[0].peak_bytes
    schedules = [trial.built.schedule(problem, "smallest") for trial in trials[:_PACKED_TRIALS]]
    sized = [(footprint(schedule), position) for position, schedule in enumerate(schedules)]
    needed, position = min(sized)
    return schedules[position], needed


def forget_trials() -> None:
    """Let go of the trials and problems that are remembered, once planning is over."""
    _RECENT.clear()
    forget_problems()


def _remembered(problem: Problem) -> list[Trial]:
    return next((trials for known, trials in _RECENT if known is problem), [])


def smallest_trials(problem: Problem) -> list[Trial]:
    """Trials with different peaks, the smallest first.

    The search is bounded in work and not in seconds: a budget that was named must be found again.
    """
    families = Families(problem)
    found: dict[int, Trial] = {}
    work = Work(_MOST_STEPS)
    search = Search(problem, 0, work=work)
    _note(found, search.best)
    low, high = lower_bound_bytes(problem), search.best.peak_bytes
    # Half way is never much too little: far below the feasible, evictions only get in each other's way.
    budget = (low + high) // 2
    for _ in range(_ROUNDS):
        search = Search(problem, budget, work=work)
        for trial in try_all(search, families):
            _note(found, trial)
            if trial.fits:
                break
        fitted = min(found) <= budget
        high = min(found)
        if not fitted:
            low = max(low, budget)
        if search.is_over or high - low <= _PRECISION * high:
            break
        budget = (low + high) // 2
    return [found[peak] for peak in sorted(found)]


def _note(found: dict[int, Trial], trial: Trial) -> None:
    known = found.get(trial.peak_bytes)
    if known is None or trial.seconds < known.seconds:
        found[trial.peak_bytes] = trial

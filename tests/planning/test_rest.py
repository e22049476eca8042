"""The rest of a schedule that has begun: whatever is drawn it is right, and as small as was asked, or as was found."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from drawn_plans import TRANSFERS
from graphs import MB, chain, evaluate, execute, normalised, random_graphs, residual, small_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning import rest
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.registry import get_planner
from torch_odt.planning.rest import Checked, Rest, rest_within
from torch_odt.planning.schedule import PageIn, PageOut, Run
from torch_odt.planning.simulate import simulate


@pytest.fixture
def never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of schedules that `lower` has made, every rest that is tried is right at once."""
    monkeypatch.setattr(rest, "suppress", lambda *errors: contextlib.nullcontext())


def checked_rest(running: Checked, position: int, budget_bytes: int) -> Rest:
    """A rest that has been replayed and executed, and whose peak has been counted again."""
    found = rest_within(running, position, budget_bytes)
    instructions = found.checked.schedule.instructions
    assert instructions[:position] == running.schedule.instructions[:position]
    timeline = simulate(running.graph, running.costs, found.checked.schedule).timeline
    while position < len(instructions) and not isinstance(instructions[position], Run | PageIn):
        position += 1
    assert found.peak_bytes == max((moment.arena_peak_bytes for moment in timeline[position:]), default=0)
    contents = evaluate(running.graph)
    expected = {index: contents[output.value] for index, output in enumerate(running.graph.outputs)}
    assert execute(running.graph, found.checked.schedule) == expected
    return found


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    step=st.one_of(random_graphs(), small_steps()),
    planner=st.sampled_from(("keep-all", "melon", "chen")),
    share=st.floats(0.3, 1.0),
    less=st.floats(0.0, 1.0),
    pages=st.booleans(),
)
@pytest.mark.usefixtures("never_refused")
def test_any_rest_of_any_schedule_is_right(
    step: tuple[TrainingGraph, Costs], planner: str, share: float, less: float, pages: bool
) -> None:
    graph, costs = step
    if pages:
        costs = replace(costs, transfers=replace(TRANSFERS, write_bytes_per_second=4.0, read_bytes_per_second=4.0))
    most = simulate(graph, costs, keep_all(graph, costs)).peak_bytes
    running = Checked.of(graph, costs, get_planner(planner)(graph, costs, int(share * most)))
    for position in range(len(running.schedule.instructions) + 1):
        own = Rest.of(running, position).peak_bytes
        found = checked_rest(running, position, int(less * own))
        assert found.peak_bytes <= own
        # A rest can be made anew again.
        again = position + (len(found.checked.schedule.instructions) - position) // 2
        assert checked_rest(found.checked, again, int(less * found.peak_bytes)).peak_bytes <= found.peak_bytes


@pytest.mark.usefixtures("never_refused")
@pytest.mark.parametrize("step", [chain(12), residual(5), normalised(6)], ids=["chain", "residual", "normalised"])
def test_half_of_what_is_kept_is_enough_from_any_moment(step: tuple[TrainingGraph, Costs]) -> None:
    graph, costs = step
    running = Checked.of(graph, costs, keep_all(graph, costs))
    budget = running.simulation.arena_peak_bytes // 2
    for position in range(len(running.schedule.instructions) + 1):
        own = Rest.of(running, position)
        found = checked_rest(running, position, budget)
        assert found.peak_bytes <= budget
        assert (found.checked is running) == (own.peak_bytes <= budget)


def test_what_fits_is_not_touched() -> None:
    running = Checked.of(*chain(6), keep_all(*chain(6)))
    assert rest_within(running, 9, 1 << 40).checked is running


def test_what_is_evicted_goes_at_once() -> None:
    graph, costs = chain(12)
    running = Checked.of(graph, costs, keep_all(graph, costs))
    position = running.schedule.boundary
    instructions = rest_within(running, position, 6 * MB).checked.schedule.instructions
    first_run = next(i for i in range(position, len(instructions)) if isinstance(instructions[i], Run))
    assert first_run - position >= 5


def test_what_comes_back_sooner_from_a_file_is_paged() -> None:
    graph, costs = chain(12, seconds=5.0)
    costs = replace(costs, transfers=TRANSFERS)
    running = Checked.of(graph, costs, keep_all(graph, costs))
    position = running.schedule.boundary
    found = checked_rest(running, position, 6 * MB)
    assert any(isinstance(instruction, PageOut) for instruction in found.checked.schedule.instructions[position:])
    assert found.peak_bytes <= 6 * MB

"""The memory of a wrapped model: which graphs make up a step, what is left of the budget, which schedule runs.

A step is the sequence of graph calls up to a backward pass. The first time, every graph runs its schedule of the
fewest bytes; when the sequence is known, its graphs are planned together, and each call runs its part of that plan.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_odt import memory
from torch_odt._extensions import memory_module
from torch_odt.cache import Cache
from torch_odt.capture.concatenate import Concatenation, concatenate
from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.update_in_backward import UPDATE, update_in_backward
from torch_odt.errors import InfeasibleBudget
from torch_odt.execute.accounting import Allowance, allow, held_by_process, make_room
from torch_odt.execute.allotted import Found, controller_of, first_budget, or_in_the_fewest
from torch_odt.execute.executor import Executor
from torch_odt.execute.graph_calls import Calls, GraphRunner, Rules
from torch_odt.execute.optimizer_reserve import OptimizerReserve
from torch_odt.execute.page_file import TORN_UPDATES, OpenPageFile
from torch_odt.execute.request import departures
from torch_odt.execute.split_schedule import split
from torch_odt.execute.wrap_given import GivenSchedule, WrapProgram
from torch_odt.execute.wrap_plan import Ledger, Sequence, StepPlan, result_bytes, summarize_wrap
from torch_odt.execute.wrap_schedules import WrapSchedules
from torch_odt.execute.wrap_undo import StepUndo
from torch_odt.execute.wrap_updates import WrapUpdates
from torch_odt.planning.plan import Plan
from torch_odt.planning.pool import Layout, pack
from torch_odt.planning.registry import get_planner
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.simulate import simulate
from torch_odt.runtime.budget import Allotment, Budget, ResolvedBudget

if TYPE_CHECKING:
    from torch_odt.runtime.controller import BudgetValue, Need

# Longer sequences (forward passes that nobody differentiates) run the schedules of the fewest bytes.
_LONGEST_SEQUENCE = 32
_MOST_PLANS = 8
# A plan that recomputes is made anew when this share of the room was unknown to it.
_NEWS = 0.1
# What tracing leaves for each op and value of a graph, generously, and how much its measurement varies.
_BYTES_PER_ENTRY = 16 * 1024
_NOISE_BYTES = 8 << 20
# An optimizer that has not been found by then is none of torch's.
_STEPS_WITHOUT_OPTIMIZER = 3
# The loss and its gradient, as multiples of the results, until a step has been seen.
_LOSS_RESULTS = 4


class WrapSession:
    """Keeps one wrapped model inside its budget.

    Args:
        model: the wrapped model.
        budget: what the process, or the training, may hold; or what decides that before each step.
        planner: a planner's name.
        disabled_rewrites: names of rewrites that are not to be made.
        cache: where measurements of ops are kept.
        optimizer: the one that trains the model; None if it is to be looked for.
        page_file: what may be paged to; None where nothing is.
        given: the plan to follow; None where one is to be made.
        planning_seconds: how long to look for a better plan than the one that is found at once.
    """

    def __init__(
        self,
        model: nn.Module,
        budget: BudgetValue,
        planner: str,
        disabled_rewrites: frozenset[str],
        cache: Cache,
        optimizer: torch.optim.Optimizer | None = None,
        page_file: OpenPageFile | None = None,
        given: GivenSchedule | None = None,
        planning_seconds: float = 0.0,
    ) -> None:
        memory.install()
        self._page_file = page_file
        self.calls = Calls(None if page_file is None else StepUndo(model))
        self.level_bytes = held_by_process()
        self.controller = controller_of(budget)
        self._asked = first_budget(budget, self.controller, self.level_bytes)
        self.budget: ResolvedBudget = self._asked.resolve(self.level_bytes)
        self.ledger = Ledger()
        self.disabled_rewrites = disabled_rewrites
        self.runner_count = 0
        self.run_count = 0
        self._level_allocated = memory.stats().allocated_bytes
        self._planner = planner
        self._schedules = WrapSchedules(
            planner, planning_seconds, cache, page_file, given, measuring_bytes=self._measuring_bytes
        )
        self._model = model
        self._given_optimizer = optimizer
        self._given = given
        self._updates: WrapUpdates | None = None
        if optimizer is not None and update_in_backward.__name__ not in disabled_rewrites:
            self._updates = WrapUpdates(model, optimizer, TORN_UPDATES if page_file else "")
        self._optimizer: OptimizerReserve | None = None
        self._steps = 0
        self._frugal: dict[tuple[GraphRunner, Rules], StepPlan] = {}
        self._sequences: dict[tuple[GraphRunner, ...], Sequence] = {}
        self._expected: dict[GraphRunner, Sequence] = {}
        self._current: list[GraphRunner] = []
        self._running: StepPlan | None = None
        self._follows: Sequence | None = None
        self._backward_began = True
        self._level_of_step = 0
        self._measured_reserve: int | None = None
        self._counted_runners = 0
        self._usual_tracing_bytes = 0
        self._tracing_bytes_before = 0
        self._arena: Any = None

    def set_budget(self, budget: BudgetValue) -> None:
        """Use another budget from the next step on; nothing is compiled again."""
        self.controller = controller_of(budget)
        self._allot(first_budget(budget, self.controller, self.level_bytes))

    def ask_controller(self) -> None:
        """Before a step: what it may hold."""
        if self.controller is None:
            return
        allotment = self.controller.before_step(self.level_bytes, self._need())
        if allotment != self._asked:
            self._allot(allotment)

    def in_the_fewest(self, find: Callable[[], Found]) -> Found:
        """What is found within the budget; where a controller allows too little for anything, in the fewest bytes."""
        return find() if self.controller is None else or_in_the_fewest(self.controller, self._allot, find)

    def _need(self) -> Need | None:
        """What the step that ran last took."""
        plan = self._running
        if plan is None:
            return None
        from torch_odt.runtime.growth import Need

        beside_bytes = self.level_bytes + self._level_of_step + self.ledger.reserved_bytes
        return Need(beside_bytes + plan.peak_bytes, slowdown=1.0 if plan.costs_no_time else None)

    def _allot(self, budget: Budget | Allotment) -> None:
        self._asked = budget
        self.budget = budget.resolve(self.level_bytes)
        if self._arena is not None:
            self._arena.release()
        self._forget_estimates()
        if self._updates is not None:
            self._updates.forget()

    def close(self) -> None:
        """Leave the optimizer as it was."""
        if self._updates is not None:
            self._updates.close()

    @property
    def plan(self) -> Plan:
        """The plan as it stands, for people."""
        waiting = [] if self._updates is None else self._updates.notes(is_captured=not self.ledger.fallback)
        plan = summarize_wrap(self.ledger, self.budget, self._planner, (*waiting, departures(self._arena)))
        if plan.captured and self._running is not None and self._running.layout is not None:
            plan.program = WrapProgram(self._running, self._running.layout, self.disabled_rewrites)
        return plan

    # What is held, and what is left.

    def used_bytes(self) -> int:
        """What is held above the level at which the model was wrapped, idle pages of the arena not counted."""
        if self._level_allocated is None:
            return memory.process_bytes() - self.level_bytes
        return self._tensor_bytes() + self.ledger.tracing_bytes

    def _tensor_bytes(self) -> int:
        return (memory.stats().allocated_bytes or 0) - (self._level_allocated or 0)

    def room_bytes(self) -> int:
        return self.budget.growth_bytes - self.used_bytes()

    def check(self, needed_bytes: int, room_bytes: int, what: str) -> None:
        """Raises InfeasibleBudget when something needs more than there is room."""
        if needed_bytes <= room_bytes:
            return
        given = self.budget.in_terms_of(self.budget.growth_bytes)
        # What a capture leaves in the process differs from start to start; the named budget must be accepted each time.
        given += max(0, self._usual_tracing_bytes - self.ledger.tracing_bytes) + _NOISE_BYTES
        hints = ["a smaller batch", "TrainStep, which sees the loss and can cut the batch"]
        if self._given_optimizer is None:
            hints.append("wrap with optimizer=, where nothing else needs the gradients")
        raise InfeasibleBudget(self.budget.text, given + needed_bytes - room_bytes, tuple(hints), what)

    def fall_back(self, reason: str) -> None:
        """From now on the model runs without graphs: no arena serves it, and failed captures have left their traces."""
        self._tracing_bytes_before = self.ledger.tracing_bytes
        self.ledger.fallback = reason
        # What malloc kept of freed tensors would stand in the way of the next ones.
        memory.tune_malloc()
        self._count_untracked(allow(self.budget, None, None))

    def resume(self) -> None:
        """What `fall_back` took for a reason was the model's own error: the next call is captured again."""
        self.ledger.fallback, self.ledger.fallback_line = "", None
        self.ledger.tracing_bytes = self._tracing_bytes_before

    def _take_stock(self, graph: TrainingGraph) -> None:
        """After a capture: what tracing and the math libraries hold besides tensors."""
        if self._counted_runners == self.runner_count:
            return
        self._counted_runners = self.runner_count
        if isinstance(self._asked, Budget) and self._asked.share is None:
            # The workers of a DataLoader have started since.
            self.budget = self._asked.resolve(self.level_bytes)
        library_bytes = self._schedules.library_bytes
        allowance = allow(self.budget, None, graph, library_bytes=library_bytes)
        usual = _BYTES_PER_ENTRY * (len(graph.ops) + len(graph.values)) + allowance.reserve_bytes
        self._usual_tracing_bytes = max(self._usual_tracing_bytes, usual)
        self._count_untracked(allowance)

    def _count_untracked(self, allowance: Allowance) -> None:
        idle = 0 if self._arena is None else max(0, self._arena.resident_bytes - self._arena.live_bytes)
        grown = allowance.spent_bytes - self._tensor_bytes() - idle
        self.ledger.tracing_bytes = max(self.ledger.tracing_bytes, grown + allowance.reserve_bytes)

    # The calls of a step.

    def new_runner(self, piece: Any) -> GraphRunner:
        self.runner_count += 1
        return GraphRunner(piece, self.calls, self._executor_for, self._on_backward, self._updates)

    def new_inference_runner(self, piece: Any) -> GraphRunner:
        self.runner_count += 1
        return GraphRunner(piece, self.calls, self._inference_executor_for, self._on_backward)

    def _executor_for(self, runner: GraphRunner, args: list[Any]) -> Executor:
        self.run_count += 1
        if self._backward_began or not self.calls.waiting:
            self._begin_step(runner)
        position = len(self._current)
        self._current.append(runner)
        if self._updates is not None:
            self._updates.note_call(runner.piece, args)
        follows = self._follows
        if follows is None or position >= len(follows.runners) or follows.runners[position] is not runner:
            self._follows = None
            return self.in_the_fewest(partial(self._frugal_executor, runner))
        assert self._running is not None
        return self._running.executors[position]

    def _begin_step(self, runner: GraphRunner) -> None:
        self._steps += self._backward_began
        self._note_sequence()
        self._current = []
        if self._updates is not None:
            self._updates.begin_step()
        self._backward_began = False
        if self._optimizer is not None and self._steps <= _STEPS_WITHOUT_OPTIMIZER:
            self._optimizer.tag_state()
        self.ask_controller()
        arena_bytes = 0 if self._arena is None else self._arena.reserve_bytes
        make_room(self._arena, arena_bytes, self.budget.total_bytes, self._steps - 1)
        self._level_of_step = self.ledger.held_bytes = self.used_bytes()
        self._follows = self._expected.get(runner)
        follows = self._follows
        self._running = None if follows is None else self.in_the_fewest(partial(self._plan_for, follows))
        if self._running is None:
            self._follows = None

    def _note_sequence(self) -> None:
        key = tuple(self._current)
        if not key or len(key) > _LONGEST_SEQUENCE:
            return
        sequence = self._sequences.setdefault(key, Sequence(key))
        sequence.names = () if self._updates is None else self._updates.calls
        self._expected[key[0]] = sequence

    def _on_backward(self) -> None:
        if not self._backward_began:
            self._backward_began = True
            self._measure_reserve()

    def _measure_reserve(self) -> None:
        """What has been allocated between the graphs of this step besides what they hold."""
        if self._follows is None or self._running is None or memory.stats().allocated_bytes is None:
            return
        unseen = self.used_bytes() - self._level_of_step - self._running.boundary_bytes
        results = result_bytes([runner.piece.graph for runner in self._current])
        reserve = max(0, unseen) + 2 * results
        self._measured_reserve = max(self._measured_reserve or 0, reserve)
        self.ledger.reserved_bytes, self.ledger.is_reserve_measured = self._measured_reserve, True

    def _optimizer_bytes(self) -> int:
        """For the optimizer's state, until it exists."""
        if self._optimizer is None or self._must_look_for_optimizers(self._optimizer):
            self._optimizer = OptimizerReserve(self._model.parameters(), self._given_optimizer)
            self.ledger.is_optimizer_known = self._optimizer.is_known
        # Whatever makes the steps must have made its state by then, and that is counted.
        is_waited_for = self._optimizer.is_known or self._steps < _STEPS_WITHOUT_OPTIMIZER
        self.ledger.optimizer_bytes = self._optimizer.missing_state_bytes if is_waited_for else 0
        return self.ledger.optimizer_bytes

    def _must_look_for_optimizers(self, found: OptimizerReserve) -> bool:
        return not found.is_current if found.is_known else self._steps < _STEPS_WITHOUT_OPTIMIZER

    def _reserve_for(self, graphs: list[TrainingGraph]) -> int:
        return self._optimizer_bytes() + self._loss_reserve_for(graphs)

    def _loss_reserve_for(self, graphs: list[TrainingGraph]) -> int:
        if self._measured_reserve is not None:
            return self._measured_reserve
        self.ledger.reserved_bytes = _LOSS_RESULTS * result_bytes(graphs)
        return self.ledger.reserved_bytes

    # Schedules.

    def _plan_for(self, sequence: Sequence) -> StepPlan:
        """The fastest plan of a sequence that fits now."""
        sequence.follow([()] * len(sequence.runners) if self._updates is None else self._updates.rules(sequence.names))
        graphs = [runner.piece.graph for runner in sequence.runners]
        room = self.room_bytes() - self._reserve_for(graphs)
        fitting = [plan for plan in sequence.plans if plan.peak_bytes <= room]
        best = min(fitting, key=lambda plan: plan.seconds, default=None)
        if best is None or (best.recompute_seconds > 0 and best.made_for_bytes < (1 - _NEWS) * room):
            best = self._make_plan(sequence, room)
            sequence.plans = [*sequence.plans[-_MOST_PLANS + 1 :], best]
        else:
            self._limit_what_is_outside()
        self._describe(best, graphs)
        return best

    def _make_plan(self, sequence: Sequence, room: int) -> StepPlan:
        graphs = sequence.graphs
        if sequence.whole is None:
            sequence.whole = concatenate(graphs)
        graph = sequence.whole.graph
        if self._given is not None:
            plan = self._place(sequence.whole, graphs, self._given.schedule_for(graph), room)
            self.check(plan.peak_bytes, room, "the given plan does not fit")
            return plan
        plan = self._place(sequence.whole, graphs, self._schedules.fastest(graph, room), room)
        if plan.peak_bytes > room:
            plan = self._place(sequence.whole, graphs, self._schedules.smallest(graph), room)
        if plan.peak_bytes > room and self._schedules.measure_all(graph):
            plan = self._place(sequence.whole, graphs, self._schedules.smallest(graph), room)
        self.check(plan.peak_bytes, room, "not even the schedule of the fewest bytes fits")
        return plan

    def _optimizer_step_bytes(self, graph: TrainingGraph) -> int:
        """Gradients and temporaries of an optimizer step after a graph, when nothing else of the step is left."""
        if self._optimizer is None:
            return 0
        updated = sum(graph.values[op.reads[0]].nbytes for op in graph.program if op.target == UPDATE)
        gradients = self._optimizer.gradient_bytes - updated
        return gradients + self._optimizer.workspace_bytes if gradients > 0 else 0

    def _place(self, whole: Concatenation, graphs: list[TrainingGraph], schedule: Schedule, room: int) -> StepPlan:
        """A schedule as executors, with addresses in the arena where there is one."""
        graph, costs = whole.graph, self._schedules.costs_of(whole.graph)
        simulation = simulate(graph, costs, schedule)
        layout = None if memory_module is None else self._layout(graph, costs, schedule)
        if layout is not None and (layout.total_bytes > room or not self._reserve_arena(layout.address_peak_bytes)):
            # Ordinary allocations have no gaps between them.
            layout = None
        needed = simulation.peak_bytes if layout is None else layout.total_bytes
        plan = StepPlan(
            graph=graph,
            costs=costs,
            schedule=schedule,
            executors=[],
            layout=layout,
            peak_bytes=needed,
            boundary_bytes=simulation.boundary_bytes,
            made_for_bytes=room,
            seconds=simulation.seconds,
            recompute_seconds=simulation.recompute_seconds,
        )
        parts = split(schedule, whole)
        if layout is not None:
            tables = [[layout.table[position] for position in part.positions] for part in parts]
            loaded = [self._arena.load(table) for table in tables]
            weakref.finalize(plan, _unload, self._arena, loaded)
        else:
            loaded = [-1] * len(parts)
        for part_graph, part, table in zip(graphs, parts, loaded, strict=True):
            arena = None if table == -1 else self._arena
            operators = {} if self._updates is None else self._updates.operators(part_graph)
            pager = None if self._page_file is None else self._page_file.pager
            plan.executors.append(
                Executor(part_graph, part.schedule, arena=arena, arena_table=table, operators=operators, pager=pager)
            )
        return plan

    def _layout(self, graph: TrainingGraph, costs: Costs, schedule: Schedule) -> Layout:
        given = self._given
        return pack(graph, costs, schedule) if given is None or schedule is not given.schedule else given.stored.layout

    def _reserve_arena(self, nbytes: int) -> bool:
        """An arena of at least so many bytes; False without one, or when a larger one is needed while it is in use."""
        if memory_module is None or nbytes == 0:
            return False
        if self._arena is None:
            self._arena = memory_module.Arena(nbytes)
        elif self._arena.reserve_bytes < nbytes:
            if self._arena.live_blocks:
                return False
            self._arena.resize(nbytes)
        self._limit_what_is_outside()
        return True

    def _limit_what_is_outside(self) -> None:
        """What of the budget other code may take before the idle arena gives way."""
        if self._arena is not None:
            outside = memory.stats().outside_bytes or 0
            self._arena.set_yield_limit(outside + max(0, self.room_bytes()))

    def _frugal_executor(self, runner: GraphRunner) -> Executor:
        """The schedule of the fewest bytes of one graph, whose later calls are not known."""
        rules = () if self._updates is None else self._updates.rules_of_last_call()
        graph = runner.graph(rules)
        self._schedules.costs_of(graph)
        self._take_stock(graph)
        room = self.room_bytes() - self._reserve_for([graph])
        plan = self._frugal.get((runner, rules))
        if plan is None or plan.peak_bytes > room:
            whole = concatenate([graph])
            plan = self._place(whole, [graph], self._frugal_schedule(graph), room)
            if plan.peak_bytes > room and self._schedules.measure_all(graph, whole.graph):
                plan = self._place(whole, [graph], self._frugal_schedule(graph), room)
            self._frugal[runner, rules] = plan
        is_first = len(self._current) == 1
        needed = max(plan.peak_bytes, self._optimizer_step_bytes(graph)) if is_first else plan.peak_bytes
        self.check(needed, room, "not even the schedule of the fewest bytes fits")
        self._describe(plan, [called.piece.graph for called in self._current])
        return plan.executors[0]

    def _frugal_schedule(self, graph: TrainingGraph) -> Schedule:
        if self._planner == "keep-all":
            # It promises that nothing is recomputed: not in the first step either.
            return get_planner("keep-all")(graph, self._schedules.costs_of(graph), 0)
        if self._given is not None and self._given.graphs == 1:
            return self._given.schedule_for(concatenate([graph]).graph)
        return self._schedules.smallest(graph)

    def _inference_executor_for(self, runner: GraphRunner, _: list[Any]) -> Executor:
        self.run_count += 1
        graph, room = runner.piece.graph, self.room_bytes()
        plan = self._frugal.get((runner, ())) or self._inference_plan(graph)
        if plan.peak_bytes > room and self._schedules.measure_all(graph):
            plan = self._inference_plan(graph)
        self._frugal[runner, ()] = plan
        self.check(plan.peak_bytes, room, "a forward pass that keeps nothing does not fit")
        return plan.executors[0]

    def _inference_plan(self, graph: TrainingGraph) -> StepPlan:
        costs = self._schedules.costs_of(graph)
        schedule = get_planner("keep-all")(graph, costs, 0)
        simulation = simulate(graph, costs, schedule)
        peak, seconds = simulation.peak_bytes, simulation.seconds
        return StepPlan(graph, costs, schedule, [Executor(graph, schedule)], None, peak, 0, 0, seconds, 0.0)

    def _measuring_bytes(self) -> int:
        return max(0, min(memory.available(), self.budget.total_bytes - held_by_process()))

    def _forget_estimates(self) -> None:
        """With another budget, what was too large to be measured may not be any more; nor are its plans to stay."""
        self._schedules.forget_estimates()
        self._frugal = {key: plan for key, plan in self._frugal.items() if not plan.costs.too_large}
        for sequence in self._sequences.values():
            sequence.plans = [plan for plan in sequence.plans if not plan.costs.too_large]

    def _describe(self, plan: StepPlan, graphs: list[TrainingGraph]) -> None:
        self.ledger.step = plan
        for note in (note for graph in graphs for note in graph.notes):
            self.ledger.note(note)


def _unload(arena: Any, tables: list[int]) -> None:
    for table in tables:
        # A table that is selected stays until another one is.
        with contextlib.suppress(RuntimeError):
            arena.unload(table)

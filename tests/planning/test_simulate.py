"""The simulator counts exactly and names what is wrong with a schedule."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from graphs import GraphMaker, chain, normalised

from torch_odt.capture.costs import Costs, OpCost
from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import ScheduleError
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.schedule import Deliver, Free, Instruction, Run, Schedule
from torch_odt.planning.simulate import Moment, simulate


def two_layers() -> tuple[TrainingGraph, Costs]:
    make = GraphMaker()
    x = make.give()
    a = make.op(x, nbytes=100)
    b = make.op(a, nbytes=50, workspace=30)
    make.output(b, "loss", 0)
    tangent = make.backward()
    make.output(make.op(tangent, a, nbytes=20), "gradient", "w")
    return make.finish()


# Values: 0 input, 1 a, 2 b, 3 tangent, 4 gradient.
PROGRAM: list[Instruction] = [
    Run(0),
    Run(1),
    Deliver(0),
    Free(2),
    Run(2),
    Deliver(1),
    Free(4),
    Free(1),
]


def test_counts_each_instruction() -> None:
    graph, costs = two_layers()
    result = simulate(graph, costs, Schedule(PROGRAM, 4))
    assert [m.live_bytes for m in result.timeline] == [100, 150, 150, 150, 170, 170, 170, 70]
    assert [m.outside_bytes for m in result.timeline] == [0, 50, 50, 50, 70, 70, 70, 70]
    assert [m.peak_bytes for m in result.timeline][:2] == [100, 180]
    assert result.peak_bytes == 180
    last = Moment(arena_bytes=0, outside_bytes=70, peak_bytes=170, arena_peak_bytes=100)
    assert list(result.timeline)[-1] == result.timeline[-1] == result.timeline[7] == last
    assert result.timeline[-3:-1] == list(result.timeline)[5:7]
    with pytest.raises(IndexError):
        result.timeline[8]
    assert result.arena_peak_bytes == 130
    assert result.outside_peak_bytes == 70
    assert result.boundary_bytes == 150
    assert result.seconds == 3.0
    assert result.recompute_seconds == 0.0
    assert result.recomputed_ops == ()


def test_accumulated_gradients_do_not_stay() -> None:
    graph, costs = two_layers()
    result = simulate(graph, costs, Schedule(PROGRAM, 4), gradients="accumulate")
    assert result.timeline[-1].live_bytes == 50
    assert result.outside_peak_bytes == 50


def test_recomputation_is_counted() -> None:
    graph, costs = two_layers()
    instructions = [Run(0), Run(1), Deliver(0), Free(2), Free(1), Run(0), Run(2), Deliver(1), Free(4), Free(1)]
    result = simulate(graph, costs, Schedule(instructions, 5))
    assert result.boundary_bytes == 50
    assert result.recomputed_ops == (0,)
    assert result.recompute_seconds == 1.0


def test_a_view_keeps_its_storage() -> None:
    make = GraphMaker()
    a = make.op(make.give(), nbytes=100)
    view = make.view(a)
    make.output(make.op(view, nbytes=1), "loss")
    graph, costs = make.finish()
    instructions = [Run(0), Run(1), Free(a), Run(2), Deliver(0), Free(3), Free(view)]
    result = simulate(graph, costs, Schedule(instructions, len(instructions)))
    assert [m.live_bytes for m in result.timeline] == [100, 100, 100, 101, 101, 101, 1]


def test_a_view_of_what_the_caller_owns_costs_nothing() -> None:
    make = GraphMaker()
    view = make.view(make.give("parameter"))
    make.output(make.op(view, nbytes=7), "loss")
    graph, costs = make.finish()
    assert simulate(graph, costs, keep_all(graph, costs)).peak_bytes == 7


def test_unused_results_and_workspace_are_gone_when_the_op_returns() -> None:
    make = GraphMaker()
    value = make.op(make.give(), nbytes=10)
    make.output(value, "loss")
    graph, _ = make.finish()
    costs = Costs({0: OpCost(1.0, ((0, 40), (1, 10), (2, 5), (2, -5)), (1,))})
    result = simulate(graph, costs, Schedule([Run(0), Deliver(0), Free(value)], 3))
    assert result.peak_bytes == 55
    assert result.timeline[-1].live_bytes == 10


def test_ops_without_costs_are_estimated() -> None:
    graph, _ = two_layers()
    result = simulate(graph, Costs({}), Schedule(PROGRAM, 4))
    assert result.peak_bytes == 170
    assert 0 < result.seconds < 1e-3


Change = Callable[[list[Instruction]], list[Instruction]]


@pytest.mark.parametrize(
    ("change", "boundary", "message"),
    [
        (lambda p: [p[0], Free(1), *p[1:]], 5, r"instruction 2, Run\(op=1\).*value 1 .* is not in memory"),
        (lambda p: [Free(1), *p], 5, r"instruction 0, Free\(value=1\).*is not in memory"),
        (lambda p: [*p[:4], Run(1), *p[4:]], 5, "result value 2 .* forward|never freed"),
        (lambda p: [Run(0), *p], 5, "its result value 1 .* is in memory already"),
        (lambda p: [*p[:3], Deliver(0), *p[3:]], 5, "loss 0.* is delivered twice"),
        (lambda p: [i for i in p if i != Deliver(1)], 4, r"output 1 \(gradient w\) is never delivered"),
        (lambda p: p[:-1], 4, "1 values are never freed: value 1"),
        (lambda p: [i for i in p if i not in (Run(2), Deliver(1), Free(4))], 4, "never run"),
        (lambda p: p, 5, "given only after the forward pass|before the boundary"),
        (lambda p: p, 1, "for the first time after the boundary"),
        (lambda p: p, 2, "loss 0 is delivered after the forward pass"),
        (lambda p: p, 9, "the boundary 9 lies outside"),
        (lambda p: [Run(17), *p], 5, "no such op"),
        (lambda p: [Deliver(17), *p], 5, "no such output"),
    ],
)
def test_names_what_is_wrong(change: Change, boundary: int, message: str) -> None:
    graph, costs = two_layers()
    with pytest.raises(ScheduleError, match=message):
        simulate(graph, costs, Schedule(change(list(PROGRAM)), boundary))


@pytest.mark.parametrize(("flag", "message"), [("is_random", "a random op runs twice"), ("is_pinned", "must run once")])
def test_what_runs_once_cannot_run_twice(flag: str, message: str) -> None:
    graph, costs = two_layers()
    graph.ops[0] = replace(graph.ops[0], **{flag: True})
    instructions = [Run(0), Run(1), Deliver(0), Free(2), Free(1), Run(0), Run(2), Deliver(1), Free(4), Free(1)]
    with pytest.raises(ScheduleError, match=message):
        simulate(graph, costs, Schedule(instructions, 5))


def test_gradients_are_delivered_behind_the_boundary() -> None:
    make = GraphMaker()
    value = make.op(make.give())
    make.output(value, "gradient", "w")
    graph, costs = make.finish()
    with pytest.raises(ScheduleError, match="in the forward pass"):
        simulate(graph, costs, Schedule([Run(0), Deliver(0), Free(value)], 3))
    simulate(graph, costs, Schedule([Run(0), Deliver(0), Free(value)], 1))


def test_dead_ops_need_not_run() -> None:
    make = GraphMaker()
    x = make.give()
    make.op(x)
    value = make.op(x)
    make.output(value, "loss")
    graph, costs = make.finish()
    simulate(graph, costs, Schedule([Run(1), Deliver(0), Free(value)], 3))


def test_a_rematerializer_does_not_replace_its_op() -> None:
    graph, costs = normalised(1)
    schedule = keep_all(graph, costs)
    pinned = next(op.index for op in graph.program if op.is_pinned)
    other = next(iter(graph.rematerializers.values()))
    instructions = [Run(other) if i == Run(pinned) else i for i in schedule.instructions]
    with pytest.raises(ScheduleError):
        simulate(graph, costs, Schedule(instructions, schedule.boundary))


def test_work_grows_as_the_schedule_does() -> None:
    calls = []
    for length in (100, 200, 400):
        graph, costs = chain(length)
        schedule = keep_all(graph, costs)
        calls.append(calls_of(lambda: simulate(graph, costs, schedule)))  # noqa: B023 - called at once
    assert calls[2] - calls[1] < 2.2 * (calls[1] - calls[0])


def calls_of(function: Callable[[], object]) -> int:
    """How many functions, of Python and of C, a call of `function` calls."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count

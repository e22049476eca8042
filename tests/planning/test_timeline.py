"""The timeline: the simulator's seconds and bytes, told apart by where they come from."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from graphs import MB, GraphMaker, chain, random_graphs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_odt.capture.costs import Costs, TransferCosts
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.plan_fields import Fields
from torch_odt.planning.registry import get_planner
from torch_odt.planning.schedule import Deliver, Free, PageIn, PageOut, Run, Schedule
from torch_odt.planning.simulate import simulate
from torch_odt.planning.timeline import WAIT, Timeline, Transfer, timeline_of

FAST = TransferCosts(
    write_latency_seconds=0.0,
    write_bytes_per_second=2.0,
    read_latency_seconds=0.5,
    read_bytes_per_second=4.0,
    limit_bytes=1 << 40,
)
ALONE = replace(FAST, overlaps=False)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    random_graphs(),
    st.floats(0.0, 1.1),
    st.sampled_from(("melon", "min-cut", "capuchin")),
    st.sampled_from((None, FAST, ALONE)),
)
def test_it_says_what_the_simulator_says(
    case: tuple[TrainingGraph, Costs], share: float, name: str, transfers: TransferCosts | None
) -> None:
    graph, costs = case[0], replace(case[1], transfers=transfers)
    most = simulate(graph, costs, keep_all(graph, costs)).peak_bytes
    schedule = get_planner(name)(graph, costs, int(share * most))
    expected, found = simulate(graph, costs, schedule), timeline_of(graph, costs, schedule)
    assert found.seconds == pytest.approx(expected.seconds)
    assert found.wait_seconds == pytest.approx(expected.wait_seconds)
    assert found.recompute_seconds == pytest.approx(expected.recompute_seconds)
    assert (found.moved_bytes("out"), found.moved_bytes("in")) == (expected.written_bytes, expected.read_bytes)
    assert max(found.file_bytes, default=0) <= expected.file_peak_bytes
    # Ops that take no time are not seen.
    assert max(found.total_bytes, default=0) <= expected.peak_bytes
    for column in (found.kept_bytes, found.recomputed_bytes, found.returned_bytes, found.moving_bytes):
        assert min(column, default=0) >= 0
    assert all(begin < end for begin, end in pairwise([*found.start_seconds, found.seconds]))
    assert all(one.end_seconds <= next_.start_seconds for one, next_ in pairwise(found.transfers))


@pytest.mark.parametrize("transfers", [FAST, ALONE])
def test_it_survives_json(transfers: TransferCosts) -> None:
    graph, costs = chain(12)
    costs = replace(costs, transfers=replace(transfers, write_bytes_per_second=10 * MB, read_bytes_per_second=10 * MB))
    timeline = timeline_of(graph, costs, get_planner("melon")(graph, costs, 5 * MB))
    assert timeline.transfers
    assert Timeline.from_fields(Fields(json.loads(json.dumps(asdict(timeline))))) == timeline


def paged() -> tuple[TrainingGraph, Costs, Schedule]:
    """Two ops of a second each; the first result goes to the file behind the second, and comes back for the third."""
    make = GraphMaker()
    x = make.give()
    first = make.op(x, nbytes=8, target="aten.relu.default")
    loss = make.op(first, nbytes=1)
    make.output(loss, "loss", 0)
    tangent = make.backward()
    gradient = make.op(first, tangent, nbytes=2)
    make.output(gradient, "gradient", "w")
    graph, costs = make.finish()
    body = [Run(0), Run(1), PageOut(first), Free(first), Deliver(0), Free(loss)]
    schedule = Schedule((*body, PageIn(first), Run(2), Free(first), Deliver(1), Free(gradient)), len(body))
    return graph, replace(costs, transfers=FAST), schedule


def test_what_moves_and_what_waits_is_told_apart() -> None:
    timeline = timeline_of(*paged())
    # 4 seconds to write 8 bytes, half a second and 2 more to read them.
    assert timeline.start_seconds == [0.0, 1.0, 2.0, 6.0, 8.5]
    assert timeline.names == ["aten.relu (op0_0)", "test.compute (op1_0)", WAIT, WAIT, "test.compute (op2_0)"]
    assert timeline.transfers == [Transfer("out", "op0_0", 8, 2.0, 6.0), Transfer("in", "op0_0", 8, 6.0, 8.5)]
    assert timeline.kept_bytes == [8, 8, 0, 0, 0]
    assert timeline.moving_bytes == [0, 0, 8, 8, 0]
    assert timeline.returned_bytes == [0, 0, 0, 0, 8]
    assert timeline.boundary_seconds == 6.0
    assert timeline.file_bytes[:3] == [0, 0, 4096]
    assert not any(timeline.continues)


def test_an_op_during_which_a_transfer_ends_is_told_in_parts() -> None:
    make = GraphMaker()
    x = make.give()
    first = make.op(x, nbytes=8)
    beside = make.op(x, nbytes=4)
    loss = make.op(first, beside, nbytes=1)
    make.output(loss, "loss", 0)
    make.backward()
    graph, costs = make.finish()
    body = [Run(0), PageOut(first), Run(1), Run(2), Free(first), Free(beside), Deliver(0), Free(loss)]
    transfers = replace(FAST, write_bytes_per_second=16.0)
    timeline = timeline_of(graph, replace(costs, transfers=transfers), Schedule(body, len(body)))
    assert timeline.start_seconds == [0.0, 1.0, 1.5, 2.0]
    assert timeline.continues == [False, False, True, False]
    assert timeline.names[1] == timeline.names[2]
    assert timeline.moving_bytes == [0, 8, 0, 0]
    assert timeline.kept_bytes == [8, 4, 12, 12]

"""Schedules that page: they compute what the program computes, hold less than others can, and hide their transfers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import MB, GraphMaker, chain, evaluate, execute, random_graphs, residual
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_odt.capture.costs import Costs, TransferCosts
from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import ScheduleError
from torch_odt.planning import pool
from torch_odt.planning.auto import auto
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.melon import melon
from torch_odt.planning.problem import problem_of
from torch_odt.planning.registry import get_planner
from torch_odt.planning.schedule import (
    Free,
    PageIn,
    PageOut,
    Run,
    Schedule,
    schedule_from_data,
    schedule_to_data,
)
from torch_odt.planning.simulate import simulate
from torch_odt.planning.smallest import smallest

# A megabyte in a tenth of what an op of `chain` takes.
FAST = TransferCosts(
    write_latency_seconds=0.0,
    write_bytes_per_second=10 * MB,
    read_latency_seconds=0.0,
    read_bytes_per_second=10 * MB,
    limit_bytes=1 << 40,
)
SLOW = replace(FAST, write_bytes_per_second=MB / 100, read_bytes_per_second=MB / 100)
COUNTED = replace(FAST, write_bytes_per_second=1.0, read_bytes_per_second=2.0, limit_bytes=3 * 4096)


def paging(case: tuple[TrainingGraph, Costs], transfers: TransferCosts = FAST) -> tuple[TrainingGraph, Costs]:
    graph, costs = case
    return graph, replace(costs, transfers=transfers)


def pages_out(schedule: Schedule) -> list[int]:
    return [i.value for i in schedule.instructions if isinstance(i, PageOut)]


def check(graph: TrainingGraph, costs: Costs, schedule: Schedule) -> None:
    simulate(graph, costs, schedule)
    expected = evaluate(graph)
    assert execute(graph, schedule) == {i: expected[output.value] for i, output in enumerate(graph.outputs)}
    pool.check(graph, costs, schedule, pool.pack(graph, costs, schedule))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    random_graphs(),
    st.floats(0.0, 1.1),
    st.sampled_from(("melon", "min-cut", "capuchin")),
    st.sampled_from((FAST, COUNTED)),
)
def test_schedules_of_random_graphs_are_right(
    case: tuple[TrainingGraph, Costs], share: float, name: str, transfers: TransferCosts
) -> None:
    graph, costs = paging(case, transfers)
    most = simulate(graph, costs, keep_all(graph, costs)).peak_bytes
    schedule = get_planner(name)(graph, costs, int(share * most))
    check(graph, costs, schedule)
    assert simulate(graph, costs, schedule).file_peak_bytes <= transfers.limit_bytes


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_graphs(), st.floats(0.0, 1.1))
def test_auto_is_right_and_fits_whatever_is_feasible(case: tuple[TrainingGraph, Costs], share: float) -> None:
    graph, costs = paging(case)
    _, least = smallest(graph, costs)
    most = simulate(graph, costs, keep_all(graph, costs)).peak_bytes
    budget = int(least + share * (most - least))
    schedule = auto(graph, costs, budget, time_limit_seconds=0.2)
    check(graph, costs, schedule)
    assert simulate(graph, costs, schedule).peak_bytes <= budget


def test_it_needs_fewer_bytes_than_recomputation_alone() -> None:
    case = residual(10)
    _, alone = smallest(*case)
    schedule, together = smallest(*paging(case))
    assert together < alone and pages_out(schedule)
    check(*paging(case), schedule)


def test_what_is_cheaper_is_done() -> None:
    case = chain(24)
    budget = simulate(*case, keep_all(*case)).peak_bytes // 2
    quick, slow = melon(*paging(case), budget), melon(*paging(case, SLOW), budget)
    assert pages_out(quick) and not simulate(*paging(case), quick).recomputed_ops
    assert not pages_out(slow) and simulate(*paging(case, SLOW), slow).recomputed_ops


@pytest.mark.parametrize("transfers", [FAST, None])
def test_capuchin_gives_up_what_it_can_where_nothing_fits(transfers: TransferCosts | None) -> None:
    graph, costs = chain(14)
    costs = replace(costs, transfers=transfers)
    schedule = get_planner("capuchin")(graph, costs, 1)
    check(graph, costs, schedule)
    kept_all = simulate(graph, costs, keep_all(graph, costs)).peak_bytes
    assert simulate(graph, costs, schedule).peak_bytes < kept_all


def test_random_numbers_come_back_from_the_file() -> None:
    make = GraphMaker()
    x = make.give()
    drawn = [make.op(x, nbytes=MB, seconds=1.0, is_random=True) for _ in range(6)]
    total = make.op(*drawn[:1], nbytes=1, seconds=1.0)
    make.output(total, "loss", 0)
    gradient = make.backward()
    for value in reversed(drawn):
        gradient = make.op(gradient, value, nbytes=1, seconds=1.0)
    make.output(gradient, "gradient", "w")
    case = make.finish()
    budget = 3 * MB
    assert simulate(*case, melon(*case, budget)).peak_bytes > budget
    schedule = melon(*paging(case), budget)
    check(*paging(case), schedule)
    assert simulate(*paging(case), schedule).peak_bytes <= budget


def test_transfers_run_beside_ops() -> None:
    case = chain(24)
    transfers = replace(FAST, write_bytes_per_second=2 * MB, read_bytes_per_second=2 * MB)
    most = simulate(*case, keep_all(*case)).peak_bytes
    beside, between = paging(case, transfers), paging(case, replace(transfers, overlaps=False))
    schedule = melon(*beside, int(0.5 * most))
    assert pages_out(schedule)
    hidden, waited = simulate(*beside, schedule), simulate(*between, schedule)
    ops = waited.seconds - waited.wait_seconds
    assert waited.wait_seconds == pytest.approx((waited.written_bytes + waited.read_bytes) / (2 * MB))
    assert hidden.seconds == pytest.approx(ops + hidden.wait_seconds)
    assert hidden.wait_seconds < 0.5 * waited.wait_seconds
    assert hidden.peak_bytes <= 0.5 * most


def test_a_page_out_precedes_its_free_and_the_free_waits() -> None:
    graph, costs = paging(chain(3), replace(FAST, write_bytes_per_second=MB / 10, read_bytes_per_second=MB / 10))
    plain = keep_all(graph, costs)
    position = next(i for i, s in enumerate(plain.instructions) if isinstance(s, Run))
    value = graph.ops[plain.instructions[position].op].results[0]  # type: ignore[union-attr]
    nbytes = simulate(graph, costs, plain).timeline[position].live_bytes
    readers = [i for i, s in enumerate(plain.instructions) if isinstance(s, Run) and value in graph.ops[s.op].reads]
    free = plain.instructions.index(Free(value))
    assert position < readers[0] < readers[1] < free
    body = list(plain.instructions)
    body[readers[1] : readers[1]] = [PageIn(value)]
    body[readers[0] + 1 : readers[0] + 1] = [PageOut(value), Free(value)]
    schedule = replace(plain, instructions=tuple(body), boundary=plain.boundary + 2)
    check(graph, costs, schedule)
    counted, before = simulate(graph, costs, schedule), simulate(graph, costs, plain)
    assert (counted.written_bytes, counted.read_bytes, counted.file_peak_bytes) == (nbytes, nbytes, nbytes)
    assert counted.wait_seconds == pytest.approx(20 * nbytes / MB)
    assert counted.seconds == pytest.approx(before.seconds + counted.wait_seconds)


def test_schedules_that_page_are_data() -> None:
    schedule = melon(*paging(chain(24)), 8 * MB)
    assert pages_out(schedule)
    assert schedule_from_data(schedule_to_data(schedule)) == schedule


def test_what_breaks_the_rules_is_refused() -> None:
    graph, costs = paging(chain(3))
    plain = keep_all(graph, costs)
    value = graph.ops[0].results[0]

    def with_(position: int, *instructions: PageOut | PageIn) -> Schedule:
        body = list(plain.instructions)
        body[position:position] = instructions
        return replace(plain, instructions=tuple(body), boundary=plain.boundary + len(instructions))

    simulate(graph, costs, with_(1, PageOut(value)))
    for schedule, text in (
        (with_(0, PageOut(value)), "is not in memory"),
        (with_(1, PageIn(value)), "is not in the file"),
        (with_(1, PageOut(value), PageOut(value)), "is in the file already"),
        (with_(1, PageOut(value), PageIn(value)), "is in memory already"),
    ):
        with pytest.raises(ScheduleError, match=text):
            simulate(graph, costs, schedule)
    with pytest.raises(ScheduleError, match="there is no file to page to"):
        simulate(graph, replace(costs, transfers=None), with_(1, PageOut(value)))


def test_what_leaves_the_step_or_is_written_into_is_never_paged() -> None:
    graph, costs = paging(residual(4))
    outputs = {graph.values[value].base for value in graph.output_values}
    assert outputs.isdisjoint(problem_of(graph, costs).paging)
    leaving = next(iter(outputs & {v for op in graph.program for v in op.results}))
    plain = keep_all(graph, costs)
    position = next(
        i for i, s in enumerate(plain.instructions) if isinstance(s, Run) and leaving in graph.ops[s.op].results
    )
    body = list(plain.instructions)
    body[position + 1 : position + 1] = [PageOut(leaving)]
    boundary = plain.boundary + (position < plain.boundary)
    with pytest.raises(ScheduleError, match="an output"):
        simulate(graph, costs, replace(plain, instructions=tuple(body), boundary=boundary))

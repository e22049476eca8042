"""The rest of a schedule that has begun: whatever is drawn, it is right, and it is as small as it was asked to be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawn_plans import TRANSFERS
from graphs import MB, GraphMaker, chain, evaluate, execute, normalised, random_graphs, residual, small_steps
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.registry import get_planner
from torch_odt.planning.rest import Checked, Rest, rest_within
from torch_odt.planning.schedule import Free, PageIn, Run, Schedule
from torch_odt.planning.simulate import simulate


def check(graph: TrainingGraph, costs: Costs, schedule: Schedule, position: int, budget_bytes: int) -> int:
    """Its peak; it has passed every check."""
    rest = rest_within(Checked.of(graph, costs, schedule), position, budget_bytes)
    found = rest.checked.schedule
    assert found.instructions[:position] == schedule.instructions[:position]
    timeline = simulate(graph, costs, found).timeline
    running = [i for i in range(position, len(timeline)) if not isinstance(found.instructions[i], Free)]
    assert rest.peak_bytes == max(
        (timeline[i].arena_peak_bytes for i in range(min(running), len(timeline))) if running else [0]
    )
    expected = evaluate(graph)
    assert execute(graph, found) == {i: expected[output.value] for i, output in enumerate(graph.outputs)}
    return rest.peak_bytes


def peak_from(graph: TrainingGraph, costs: Costs, schedule: Schedule, position: int) -> int:
    return Rest.of(Checked.of(graph, costs, schedule), position).peak_bytes


@settings(deadline=None, max_examples=150)
@given(st.one_of(random_graphs(), small_steps()), st.sampled_from(("keep-all", "melon", "chen")), st.data())
def test_any_rest_of_any_schedule_is_right(
    step: tuple[TrainingGraph, Costs], planner: str, data: st.DataObject
) -> None:
    graph, costs = step
    if data.draw(st.booleans()):
        costs = replace(costs, transfers=replace(TRANSFERS, write_bytes_per_second=4.0, read_bytes_per_second=4.0))
    most = simulate(graph, costs, keep_all(graph, costs)).peak_bytes
    schedule = get_planner(planner)(graph, costs, int(data.draw(st.floats(0.3, 1.0)) * most))
    for position in range(len(schedule.instructions) + 1):
        own = peak_from(graph, costs, schedule, position)
        assert check(graph, costs, schedule, position, int(data.draw(st.floats(0.1, 1.0)) * own)) <= own

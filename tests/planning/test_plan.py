from __future__ import annotations

import builtins
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from step_builder import StepBuilder

from torch_odt.cache import Cache
from torch_odt.errors import PlanError
from torch_odt.planning.plan import Plan, PlanLine, Recomputed, eager_seconds, recomputed_in
from torch_odt.planning.pool import pack
from torch_odt.planning.schedule import Deliver, Free, Instruction, Run, Schedule
from torch_odt.planning.simulate import simulate
from torch_odt.planning.timeline import timeline_of
from torch_odt.runtime.budget import ResolvedBudget

MIB = 2**20


def recomputing_step(depth: int = 4) -> tuple[StepBuilder, Schedule]:
    """A chain whose backward pass recomputes each activation from the input."""
    step = StepBuilder()
    x = step.given(MIB)
    activations, ops = [], []
    for _ in range(depth):
        activations += step.op([x], [MIB], seconds=0.25, target="aten.relu.default")
        ops.append(len(step.ops) - 1)
    (loss,) = step.op([activations[-1]], [64], seconds=0.5)
    delivered = step.output(loss, "loss")
    instructions: list[Instruction] = []
    for op, activation in zip(ops[:-1], activations[:-1], strict=True):
        instructions += [Run(op), Free(activation)]
    instructions += [Run(ops[-1]), Run(depth), Free(activations[-1]), Deliver(delivered), Free(loss)]
    boundary = len(instructions)
    step.start_backward()
    for i, (op, activation) in enumerate(zip(ops, activations, strict=True)):
        (gradient,) = step.op(
            [activation], [MIB // 2], seconds=0.5, events=[(0, MIB), (1, MIB // 2), (0, -MIB)], ordinals=[1]
        )
        given = step.output(gradient, "gradient", f"weight{i}")
        instructions += [Run(op), Run(len(step.ops) - 1), Deliver(given), Free(gradient), Free(activation)]
    return step, Schedule(tuple(instructions), boundary, "test")


def budget(growth_bytes: int, of: str = "training") -> ResolvedBudget:
    return ResolvedBudget(300 * MIB + growth_bytes, 300 * MIB, growth_bytes, of, "what was asked for")  # type: ignore[arg-type]


def plan_for(step: StepBuilder, schedule: Schedule, lines: Sequence[PlanLine] = (), **options: Any) -> Plan:
    """The plan of one schedule, run once or once for each micro-batch."""
    graph, costs = step.graph(), step.costs()
    micro_batch = options.get("micro_batch")
    passes = -(-options["batch"] // micro_batch) if micro_batch else 1
    layout = pack(graph, costs, schedule)
    later = pack(graph, costs, schedule, gradients="accumulate") if passes > 1 else None
    layouts = [layout] if later is None else [layout, later]
    own = [
        PlanLine("activations and temporaries", max(one.address_peak_bytes for one in layouts)),
        PlanLine("gradients, losses and results", max(one.outside_peak_bytes for one in layouts)),
    ]
    return Plan(
        planner=schedule.planner,
        lines=(*own, *lines),
        step_seconds=passes * simulate(graph, costs, schedule).seconds,
        eager_seconds=passes * eager_seconds(graph, costs),
        recomputed=recomputed_in(graph, costs, schedule, passes=passes),
        schedule=schedule,
        layout=layout,
        later_layout=later,
        timeline=timeline_of(graph, costs, schedule),
        **options,
    )


def make_plan(**options: Any) -> Plan:
    step, schedule = recomputing_step()
    options = {"budget": budget(8 * MIB), "batch": 8} | options
    lines = [PlanLine("optimizer state", MIB, "made by its first step"), PlanLine("nothing", 0)]
    return plan_for(step, schedule, lines, **options)


def test_the_footprint_is_the_sum_of_its_lines() -> None:
    plan = make_plan()
    assert plan.arena_bytes == 2 * MIB
    assert [line.nbytes for line in plan.lines] == [2 * MIB, 2 * MIB + 64, MIB, 0]
    assert plan.peak_bytes == 5 * MIB + 64


def test_time_counts_what_runs_twice() -> None:
    plan = make_plan()
    assert plan.eager_seconds == pytest.approx(4 * 0.25 + 0.5 + 4 * 0.5)
    assert plan.step_seconds == pytest.approx(plan.eager_seconds + 4 * 0.25)
    assert plan.recomputed == (Recomputed("aten.relu.default", 4, 1.0),)
    assert plan.recomputed_ops == 4
    assert plan.slowdown == pytest.approx(4.5 / 3.5)


def test_micro_batches_multiply_time_and_share_the_arena() -> None:
    plan = make_plan(batch=8, micro_batch=3)
    assert plan.passes == 3
    assert plan.eager_seconds == pytest.approx(3 * 3.5)
    assert plan.recomputed_ops == 12
    assert plan.later_layout is not None and plan.layout is not None
    assert plan.arena_bytes == max(plan.later_layout.address_peak_bytes, plan.layout.address_peak_bytes)


def test_views_are_not_counted_as_recomputed() -> None:
    step = StepBuilder()
    x = step.given(64)
    (a,) = step.op([x], [64])
    view = step.view(a)
    schedule = Schedule([Run(0), Run(1), Free(view), Run(1), Free(view), Free(a)], 6)
    assert recomputed_in(step.graph(), step.costs(), schedule) == ()
    assert eager_seconds(step.graph(), step.costs()) == pytest.approx(1e-3)


def test_the_timeline_tells_kept_from_recomputed() -> None:
    plan = make_plan()
    assert plan.timeline is not None
    assert plan.timeline.seconds == pytest.approx(plan.step_seconds)
    assert plan.timeline.boundary_seconds == pytest.approx(1.5)
    forward, backward = plan.timeline.kept_bytes[:5], plan.timeline.recomputed_bytes[5:]
    assert forward == [MIB] * 5
    assert plan.timeline.recomputed_bytes[:5] == [0] * 5
    assert backward == [MIB] * 8
    assert plan.timeline.workspace_bytes[6::2] == [MIB] * 4
    assert max(plan.timeline.total_bytes) == 2 * MIB


def test_a_plan_prints_what_it_says() -> None:
    text = str(make_plan(notes=["a note"], smallest_feasible_bytes=3 * MIB))
    for part in (
        "Plan by 'test'",
        "what was asked for",
        "8 samples, at once",
        "5.0 MiB of 8.0 MiB, 63%",
        "4.50 s in operators, 1.29 times the 3.50 s of keeping everything; 4 calls recomputed",
        "3.0 MiB would still be feasible",
        "optimizer state",
        "made by its first step",
        "aten.relu",
        "- a note",
    ):
        assert part in text
    assert "nothing " not in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_plan_prints_without_what_is_not_known() -> None:
    text = str(Plan(planner="checkpoints", lines=(), step_seconds=0.0, eager_seconds=0.0, captured=False))
    assert "Plan without a graph" in text
    assert "whole, at once" in text
    assert "0 B above the level before" in text


def test_a_budget_of_the_process_names_what_was_held() -> None:
    assert "300.0 MiB held before" in str(make_plan(budget=budget(8 * MIB, "process")))
    assert "the budget leaves nothing" in str(make_plan(budget=budget(-MIB, "process")))


def test_micro_batches_are_printed() -> None:
    assert "8 samples, in 3 micro-batches of 3" in str(make_plan(batch=8, micro_batch=3))


def test_many_recomputed_operators_are_summed_up() -> None:
    plan = make_plan()
    plan.recomputed = [Recomputed(f"aten.op{i}.default", 2, 10.0 - i) for i in range(9)]
    text = str(plan)
    assert "aten.op5 " in text and "aten.op6 " not in text
    assert "3 others" in text


def test_a_plan_is_plain_data() -> None:
    plan = make_plan(notes=["a note"])
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["peak_bytes"] == plan.peak_bytes == sum(line["nbytes"] for line in data["lines"])
    assert data["budget"]["growth_bytes"] == 8 * MIB
    assert data["recomputed"] == [{"target": "aten.relu.default", "calls": 4, "seconds": 1.0}]
    assert "schedule" not in data


@pytest.mark.parametrize("options", [{}, {"micro_batch": 3}, {"budget": None}])
def test_a_plan_survives_a_file(tmp_path: Path, options: dict[str, Any]) -> None:
    plan = make_plan(**options)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert str(loaded) == str(plan)


def test_a_plan_without_a_graph_survives_a_file(tmp_path: Path) -> None:
    plan = Plan(planner="none", lines=(PlanLine("all", 7),), step_seconds=0.0, eager_seconds=0.0, captured=False)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "torch_odt plan"}', '{"format": 2}'])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError):
        Plan.load(tmp_path / "plan.json")


def test_a_large_plan_comes_back_from_the_cache(tmp_path: Path) -> None:
    step, schedule = recomputing_step(depth=500)
    plan = plan_for(step, schedule)
    cache = Cache(tmp_path)
    cache.save_plan("key", plan.to_state())
    loaded = Plan.from_state(cache.load_plan("key"))
    assert loaded == plan


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_plan_draws_itself(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{suffix}"
    make_plan().plot(path)
    assert path.stat().st_size > 5_000


@pytest.mark.parametrize("growth_bytes", [4 * MIB, 8 * MIB, 80 * MIB, -MIB])
def test_any_budget_can_be_drawn(tmp_path: Path, growth_bytes: int) -> None:
    pytest.importorskip("matplotlib")
    make_plan(budget=budget(growth_bytes), micro_batch=4).plot(tmp_path / "plan.png")


def test_a_plan_without_a_timeline_cannot_be_drawn(tmp_path: Path) -> None:
    plan = Plan(planner="none", lines=(), step_seconds=0.0, eager_seconds=0.0, captured=False)
    with pytest.raises(PlanError, match="not captured"):
        plan.plot(tmp_path / "plan.png")


def test_drawing_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"torch_odt\[plot\]"):
        make_plan().plot(tmp_path / "plan.png")

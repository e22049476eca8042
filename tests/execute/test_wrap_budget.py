"""What `wrap` promises of bytes: a step inside its budget, or a refusal before it."""

from __future__ import annotations

import copy
import gc
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from wrapped_models import Conv, assert_same, images, planned_step, predicted_bytes, step, training, wrapped

from torch_odt import InfeasibleBudget, OdtWarning, memory
from torch_odt.execute import wrap as wrap_module
from torch_odt.execute import wrap_schedules
from torch_odt.execute.wrap import plan_of, session_of, set_budget, wrap

# torch.compile itself warns of this and that.
pytestmark = [
    pytest.mark.filterwarnings("default", "error::torch_odt.errors.OdtWarning"),
    pytest.mark.usefixtures("fresh_dynamo"),
]


class Deep(nn.Module):
    """A chain whose activations are most of what a step holds."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(6)]
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 1), *blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean((2, 3))


class DeepWithBreak(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = len(self.layers) // 2
        x = self.layers[:half](x)
        torch._dynamo.graph_break()
        return self.layers[half:](x).mean((2, 3))


class DeepUncaptured(Deep):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


needs_allocator = pytest.mark.skipif(not memory.install(), reason="the memory extension is missing")


def peak_of(call: Callable[[], object]) -> int:
    """The allocator's peak while something runs, above the level before."""
    level = memory.stats().allocated_bytes
    memory.reset_peak()
    call()
    peak = memory.stats().peak_bytes
    assert peak is not None and level is not None
    return peak - level


@needs_allocator
def test_the_peak_is_what_was_planned_and_a_budget_too_small_is_refused() -> None:
    torch.manual_seed(0)
    model, reference = wrapped(Deep(), planner="melon")
    x = images(8, 32)
    for seed in range(3):
        step(model, x, seed)
        model.zero_grad()
    full = predicted_bytes(model)

    def peak_of_a_step() -> int:
        return peak_of(lambda: step(model, x))

    assert peak_of_a_step() <= 1.02 * full + 4096
    model.zero_grad()
    tight = full * 6 // 10
    session = session_of(model)
    set_budget(model, training(session.used_bytes() + tight))
    reference.load_state_dict(model.state_dict())
    assert peak_of_a_step() <= tight
    assert plan_of(model).recomputed
    step(reference, x)
    assert_same(model, reference, tolerance=1e-5)

    model.zero_grad()
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    set_budget(model, training(session.used_bytes() + full // 20))
    with pytest.raises(InfeasibleBudget) as refused:
        model(x)
    assert "_dynamo" not in "".join(traceback.format_exception(refused.value)), (
        "how it was called hides what was refused"
    )
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    set_budget(model, training(refused.value.smallest_feasible_bytes))
    step(model, x)


@needs_allocator
def test_a_refused_start_leaves_no_estimates_to_later_plans() -> None:
    """A budget in which nothing could be measured; the next one's plans must not rest on what was estimated then."""
    model, _ = wrapped(Deep(), training(4096))
    x = images(8, 32)
    with pytest.raises(InfeasibleBudget) as refused:
        model(x)
    set_budget(model, training(refused.value.smallest_feasible_bytes))
    for _ in range(3):
        step(model, x)
        model.zero_grad()
    assert not planned_step(model).costs.too_large
    assert not any("departed" in note for note in plan_of(model).notes)


@needs_allocator
def test_graphs_around_a_break_share_one_budget() -> None:
    torch.manual_seed(0)
    model, reference = wrapped(DeepWithBreak())
    x = images(8, 32)
    for seed in range(3):
        step(model, x, seed)
        step(reference, x, seed)
        model.zero_grad()
    session = session_of(model)
    full, runners = predicted_bytes(model), session.runner_count
    assert runners == 2
    tight = full * 6 // 10
    set_budget(model, training(session.used_bytes() + tight))
    reference.load_state_dict(model.state_dict())
    reference.zero_grad()
    assert peak_of(lambda: step(model, x)) <= tight
    step(reference, x)
    assert_same(model, reference)
    assert plan_of(model).recomputed and session.runner_count == runners, "planned anew, not compiled"
    assert any("2 graphs, planned together" in note for note in plan_of(model).notes)


@needs_allocator
def test_what_lies_outside_of_the_graphs_is_measured_and_said() -> None:
    model, _ = wrapped(Deep())
    x = images(8, 32)
    step(model, x)
    (before,) = [line for line in plan_of(model).lines if line.label == "loss"]
    assert "estimated" in before.note
    for _ in range(2):
        step(model, x)
    (after,) = [line for line in plan_of(model).lines if line.label == "loss"]
    assert "measured" in after.note and after.nbytes > 0


@needs_allocator
def test_gradients_and_state_are_counted_as_such() -> None:
    model, _ = wrapped(Deep())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    nbytes = sum(p.nbytes for p in model.parameters())
    gc.collect()
    before = {name: count.allocated_bytes for name, count in (memory.stats().by_category or {}).items()}
    for _ in range(3):
        optimizer.zero_grad()
        model(images(2, 16)).sum().backward()
        optimizer.step()
    after = memory.stats().by_category or {}
    assert after["gradient"].allocated_bytes - before["gradient"] == nbytes
    assert after["optimizer"].allocated_bytes - before["optimizer"] == nbytes


def test_a_second_start_plans_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for start in range(2):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = wrap(Deep(), budget=training("1GiB"), cache=tmp_path)
        if start:
            monkeypatch.setattr(wrap_schedules, "planned", lambda *_, **__: pytest.fail("planned again"))
        for seed in range(3):
            step(model, images(2, 16), seed)
        assert plan_of(model).schedule is not None


@needs_allocator
def test_a_validation_pass_that_does_not_fit_is_refused() -> None:
    model, _ = wrapped(Deep())
    step(model, images(8, 32))
    step(model, images(8, 32))
    session = session_of(model)
    set_budget(model, training(session.used_bytes() + (8 << 20)))
    many = images(256, 64)
    with torch.no_grad(), pytest.raises(InfeasibleBudget, match="keeps nothing") as refused:
        model.eval()(many)
    set_budget(model, training(refused.value.smallest_feasible_bytes))
    with torch.no_grad():
        peak = peak_of(lambda: model(many))
    assert 8 << 20 < peak <= refused.value.smallest_feasible_bytes


@needs_allocator
def test_the_fallback_obeys_the_budget() -> None:
    torch.manual_seed(0)
    model, reference = wrapped(DeepUncaptured())
    x = images(8, 64)
    with pytest.warns(OdtWarning, match="cannot be captured"):
        step(model, x)
    step(reference, x)
    model.zero_grad()
    full = peak_of(lambda: step(model, x, 1))
    step(reference, x, 1)
    session = session_of(model)
    model.zero_grad()
    set_budget(model, training(session.used_bytes() + full * 7 // 8))
    assert peak_of(lambda: step(model, x, 2)) <= full * 7 // 8
    reference.zero_grad()
    step(reference, x, 2)
    assert_same(model, reference)

    set_budget(model, training(session.used_bytes() + (1 << 20)))
    with pytest.raises(InfeasibleBudget, match="nothing more to checkpoint") as refused:
        model(x)
    with torch.no_grad(), pytest.raises(InfeasibleBudget, match="keeps nothing"):
        model(x)
    model.zero_grad()
    set_budget(model, training(refused.value.smallest_feasible_bytes))
    step(model, x)


def test_too_many_shapes_end_in_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrap_module, "_RECOMPILE_LIMIT", 2)
    torch.manual_seed(0)
    model, reference = wrapped(Conv())
    batches = [images(count) for count in (2, 3, 4, 5)]
    with pytest.warns(OdtWarning, match="cannot be captured.*[Rr]ecompile"):
        for x in batches:
            step(model, x)
    for x in batches:
        step(reference, x)
    assert_same(model, reference)
    assert not plan_of(model).captured

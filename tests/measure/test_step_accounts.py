"""Where a step's seconds and bytes go: beside the step itself, the allocator, and counts by hand."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_odt as odt
from torch_odt import memory
from torch_odt.measure import step_memory as step_memory_module
from torch_odt.measure.layers import layer_memory
from torch_odt.measure.operators import OUTSIDE, StepOperators, operator_times
from torch_odt.measure.record import CATEGORIES
from torch_odt.measure.step_memory import StepMemory, follow_operators, sample
from torch_odt.measure.steps import Inference, PlainStep, Work

MIB = 1 << 20


def make_work(*, batch: int = 16) -> Work:
    memory.install()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Work(model, F.cross_entropy, optimizer, (torch.randn(batch, 3, 32, 32), torch.randint(4, (batch,))))


def assert_add_up(found: StepOperators) -> None:
    """The rows are the step by the clock, and no operator's time is counted twice."""
    assert sum(row.seconds for row in found.rows) == pytest.approx(found.profiled_seconds, rel=0.05)
    assert all(row.seconds >= 0 for row in found.rows)
    assert found.unprofiled_seconds > 0


def test_rows_of_operators_are_the_profiled_step() -> None:
    step = PlainStep(make_work())
    step()
    found = operator_times(step, steps=2)
    assert_add_up(found)
    by_name = {(row.op, row.direction): row.calls for row in found.rows}
    assert by_name["convolution", "forward"] == by_name["convolution_backward", "backward"] == 1
    assert by_name["batch_norm", "forward"] == by_name["native_batch_norm_backward", "backward"] == 1
    assert by_name[OUTSIDE, "outside"] == 1
    assert any(direction == "optimizer" for _, direction in by_name)


def test_rows_of_operators_of_a_planned_step() -> None:
    work = make_work()
    step = odt.TrainStep(
        work.model, work.loss_fn, work.optimizer, budget=odt.Budget("1GiB", of="training"), cache=False
    )
    step(*work.batch)
    found = operator_times(lambda: step(*work.batch), steps=2)
    assert_add_up(found)
    by_name = {(row.op, row.direction): row.calls for row in found.rows}
    assert by_name["convolution", "forward"] == by_name["convolution_backward", "backward"] == 1
    assert any(direction == "optimizer" for _, direction in by_name)


def test_a_disturbed_step_counts_in_no_row() -> None:
    """Of three rounds one takes long, as when another program has the processor."""
    a = torch.ones(300, 300)
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        a.mm(a)
        if calls in (6, 7, 8):
            time.sleep(0.2)

    found = operator_times(step, steps=3)
    assert_add_up(found)
    assert found.profiled_seconds < 0.1 > found.unprofiled_seconds
    assert {(row.op, row.calls) for row in found.rows} == {("mm", 1), (OUTSIDE, 1)}


def test_categories_of_a_plain_step_are_what_the_allocator_counts() -> None:
    work = make_work()
    step = PlainStep(work)
    step()
    if not memory.is_tracking():
        assert follow_operators(step) is None
        return
    memory.reset_peak()
    step()
    peak = memory.stats().peak_bytes
    assert peak is not None
    found = follow_operators(step)
    assert found is not None
    at_peak = found.at_peak
    assert abs(sum(at_peak.values()) - peak) <= 0.02 * peak
    weights = sum(tensor.nbytes for tensor in (*work.model.parameters(), *work.model.buffers()))
    # Other tests' tensors may live beside these.
    assert at_peak["weights"] >= weights
    # The convolution's output and what follows the ReLU, at least.
    assert max(found.bytes["activations"]) >= 2 * 16 * 8 * 32 * 32 * 4
    ends = {name: counts[-1] for name, counts in found.bytes.items()}
    trained = sum(parameter.nbytes for parameter in work.model.parameters())
    assert ends["gradients"] >= trained <= ends["optimizer"]


def test_a_sampled_step_tells_its_peak() -> None:
    step = PlainStep(make_work(batch=64))
    step()
    found = sample(step)
    if not memory.is_tracking():
        assert found is None
        return
    assert found is not None
    seen = max(map(sum, zip(*found.bytes.values(), strict=True)))
    assert seen <= found.peak_bytes
    assert (seen < 0.99 * found.peak_bytes) == bool(found.notes)
    traces = found.traces(most_points=5)
    assert {len(trace.values) for trace in traces} == {len(traces[0].at_seconds)}
    assert len(traces[0].at_seconds) <= 5
    assert max(map(sum, zip(*(trace.values for trace in traces[:-1]), strict=True))) == seen
    (process,) = [trace.values for trace in traces if trace.label == "process"]
    (above,) = [trace.values for trace in found.traces(most_points=5, base_bytes=1 << 40) if trace.label == "process"]
    assert min(process) > 0 == max(above), "what the process holds is above its level before the step"


def test_a_step_is_made_again_until_its_peak_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two are over before anything is read of what they take."""
    calls = 0

    def sampled(step: Callable[[], None]) -> StepMemory:
        nonlocal calls
        calls += 1
        found = StepMemory(peak_bytes=1000)
        held = dict.fromkeys(CATEGORIES, 0) | {"activations": {1: 100, 2: 300}.get(calls, 995)}
        found.add(0.0, held, 0)
        return found

    monkeypatch.setattr(step_memory_module, "_sampled", sampled)
    monkeypatch.setattr(memory, "is_tracking", lambda: True)
    found = sample(lambda: None)
    assert found is not None and calls == 3
    assert found.at_peak["activations"] == 995 and not found.notes
    monkeypatch.setattr(step_memory_module, "_MOST_STEPS", 2)
    calls = 0
    found = sample(lambda: None)
    assert found is not None and calls == 2 and found.at_peak["activations"] == 300
    assert found.notes == ["the allocator's own peak is 700 bytes above what was seen in a step"]


def test_inference_keeps_nothing() -> None:
    work = make_work()
    assert Inference(work)().shape == (16, 4)
    assert not work.model.training
    assert all(parameter.grad is None for parameter in work.model.parameters())


def test_layers_are_counted_by_hand() -> None:
    work = make_work()
    PlainStep(work)()
    rows = {row.layer: row for row in layer_memory(work)}
    assert set(rows) == {"0", "1", "2", "5", ""}
    image = 16 * 32 * 32 * 4
    assert rows["0"].weights_bytes == rows["0"].gradients_bytes == rows["0"].optimizer_bytes == (8 * 27 + 8) * 4
    # Its input; the batch.
    assert rows["0"].activations_bytes == 3 * image
    # Its input, and the mean and deviation of each of 8 channels.
    assert rows["1"].activations_bytes == 8 * image + 2 * 8 * 4
    assert rows["1"].weights_bytes == 4 * 8 * 4 + 8
    assert rows["1"].gradients_bytes == 2 * 8 * 4
    # Its output, which the pooling needs as well.
    assert rows["2"].activations_bytes == 8 * image
    assert rows["5"].activations_bytes == 16 * 8 * 4
    assert all(parameter.grad is not None for parameter in work.model.parameters())
    assert not work.model._forward_hooks and not work.model._forward_pre_hooks

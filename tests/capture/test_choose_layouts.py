"""Layouts chosen for a whole graph: where that happens, where it must not, and what comes out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.capture.test_rewrite import execute, ops_named
from torch_odt.capture.batch_axis import analyse
from torch_odt.capture.graph import OutputKind, TrainingGraph, map_refs
from torch_odt.capture.operators import resolve
from torch_odt.capture.rewrite import rewrite
from torch_odt.capture.trace import trace_step
from torch_odt.execute.loss import make_compute

CONVOLUTION, CONVOLUTION_BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"
NAME = "choose_layouts"
SLOW = ["googlenet", "densenet121", "shufflenet_v2_x0_5", "efficientnet_b0"]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 too, where rounding carries nothing over, and whatever the copies cost."""
    monkeypatch.setattr(f"torch_odt.capture.{NAME}.convolves_by_onednn", lambda dtype: True)
    monkeypatch.setattr(f"torch_odt.capture.{NAME}.MOST_COPIED", math.inf)


def capture(
    model: nn.Module, *args: Tensor, chosen: bool = True, drop: tuple[OutputKind, ...] = ("result",)
) -> TrainingGraph:
    traced = trace_step(model, F.mse_loss, make_compute(F.mse_loss), (args, {})).graph
    return rewrite(traced, drop=drop, disabled=() if chosen else (NAME,))


def is_chosen(graph: TrainingGraph) -> bool:
    return any(note.endswith(f"({NAME})") for note in graph.notes)


def run_plainly(model: nn.Module, x: Tensor, y: Tensor) -> dict[tuple[str, Any], Tensor]:
    model = copy.deepcopy(model)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    found: dict[tuple[str, Any], Tensor] = {("loss", 0): loss.detach()}
    found |= {("gradient", name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {("mutation", name): buffer for name, buffer in model.named_buffers() if model.training}


def target_of(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.randn_like(copy.deepcopy(model)(x))


def check(model: nn.Module, x: Tensor) -> TrainingGraph:
    """A step in float64 is plain PyTorch's within rounding, with its random numbers and the strides of its results."""
    model, x = model.double(), x.double()
    y = target_of(model, x)
    graph = capture(model, x, y)
    state = torch.get_rng_state()
    found = execute(graph, model, (x, y))
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    plain = run_plainly(model, x, y)
    assert torch.equal(torch.get_rng_state(), after)
    assert set(found) == set(plain)
    for key, wanted in plain.items():
        torch.testing.assert_close(found[key], wanted, rtol=1e-9, atol=1e-9)
        assert in_order(found[key]) == in_order(wanted), key
    return graph


def in_order(tensor: Tensor) -> list[int]:
    """The strides that mean something."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


class EveryKind(nn.Module):
    """Convolutions of all kinds, and around them what follows their layout and what does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.pointwise = nn.Conv2d(8, 16, 1)
        self.squeeze = nn.Conv2d(16, 4, 1)
        self.excite = nn.Conv2d(4, 16, 1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2, bias=False)
        self.norm, self.group_norm = nn.BatchNorm2d(8), nn.GroupNorm(2, 8)
        self.strided = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.head = nn.Linear(8 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = F.dropout(x, 0.3)
        x = torch.cat([F.max_pool2d(self.depthwise(x), 2), F.avg_pool2d(self.grouped(x), 2)], 1)[:, 3:11]
        x = F.hardswish(self.pointwise(x))
        x = x * torch.sigmoid(self.excite(F.silu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        x = F.leaky_relu(self.norm(self.up(x))) * self.scale
        shortcut = x
        x = F.interpolate(self.group_norm(self.strided(x)), scale_factor=2, mode="bilinear")
        x = F.interpolate(F.pad(self.strided(x), (1, 1, 1, 1)), size=x.shape[2:])
        for _ in range(2):
            x = self.strided(x)
        x = x + shortcut[:, :, ::4, ::4]
        return self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))


def small(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), *layers)


@pytest.mark.usefixtures("_always")
def test_images_are_copied_once() -> None:
    model, x = small(), torch.randn(2, 3, 16, 16)
    graph = capture(model, x, target_of(model, x))
    assert "3 convolutions read and write channels_last, with 9 copies around them (choose_layouts)" in graph.notes
    for op in (*ops_named(graph, CONVOLUTION), *ops_named(graph, CONVOLUTION_BACKWARD)):
        given = [
            torch.empty_strided(v.shape, v.stride) for v in map(graph.values.__getitem__, (*op.reads, *op.shape_reads))
        ]
        assert all(t.is_contiguous(memory_format=torch.channels_last) for t in given if t.dim() == 4)


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_every_kind_of_operator(memory_format: torch.memory_format) -> None:
    model = EveryKind().to(memory_format=memory_format)
    x = torch.randn(3, 3, 16, 16).to(memory_format=memory_format)
    assert is_chosen(check(model, x))


@pytest.mark.usefixtures("_always")
def test_layers_in_evaluation_mode() -> None:
    assert is_chosen(check(EveryKind().eval(), torch.randn(3, 3, 16, 16)))


@pytest.mark.usefixtures("_always")
@settings(max_examples=40)
@given(
    samples=st.integers(1, 3),
    channels=st.integers(1, 5),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    kernel=st.sampled_from([1, 3]),
    view=st.sampled_from([Tensor.contiguous, lambda x: x[:, :, ::2], lambda x: x.transpose(2, 3), lambda x: x[::2]]),
)
def test_all_shapes_and_strides(
    samples: int, channels: int, height: int, width: int, kernel: int, view: Callable[[Tensor], Tensor]
) -> None:
    middle = 2 * channels + 1
    model = nn.Sequential(
        nn.Conv2d(channels, middle, kernel, padding=1),
        nn.BatchNorm2d(middle),
        nn.ReLU(),
        nn.Conv2d(middle, middle, kernel, padding=1),
        nn.Conv2d(middle, channels, kernel, padding=1),
    )
    assert is_chosen(check(model, view(torch.randn(2 * samples, channels, height + 1, width + 1))))


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize(
    "name", ["mobilenet_v2", "resnet18", "squeezenet1_1", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)]
)
def test_strides_are_those_of_running_it(name: str) -> None:
    options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    model = getattr(torchvision.models, name)(num_classes=4, **options)
    x, y = torch.randn(2, 3, 64, 64), torch.randn(2, 4)
    graph = capture(model, x, y)
    assert is_chosen(graph)
    assert wrong_strides(graph, model, (x, y)) == []


def wrong_strides(graph: TrainingGraph, model: nn.Module, args: tuple[Tensor, ...]) -> list[tuple[str, str]]:
    """Values whose strides are others when the graph runs, with the operators that made them."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    table: dict[int, Tensor] = dict(graph.constants)
    for value in map(graph.values.__getitem__, graph.inputs):
        if value.kind in ("parameter", "buffer"):
            table[value.index] = state[str(value.target)].detach()
        else:
            table[value.index] = torch.ones(value.shape) if value.kind == "tangent" else args[int(value.target or 0)]
    wrong = []
    for op in graph.program:
        results = resolve(op.target)(*map_refs(op.args, table.__getitem__), **map_refs(op.kwargs, table.__getitem__))
        for index, tensor in zip(op.writes, [results] if isinstance(results, Tensor) else results, strict=True):
            if index is not None:
                table[index] = tensor
                value = graph.values[index]
                if in_order(tensor) != in_order(torch.empty_strided(value.shape, value.stride, device="meta")):
                    wrong.append((value.name, op.target))
    return wrong


@pytest.mark.usefixtures("_always")
def test_results_leave_with_their_strides() -> None:
    model, x = small(), torch.randn(2, 3, 16, 16)
    graph = capture(model, x, target_of(model, x), drop=())
    assert is_chosen(graph)
    for output in graph.outputs:
        value = graph.values[output.value]
        tensor = torch.empty_strided(value.shape, value.stride)
        assert tensor.is_contiguous(), output


def permuting() -> nn.Module:
    class Permuting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = small(), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.first(x).permute(0, 2, 3, 1))

    return Permuting()


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (permuting, (2, 3, 16, 16)),
        (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.Conv1d(4, 4, 3)), (2, 3, 16)),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.Conv2d(4, 4, 3)), (2, 3, 16, 16)),
        (lambda: small().double(), (2, 3, 16, 16)),
    ],
)
def test_graphs_that_gain_nothing_stay(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model = make()
    x = torch.randn(shape, dtype=next(model.parameters()).dtype)
    y = target_of(model, x)
    graph = capture(model, x, y)
    assert not is_chosen(graph)
    assert graph.fingerprint == capture(model, x, y, chosen=False).fingerprint


@pytest.mark.usefixtures("_always")
def test_micro_batches_add_up() -> None:
    model, x = small(nn.Flatten(), nn.Linear(400, 4)), torch.randn(8, 3, 16, 16)
    y = torch.randn(8, 4)
    full, micro = capture(model, x, y), capture(model, x[:2], y[:2])
    assert is_chosen(full) and is_chosen(micro)
    assert analyse(full, micro, 8, 2).loss_kind == "mean"


@pytest.mark.usefixtures("_always")
def test_not_a_number_and_infinity_stay() -> None:
    model, x = small(), torch.randn(3, 3, 16, 16)
    y = target_of(model, x)
    x[1, 0, 3, 3], x[2, 1, 4, 4] = float("nan"), float("inf")
    graph = capture(model, x, y)
    assert is_chosen(graph)
    found, plain = execute(graph, model, (x, y)), run_plainly(model, x, y)
    for key, wanted in plain.items():
        assert torch.equal(found[key].isnan(), wanted.isnan()), key

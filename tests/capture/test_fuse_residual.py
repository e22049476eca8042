"""BatchNorm, the addition of a residual and a clamp as one operator: where it happens, and where it must not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import Tensor, nn

from tests.capture.test_fuse_batch_norm import capture, check
from tests.capture.test_rewrite import execute, ops_named, recompute
from torch_odt.capture.batch_norm_match import BATCH_NORM, BATCH_NORM_BACKWARD
from torch_odt.capture.fuse_batch_norm import FUSED, FUSED_ADD_BACKWARD, FUSED_BACKWARD, FUSED_NORMALIZE

Join = Callable[[nn.Module, Tensor, Tensor], Tensor]
FORMATS = [torch.contiguous_format, torch.channels_last]


class Residual(nn.Module):
    """Two convolutions, whose second one's BatchNorm is added to something, and a third one behind the sum."""

    def __init__(self, join: Join, norms: int = 1) -> None:
        super().__init__()
        self.join = join
        self.first, self.second, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(norms))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.join(self, x, self.second(x)))


def batch(memory_format: torch.memory_format = torch.contiguous_format) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 10, 10).to(memory_format=memory_format), torch.randn(4, 4, 6, 6)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize(
    "join",
    [
        lambda m, x, y: (m.norms[0](y) + x).relu(),
        lambda m, x, y: (x + m.norms[0](y)).relu(),
        lambda m, x, y: m.norms[0](y).add_(x).relu_(),
        lambda m, x, y: nn.functional.relu6(m.norms[0](y) + x),
        lambda m, x, y: nn.functional.hardtanh(x + m.norms[0](y), -0.5, 2.0),
    ],
)
def test_a_residual_and_a_clamp_are_fused(join: Join, memory_format: torch.memory_format) -> None:
    graph = check(Residual(join).to(memory_format=memory_format), *batch(memory_format), 1)
    (backward,) = ops_named(graph, FUSED_ADD_BACKWARD)
    gone = ("relu", "hardtanh", "threshold_backward", "hardtanh_backward", "native_batch_norm_backward")
    assert not any(ops_named(graph, target) for target in (BATCH_NORM, *(f"aten.{name}.default" for name in gone)))
    (fused,) = ops_named(graph, FUSED)
    assert backward.args[1].value == fused.results[0], "the mask comes from the output"
    ((first, second),) = recompute(graph, FUSED_NORMALIZE)
    assert torch.equal(first, second) and first.stride() == second.stride()


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize(
    "join",
    [lambda m, x, y: m.norms[0](y) + x, lambda m, x, y: x + m.norms[0](y), lambda m, x, y: m.norms[0](y).add_(x)],
)
def test_a_residual_alone_leaves_the_backward_pass_alone(join: Join, memory_format: torch.memory_format) -> None:
    graph = check(Residual(join).to(memory_format=memory_format), *batch(memory_format), 1)
    assert len(ops_named(graph, BATCH_NORM_BACKWARD)) == 1
    assert not ops_named(graph, FUSED_BACKWARD) and not ops_named(graph, FUSED_ADD_BACKWARD)
    ((first, second),) = recompute(graph, FUSED_NORMALIZE)
    assert torch.equal(first, second) and first.stride() == second.stride()


@pytest.mark.parametrize(
    "join",
    [
        lambda m, x, y: (m.norms[0](y) + m.norms[1](x)).relu(),
        lambda m, x, y: (m.norms[1](x) + m.norms[0](y)).relu(),
    ],
)
def test_of_two_batch_norms_one_takes_the_other_as_its_residual(
    join: Join,
) -> None:
    graph = check(Residual(join, norms=2), *batch(), 1)
    assert len(ops_named(graph, BATCH_NORM)) == len(ops_named(graph, BATCH_NORM_BACKWARD)) == 1
    (backward,) = ops_named(graph, FUSED_ADD_BACKWARD)
    (other,) = ops_named(graph, BATCH_NORM_BACKWARD)
    assert other.args[0].value == backward.writes[3], "the gradient that passes the clamp is that of both"


@pytest.mark.parametrize(
    ("norms", "join", "fused"),
    [
        # A residual that has an activation function of its own.
        (2, lambda m, x, y: (m.norms[0](y) + m.norms[1](x).relu()).relu(), 1),
        (2, lambda m, x, y: (m.norms[1](x).relu() + m.norms[0](y)).relu(), 2),
        # Sums that others need.
        (2, lambda m, x, y: (m.norms[0](y) + x).relu() + (m.norms[1](y) + x), 2),
        (1, lambda m, x, y: (lambda s: s.relu() + s)(m.norms[0](y) + x), 1),
        # A residual that is BatchNorm's input or comes after BatchNorm, a scaled one, a number, one of another shape.
        (1, lambda m, x, y: (m.norms[0](y) + y).relu(), 1),
        (1, lambda m, x, y: (m.norms[0](y) + m.second(x).sigmoid()).relu(), 0),
        (1, lambda m, x, y: torch.add(m.norms[0](y), x, alpha=2).relu(), 0),
        (1, lambda m, x, y: (m.norms[0](y) + 1).relu(), 0),
        (1, lambda m, x, y: (m.norms[0](y) + x.mean((2, 3), keepdim=True)).relu(), 0),
        (1, lambda m, x, y: (lambda n: n + n)(m.norms[0](y)), 0),
        # Only clamps have a backward op behind a residual: the addition alone is fused.
        (1, lambda m, x, y: nn.functional.silu(m.norms[0](y) + x), 1),
        (1, lambda m, x, y: nn.functional.hardswish(x + m.norms[0](y)), 1),
        (1, lambda m, x, y: (lambda n: n + n.relu())(m.norms[0](y)), 0),
    ],
)
def test_what_is_fused(norms: int, join: Join, fused: int) -> None:
    check(Residual(join, norms), *batch(), fused)


def test_another_layout_is_left_alone() -> None:
    model = Residual(lambda m, x, y: (m.norms[0](y) + x.contiguous(memory_format=torch.channels_last)).relu())
    check(model, *batch(), 0)


def test_a_residual_without_gradient() -> None:
    graph = check(Residual(lambda m, x, y: (m.norms[0](y) + x.detach()).relu()), *batch(), 1)
    (backward,) = ops_named(graph, FUSED_ADD_BACKWARD)
    assert backward.writes[3] is None


def test_a_frozen_batch_norm_leaves_the_clamp_its_own_backward_op() -> None:
    model = Residual(lambda m, x, y: (m.norms[0](y.detach()) + x).relu())
    model.norms[0].requires_grad_(False)
    graph = check(model, *batch(), 1)
    assert not ops_named(graph, FUSED_ADD_BACKWARD) and ops_named(graph, "aten.threshold_backward.default")


@pytest.mark.parametrize(("name", "fused", "bare"), [("resnet18", 17, 3), ("resnet50", 49, 4), ("mobilenet_v2", 45, 7)])
def test_networks(name: str, fused: int, bare: int) -> None:
    model = getattr(torchvision.models, name)(num_classes=4).train()
    graph = capture(model, torch.randn(2, 3, 64, 64), torch.randn(2, 4))
    assert (len(ops_named(graph, FUSED)), len(ops_named(graph, BATCH_NORM))) == (fused, bare)
    execute(graph, model, (torch.randn(2, 3, 64, 64), torch.randn(2, 4)))

"""Frozen BatchNorms inside the convolutions in front of them: where, what it saves, and that results stay."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.test_rewrite import capture, execute, ops_named
from torch_odt.adapt.frozen_batch_norm import FrozenBatchNorm
from torch_odt.capture.graph import TrainingGraph

AFFINE, CONVOLUTION_BACKWARD = "aten.addcmul.default", "aten.convolution_backward.default"


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def norm(channels: int, dims: int = 2, **options: Any) -> FrozenBatchNorm:
    made = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](channels, **options)
    for tensor in (made.running_mean, *made.parameters()):
        nn.init.normal_(tensor)
    nn.init.uniform_(made.running_var, 0.5, 2)
    return FrozenBatchNorm(made)


def only_biases(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


def check(model: nn.Module, x: Tensor, folded: int) -> TrainingGraph:
    """Loss and gradients are plain PyTorch's within rounding, and so many BatchNorms are folded."""
    y = torch.randn_like(model(x))
    graph = capture(model, x, y)
    assert any(note.startswith(f"{folded} frozen BatchNorms") for note in graph.notes) is bool(folded)
    found = execute(graph, model, (x, y))
    plain = copy.deepcopy(model)
    loss = F.mse_loss(plain(x), y)
    loss.backward()
    torch.testing.assert_close(found["loss", 0], loss.detach())
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert {target for kind, target in found if kind == "gradient"} == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found["gradient", name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    return graph


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(4, 6, 3, bias=False),
        nn.Conv2d(4, 6, 3, bias=True, stride=2, padding=1),
        nn.Conv2d(4, 6, 3, groups=2, bias=False),
        nn.Conv2d(4, 8, 1, bias=False).to(memory_format=torch.channels_last),
    ],
    ids=["plain", "bias", "groups", "channels_last"],
)
def test_a_norm_behind_a_convolution_is_gone(convolution: nn.Conv2d) -> None:
    first = nn.Conv2d(3, 4, 3, bias=False)
    model = only_biases(nn.Sequential(first, norm(4), nn.ReLU6(), convolution, norm(convolution.out_channels)))
    if convolution.bias is not None:
        convolution.bias.requires_grad_(False)
    graph = check(model, torch.randn(2, 3, 16, 16), folded=2)
    # What is left adds to a bias, a number a channel.
    assert all(len(graph.values[op.results[0]].shape) == 1 for op in ops_named(graph, AFFINE))
    for op in ops_named(graph, CONVOLUTION_BACKWARD):
        assert op.args[2].value not in graph.inputs


def test_a_weight_that_is_larger_than_images_is_not_kept_scaled() -> None:
    model = only_biases(
        nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 64, 3, bias=False), norm(64))
    )
    graph = check(model, torch.randn(2, 3, 7, 7), folded=2)
    (backward,) = ops_named(graph, CONVOLUTION_BACKWARD)
    assert graph.values[backward.args[2].value].target == "3.weight"


@pytest.mark.parametrize(("dims", "make"), [(1, nn.Conv1d), (3, nn.Conv3d)])
def test_other_dimensions_too(dims: int, make: type[nn.Module]) -> None:
    model = only_biases(nn.Sequential(make(2, 3, 2), norm(3, dims), nn.ReLU(), make(3, 2, 2), norm(2, dims)))
    check(model, torch.randn(2, 2, *(5,) * dims), folded=2)


def test_a_norm_without_weight_and_bias() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), norm(5, affine=False))
    model[2].weight.requires_grad_(False)
    check(model, torch.randn(2, 3, 8, 8), folded=1)


def test_a_convolution_that_trains_gets_its_own_gradient() -> None:
    model = only_biases(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), norm(4), nn.ReLU(), nn.Conv2d(4, 5, 3), norm(5)))
    assert model[3].bias.requires_grad
    for layer in (model[0], model[3]):
        layer.weight.requires_grad_(True)
    check(model, torch.randn(2, 3, 8, 8), folded=2)


def test_what_others_read_is_left() -> None:
    class Shortcut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(3, 3, 3, padding=1, bias=False), norm(3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.convolution(x)
            return self.norm(x) + x

    check(only_biases(Shortcut()), torch.randn(2, 3, 8, 8), folded=0)


def test_a_norm_in_front_is_left() -> None:
    check(only_biases(nn.Sequential(norm(3), nn.Conv2d(3, 4, 3, bias=False))), torch.randn(2, 3, 8, 8), folded=0)


def test_a_transposed_convolution_is_left() -> None:
    model = only_biases(nn.Sequential(nn.ConvTranspose2d(3, 4, 3, bias=False), norm(4)))
    check(model, torch.randn(2, 3, 8, 8), folded=0)


def test_it_makes_fewer_tensors_and_can_be_switched_off() -> None:
    layers = nn.Conv2d(3, 4, 3, bias=False), norm(4), nn.SiLU(), nn.Conv2d(4, 4, 3, bias=False), norm(4)
    model = only_biases(nn.Sequential(*layers))
    x, y = torch.randn(2, 3, 16, 16), torch.randn(2, 4, 12, 12)
    folded, left = (
        capture(model, x, y, disabled=[*disabled, "choose_layouts"]) for disabled in ([], ["fold_batch_norm"])
    )
    # Two norms less in the forward pass, and one gradient less that is scaled: nothing is in front of the other.
    assert images_in(left) - images_in(folded) == 3
    found, wanted = execute(folded, model, (x, y)), execute(left, model, (x, y))
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5)


def images_in(graph: TrainingGraph) -> int:
    shapes = [graph.values[value].shape for op in graph.program for value in op.results]
    return sum(len(shape) == 4 and shape[0] == 2 for shape in shapes)

"""A convolution that is computed in int8 in both passes: near to float32, differentiable, traceable, and it trains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torch_odt.ops import int8_training_conv2d


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


@pytest.mark.parametrize(
    ("channels", "kernel", "windows"),
    [
        ((16, 24), 1, {}),
        ((8, 12), 3, {"stride": 2, "padding": 1}),
        ((12, 12), 3, {"padding": 1, "groups": 12}),
        ((6, 9), 3, {"padding": 2, "dilation": 2, "groups": 3}),
    ],
)
def test_both_passes_are_near_to_float32(channels: tuple[int, int], kernel: int, windows: dict[str, int]) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(*channels, kernel, **windows)
    x = torch.randn(4, channels[0], 15, 15, requires_grad=True)
    expected = layer(x)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [x, layer.weight, layer.bias], gradient)
    found = int8_training_conv2d(x, layer.weight, layer.bias, **windows)
    assert relative_error(found, expected) < 0.02
    ours = torch.autograd.grad(found, [x, layer.weight, layer.bias], gradient)
    assert all(relative_error(one, other) < 0.04 for one, other in zip(ours, wanted, strict=True))
    assert torch.equal(ours[2], wanted[2]) or relative_error(ours[2], wanted[2]) < 1e-5


def test_the_gradient_is_right_on_average() -> None:
    torch.manual_seed(0)
    x = torch.randint(-127, 128, (2, 4, 6, 6)).float()  # of which int8 keeps everything
    x[0, 0, 0, 0] = 127
    weight = torch.randn(5, 4, 3, 3, requires_grad=True)
    gradient = torch.randn(2, 5, 4, 4)

    def of(seed: int) -> Tensor:
        return torch.autograd.grad(int8_training_conv2d(x, weight, seed=seed), weight, gradient)[0]

    assert torch.equal(of(1), of(1)) and not torch.equal(of(1), of(2))
    mean = torch.stack([of(seed) for seed in range(60)]).mean(0)
    exact = torch.autograd.grad(torch.conv2d(x, weight), weight, gradient)[0]
    assert relative_error(mean, exact) < 0.25 * relative_error(of(1), exact)


def test_it_keeps_bytes_for_the_backward_pass() -> None:
    kept: list[Tensor] = []
    x, weight = torch.randn(2, 8, 10, 10), torch.randn(8, 8, 3, 3, requires_grad=True)

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        int8_training_conv2d(x, weight)
    assert sum(tensor.nbytes for tensor in kept) == x.numel() + weight.numel() + 8


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the check itself
def test_it_is_registered_as_torch_wants_it() -> None:
    x, weight = torch.randn(2, 6, 5, 5, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    arguments = (x, weight, [2, 1], [1, 1], [1, 1], 2, 3)
    torch.library.opcheck(torch.ops.torch_odt.int8_training_conv2d.default, arguments)


def test_zeros_and_nothing() -> None:
    weight = torch.randn(4, 3, 1, 1, requires_grad=True)
    output = int8_training_conv2d(torch.zeros(2, 3, 4, 4), weight)
    assert not output.any()
    output.sum().backward()
    assert weight.grad is not None and not weight.grad.any()
    assert int8_training_conv2d(torch.zeros(0, 3, 4, 4), weight).shape == (0, 4, 4, 4)


@pytest.mark.parametrize("bad", [torch.zeros(1, 3, 2, 2).double(), torch.full((1, 3, 2, 2), float("nan"))])
def test_bad_input_is_named(bad: Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"must be float32|not finite"):
        int8_training_conv2d(bad, torch.randn(4, 3, 1, 1))


@pytest.mark.parametrize("bias", [torch.zeros(4, 1, 1), torch.zeros(1), torch.zeros(4, dtype=torch.float64)])
def test_a_bias_of_another_kind_is_named(bias: Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"bias must be float32 of shape \(4,\), not"):
        int8_training_conv2d(torch.randn(1, 3, 2, 2), torch.randn(4, 3, 1, 1), bias)
    with pytest.raises(RuntimeError, match="must have 4 dimensions, not 3 and 4"):
        int8_training_conv2d(torch.randn(3, 2, 2), torch.randn(4, 3, 1, 1))


def losses_of(in_int8: bool) -> list[float]:
    """Two layers learn which half of a picture is brighter."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 2, 8)
    optimizer = torch.optim.SGD([parameter for layer in layers for parameter in layer.parameters()], 0.1)

    def run(layer: nn.Conv2d, x: Tensor, seed: int) -> Tensor:
        if not in_int8:
            return layer(x)
        return int8_training_conv2d(x, layer.weight, layer.bias, padding=layer.padding[0], seed=seed)

    losses = []
    for step in range(150):
        x = torch.rand(32, 1, 8, 8)
        wanted = (x[..., :4].mean((1, 2, 3)) > x[..., 4:].mean((1, 2, 3))).long()
        output = run(layers[1], run(layers[0], x, 2 * step).relu(), 2 * step + 1)
        loss = nn.functional.cross_entropy(output.flatten(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_network_trains_as_in_float32() -> None:
    ours, theirs = losses_of(True), losses_of(False)
    assert sum(ours[-10:]) < 0.8 * sum(ours[:10])
    assert abs(sum(ours[-10:]) - sum(theirs[-10:])) < 0.1 * sum(theirs[-10:])

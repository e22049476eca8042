"""What the tests of NITI's arithmetic share: a small network, and the arithmetic of a layer in int64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_odt.quant.niti_numbers import Scaled, as_carrier, as_int8, bits_of, shift_rounded


def small_net() -> nn.Sequential:
    """Convolutions, a depthwise one, pools and linear layers, without BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 16, 1),
        nn.ReLU6(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 4),
    )


class Means(nn.Module):
    """Each way to write a mean over rows and columns."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(1, 6, 3, 2, 1), nn.AdaptiveAvgPool2d(1)
        self.heads = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        means = (self.pool(x).flatten(1), torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1), x.mean([2, 3]))
        first, second, third = (head(mean) for head, mean in zip(self.heads, means, strict=True))
        found: Tensor = first + second + third
        return found


class Residual(nn.Module):
    """Two residual sums without a norm, one of which has a convolution beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.first = nn.Conv2d(6, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.beside = nn.Conv2d(6, 6, 1)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(self.first(x)) + x
        y = self.second(x)
        y += self.beside(x)
        found: Tensor = self.head(F.avg_pool2d(torch.relu(y), 4).flatten(1))
        return found


def batches(count: int, size: int = 8, seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Images of one channel, of which the label is the brightest quarter."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        labels = torch.randint(0, 4, (size,), generator=generator)
        images = 0.3 * torch.randn(size, 1, 8, 8, generator=generator)
        for image, label in zip(images, labels.tolist(), strict=True):
            row, column = divmod(label, 2)
            image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
        found.append((images, labels))
    return found


def bytes_of(model: nn.Module) -> dict[str, list[int]]:
    """Everything in a state_dict, byte by byte."""
    return {
        name: tensor.reshape(-1).contiguous().view(torch.uint8).tolist() for name, tensor in model.state_dict().items()
    }


def mantissas(*shape: int, seed: int, most: int = 127) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(-most, most + 1, shape, dtype=torch.int8, generator=generator)
    return found.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else found


def scaled(values: Tensor, exponent: int) -> Scaled:
    """As a layer takes it, with a gradient."""
    return Scaled(as_carrier(values).requires_grad_(), torch.tensor([float(exponent)], requires_grad=True))


@dataclass(frozen=True)
class Reference:
    """A layer's arithmetic in int64, where every scale is looked at.

    Attributes:
        output, input_gradient, weight_gradient, bias_gradient: mantissas.
        output_exponent, input_exponent: theirs.
    """

    output: Tensor
    output_exponent: int
    input_gradient: Tensor
    input_exponent: int
    weight_gradient: Tensor
    bias_gradient: Tensor


def reference(
    image: Scaled,
    weight: Scaled,
    bias: Tensor,
    bias_exponent: int,
    gradient: Scaled,
    bits: int,
    windows: dict[str, int],
) -> Reference:
    """What a convolution and its gradients are, from float64 sums, which hold them exactly."""
    x, w, g = (as_int8(tensor.mantissas.detach()).double() for tensor in (image, weight, gradient))
    of_x, of_w, of_g = (int(tensor.exponent) for tensor in (image, weight, gradient))
    added = (bias.double() * 2.0 ** (bias_exponent - of_x - of_w)).round()
    x, w = x.requires_grad_(), w.requires_grad_()
    sums = torch.conv2d(x, w, None, **windows)  # type: ignore[arg-type]
    of_input, of_weight = torch.autograd.grad(sums, (x, w), g)
    output, shift = _fewer(sums.detach() + added[:, None, None], 7)
    input_gradient, input_shift = _fewer(of_input, 7)
    weight_gradient, _ = _fewer(of_weight, bits)
    bias_gradient, _ = _fewer(g.sum((0, 2, 3)), bits)
    return Reference(
        output, of_x + of_w + shift, input_gradient, of_g + of_w + input_shift, weight_gradient, bias_gradient
    )


def _fewer(sums: Tensor, bits: int) -> tuple[Tensor, int]:
    whole = sums.long()
    shift = max(0, bits_of(float(whole.abs().max())) - bits)
    return shift_rounded(whole, shift).clamp(-127, 127).to(torch.int8), shift

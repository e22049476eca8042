"""Small networks that hold what int8 has layers for, in the ways in which such code is written."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 12


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


class Residual(nn.Module):
    """BatchNorm to fold, a depthwise convolution, a sum with ReLU behind it, functions and methods."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding="same", groups=8)
        self.pointwise = nn.Conv2d(8, 8, 1, bias=False)
        self.last_norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu6(self.norm(self.stem(x))), 2)
        y = F.silu(self.depthwise(x))
        x = F.relu(x + self.last_norm(self.pointwise(y)))
        x = F.dropout(x.mean([2, 3]), 0.3, self.training)
        return self.head(x)


class Excited(nn.Module):
    """Squeeze and excitation, hardswish, and a softmax that int8 has nothing for."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6), nn.Hardswish())
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 6, 1), nn.Hardsigmoid())
        self.attention = nn.Conv2d(6, 1, 1)
        self.pool = nn.AvgPool2d(5)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.squeeze(x) * x
        x = x * torch.softmax(self.attention(x).flatten(2), 2).view(x.size(0), 1, 5, 5)
        return self.head(self.pool(x).view(x.shape[0], -1))


class Fire(nn.Module):
    """Two branches side by side, and scores that are averaged, as in SqueezeNet."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(3, 6, 1)
        self.narrow = nn.Conv2d(6, 5, 1)
        self.wide = nn.Conv2d(6, 7, 3, padding=1)
        self.scores = nn.Conv2d(12, 4, 1)
        self.pool = nn.AdaptiveAvgPool2d((1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        x = torch.cat([F.relu(self.narrow(x)), F.relu(self.wide(x))], 1)
        return torch.flatten(self.pool(self.scores(x)), 1)


class ChannelsBehind(nn.Module):
    """Linear layers over the channels of images that have these last, as in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2)
        self.wide = nn.Linear(8, 16)
        self.narrow = nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.narrow(F.gelu(self.wide(x.permute(0, 2, 3, 1))))
        return self.head((x + y.permute(0, 3, 1, 2)).mean([2, 3]))


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 8),
        nn.Tanh(), nn.Linear(8, 4),
    )  # fmt: skip


def vgg() -> nn.Sequential:
    """Without BatchNorm, with flattened images, and BatchNorm in front."""
    return nn.Sequential(
        nn.BatchNorm2d(3), nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 6, 3), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(54, 4),
    )  # fmt: skip


NETWORKS = {
    "residual": Residual,
    "excited": Excited,
    "fire": Fire,
    "mlp": mlp,
    "vgg": vgg,
    "channels_behind": ChannelsBehind,
}


def trained_a_little(name: str) -> nn.Module:
    """In evaluation mode, with statistics that BatchNorm has seen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = NETWORKS[name]()
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, (nn.BatchNorm2d, nn.BatchNorm1d)):
                    module.weight.uniform_(0.5, 1.5)
                    module.bias.normal_(0, 0.2)
            for _ in range(20):
                model(images(16))
    return model.eval()


def images(count: int = 8, seed: int | None = None) -> Tensor:
    draw = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, SIZE, SIZE, generator=draw)


def calibration(count: int = 3) -> list[Tensor]:
    return [images(16, seed) for seed in range(count)]


def labels(count: int = 8, seed: int = 0) -> Tensor:
    return torch.randint(0, 4, (count,), generator=torch.Generator().manual_seed(seed))


def copies(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return copy.deepcopy(model), copy.deepcopy(model)

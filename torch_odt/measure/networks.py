"""The papers' networks that torchvision does not have, by name.

LeNet is of Cai et al. ("Towards Ubiquitous Learning", EMDL 2021). The others are of Chen et al. (
"Exploring the Capabilities of Mobile Devices in Supporting Deep Learning", SEC 2019): its Table 2 and the sweeps of its
section 4.3. Where a table leaves open a layer's stride or pooling, the docstring says what was chosen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

IMAGE_SHAPES = {"lenet": (1, 28, 28)}
"""What a sample of a network is, where it is not CIFAR-10's."""
CIFAR_SHAPE = (3, 32, 32)


def lenet(classes: int = 10) -> nn.Module:
    """LeNet-5 with ReLU and max-pooling, for images of 28 x 28 in grey."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes),
    )  # fmt: skip


def mentee(classes: int = 10) -> nn.Module:
    """Five convolutions and three fully connected layers.

    The table names the last pooling alone. Three more, after the convolutions before it, come closest to the 26.89
    million parameters that the text states: 29.1 million.
    """
    channels = (3, 64, 128, 256, 512, 512)
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(channels)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        if 1 <= number <= 3:
            layers.append(nn.MaxPool2d(2))
    head = [nn.Linear(512 * 4, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, classes)]
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), *head)


def reduced_mobilenet(classes: int = 10) -> nn.Module:
    """Six layers of MobileNet, with BatchNorm and ReLU after each convolution as there.

    The two depthwise convolutions before the channels double to 128 and 256 halve the image, so that 7 x 7 is pooled.
    """
    layers: list[nn.Module] = [*_normalised(nn.Conv2d(3, 32, 3, padding=1, bias=False))]
    for before, after, stride in ((32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)):
        layers += _normalised(nn.Conv2d(before, before, 3, stride, padding=1, groups=before, bias=False))
        layers += _normalised(nn.Conv2d(before, after, 1, bias=False))
    return nn.Sequential(*layers, nn.AvgPool2d(7), nn.Flatten(), nn.Linear(256, classes))


def reduced_resnet(classes: int = 10) -> nn.Module:
    """Eight layers of a wide ResNet: blocks of two convolutions with a shortcut; two of them halve the image."""
    return nn.Sequential(
        *_normalised(nn.Conv2d(3, 16, 3, padding=1, bias=False)),
        *_normalised(nn.Conv2d(16, 160, 3, padding=1, bias=False)),
        _Residual(160, 320), _Residual(320, 640), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(640, classes),
    )  # fmt: skip


class _Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *_normalised(nn.Conv2d(before, after, 3, 2, padding=1, bias=False)),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = nn.Conv2d(before, after, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convolutions(x) + self.shortcut(x))


def fully_connected(width: int, depth: int) -> nn.Module:
    """Layers without activation on an image of CIFAR-10, the last layer's outputs being the classes' scores."""
    widths = [3072, *[width] * depth]
    return nn.Sequential(nn.Flatten(), *[nn.Linear(a, b) for a, b in pairwise(widths)])


def convolution(width: int, depth: int) -> nn.Module:
    """3 x 3 convolutions without activation; means over the image are the scores, which takes no parameters."""
    channels = [3, *[width] * depth]
    layers = [nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(channels)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def separable(width: int, depth: int) -> nn.Module:
    """The same with depthwise-separable convolutions: 3 x 3 within each channel, then 1 x 1 across them."""
    channels = [3, *[width] * depth]
    layers = [
        layer for a, b in pairwise(channels) for layer in (nn.Conv2d(a, a, 3, padding=1, groups=a), nn.Conv2d(a, b, 1))
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "lenet": lenet,
    "mentee": mentee,
    "reduced_mobilenet": reduced_mobilenet,
    "reduced_resnet": reduced_resnet,
}
SWEPT: dict[str, Callable[[int, int], nn.Module]] = {
    "fully_connected": fully_connected,
    "convolution": convolution,
    "separable": separable,
}
_SWEPT_NAME = re.compile(rf"({'|'.join(SWEPT)})_(\d+)x(\d+)")


def is_network(name: str) -> bool:
    """Whether `make_network` knows a name."""
    return name in NETWORKS or _SWEPT_NAME.fullmatch(name) is not None


def make_network(name: str, classes: int = 10) -> nn.Module:
    """A network by name: one of `NETWORKS`, or one of a sweep, such as "convolution_64x2" (width x depth).

    Raises:
        KeyError: there is none of that name.

    Example:
        >>> sum(p.numel() for p in make_network("fully_connected_64x1").parameters())
        196672
    """
    swept = _SWEPT_NAME.fullmatch(name)
    if swept is None:
        return NETWORKS[name](classes)
    return SWEPT[swept[1]](int(swept[2]), int(swept[3]))


def _normalised(convolution: nn.Conv2d) -> tuple[nn.Module, ...]:
    return convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU()

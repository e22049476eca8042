"""Networks for small devices, and how fast each may learn when it is pretrained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from recipes.common.mcunet import MCUNetLike


@dataclass(frozen=True)
class Network:
    """One to adapt.

    Attributes:
        make: from the number of classes.
        rate: the highest learning rate of its pretraining.
    """

    make: Callable[[int], nn.Module]
    rate: float = 0.1


def _mobilenet_v2(classes: int) -> nn.Module:
    from torchvision.models import mobilenet_v2

    return mobilenet_v2(width_mult=0.35, num_classes=classes)


# MobileNetV2 diverges at the rate that suits the others.
NARROW_NETWORKS = {"mcunet": Network(MCUNetLike), "mobilenet_v2": Network(_mobilenet_v2, rate=0.02)}

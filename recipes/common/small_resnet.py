"""A residual network for small images, and a plain one that is much smaller."""

from __future__ import annotations

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut.

    K. He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, figure 2, with a projection where the shape
    changes.
    """

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*conv_norm(inputs, outputs, stride), nn.ReLU(), *conv_norm(outputs, outputs, 1))
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return y


class SmallResNet(nn.Sequential):
    """ResNet-18 without its last stage and the strides of its stem: images `(n, 3, h, w)` -> scores `(n, classes)`.

    Its layers `stage1` to `stage3` have `width`, 2 `width` and 4 `width` channels, of h, h/2 and h/4 rows.
    """

    def __init__(self, classes: int, *, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_norm(3, width, 1), nn.ReLU())
        channels = width
        for number in range(3):
            outputs = width << number
            first = BasicBlock(channels, outputs, stride=1 if number == 0 else 2)
            self.add_module(f"stage{number + 1}", nn.Sequential(first, BasicBlock(outputs, outputs, stride=1)))
            channels = outputs
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(channels, classes)


class SmallConvNet(nn.Sequential):
    """Three convolutions with strides, BatchNorm and ReLU; layers `stage1` to `stage3` of h/2, h/4 and h/4 rows."""

    def __init__(self, classes: int, *, width: int = 8) -> None:
        super().__init__()
        channels = 3
        for number, stride in enumerate((2, 2, 1)):
            stage = nn.Sequential(*conv_norm(channels, width << number, stride), nn.ReLU())
            self.add_module(f"stage{number + 1}", stage)
            channels = width << number
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(channels, classes)


def conv_norm(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    """A 3x3 convolution and its BatchNorm."""
    return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)]

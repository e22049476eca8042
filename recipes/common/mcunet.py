"""A network as MCUNet's search makes them, for microcontrollers: inverted residual blocks of mixed kernels and widths.

J. Lin et al., "MCUNet: Tiny Deep Learning on IoT Devices", NeurIPS 2020, section 3.1: a stem, a block without
expansion, then stages of inverted residual blocks (M. Sandler et al., "MobileNetV2", CVPR 2018) whose kernels are 3, 5
or 7 and whose expansions are 3 to 6. This is a member of that space, of 14 blocks and 42 convolutions, not one of the
published networks.
"""

from __future__ import annotations

from torch import Tensor, nn

# Of each block: kernel, expansion, channels, stride.
BLOCKS = (
    (3, 1, 8, 1),
    (7, 3, 16, 2), (3, 4, 16, 1), (5, 4, 16, 1),
    (7, 4, 24, 2), (5, 5, 24, 1), (5, 4, 24, 1),
    (5, 5, 40, 2), (7, 4, 40, 1),
    (5, 5, 48, 1), (3, 4, 48, 1),
    (7, 5, 96, 2), (5, 4, 96, 1),
    (7, 5, 160, 1),
)  # fmt: skip


class InvertedResidual(nn.Module):
    """1x1 expansion, depthwise convolution, 1x1 projection; added to its input where the shapes allow."""

    def __init__(self, inputs: int, outputs: int, *, kernel: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        expand = [] if expansion == 1 else [conv_norm(inputs, hidden, 1), nn.ReLU6()]
        self.adds = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            *expand,
            conv_norm(hidden, hidden, kernel, stride=stride, groups=hidden),
            nn.ReLU6(),
            conv_norm(hidden, outputs, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return x + y if self.adds else y


def conv_norm(inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution that keeps the size (divided by the stride), and its BatchNorm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class MCUNetLike(nn.Module):
    """Images `(n, 3, h, w)` -> scores `(n, classes)`."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 16, 3, stride=2), nn.ReLU6())
        blocks: list[nn.Module] = []
        channels = 16
        for kernel, expansion, outputs, stride in BLOCKS:
            blocks.append(InvertedResidual(channels, outputs, kernel=kernel, expansion=expansion, stride=stride))
            channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.pool(self.blocks(self.stem(x))).flatten(1))
        return scores

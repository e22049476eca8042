"""ProxylessNAS-Mobile, of any width.

H. Cai et al., "ProxylessNAS: Direct Neural Architecture Search on Target Task and Hardware", ICLR 2019, figure 4: the
network that was found for phones. As published it has 4,080,512 parameters and takes 320 million multiplications for an
image of 224x224; of width 0.3 it is one of the networks of TTE and MCUNet. Its weights are drawn, not trained.
"""

from __future__ import annotations

from torch import Tensor, nn

from recipes.common.mcunet import InvertedResidual, conv_norm

# Of each block: kernel, expansion, channels, stride.
BLOCKS = (
    (3, 1, 16, 1),
    (5, 3, 32, 2), (3, 3, 32, 1),
    (7, 3, 40, 2), (3, 3, 40, 1), (5, 3, 40, 1), (5, 3, 40, 1),
    (7, 6, 80, 2), (5, 3, 80, 1), (5, 3, 80, 1), (5, 3, 80, 1),
    (5, 6, 96, 1), (5, 3, 96, 1), (5, 3, 96, 1), (5, 3, 96, 1),
    (7, 6, 192, 2), (7, 6, 192, 1), (7, 3, 192, 1), (7, 3, 192, 1),
    (7, 6, 320, 1),
)  # fmt: skip
STEM, FEATURES = 32, 1280


class ProxylessMobile(nn.Module):
    """Images `(n, 3, h, w)` -> scores `(n, classes)`.

    Args:
        classes: of the classifier.
        width: a factor of all channels, those in front of the classifier included. They are rounded to multiples of 8,
            and lose less than a tenth by that, as MobileNetV2's are (M. Sandler et al., CVPR 2018).
    """

    def __init__(self, classes: int = 1000, *, width: float = 1.0) -> None:
        super().__init__()
        channels = scaled(STEM, width)
        self.stem = nn.Sequential(conv_norm(3, channels, 3, stride=2), nn.ReLU6())
        blocks: list[nn.Module] = []
        for kernel, expansion, outputs, stride in BLOCKS:
            outputs = scaled(outputs, width)
            blocks.append(InvertedResidual(channels, outputs, kernel=kernel, expansion=expansion, stride=stride))
            channels = outputs
        self.blocks = nn.Sequential(*blocks)
        features = scaled(FEATURES, width)
        self.features = nn.Sequential(conv_norm(channels, features, 1), nn.ReLU6())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(self.blocks(self.stem(x)))
        scores: Tensor = self.classifier(self.pool(features).flatten(1))
        return scores


def scaled(channels: int, width: float) -> int:
    """Channels of a layer at a width."""
    wanted = channels * width
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * wanted else rounded + 8

"""Which input channels of a layer train, where only some of them do."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from torch_odt.adapt.sparse_layers import channel_dim

ChannelChoice = Literal["largest", "smallest", "random"]


def check_choice(choice: str) -> None:
    """Raise `ValueError` where there is no such choice."""
    if choice not in get_args(ChannelChoice):
        raise ValueError(f"channels={choice!r}: choose one of {', '.join(map(repr, get_args(ChannelChoice)))}")


def kept_channels(layer: nn.Module, ratio: float, *, choice: ChannelChoice = "largest", seed: int = 0) -> Tensor:
    """The input channels whose weights train.

    Args:
        layer: a linear layer or convolution. In a depthwise convolution input channels go with output channels; in one
            of several groups, channels are counted within a group.
        ratio: of the channels; at least one is kept.
        choice: "largest": those whose weights have the largest norm (the paper's magnitude+); "smallest"; "random".
        seed: of the random choice.

    Returns:
        Indices, int64, ascending.

    Raises:
        ValueError: there is no such choice, or the ratio is not in (0, 1].

    Example:
        >>> layer = nn.Linear(4, 2)
        >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, 9.0, 2.0, 8.0], [1.0, 9.0, 2.0, 8.0]]))
        >>> kept_channels(layer, 1 / 2)
        tensor([1, 3])
    """
    check_choice(choice)
    if not 0 < ratio <= 1:
        raise ValueError(f"a ratio of {ratio}: it is the share of the input channels that train, in (0, 1]")
    weight = layer.get_parameter("weight").detach()
    # Of depthwise convolutions, the rows that are made of one input channel belong together.
    by_channel = weight.unflatten(0, (layer.in_channels, -1)) if channel_dim(layer) == 0 else weight.transpose(0, 1)
    channels = len(by_channel)
    count = max(1, round(ratio * channels))
    if choice == "random":
        order = torch.randperm(channels, generator=torch.Generator().manual_seed(seed)).to(weight.device)
    else:
        norms = torch.linalg.vector_norm(by_channel.flatten(1).float(), dim=1)
        order = torch.argsort(norms, descending=choice == "largest", stable=True)
    return order[:count].sort().values

"""A network is quantized in one way: what one verb has put into it, another takes for something that it is not."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from torch import nn


class Quantized(nn.Module):
    """A layer that a verb of this room has put into a model.

    Attributes:
        verb: that verb's name.
        way_back: what gives the plain layer back, in words.
    """

    verb: ClassVar[str]
    way_back: ClassVar[str]


def require_plain(model: nn.Module, verb: str, left_out: Collection[str] = ()) -> None:
    """Raises ValueError where a model has layers of another verb than this one.

    Args:
        left_out: names of layers that this verb is to leave alone; a container's name is for all inside it.
    """
    for name, module in model.named_modules():
        is_left_out = any(name == each or name.startswith(f"{each}.") for each in left_out)
        if isinstance(module, Quantized) and module.verb != verb and not is_left_out:
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__} of {module.verb}, and a network is quantized in "
                f"one way: take that back first, by {module.way_back}, or leave such layers out where {verb} can"
            )

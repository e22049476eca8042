"""How an optimizer of torch changes int8 weights: float32 for a moment, some layers at a time.

A copy of all weights in float32 would be as large as the model was before it was converted, and would be read and
written in main memory. Some layers at a time stay in a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torch_odt.quant.modules import Int8Layer

# What these do to a parameter depends on no other one, so that a step may be taken in parts.
PARTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
PART_WEIGHTS = 1 << 20  # four megabytes in float32


class Int8Updates:
    """Hooks of an optimizer's step that change the int8 weights of layers.

    Args:
        optimizer: whose step is meant; one of another class than those of torch.optim takes all layers at once.
        layers: whose weights are int8 alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layers: list[Int8Layer]) -> None:
        self._layers = layers
        self._in_parts = type(optimizer) in PARTWISE
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def stop(self) -> None:
        """The optimizer is as before."""
        while self._handles:
            self._handles.pop().remove()

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        due = [layer for layer in self._layers if layer.weight_slot.grad is not None]
        if not self._in_parts:
            for layer in due:
                layer.unpack_()
            return
        for part in _parts_of(due):
            with _only(optimizer, {id(layer.weight_slot) for layer in part}) as step:
                try:
                    for layer in part:
                        layer.unpack_()
                    step()
                    for layer in part:
                        layer.pack_()
                finally:
                    for layer in part:
                        layer.discard_()
        # The step proper is to leave them as they are.
        for layer in due:
            gradient: Tensor = layer.weight_slot.grad  # type: ignore[assignment]
            self._gradients.append((layer.weight_slot, gradient))
            layer.weight_slot.grad = None

    def _after(self, *_: Any) -> None:
        if not self._in_parts:
            for layer in self._layers:
                if layer.weight_slot.grad is not None:
                    layer.pack_()
        while self._gradients:
            slot, gradient = self._gradients.pop()
            slot.grad = gradient


def _parts_of(layers: list[Int8Layer]) -> Iterator[list[Int8Layer]]:
    """Layers one after another, of `PART_WEIGHTS` weights at most or one alone."""
    part: list[Int8Layer] = []
    weights = 0
    for layer in layers:
        if part and weights + layer.weight.numel() > PART_WEIGHTS:
            yield part
            part, weights = [], 0
        part.append(layer)
        weights += layer.weight.numel()
    if part:
        yield part


@contextmanager
def _only(optimizer: torch.optim.Optimizer, wanted: set[int]) -> Iterator[Callable[[], Any]]:
    """For the time of a context the optimizer has these parameters alone; gives its step without hooks."""
    groups = optimizer.param_groups
    step: Any = type(optimizer).step
    some = [
        {**group, "params": [parameter for parameter in group["params"] if id(parameter) in wanted]} for group in groups
    ]
    optimizer.param_groups = [group for group in some if group["params"]]
    try:
        yield lambda: getattr(step, "__wrapped__", step)(optimizer)
    finally:
        optimizer.param_groups = groups

"""The layers of a model in the order in which they run, with the shapes that go through them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def int8_hint(model: nn.Module) -> str:
    """What an error adds that has missed layers in a model whose layers were quantized; "" for others."""
    for module in model.modules():
        # Rooms that build upon this one put them there.
        verb, way_back = (getattr(module, name, None) for name in ("verb", "way_back"))
        if isinstance(verb, str) and isinstance(way_back, str):
            return (
                f". Its layers are {verb}'s: take that back first, by {way_back}; or let requires_grad_(False), before "
                f"{verb}, say what does not train, which needs no verb more"
            )
    return ""


@dataclass(frozen=True)
class Layer:
    """A module without submodules, as it ran.

    Attributes:
        name: as `model.named_modules()` has it.
        module: the module.
        input_shape: of its first tensor argument, with the batch.
        output_shape: of its result, with the batch.
    """

    name: str
    module: nn.Module
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]


def run_layers(model: nn.Module, *inputs: Any, **named_inputs: Any) -> list[Layer]:
    """Run a model once, without gradients and in evaluation mode, and note its layers.

    Args:
        model: left as it was, modes and buffers included.
        inputs, named_inputs: what the model is called with; one sample is enough where only layers matter.

    Returns:
        One `Layer` for each call of a module that has no submodules and takes and returns a tensor, in order. A module
        that runs twice is there twice.

    Example:
        >>> [layer.output_shape for layer in run_layers(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.ones(1, 4))]
        [(1, 3), (1, 3)]
    """
    layers: list[Layer] = []
    handles = []
    for name, module in model.named_modules():
        if next(module.children(), None) is None:

            def note(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                first = next((value for value in args if isinstance(value, Tensor)), None)
                if first is not None and isinstance(output, Tensor):
                    layers.append(Layer(name, module, tuple(first.shape), tuple(output.shape)))

            handles.append(module.register_forward_hook(note))
    try:
        with evaluating(model), torch.no_grad():
            model(*inputs, **named_inputs)
    finally:
        for handle in handles:
            handle.remove()
    return layers


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, and afterwards every module in the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training

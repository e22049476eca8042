"""Which layers of a model can be converted, and why others cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

import torch
from torch import nn

_OTHERS = (nn.Conv1d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Bilinear, nn.RNNBase)


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Convolutions and linear layers, each once."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear, *_OTHERS)):
            yield name, module


def reasons(model: nn.Module, calls: Counter[str] | None, keep_float32: Collection[str]) -> dict[str, str]:
    """Why layers stay float32, by name; those that can be converted are not in it.

    Args:
        model: as it is before.
        calls: how often each submodule is called, where that is known.
        keep_float32: names that the user wants left.
    """
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    found = {}
    for name, layer in layers_of(model):
        reason = "it was asked for" if name in keep_float32 else _of_layer(layer, owners)
        if reason is None and places[id(layer)] > 1:
            reason = "it stands in several places"
        if reason is None and calls is not None and calls[name] != 1:
            reason = f"it is called {calls[name]} times" if calls[name] else "another module calls it, or none does"
        if reason is not None:
            found[name] = reason
    return found


def _of_layer(layer: nn.Module, owners: Counter[int]) -> str | None:
    if type(layer) not in (nn.Conv2d, nn.Linear):
        return f"there are no int8 kernels for {type(layer).__name__}"
    parameters = list(layer.parameters())
    if any(parameter.dtype != torch.float32 or parameter.device.type != "cpu" for parameter in parameters):
        return "its parameters are not float32 on the CPU"
    if any(owners[id(parameter)] > 1 for parameter in parameters):
        return "it shares a parameter with another layer"
    if isinstance(layer, nn.Conv2d) and layer.padding_mode != "zeros":
        return f"padding_mode={layer.padding_mode!r} is not known to the int8 kernels"
    if isinstance(layer, nn.Conv2d) and isinstance(layer.padding, str):
        return f"padding={layer.padding!r} is not known to the int8 kernels: give numbers"
    return None

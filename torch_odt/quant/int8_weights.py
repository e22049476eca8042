"""Weights of a whole network in 8 bits, and back: as a deployed network holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from torch_odt.adapt.adaptation import Adapting
from torch_odt.adapt.stored_weights import StoredConv2d, StoredLinear
from torch_odt.quant.pruning import load_pruned_

_STORED = (StoredConv2d, StoredLinear)


def store_int8_weights_(model: nn.Module, layers: Iterable[str] | None = None) -> tuple[str, ...]:
    """Store weights of 2-D convolutions and linear layers as int8, in place, and free those of 32 bits.

    Choose it for what does not train, or to deploy a model: a quarter of the bytes, and each weight off by at most half
    a step, 1/254 of the largest of its filter. Layers compute in float32, with weights that are made of the codes when
    they are needed. Biases and norms stay float32.

    Args:
        model: its layers become `StoredConv2d` and `StoredLinear`.
        layers: names of the layers; by default all that can be stored so. What else there is stays as it is: layers
            that share a weight, subclasses, and convolutions that are padded with something else than zeros.

    Returns:
        The names of the layers that were stored.

    Raises:
        ValueError: a layer that was named is none, or cannot be stored so.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))
        >>> store_int8_weights_(model)
        ('0', '3')
        >>> model[3].codes.dtype, model[3].codes.shape
        (torch.int8, torch.Size([2, 32]))
    """
    possible = storable_layers(model)
    names = list(possible) if layers is None else list(layers)
    for name in names:
        if name not in possible:
            raise ValueError(f"{name!r} cannot be stored as int8; layers that can: {', '.join(possible) or 'none'}")
    with Adapting(model) as adapting:
        for name in names:
            layer = possible[name]
            adapting.replace(name, StoredLinear(layer) if isinstance(layer, nn.Linear) else StoredConv2d(layer))
    return tuple(names)


def restore_float_weights_(model: nn.Module, layers: Iterable[str] | None = None) -> tuple[str, ...]:
    """Make ordinary layers of those whose weights are stored in 8 bits, in place: the weights that the codes stand for.

    Args:
        layers: names of the layers; all by default.

    Returns:
        The names of the layers that were restored. Their weights require gradients.

    Raises:
        ValueError: a layer that was named is none of these.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 2))
        >>> _ = store_int8_weights_(model)
        >>> restore_float_weights_(model), model[0]
        (('0',), Linear(in_features=4, out_features=2, bias=True))
    """
    possible = {name: module for name, module in model.named_modules() if isinstance(module, _STORED)}
    names = list(possible) if layers is None else list(layers)
    for name in names:
        if name not in possible:
            raise ValueError(f"the weight of {name!r} is not stored in 8 bits; those of {', '.join(possible)} are")
    with Adapting(model) as adapting:
        for name in names:
            adapting.replace(name, _ordinary(possible[name]))
    return tuple(names)


def load_int8_weights_(model: nn.Module, state_dict: Mapping[str, Any]) -> nn.Module:
    """Give a model as it was made the shapes, int8 weights and values of a state_dict, in place.

    Choose it to read back a model that was pruned, or stored in 8 bits, or both, bit for bit.

    Args:
        model: of the same architecture, with all of its filters and with ordinary layers.
        state_dict: of a model behind `prune_`, `store_int8_weights_` or `minilearn_`.

    Returns:
        The model.

    Raises:
        ValueError: as `load_pruned_`.

    Example:
        >>> stored, fresh = (nn.Sequential(nn.Linear(4, 2)) for _ in range(2))
        >>> _ = store_int8_weights_(stored)
        >>> bool((load_int8_weights_(fresh, stored.state_dict())[0].codes == stored[0].codes).all())
        True
    """
    names = [name.removesuffix(".codes") for name in state_dict if name.endswith(".codes")]
    floats = {name: value for name, value in state_dict.items() if name.rpartition(".")[2] not in ("codes", "scale")}
    for name in names:
        floats[f"{name}.weight"] = state_dict[f"{name}.codes"] * state_dict[f"{name}.scale"]
    load_pruned_(model, floats)
    store_int8_weights_(model, names)
    # Codes of what codes stood for are the same, scales may be off by a rounding.
    model.load_state_dict(state_dict)
    return model


def storable_layers(model: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """The layers, by name, whose weights `store_int8_weights_` can store."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {
        name: module
        for name, module in model.named_modules()
        if name
        and type(module) in (nn.Linear, nn.Conv2d)
        and isinstance(module, nn.Linear | nn.Conv2d)
        and owners[id(module.weight)] == 1
        and getattr(module, "padding_mode", "zeros") == "zeros"
    }


def _ordinary(stored: StoredConv2d | StoredLinear) -> nn.Module:
    weight = stored.weight.detach()
    options: dict[str, Any] = {"bias": stored.bias is not None, "device": weight.device, "dtype": weight.dtype}
    layer: nn.Linear | nn.Conv2d
    if isinstance(stored, StoredConv2d):
        geometry: dict[str, Any] = {name: getattr(stored, name) for name in ("stride", "padding", "dilation", "groups")}
        rows, columns, *kernel = weight.shape
        layer = nn.Conv2d(columns * stored.groups, rows, tuple(kernel), **geometry, **options)  # type: ignore[arg-type]
    else:
        layer = nn.Linear(weight.shape[1], weight.shape[0], **options)
    layer.weight = nn.Parameter(weight)
    layer.bias = stored.bias
    return layer


def float_weights(model: nn.Module) -> tuple[str, ...]:
    """Names of the layers whose weights (of more than one dimension) are not stored in 8 bits."""
    return tuple(
        name
        for name, module in model.named_modules()
        if any(parameter is not None and parameter.dim() > 1 for parameter in module._parameters.values())
    )

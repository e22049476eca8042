"""How much of a converted network has reached the ends of its ranges."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from torch_odt.quant.activation import LEAST, MOST, WEIGHT_MOST, Int8Activation
from torch_odt.quant.modules import Int8Add, Int8Concatenate, Int8Layer, Int8Multiply, Quantize
from torch_odt.quant.trace import evaluating, feed

# Tables' ends may be those of their function, and what else there is passes on the grid of its input.
_JOINING = (Int8Add, Int8Concatenate, Int8Multiply)
_WITH_RANGES = (*_JOINING, Int8Layer, Quantize)


@dataclass(frozen=True)
class Saturation:
    """What a layer has at the ends of int8.

    Attributes:
        activations: the share of the output's elements that are clamped to int8's bounds or lie on them; a clamp of the
            network's own, as ReLU's, does not count. Where a max-pool is a part of the layer, of what it leaves: more
            of it is at the upper bound, and less at the lower one, so that such a share is to be compared with earlier
            ones of the same layer.
        weights: the share of the weights at 127 steps or -127.
        updates: how many times an update wanted a weight beyond that, since the conversion.
    """

    activations: float
    weights: float
    updates: int


def saturation(model: nn.Module, batches: Iterable[Any]) -> dict[str, Saturation]:
    """How much of a converted model has reached the ends of its ranges, which `convert_` fixed.

    Choose it while training, every few hundred steps: the ranges of activations do not follow what is learned. Where a
    layer's share grows, convert again on batches of now (`dequantize_`, then `convert_`).

    Args:
        model: a converted one.
        batches: as for `convert_`; run in evaluation mode and without gradients.

    Returns:
        By the name of each layer with an int8 output of its own range.

    Raises:
        ValueError: the model has no int8 layers, or there are no batches.

    Example:
        >>> import torch_odt as odt
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x = torch.randn(16, 4)
        >>> _ = odt.quant.convert_(model, [x])
        >>> calm, wild = (odt.quant.saturation(model, [each])["0"].activations for each in (x, 100 * x))
        >>> calm < 0.1 and calm < wild
        True
    """
    counts: dict[str, tuple[int, int]] = {}
    handles: list[RemovableHandle] = []

    def watch(name: str, module: nn.Module) -> None:
        def count(_: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Int8Activation):
                at_ends, elements = counts.get(name, (0, 0))
                counts[name] = (at_ends + _at_ends(module, args, output), elements + output.values.numel())

        handles.append(module.register_forward_hook(count))

    for name, module in model.named_modules():
        if isinstance(module, _WITH_RANGES):
            watch(name, module)
    try:
        with evaluating(model), torch.no_grad():
            seen = sum(1 for batch in batches if feed(model, batch))
    finally:
        for handle in handles:
            handle.remove()
    if not handles:
        raise ValueError(f"{type(model).__name__} has no int8 layers: convert it with odt.quant.convert_ first")
    if not seen:
        raise ValueError("batches is empty: give some of what the model is to see")
    return {
        name: _of(model.get_submodule(name), at_ends / max(1, elements)) for name, (at_ends, elements) in counts.items()
    }


def _at_ends(module: nn.Module, args: Any, output: Int8Activation) -> int:
    low, high = getattr(module, "low", None), getattr(module, "high", None)
    step, zero = (float(number) for number in output.grid)
    if low is None and isinstance(module, _JOINING) and _are_without_sign(args):
        # Zeros, which ReLUs in front have made.
        low = 0.0
    count = 0
    if low is None or round(low / step) + zero < LEAST:
        count += int((output.values == LEAST).sum())
    if high is None or round(high / step) + zero > MOST:
        count += int((output.values == MOST).sum())
    return count


def _are_without_sign(args: Any) -> bool:
    """Whether nothing that a layer joins can be below 0."""
    joined = tree_leaves(args, lambda each: isinstance(each, Int8Activation))
    return bool(joined) and all(isinstance(each, Int8Activation) and float(each.grid[1]) <= LEAST for each in joined)


def _of(module: nn.Module, activations: float) -> Saturation:
    if not isinstance(module, Int8Layer):
        return Saturation(activations, 0.0, 0)
    weight = module.int8_weight()
    return Saturation(activations, float((weight.abs() == WEIGHT_MOST).float().mean()), int(module.saturated))

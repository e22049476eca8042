"""Integer training of an ordinary network: NITI's arithmetic with Mandheling's rescaling, in one verb.

M. Wang et al., "NITI", IEEE TPDS 2022 (arXiv 2009.13108); D. Xu et al., "Mandheling", MobiCom 2022.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from torch_odt.adapt.adaptation import Adaptation, Adapting
from torch_odt.ops.int8_arguments import Rounding
from torch_odt.quant import niti_graph
from torch_odt.quant.batch_splitting import cache_bytes
from torch_odt.quant.fold_batch_norms import fold_batch_norms
from torch_odt.quant.niti_convertible import layers_of, reasons
from torch_odt.quant.niti_layers import LEAST_GRADIENT_BITS, MOST_GRADIENT_BITS, NitiConv2d, NitiLayer, NitiLinear
from torch_odt.quant.niti_passes import ROUNDINGS
from torch_odt.quant.one_way import require_plain
from torch_odt.quant.packed_weights import PackedWeights
from torch_odt.quant.rescaling import Rescaling

BatchNorms = Literal["float32", "fold"]
Start = Literal["model", "xavier"]
Split = int | Literal["cache"] | None
MOST_HEADROOM_BITS = 5
_CHOICES: dict[str, tuple[str, ...]] = {
    "batch_norm": ("float32", "fold"),
    "start": ("model", "xavier"),
    "rounding": ROUNDINGS,
}


@dataclass
class NitiTraining:
    """A model that trains in integers, and what is left to see and to undo.

    `print` it to see what was converted and how the scales are doing; give the model to `NitiSGD`.

    Attributes:
        model: the converted model, the same object as before.
        converted: names of the layers that compute in integers.
        in_float32: names of the layers that do not, each with the reason.
        between: what stands between converted layers and is computed in float32.
        packs: the packed weights, where they are kept.
    """

    model: nn.Module
    converted: tuple[str, ...]
    in_float32: dict[str, str]
    between: tuple[str, ...]
    packs: PackedWeights | None
    _adaptation: Adaptation = field(repr=False)

    def layers(self) -> dict[str, NitiLayer]:
        """The converted layers by name."""
        return {name: module for name, module in self.model.named_modules() if isinstance(module, NitiLayer)}

    def set_gradient_bits(self, bits: int, layers: Iterable[str] | None = None) -> None:
        """What is left of a weight's gradient (mu), which is the learning rate: one bit less halves the steps.

        Args:
            bits: from -8 to 7; below 1, most elements of a gradient are 0 and the rest 1 or -1.
            layers: names of converted layers; all of them by default.

        Raises:
            ValueError: the number is another, or a layer is not converted.
        """
        _check_bits(bits)
        known = self.layers()
        for name in known if layers is None else layers:
            if name not in known:
                raise ValueError(f"{name} is not in NITI's arithmetic; these are: {', '.join(list(known)[:5])} ...")
            known[name].gradient_bits.fill_(bits)

    def rescalings(self) -> dict[str, Rescaling]:
        """How the scale of each rescaled tensor is kept, by "layer: tensor"; those that had no batch are left out."""
        return {
            f"{name}: {tensor}": rescaling
            for name, layer in self.layers().items()
            for tensor, rescaling in layer.rescalings().items()
            if rescaling.batches
        }

    def checked_share(self) -> float:
        """The share of batches in which a tensor's scale was looked at, as the mean over all tensors that have one."""
        found = list(self.rescalings().values())
        return sum(each.checks / each.batches for each in found) / len(found) if found else 0.0

    def clipped_share(self) -> float:
        """The share of batches in which a tensor was clipped because its scale was held, as the mean over all."""
        found = list(self.rescalings().values())
        return sum(each.clipped_batches / each.batches for each in found) / len(found) if found else 0.0

    def dequantize_(self) -> nn.Module:
        """Make an ordinary float32 model of it again, with the weights that were trained; returns the model.

        It computes what the integers did but for their rounding. Where BatchNorms were folded, they now add the bias
        alone. A second call does nothing.
        """
        return self._adaptation.unload()

    def __str__(self) -> str:
        lines = [f"NITI arithmetic in {type(self.model).__name__}", f"  integers    {len(self.converted)} layers"]
        lines += [f"  float32     {name}: {reason}" for name, reason in self.in_float32.items()]
        lines += [f"  between     {name} in float32" for name in self.between[:8]]
        if len(self.between) > 8:
            lines.append(f"  between     and {len(self.between) - 8} more")
        lines.append(f"  scales      looked at in {self.checked_share():.1%} of the batches, mean over tensors")
        clipped = sorted(self.rescalings().items(), key=lambda item: -item[1].clipped_batches / item[1].batches)
        lines += [
            f"  clipped     {name}: {each.clipped_batches} of {each.batches} batches"
            for name, each in clipped[:3]
            if each.clipped_batches
        ]
        return "\n".join(lines)


def niti_(
    model: nn.Module,
    *,
    gradient_bits: int = 4,
    batch_norm: BatchNorms = "float32",
    start: Start = "model",
    headroom_bits: int = 1,
    rounding: Rounding = "pseudo_stochastic",
    longest_period: int = 64,
    slack_bits: int = 1,
    split: Split = None,
    packs: PackedWeights | None = None,
    keep_float32: Collection[str] = (),
) -> NitiTraining:
    """Let a model's convolutions and linear layers train in integers of eight bits, with no float32 copy of a weight.

    When to choose it: to train in a quarter of the bytes, where int8 products are faster than float32's. Weights,
    activations, their gradients and the updates are int8 with one power of two for each tensor. What cannot be
    converted stays float32 and is named.

    BatchNorm is computed in float32 between integer convolutions, as Mandheling leaves it to the CPU: the convolution
    then gives its sums as float32, and takes gradients in float32. With "fold", BatchNorms behind convolutions become
    part of their weights and biases (with running statistics as they are, so for a pretrained model), and everything
    stays in integers, residual sums included. A model without BatchNorm is in integers from end to end.

    The structure of the forward pass is read by `torch.fx`. Where that cannot, each layer is converted by itself, with
    float32 in between, and `between` says so; a layer that such a model calls twice in a step must then be in
    `keep_float32`. Train with `NitiSGD`; a plain loop, `TrainStep` and `wrap` take the model as any other.
    `state_dict()` holds all there is; to load it, convert a new model in the same way first (the model cannot be
    pickled as a whole). Gradients of eight bits cannot be added up: one forward and one backward pass for each step,
    with no accumulation, no clipping and no micro-batches.

    Args:
        model: changed in place.
        gradient_bits: what is left of a weight's gradient (mu), which is the learning rate; from -8 to 7.
        batch_norm: "float32" or "fold".
        start: weights are those of the "model", or drawn anew by "xavier", uniformly, with biases of zero, as in NITI.
        headroom_bits: by so many bits a weight may grow beyond the largest one of its layer at the start; the exponents
            of weights never change. What is spared is lost at the other end.
        rounding: of activations and gradients, "pseudo_stochastic" or "nearest".
        longest_period: a scale that holds is looked at once in so many batches at least; 1 looks at it in each.
        slack_bits: see `Rescaling`.
        split: a layer whose tensors take more than so many bytes runs in parts of the batch; "cache" takes the size of
            a core's own cache, None does not split.
        packs: keep packed weights there from one call to the next; see `PackedWeights` for what that takes.
        keep_float32: names of layers that are left as they are.

    Returns:
        What was converted, how the scales are doing, and the way back.

    Raises:
        ValueError: an option is not known, a name is not that of a module, nothing can be converted, or the model is
            quantized in another way.

    Example:
        >>> from torch import nn
        >>> import torch_odt as odt
        >>> model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
        >>> training = odt.quant.niti_(model, gradient_bits=3)
        >>> optimizer = odt.quant.NitiSGD(model)
        >>> loss = odt.quant.niti_cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.tensor([0, 1, 2, 3]))
        >>> loss.backward()
        >>> optimizer.step()
        >>> training.converted
        ('0', '3')
    """
    _check_bits(gradient_bits)
    _check_choices(batch_norm=batch_norm, start=start, rounding=rounding)
    _check_numbers(headroom_bits, longest_period, slack_bits, split)
    require_plain(model, "niti_", keep_float32)
    unknown = set(keep_float32) - {name for name, _ in model.named_modules()}
    if unknown:
        raise ValueError(f"keep_float32 names {', '.join(sorted(unknown))}, which the model does not have")
    part_bytes = cache_bytes() if split == "cache" else split or 0
    rescaling = Rescaling(longest_period, slack_bits)
    between: list[str] = []
    with Adapting(model) as adapting:
        graph = None
        try:
            graph = niti_graph.traced(model)
        except ValueError as error:
            between.append(f"everything between layers, because {error}")
        in_float32 = reasons(model, niti_graph.calls_of(graph) if graph else None, keep_float32)
        names = [name for name, _ in layers_of(model) if name not in in_float32]
        if graph and batch_norm == "fold":
            fold_batch_norms(adapting, graph, names)
        converted = []
        for name in names:
            layer = model.get_submodule(name)
            if start == "xavier":
                _draw(layer)
            kind: Any = NitiConv2d if isinstance(layer, nn.Conv2d) else NitiLinear
            try:
                made = kind(
                    layer, gradient_bits=gradient_bits, headroom_bits=headroom_bits, rounding=rounding,
                    rescaling=rescaling, part_bytes=part_bytes, packs=packs,
                )  # fmt: skip
            except ValueError as error:
                in_float32[name] = str(error)
                continue
            adapting.replace(name, made)
            adapting.also_undo(partial(_write_back, layer, made))
            made.to_float = graph is None
            converted.append(name)
        if not converted:
            told = "; ".join(f"{name}: {reason}" for name, reason in list(in_float32.items())[:3])
            raise ValueError(f"{type(model).__name__} has no layer that can be converted ({told or 'none at all'})")
        if graph:
            between += niti_graph.rewrite(model, graph, rounding)
            adapting.also_undo(niti_graph.install(model, graph))
        adaptation = adapting.finish("niti")
    return NitiTraining(model, tuple(converted), in_float32, tuple(between), packs, adaptation)


@torch.no_grad()
def _draw(layer: nn.Module) -> None:
    nn.init.xavier_uniform_(layer.weight)  # type: ignore[arg-type]
    if layer.bias is not None:
        layer.bias.zero_()  # type: ignore[operator]


@torch.no_grad()
def _write_back(layer: nn.Module, made: NitiLayer) -> None:
    layer.weight.copy_(made.float_weight())  # type: ignore[operator]
    bias = made.float_bias()
    if bias is not None:
        layer.bias.copy_(bias)  # type: ignore[operator]


def _check_bits(bits: int) -> None:
    if not LEAST_GRADIENT_BITS <= bits <= MOST_GRADIENT_BITS:
        raise ValueError(f"gradient_bits={bits}: it is from {LEAST_GRADIENT_BITS} to {MOST_GRADIENT_BITS}")


def _check_choices(**options: str) -> None:
    for name, value in options.items():
        if value not in _CHOICES[name]:
            raise ValueError(f"{name}={value!r}: it is one of {', '.join(_CHOICES[name])}")


def _check_numbers(headroom_bits: int, longest_period: int, slack_bits: int, split: Split) -> None:
    if not 0 <= headroom_bits <= MOST_HEADROOM_BITS:
        raise ValueError(f"headroom_bits={headroom_bits}: it is from 0 to {MOST_HEADROOM_BITS}")
    if longest_period < 1 or slack_bits < 0:
        raise ValueError("longest_period must be 1 or more, and slack_bits 0 or more")
    if isinstance(split, str) and split != "cache":
        raise ValueError(f"split={split!r}: it is a number of bytes, 'cache' or None")
    if isinstance(split, int) and split < 1:
        raise ValueError(f"split={split}: a part takes one byte at least; None does not split")

"""Quantization-aware training: float32 that is rounded to what int8 can hold, with straight-through gradients.

B. Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
CVPR 2018, section 3 (observed ranges, folded BatchNorm); S. K. Esser et al., "Learned Step Size Quantization", ICLR
2020, equations 2 to 4 (learned ranges).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_odt.adapt.adaptation import Adaptation, Adapting
from torch_odt.adapt.layers import evaluating
from torch_odt.adapt.norms_behind import norms_behind
from torch_odt.errors import CaptureError
from torch_odt.quant.layer_choice import choose_layers, copy_layer
from torch_odt.quant.observed_ranges import (
    HIGH,
    LOW,
    NONE_SEEN,
    learned_steps,
    observed_range,
    steps_of_range,
    weight_steps,
)
from torch_odt.quant.one_way import Quantized, require_plain

Ranges = Literal["observed", "learned"]
BatchNorms = Literal["keep", "fold"]


class _FakeQuantized(Quantized):
    """A layer whose weight and input are rounded to what int8 can hold, before it computes in float32.

    Attributes:
        weight, bias: those of the layer in whose place it is.
        norm: the BatchNorm that is folded into them, with the statistics that it has; or None.
        input_range: observed: the average of least and greatest value of the input, float32 of shape (2,).
        input_step, weight_step: learned: the size of a step, of weights for each output channel, in units of what it
            was at first; see `learned_steps`.
        input_unit, weight_unit: learned: those units.
        input_zero: learned: the value that stands for 0, float32 of shape (1,); it is rounded.
    """

    verb, way_back = "fake_quantize_", "unload() or merge() of what fake_quantize_ returned"

    weight: Tensor
    bias: Any
    norm: _BatchNorm | None
    input_range: Tensor
    input_step: nn.Parameter
    input_unit: Tensor
    input_zero: nn.Parameter
    weight_step: nn.Parameter
    weight_unit: Tensor

    def prepare(self, label: str, ranges: Ranges, averaging: float, norm: _BatchNorm | None, span: Tensor) -> None:
        """Everything that the plain layer has not.

        Raises:
            ValueError: ranges are to be learned and start from zero.
        """
        self.label, self.ranges, self.averaging = label, ranges, averaging
        self.register_module("norm", norm)
        if ranges == "observed":
            self.register_buffer("input_range", span)
            return
        if not bool(span[1] > span[0]):
            raise ValueError(
                f"{label}: its input is 0 throughout in the sample, and a range cannot be learned from there; give "
                "another sample, or name the layer in `skip`"
            )
        step, zero = steps_of_range(span)
        self.register_buffer("input_unit", step.reshape(1))
        self.input_zero = nn.Parameter(zero.float().reshape(1))
        with torch.no_grad():
            weight, _ = self._folded()
            mean = weight.abs().flatten(1).mean(1)
            # Esser et al., section 2.1.
            self.register_buffer("weight_unit", torch.where(mean > 0, 2 * mean / math.sqrt(HIGH), 1.0).float())
        self.input_step, self.weight_step = (
            nn.Parameter(torch.ones_like(unit)) for unit in (self.input_unit, self.weight_unit)
        )

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Input, weight and bias, the first two as int8 would hold them."""
        weight, bias = self._folded()
        if self.ranges == "observed":
            return self._observed(x), _rounded_weight(weight, weight_steps(weight.detach(), self.label)), bias
        step = learned_steps(self.input_step, self.input_unit, self.label)
        weight_step = learned_steps(self.weight_step, self.weight_unit, self.label)
        # Esser et al., section 2.2: gradients of steps as large as those of weights, relative to what they belong to.
        of_input = 1 / math.sqrt(max(1, x[:1].numel()) * HIGH)
        of_weight = 1 / math.sqrt(weight[0].numel() * HIGH)
        x = torch._fake_quantize_learnable_per_tensor_affine(x, step, self.input_zero, LOW, HIGH, of_input)
        weight = torch._fake_quantize_learnable_per_channel_affine(
            weight, weight_step, torch.zeros_like(weight_step), 0, -HIGH, HIGH, of_weight
        )
        return x, weight, bias

    def _observed(self, x: Tensor) -> Tensor:
        averaging = self.averaging if self.training else 0.0
        span = observed_range(x.detach(), self.input_range, averaging, self.label)
        if self.training:
            with torch.no_grad():
                self.input_range.copy_(span)
        return torch.fake_quantize_per_tensor_affine(x, *steps_of_range(span), LOW, HIGH)

    def _folded(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias, with the BatchNorm's part in them."""
        if self.norm is None:
            return self.weight, self.bias
        norm = self.norm
        assert norm.running_mean is not None and norm.running_var is not None
        factor = torch.rsqrt(norm.running_var + norm.eps)
        if norm.weight is not None:
            factor = factor * norm.weight
        shift = -norm.running_mean if self.bias is None else self.bias - norm.running_mean
        shift = shift * factor if norm.bias is None else torch.addcmul(norm.bias, shift, factor)
        return self.weight * factor.reshape(-1, *(1 for _ in self.weight.shape[1:])), shift

    def extra_repr(self) -> str:
        folded = "" if self.norm is None else ", BatchNorm folded"
        return f"{super().extra_repr()}, {self.ranges} ranges{folded}"


class FakeQuantizedLinear(_FakeQuantized, nn.Linear):
    """`torch.nn.Linear` on rounded operands, see `fake_quantize_`."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(*self.operands(x))


class FakeQuantizedConv1d(_FakeQuantized, nn.Conv1d):
    """`torch.nn.Conv1d` on rounded operands, see `fake_quantize_`."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(*self.operands(x))


class FakeQuantizedConv2d(_FakeQuantized, nn.Conv2d):
    """`torch.nn.Conv2d` on rounded operands, see `fake_quantize_`."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(*self.operands(x))


class FakeQuantizedConv3d(_FakeQuantized, nn.Conv3d):
    """`torch.nn.Conv3d` on rounded operands, see `fake_quantize_`."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(*self.operands(x))


_KINDS: dict[type[nn.Module], type[_FakeQuantized]] = {
    nn.Linear: FakeQuantizedLinear,
    nn.Conv1d: FakeQuantizedConv1d,
    nn.Conv2d: FakeQuantizedConv2d,
    nn.Conv3d: FakeQuantizedConv3d,
}


def fake_quantize_(
    model: nn.Module,
    *,
    ranges: Ranges = "observed",
    batch_norm: BatchNorms = "keep",
    averaging: float = 0.01,
    sample: Tensor | Sequence[Any] | None = None,
    skip: Collection[str] = (),
) -> Adaptation:
    """Let convolutions and linear layers compute with what int8 can hold, and train so (QAT).

    Choose it to prepare a model for int8 inference, where training itself may be in float32: values are rounded, and
    computed with in float32. Weights have a symmetric range for each output channel, inputs an asymmetric one for the
    tensor. The gradient goes straight through the rounding, and is 0 where a value was clipped. What a range is taken
    from covers the whole batch, so that a step is not cut into micro-batches.

    Args:
        model: changed in place.
        ranges: "observed": of weights, the largest absolute value; of inputs, a moving average of least and greatest
            value. "learned": the steps are parameters, and those of inputs have a learned zero, too (LSQ); they start
            from the weights and from `sample`.
        batch_norm: "keep" leaves BatchNorms as they are. "fold" makes those behind a layer a part of its weight and
            bias, with the statistics that they have, as an int8 graph has them: weight and bias of the BatchNorm go on
            training, its statistics do not change.
        averaging: the share of a batch in the moving average, above 0 up to 1.
        sample: what the model is called with once, in evaluation mode, to start ranges from: a tensor, or a sequence of
            arguments. Without it observed ranges start with the first batch that trains.
        skip: names of layers that stay in float32; a container's name is for all inside it.

    Returns:
        What trains. Its `unload()` and `merge()` give the plain layers back, with what they have learnt; what was
        learned of ranges is dropped. Notes name what stays in float32, and why.

    Raises:
        ValueError: an option is another, nothing can be quantized, `skip` names what is not there, or ranges are to be
            learned without a sample, or from an input of zeros; or the model is quantized in another way.
        RuntimeError: from the model, where ranges or weights have become useless: nothing was observed before
            evaluation, or a number is not finite, or a learned step is not positive. The layer is named.

    Example:
        >>> import torch_odt as odt
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
        >>> adaptation = odt.quant.fake_quantize_(model, batch_norm="fold", sample=torch.randn(4, 3, 8, 8))
        >>> [type(layer).__name__ for layer in model]
        ['FakeQuantizedConv2d', 'Identity', 'ReLU', 'Flatten', 'FakeQuantizedLinear']
        >>> [type(layer).__name__ for layer in adaptation.unload()]
        ['Conv2d', 'BatchNorm2d', 'ReLU', 'Flatten', 'Linear']
    """
    _check(ranges, batch_norm, averaging, sample)
    require_plain(model, "fake_quantize_", skip)
    choice = choose_layers(model, _why_not, skip=skip)
    spans = {} if sample is None else _spans(model, choice.taken, sample)
    with Adapting(model) as adapting:
        adapting.notes.extend(choice.notes())
        norms = _norms(adapting, choice.taken) if batch_norm == "fold" else {}
        idle = [name for name in choice.taken if sample is not None and name not in spans]
        if idle:
            adapting.notes.append(f"{', '.join(idle)}: float32, because the sample does not run through them")
        for name, layer in choice.taken.items():
            if name in idle:
                continue
            norm = norms.get(name)
            quantized = copy_layer(_KINDS[type(layer)], layer)
            module = None if norm is None else model.get_submodule(norm)
            quantized.prepare(name, ranges, averaging, module, spans.get(name, torch.tensor(NONE_SEEN)))
            if norm is not None:
                adapting.replace(norm, nn.Identity())
            adapting.replace(name, quantized)
        return adapting.finish(f"fake quantization ({ranges} ranges)")


def _check(ranges: str, batch_norm: str, averaging: float, sample: object) -> None:
    if ranges not in ("observed", "learned"):
        raise ValueError(f"ranges={ranges!r}: choose observed or learned")
    if batch_norm not in ("keep", "fold"):
        raise ValueError(f"batch_norm={batch_norm!r}: choose keep or fold")
    if not 0 < averaging <= 1:
        raise ValueError(f"averaging={averaging}: it is a share of a batch, above 0 up to 1")
    if ranges == "learned" and sample is None:
        raise ValueError("ranges='learned' needs a sample to start from: give a batch of what the model is called with")


def _why_not(layer: nn.Module) -> str | None:
    if type(layer) in _KINDS:
        return None
    if isinstance(layer, _FakeQuantized):
        return "because it is fake-quantized already"
    return f"because {type(layer).__name__} is none of {', '.join(kind.__name__ for kind in _KINDS)}"


def _rounded_weight(weight: Tensor, steps: Tensor) -> Tensor:
    zeros = torch.zeros_like(steps, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weight, steps, zeros, 0, -HIGH, HIGH)


def _norms(adapting: Adapting, layers: dict[str, nn.Module]) -> dict[str, str]:
    """Which BatchNorms are folded into which of the layers; notes name those that are kept."""
    model = adapting.model
    try:
        behind = norms_behind(model)
    except CaptureError as error:
        adapting.notes.append(f"BatchNorms are kept: {error}")
        return {}
    folded = {}
    for name, norm_name in behind.items():
        norm = model.get_submodule(norm_name)
        if name in layers and isinstance(norm, _BatchNorm) and norm.running_mean is not None:
            folded[name] = norm_name
    kept = [
        name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and name not in folded.values()
    ]
    if kept:
        adapting.notes.append(f"BatchNorms that are behind no quantized layer alone are kept: {', '.join(kept)}")
    return folded


def _spans(model: nn.Module, layers: dict[str, nn.Module], sample: Tensor | Sequence[Any]) -> dict[str, Tensor]:
    """The least and greatest value of each layer's input."""
    spans: dict[str, Tensor] = {}
    inputs = (sample,) if isinstance(sample, Tensor) else tuple(sample)
    with evaluating(model), torch.no_grad(), _watching(layers, spans):
        model(*inputs)
    return spans


@contextmanager
def _watching(layers: dict[str, nn.Module], spans: dict[str, Tensor]) -> Iterator[None]:
    handles = []
    for name, layer in layers.items():

        def note(module: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
            now = observed_range(inputs[0], torch.tensor(NONE_SEEN), 1.0, name)
            before = spans.get(name, now)
            spans[name] = torch.stack([torch.minimum(now[0], before[0]), torch.maximum(now[1], before[1])])

        handles.append(layer.register_forward_pre_hook(note))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

"""Octo: training in int8, with compensation that is learned from the loss and clipped ranges in the backward pass.

Q. Zhou et al., "Octo: INT8 Training with Loss-aware Compensation and Backward Quantization for Tiny On-device
Learning", USENIX ATC 2021.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_odt.adapt.adaptation import Adaptation, Adapting
from torch_odt.adapt.layers import run_layers
from torch_odt.adapt.norms_behind import norms_behind
from torch_odt.errors import CaptureError
from torch_odt.quant.layer_choice import choose_layers, copy_layer
from torch_odt.quant.octo_layers import OctoConv2d, OctoLinear, padding_of
from torch_odt.quant.one_way import require_plain

Compensation = Literal["channel", "position", "none"]
GradientRounding = Literal["stochastic", "nearest"]
WeightRanges = Literal["channel", "tensor"]
_KINDS: dict[type[nn.Module], type[OctoConv2d] | type[OctoLinear]] = {nn.Conv2d: OctoConv2d, nn.Linear: OctoLinear}


@dataclass
class Octo(Adaptation):
    """A model that trains in int8, and the way back to float32; see `octo_` and `Adaptation`."""

    def parameter_groups(self, *, compensation_decay: float = 0.1) -> list[dict[str, Any]]:
        """What trains, for the optimizer, with the paper's penalty on the compensation.

        `compensation_decay / 2 * (|mu|^2 + |delta|^2)` is what weight decay of that size adds to the loss, with SGD and
        Adam. Shares of ranges and `alpha` have no decay of the optimizer's, because what these are near to is not 0.

        Args:
            compensation_decay: lambda in the paper.

        Example:
            >>> import torch_odt as odt
            >>> octo = odt.quant.octo_(nn.Sequential(nn.Linear(4, 2)))
            >>> optimizer = torch.optim.SGD(octo.parameter_groups(), lr=0.1, weight_decay=1e-4)
            >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
            [(2, 0.0001), (2, 0.1), (2, 0)]
        """
        decayed: set[int] = set()
        undecayed: set[int] = set()
        for module in self.model.modules():
            if isinstance(module, OctoConv2d | OctoLinear):
                decayed |= {id(module.mu), id(module.delta)}
                undecayed |= {id(module.alpha), id(module.log_clip)}
        parameters = self.parameters()
        groups: list[dict[str, Any]] = [
            {"params": [each for each in parameters if id(each) not in decayed | undecayed]},
            {"params": [each for each in parameters if id(each) in decayed], "weight_decay": compensation_decay},
            {"params": [each for each in parameters if id(each) in undecayed], "weight_decay": 0},
        ]
        return [group for group in groups if group["params"]]

    def merge(self) -> nn.Module:
        """Make a plain float32 model, whose biases have the compensation in them: what was learned is kept.

        Its outputs are those of the int8 model up to int8's rounding. Layers without a bias get one where there is a
        compensation for each channel.

        Raises:
            ValueError: there is a compensation for each position, which no bias can be; `unload` drops it.
        """
        shifts: dict[str, Tensor] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, OctoConv2d | OctoLinear) and (shift := module.compensation()) is not None:
                if shift.dim() > 1:
                    raise ValueError(
                        f"{name} has a compensation for each position, which no bias can be; unload() drops it"
                    )
                shifts[name] = shift.detach()
        model = self.unload()
        for name, shift in shifts.items():
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Conv2d | nn.Linear)
            if layer.bias is None:
                layer.bias = nn.Parameter(shift)
            else:
                with torch.no_grad():
                    layer.bias.add_(shift)
        return model


def octo_(
    model: nn.Module,
    *,
    compensation: Compensation = "channel",
    clip: float = 0.95,
    learn_clip: bool = True,
    gradient_rounding: GradientRounding = "stochastic",
    weight_ranges: WeightRanges = "channel",
    sample: Tensor | Sequence[Any] | None = None,
    skip: Collection[str] = (),
) -> Octo:
    """Let 2-D convolutions and linear layers train in int8, forward and backward, by Octo's method.

    Choose it to train where the processor has dot products of bytes: products are int8 times int8 in both passes, and
    what is kept between them of inputs is a quarter of the bytes. Weights, gradients of weights and the optimizer stay
    in float32. Each input has the range that it has in the batch, asymmetric. So samples influence each other's
    rounding, and a step is not cut into micro-batches.

    Two things make up for the rounding. *Loss-aware compensation* adds `alpha * mu + delta` to each output, and learns
    these from the loss; they do not depend on the batch. *Parameterized range clipping* takes for the backward pass
    what lies within a share of each operand's range, in smaller steps. The shares learn to make the rounding error as
    small as they can: `octo_conv2d` has the gradient.

    Args:
        model: changed in place.
        compensation: "channel": three numbers for each output channel. A layer whose output goes into a BatchNorm that
            takes statistics of the batch gets none, because the BatchNorm would take a constant of each channel out
            again. "position": three numbers for each output element of a sample (as in the authors' code, but for the
            batch), for inputs of one size, BatchNorm or not; needs `sample`. "none".
        clip: the share of their ranges to which the backward pass's operands are clipped at first, above 0 up to 1.
        learn_clip: let the shares train. It costs a pass over each operand.
        gradient_rounding: "stochastic" rounds gradients so that they are right on average; "nearest" is the authors'.
        weight_ranges: "channel": each output channel of a weight has a range of its own. "tensor": all have one, as the
            authors' do, for what runs the network later and knows no other; it rounds small channels coarsely, which is
            what compensation is for.
        sample: a tensor or a sequence of arguments to call the model with once, for the sizes of outputs.
        skip: names of layers that stay in float32; a container's name is for all inside it.

    Returns:
        What trains. `parameter_groups()` is for the optimizer; `unload()` gives the plain layers back with their
        weights, without the compensation; `merge()` puts the compensation into biases first. Notes name what stays in
        float32, and why.

    Raises:
        ValueError: an option is another, nothing can be quantized, `skip` names what is not there, or the model is
            quantized in another way.
        RuntimeError: from the model, where an input, a weight or a gradient is not finite, or not float32; the layer is
            named.

    Example:
        >>> import torch_odt as odt
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
        >>> octo = odt.quant.octo_(model)
        >>> optimizer = torch.optim.SGD(octo.parameter_groups(), lr=0.05)
        >>> step = odt.TrainStep(model, nn.functional.cross_entropy, optimizer, budget="2GiB")
        >>> loss = step(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]))
        >>> [type(layer).__name__ for layer in octo.merge()]
        ['Conv2d', 'ReLU', 'Flatten', 'Linear']
    """
    _check(compensation, clip, gradient_rounding, weight_ranges, sample)
    require_plain(model, "octo_", skip)
    choice = choose_layers(model, _why_not, skip=skip)
    with Adapting(model) as adapting:
        adapting.notes.extend(choice.notes())
        shapes = _compensation_shapes(adapting, choice.taken, compensation, sample)
        for number, (name, layer) in enumerate(choice.taken.items()):
            quantized = copy_layer(_KINDS[type(layer)], layer)
            quantized.prepare(
                name,
                number,
                shapes.get(name),
                clip=clip,
                learns=learn_clip,
                is_stochastic=gradient_rounding == "stochastic",
                by_channel=weight_ranges == "channel",
            )
            adapting.replace(name, quantized)
        method = f"octo (compensation: {compensation})"
        return Octo(**vars(adapting.finish(method)))


def _check(compensation: str, clip: float, gradient_rounding: str, weight_ranges: str, sample: object) -> None:
    if compensation not in ("channel", "position", "none"):
        raise ValueError(f"compensation={compensation!r}: choose channel, position or none")
    if compensation == "position" and sample is None:
        raise ValueError("compensation='position' needs a sample, for the sizes of outputs")
    if not 0 < clip <= 1:
        raise ValueError(f"clip={clip}: it is a share of a range, above 0 up to 1")
    if gradient_rounding not in ("stochastic", "nearest"):
        raise ValueError(f"gradient_rounding={gradient_rounding!r}: choose stochastic or nearest")
    if weight_ranges not in ("channel", "tensor"):
        raise ValueError(f"weight_ranges={weight_ranges!r}: choose channel or tensor")


def _why_not(layer: nn.Module) -> str | None:
    if isinstance(layer, OctoConv2d | OctoLinear):
        return "because it trains in int8 already"
    if type(layer) not in _KINDS:
        return f"because {type(layer).__name__} is neither Conv2d nor Linear"
    if isinstance(layer, nn.Conv2d) and padding_of(layer) is None:
        return "because it is padded with something else than zeros, or with more on one side"
    return None


def _compensation_shapes(
    adapting: Adapting,
    layers: dict[str, nn.Module],
    compensation: Compensation,
    sample: Tensor | Sequence[Any] | None,
) -> dict[str, tuple[int, ...]]:
    """Of each layer that gets one."""
    if compensation == "none":
        return {}
    if compensation == "channel":
        cancelled = _before_batch_statistics(adapting, layers)
        return {name: (_channels(layer),) for name, layer in layers.items() if name not in cancelled}
    assert sample is not None
    inputs = (sample,) if isinstance(sample, Tensor) else tuple(sample)
    outputs: dict[str, set[tuple[int, ...]]] = {}
    for layer in run_layers(adapting.model, *inputs):
        outputs.setdefault(layer.name, set()).add(layer.output_shape[1:])
    shapes = {}
    for name in layers:
        found = outputs.get(name, set())
        if len(found) == 1:
            shapes[name] = found.pop()
        else:
            adapting.notes.append(f"{name}: no compensation, because the sample gives it {len(found)} output sizes")
    return shapes


def _channels(layer: nn.Module) -> int:
    assert isinstance(layer, nn.Conv2d | nn.Linear)
    return layer.weight.shape[0]


def _before_batch_statistics(adapting: Adapting, layers: dict[str, nn.Module]) -> set[str]:
    """Layers whose output a BatchNorm in training mode normalizes; a note counts them."""
    model = adapting.model
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return set()
    try:
        behind = norms_behind(model)
    except CaptureError as error:
        adapting.notes.append(f"compensation in front of BatchNorms, too, where it changes nothing: {error}")
        return set()
    cancelled = layers.keys() & behind.keys()
    if cancelled:
        adapting.notes.append(
            f"{len(cancelled)} layers are in front of BatchNorms, which take a constant of a channel out again: no "
            "compensation there; compensation='position' is for those"
        )
    return cancelled

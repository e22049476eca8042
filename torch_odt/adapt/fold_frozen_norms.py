"""Frozen BatchNorms that become a part of the frozen convolutions in front of them, once, when a model is adapted.

A step multiplies the weight by the norm's scale each time otherwise, since it may not keep a second weight: of
MobileNetV2, whose last 20 biases train, these and what goes with them are half of its operators.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torch_odt.adapt.adaptation import Adapting
from torch_odt.adapt.frozen_batch_norm import FrozenBatchNorm, FrozenBatchNormAct, freeze_batch_norms
from torch_odt.adapt.norms_behind import norms_behind
from torch_odt.adapt.sparse_layers import CONVOLUTIONS

FrozenNorms = Literal["frozen", "folded"]


def check_norm(norm: str) -> None:
    """Raises ValueError where it is no way to treat frozen BatchNorms."""
    if norm not in ("frozen", "folded"):
        raise ValueError(f"norm={norm!r}: it is 'frozen' or 'folded'")


def freeze_norms(adapting: Adapting, norm: str) -> None:
    """Let BatchNorms keep their statistics, as `norm` says: "frozen", or "folded" into the convolutions."""
    if norms := freeze_batch_norms(adapting):
        if norm == "folded":
            fold_frozen_norms(adapting)
        adapting.notes.append(f"{norms} BatchNorms keep their statistics")
    elif norm == "folded":
        adapting.notes.append("the model has no BatchNorm for norm='folded'")


def fold_frozen_norms(adapting: Adapting) -> None:
    """Make convolutions of frozen convolutions and the `FrozenBatchNorm`s behind them; a note says of how many.

    The convolution has the scaled weight, and the norm's bias and shift as its bias, which trains if the norm's did. Of
    the first weight nothing is kept: taken back, it is the scaled one over the scale, and the norm's bias is what is
    left of the convolution's. Both are within rounding what they were. Meanwhile the first weight is empty, for what
    else reads it outside of the model, too.

    Norms stay that are behind something else in either mode, or whose convolution trains, shares its weight, is in less
    than 32 bits, has hooks, or computes something of its own; or whose weight trains or is too close to 0 to divide by,
    or whose bias trains and is another one's as well.

    Raises:
        CaptureError: `torch.fx` cannot follow the model.
    """
    model = adapting.model
    sharing = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    folded = 0
    norms = sum(isinstance(module, FrozenBatchNorm) for module in model.modules())
    # Code without any need not be what torch.fx can follow.
    for name, norm_name in _behind_in_both_modes(model).items() if norms else ():
        conv, norm = model.get_submodule(name), model.get_submodule(norm_name)
        assert isinstance(norm, FrozenBatchNorm)
        if not _can_fold(conv, norm) or sharing[id(conv.weight)] > 1:
            continue
        if norm.bias is not None and norm.bias.requires_grad and sharing[id(norm.bias)] > 1:
            continue
        _fold(adapting, (name, conv), (norm_name, norm))
        folded += 1
    rest = f", {norms - folded} are not" if folded < norms else ""
    adapting.notes.append(f"{folded} frozen BatchNorms are a part of the convolutions in front of them{rest}")


def _behind_in_both_modes(model: nn.Module) -> dict[str, str]:
    """The norms behind layers; code may ask for the mode."""
    modes = [(module, module.training) for module in model.modules()]
    found = []
    try:
        for training in (True, False):
            for module, _ in modes:
                module.training = training
            found.append(norms_behind(model, FrozenBatchNorm))
    finally:
        for module, mode in modes:
            module.training = mode
    return dict(found[0].items() & found[1].items())


def _can_fold(conv: Any, norm: FrozenBatchNorm) -> bool:
    if type(conv) not in CONVOLUTIONS or any(_is_changed(module) for module in (conv, norm)):
        return False
    weight, bias, of_norm = conv.weight, conv.bias, norm.weight
    if any(tensor is not None and tensor.requires_grad for tensor in (weight, bias, of_norm)):
        return False
    if weight.dtype not in (torch.float32, torch.float64) or norm.frozen_scale.dtype != weight.dtype:
        return False
    scale = norm.frozen_scale
    is_safe = (scale.abs() > torch.finfo(scale.dtype).eps ** 2) & scale.isfinite() & norm.frozen_offset.isfinite()
    return bool(is_safe.all())


def _is_changed(module: nn.Module) -> bool:
    """Whether something else runs when it is called, saved or loaded."""
    hooks = [value for name, value in vars(module).items() if name.endswith("_hooks")]
    return "forward" in vars(module) or any(hooks)


@torch.no_grad()
def _fold(adapting: Adapting, conv: tuple[str, Any], norm: tuple[str, FrozenBatchNorm]) -> None:
    (name, layer), (norm_name, frozen) = conv, norm
    bias = _shift(layer, frozen) if frozen.bias is None else _shift(layer, frozen) + frozen.bias
    trains = frozen.bias is not None and frozen.bias.requires_grad
    folded = _like(layer)
    folded.weight = nn.Parameter(layer.weight * _column(frozen.frozen_scale, layer.weight), requires_grad=False)
    folded.bias = nn.Parameter(bias, requires_grad=trains)
    adapting.replace(name, folded)
    is_activating = isinstance(frozen, FrozenBatchNormAct)
    kept = (FoldedBatchNormAct if is_activating else FoldedBatchNorm)(frozen, layer.bias)  # type: ignore[arg-type]
    adapting.replace(norm_name, kept)

    adapting.also_undo(partial(_give_back, layer, frozen, folded, kept, trains))
    layer.weight.data = layer.weight.data.new_empty(0)


@torch.no_grad()
def _give_back(layer: Any, frozen: FrozenBatchNorm, folded: Any, kept: FoldedBatchNorm, trains: bool) -> None:
    # Another state may have been loaded.
    kept.give_back(frozen, layer.bias)
    # The model may have been moved since, the norm with it or not.
    scale, shift = (each.to(folded.weight) for each in (frozen.frozen_scale, _shift(layer, frozen)))
    layer.weight.data = folded.weight.data / _column(scale, folded.weight)
    # A later method may have let a bias train that did not.
    if frozen.bias is not None and (trains or not torch.equal(folded.bias, shift + frozen.bias)):
        frozen.bias.copy_(folded.bias - shift)


def _shift(conv: Any, norm: FrozenBatchNorm) -> Tensor:
    """What is added to each channel by the convolution and the norm, the norm's bias apart."""
    if conv.bias is None:
        return norm.frozen_offset.clone()
    return torch.addcmul(norm.frozen_offset, conv.bias, norm.frozen_scale)


def _column(scale: Tensor, weight: Tensor) -> Tensor:
    return scale.view(-1, *(1,) * (weight.dim() - 1))


def _like(conv: Any) -> Any:
    """A convolution of the same geometry with a bias, whose tensors are nowhere yet."""
    return type(conv)(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
        padding_mode=conv.padding_mode,
        device="meta",
    )


_OF_NORM = ("weight", "running_mean", "running_var", "num_batches_tracked")


class FoldedBatchNorm(nn.Module):
    """What stands where a frozen BatchNorm was that is a part of the convolution in front of it: returns its input.

    It has the norm's weight and statistics, and the convolution's own bias, in its state_dict, so that both can be
    given back in another process; the norm's bias is a part of the convolution's. They are neither buffers nor in
    `__dict__`: of both a step would take note at each call.
    """

    __slots__ = ("_kept",)
    _kept: dict[str, Tensor]

    def __init__(self, norm: FrozenBatchNorm, bias_in_front: Tensor | None) -> None:
        super().__init__()
        found = {name: getattr(norm, name) for name in _OF_NORM} | {"bias_in_front": bias_in_front}
        self._kept = {name: tensor for name, tensor in found.items() if tensor is not None}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_kept": self._kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({name: value for name, value in state.items() if name != "_kept"})
        self._kept = state["_kept"]

    def forward(self, x: Tensor) -> Tensor:
        return x

    @torch.no_grad()
    def give_back(self, norm: FrozenBatchNorm, bias_in_front: Tensor | None) -> None:
        """Write what is kept into the norm and the convolution's own bias."""
        for name, kept in self._kept.items():
            old = bias_in_front if name == "bias_in_front" else getattr(norm, name)
            assert old is not None
            old.copy_(kept)
        norm.refresh()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, kept in self._kept.items():
            destination[prefix + name] = kept if keep_vars else kept.detach()

    @torch.no_grad()
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        for name, kept in self._kept.items():
            found = state_dict.get(prefix + name)
            if found is None:
                missing_keys.append(prefix + name)
            elif found.shape != kept.shape:
                error_msgs.append(f"size mismatch for {prefix}{name}: {tuple(found.shape)} and {tuple(kept.shape)}")
            else:
                kept.copy_(found)


class FoldedBatchNormAct(FoldedBatchNorm):
    """The same of timm's, which drops and activates."""

    def __init__(self, norm: FrozenBatchNormAct, bias_in_front: Tensor | None) -> None:
        super().__init__(norm, bias_in_front)
        self.drop, self.act = norm.drop, norm.act

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.act(self.drop(x))  # type: ignore[operator]
        return result

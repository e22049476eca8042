"""BatchNorm whose statistics stay what they are, whatever mode the model is put into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_odt.adapt.adaptation import Adapting

PLAIN_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class FrozenBatchNorm(nn.Module):
    """BatchNorm with its running statistics: an affine map of each channel, in training, too.

    The map is one multiplication and one addition, `x * scale + shift` with `scale = weight / sqrt(running_var + eps)`
    and `shift = bias - running_mean * scale`. Where the weight is frozen, the backward pass needs nothing of `x`: plain
    PyTorch's operator keeps it (`F.batch_norm(training=False)`). Values agree with it within rounding. The names in the
    state_dict are those of the BatchNorm that it stands for, whose tensors it shares. What is made of a
    frozen weight and of the statistics is computed once: here, when a state_dict is loaded, and by `refresh`. A weight
    that trains then, or when `train()` is called, is read in every pass until the next of these, frozen or not. The
    result has the input's type, under autocast, too.

    Choose it wherever a pretrained network with BatchNorm is adapted to few samples, or in small batches: samples do
    not influence each other then, so that micro-batches are exact, too.

    Args:
        norm: a BatchNorm of any dimension that has running statistics, or another of these.

    Raises:
        ValueError: it has no running statistics to use.

    Example:
        >>> norm = nn.BatchNorm2d(3)
        >>> frozen = FrozenBatchNorm(norm)
        >>> x = torch.randn(2, 3, 4, 4)
        >>> torch.allclose(frozen.train()(x), norm.eval()(x), atol=1e-6)
        True
    """

    num_features: int
    eps: float
    momentum: float | None
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor | None
    frozen_scale: Tensor
    frozen_offset: Tensor

    def __init__(self, norm: AnyBatchNorm) -> None:
        super().__init__()
        if norm.running_mean is None or norm.running_var is None:
            raise ValueError("a BatchNorm without running statistics (track_running_stats=False) cannot be frozen")
        self.num_features = norm.num_features
        self.eps = norm.eps
        self.momentum = norm.momentum
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self.register_buffer("num_batches_tracked", norm.num_batches_tracked)
        with torch.no_grad():
            self.register_buffer("frozen_scale", self._scale().clone(), persistent=False)
            self.register_buffer("frozen_offset", -self.running_mean * self.frozen_scale, persistent=False)
        self._is_fixed = not self._trains()

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.frozen_scale, self.frozen_offset
        if self._trains() or not self._is_fixed:
            scale = self._scale()
            shift = -self.running_mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        return self._affine(x, scale, shift)

    def _affine(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        of_channels = (-1, *(1 for _ in range(x.dim() - 2)))
        return torch.addcmul(shift.view(of_channels), x, scale.view(of_channels)).to(x.dtype)

    def refresh(self) -> None:
        """Compute anew what is made of the weight and the statistics, for those that were changed in place.

        Call it after a weight was frozen by hand; the verbs do.
        """
        with torch.no_grad():
            self.frozen_scale.copy_(self._scale())
            self.frozen_offset.copy_(-self.running_mean * self.frozen_scale)
        self._is_fixed = not self._trains()

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        # Noted here, because a forward pass that changes attributes cannot be captured.
        self._is_fixed = self._is_fixed and not self._trains()
        return super().train(mode)

    def _trains(self) -> bool:
        return self.weight is not None and self.weight.requires_grad

    def _scale(self) -> Tensor:
        scale = torch.rsqrt(self.running_var + self.eps)
        return scale if self.weight is None else scale * self.weight

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.refresh()

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}"


AnyBatchNorm = _BatchNorm | FrozenBatchNorm


class FrozenBatchNormAct(FrozenBatchNorm):
    """timm's BatchNorm that drops and activates what it has normalised, with fixed statistics."""

    def __init__(self, norm: AnyBatchNorm) -> None:
        super().__init__(norm)
        self.drop, self.act = norm.drop, norm.act

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.act(self.drop(super().forward(x)))  # type: ignore[operator]
        return result


def frozen_batch_norm(
    name: str,
    norm: AnyBatchNorm,
    plain: type[FrozenBatchNorm] = FrozenBatchNorm,
    activating: type[FrozenBatchNorm] = FrozenBatchNormAct,
) -> FrozenBatchNorm:
    """What takes a norm's place: itself, where it is of that type.

    Raises:
        ValueError: it is of a type that computes more than BatchNorm, nobody knows what.
    """
    kind = type(norm)
    if isinstance(norm, FrozenBatchNorm):
        wanted = activating if isinstance(norm, FrozenBatchNormAct) else plain
        return norm if kind is wanted else wanted(norm)
    if kind in PLAIN_BATCH_NORMS:
        return plain(norm)
    if kind.__module__.startswith("timm.") and kind.__name__.startswith("BatchNormAct"):
        return activating(norm)
    raise ValueError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which may compute more than BatchNorm: it cannot be "
        "frozen. Replace it by torch.nn.BatchNorm2d and what follows"
    )


def freeze_batch_norms(
    adapting: Adapting, *, below: str = "", make: Callable[[str, AnyBatchNorm], FrozenBatchNorm] = frozen_batch_norm
) -> int:
    """Put a `FrozenBatchNorm` in the place of each BatchNorm; those that there are take up what they have learnt.

    Args:
        below: the name of a submodule, for those inside it alone.
        make: makes it, of a norm and its name; an earlier verb's, too.

    Returns:
        How many there are now. Those without running statistics are left as they are, and named in the notes.

    Raises:
        ValueError: one of them is of a type that cannot be frozen.
    """
    prefix = f"{below}." if below else ""
    count = 0
    seen: set[int] = set()
    for name, module in list(adapting.model.named_modules(remove_duplicate=False)):
        if id(module) in seen or not f"{name}.".startswith(prefix):
            continue
        seen.add(id(module))
        if not isinstance(module, AnyBatchNorm):
            continue
        if isinstance(module, FrozenBatchNorm):
            module.refresh()
            # Where another takes its place and is taken back, the weight may have learnt meanwhile.
            adapting.also_undo(module.refresh)
        if module.running_mean is None:
            adapting.notes.append(f"{name} has no running statistics, so it normalizes with those of the batch")
            continue
        made = make(name, module)
        if made is not module:
            adapting.replace(name, made)
        count += 1
    return count

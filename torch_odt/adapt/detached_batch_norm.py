"""BatchNorm that follows the batch, and through whose statistics no gradient passes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_odt.adapt.frozen_batch_norm import AnyBatchNorm, FrozenBatchNorm, FrozenBatchNormAct, frozen_batch_norm


class DetachedBatchNorm(FrozenBatchNorm):
    """BatchNorm that normalizes with the statistics of the batch in training, as constants of the backward pass.

    The forward pass is BatchNorm's, and running statistics follow as they do there; the gradient of the input is that
    of the output times `weight / sqrt(var + eps)`. BatchNorm's own has two terms more, which say how the sample moves
    the mean and the variance, and for which it keeps its input. Where the weight is frozen, nothing of the input is
    kept here. In evaluation it is a `FrozenBatchNorm`.

    Choose it over that where data differ much from those of the pretraining, and a batch has eight samples or more:
    statistics fit what the layers in front compute by now. Samples influence each other, so that batches cannot be cut.
    No gradient holds statistics back, so that a learning rate which frozen ones bear may be too high.

    Args:
        norm: a BatchNorm of any dimension that has running statistics, or a frozen one.

    Raises:
        ValueError: it has no running statistics; or, when called, a batch has fewer than two values for each channel.

    Example:
        >>> from torch import nn
        >>> norm = nn.BatchNorm2d(3)
        >>> x = torch.randn(8, 3, 4, 4)
        >>> torch.allclose(DetachedBatchNorm(norm)(x), norm(x), atol=1e-5)
        True
    """

    def __init__(self, norm: AnyBatchNorm) -> None:
        super().__init__(norm)
        self._is_fixed = False
        self.training = norm.training

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        values = x.numel() // self.num_features
        if values < 2:
            raise ValueError(f"a batch of shape {tuple(x.shape)} has fewer than two values for each channel")
        with torch.no_grad():
            of_samples = [dim for dim in range(x.dim()) if dim != 1]
            variance, mean = torch.var_mean(x.to(self.running_var.dtype), of_samples, correction=0)
            self._follow(mean, variance * (values / (values - 1)))
            scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        return self._affine(x, scale, shift)

    def refresh(self) -> None:
        super().refresh()
        # Statistics move in training.
        self._is_fixed = False

    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance, self.momentum)
        else:
            assert self.num_batches_tracked is not None
            share = 1 / self.num_batches_tracked.to(mean.dtype)
            self.running_mean.lerp_(mean, share)
            self.running_var.lerp_(variance, share)


class DetachedBatchNormAct(FrozenBatchNormAct, DetachedBatchNorm):
    """timm's BatchNorm that drops and activates what it has normalised, with the statistics of the batch."""


def detached_batch_norm(name: str, norm: AnyBatchNorm) -> FrozenBatchNorm:
    """What takes a BatchNorm's place; raises ValueError where it is of a type that computes more."""
    if isinstance(norm, nn.SyncBatchNorm):
        raise ValueError(
            f"{name} is a SyncBatchNorm, which follows the batches of all processes, and norm='detached' those of one. "
            "Choose norm='frozen', or make torch.nn.BatchNorm2d of it"
        )
    return frozen_batch_norm(name, norm, DetachedBatchNorm, DetachedBatchNormAct)

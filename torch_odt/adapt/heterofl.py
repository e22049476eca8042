"""What HeteroFL changes in how a client trains its sub-model: scaled activations, static BatchNorm, a masked loss.

E. Diao, J. Ding, V. Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients", ICLR 2021, section 3. Which weights a client holds, and how they are merged, say `SubModel` and
`merge_sub_models`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from torch_odt.adapt.adaptation import Adaptation, Adapting
from torch_odt.adapt.arguments import require_numbers
from torch_odt.adapt.frozen_batch_norm import FrozenBatchNorm
from torch_odt.adapt.head import find_head


class _Scaled(nn.Module):
    """Mixed into a layer: what it returns is divided by the rate, in training (the paper's scaler).

    A hook would do the same, but a step with hooks runs as Python and cannot be planned.
    """

    rate: float

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        return output / self.rate if self.training else output


class ScaledLinear(_Scaled, nn.Linear):
    """A linear layer with the scaler behind it."""


class ScaledConv1d(_Scaled, nn.Conv1d):
    """A convolution with the scaler behind it."""


class ScaledConv2d(_Scaled, nn.Conv2d):
    """A convolution with the scaler behind it."""


class ScaledConv3d(_Scaled, nn.Conv3d):
    """A convolution with the scaler behind it."""


_SCALED: dict[type[nn.Module], type[_Scaled]] = {
    nn.Linear: ScaledLinear,
    nn.Conv1d: ScaledConv1d,
    nn.Conv2d: ScaledConv2d,
    nn.Conv3d: ScaledConv3d,
}


def heterofl_(
    model: nn.Module, rate: float, *, head: str | None = None, scaler: bool = True, static_batch_norm: bool = True
) -> Adaptation:
    """Let a sub-model train as HeteroFL's clients do.

    Choose it for every client of a federation whose sub-models are merged with wider ones, the widest included. Names
    in the state_dict stay what they are.

    Args:
        model: changed in place.
        rate: the sub-model's share of the full model's channels, in (0, 1].
        head: the classifier's name, whose output is not scaled; by default it is the last linear layer.
        scaler: in training, outputs of all other convolutions and linear layers are divided by the rate, so that they
            are as large as the full model's, whose sums have more terms.
        static_batch_norm: in training, BatchNorm takes each batch's statistics and tracks none. Those in the
            state_dict stay what the server has sent; `estimate_batch_norm_` finds them after training.

    Returns:
        What trains; its `unload()` takes the change back.

    Raises:
        ValueError: the rate is no share, the model has no classifier that can be found, or a layer is of a kind that
            cannot be scaled; it is named.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
        >>> adaptation = heterofl_(model, 0.5)
        >>> _ = model(torch.randn(4, 3, 3, 3))
        >>> int(model[1].num_batches_tracked)
        0
    """
    require_numbers(rate=rate)
    if not 0 < rate <= 1:
        raise ValueError(f"rate={rate}: it is the sub-model's share of the full model's channels, in (0, 1]")
    with Adapting(model) as adapting:
        classifier = find_head(model, head)
        for name, module in list(model.named_modules()):
            if scaler and rate < 1 and isinstance(module, _ConvNd | nn.Linear) and name != classifier:
                adapting.replace(name, _scaled(name, module, rate))
            if static_batch_norm and isinstance(module, _BatchNorm) and module.track_running_stats:
                module.track_running_stats = False
                adapting.also_undo(partial(setattr, module, "track_running_stats", True))
        return adapting.finish(f"heterofl (rate {rate:g})")


def _scaled(name: str, layer: nn.Module, rate: float) -> _Scaled:
    if type(layer) not in _SCALED:
        known = ", ".join(kind.__name__ for kind in _SCALED)
        raise ValueError(f"{name!r} is a {type(layer).__name__}; what can be scaled are {known}: or give scaler=False")
    # A shallow copy: parameters, buffers and their names are the layer's own.
    scaled: Any = copy.copy(layer)
    scaled.__class__ = _SCALED[type(layer)]
    scaled.rate = rate
    return scaled


def estimate_batch_norm_(model: nn.Module, batches: Iterable[Any], *, reset: bool = True) -> None:
    """Set BatchNorm's statistics to the mean over batches, after training.

    The model sees each batch once, in training mode and without gradients. Dropout is off. No client has to show its
    data: the model goes from one to the next, with `reset=False` from the second on.

    Args:
        model: with BatchNorms that have running statistics; others are left as they are.
        batches: inputs, or tuples whose first element is the input, as a loader yields them.
        reset: forget what was tracked before.

    Raises:
        ValueError: there are no batches, one is not finite, or no BatchNorm has running statistics.

    Example:
        >>> model, x = nn.BatchNorm1d(2), torch.tensor([[0.0, 1.0], [2.0, 5.0]])
        >>> estimate_batch_norm_(model, [x])
        >>> model.running_mean
        tensor([1., 3.])
    """
    norms = [each for each in model.modules() if isinstance(each, _BatchNorm) and each.running_mean is not None]
    if not norms:
        are_adapted = any(isinstance(module, FrozenBatchNorm) for module in model.modules())
        instead = ": those of an adapted model are estimated before, or after its merge()" if are_adapted else ""
        raise ValueError(
            f"no BatchNorm of the model ({type(model).__name__}) has running statistics to estimate{instead}"
        )
    modes = [(module, module.training) for module in model.modules()]
    options = [(norm, norm.momentum, norm.track_running_stats) for norm in norms]
    model.eval()
    for norm in norms:
        norm.train()
        # The mean over all batches, and not one that forgets.
        norm.momentum, norm.track_running_stats = None, True
    seen = False
    try:
        with torch.no_grad():
            for batch in batches:
                x = batch[0] if isinstance(batch, (tuple, list)) else batch
                if not bool(x.isfinite().all()):
                    raise ValueError("a batch holds numbers that are not finite; the statistics are of those before it")
                if reset and not seen:
                    for norm in norms:
                        norm.reset_running_stats()
                model(x)
                seen = True
    finally:
        for norm, momentum, tracks in options:
            norm.momentum, norm.track_running_stats = momentum, tracks
        for module, training in modes:
            module.training = training
    if not seen:
        raise ValueError("there are no batches to estimate BatchNorm's statistics from")


class MaskedCrossEntropy(nn.Module):
    """Cross-entropy in which the logits of classes that a client does not have are zero.

    Nothing pushes these logits down then, and no gradient reaches their rows of the classifier: give the same classes
    to `ClientUpdate`, so that the rows are merged from clients that have them.

    Args:
        classes: those that the client has. A target of another class goes unnoticed: its logit counts as 0.
        of: how many there are.

    Raises:
        ValueError: there are no classes, or none of that number.

    Example:
        >>> MaskedCrossEntropy([0, 2], of=3)(torch.tensor([[0.0, 9.0, 0.0]]), torch.tensor([0]))
        tensor(1.0986)
    """

    absent: Tensor

    def __init__(self, classes: Sequence[int] | Tensor, *, of: int) -> None:
        super().__init__()
        classes = classes.tolist() if isinstance(classes, Tensor) else list(classes)
        if not classes or any(not 0 <= each < of for each in classes):
            raise ValueError(f"the classes {list(classes)} are not some of 0 to {of - 1}")
        absent = torch.ones(of, dtype=torch.bool)
        absent[list(classes)] = False
        self.register_buffer("absent", absent)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        if logits.dim() > 2 or logits.shape[-1:] != self.absent.shape:
            raise ValueError(f"the logits are of {tuple(logits.shape)}, not of (samples, {len(self.absent)})")
        return F.cross_entropy(logits.masked_fill(self.absent, 0.0), target)

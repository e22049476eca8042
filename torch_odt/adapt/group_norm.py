"""GroupNorm in the place of BatchNorm: no statistics of a batch, so that samples do not influence each other."""

from __future__ import annotations

from torch import nn

from torch_odt.adapt.adaptation import Adapting
from torch_odt.adapt.frozen_batch_norm import PLAIN_BATCH_NORMS, AnyBatchNorm, FrozenBatchNorm, FrozenBatchNormAct

CHANNELS_PER_GROUP = 8


def group_count(channels: int) -> int:
    """Groups of as many channels as divide them, at most 8 (TinyTL's rule).

    Example:
        >>> group_count(32), group_count(12), group_count(7)
        (4, 2, 1)
    """
    return channels // max(size for size in range(1, CHANNELS_PER_GROUP + 1) if channels % size == 0)


def group_batch_norms(adapting: Adapting) -> int:
    """Put a GroupNorm with the same weight and bias in the place of each BatchNorm, frozen or not; returns how many.

    The model computes something else then: it is to be a model that was pretrained so, or one of which everything
    trains. GroupNorm keeps its input for the backward pass, frozen or not.
    """
    count = 0
    for name, module in list(adapting.model.named_modules()):
        if isinstance(module, AnyBatchNorm):
            is_frozen = isinstance(module, FrozenBatchNorm) and not isinstance(module, FrozenBatchNormAct)
            if not is_frozen and type(module) not in PLAIN_BATCH_NORMS:
                kind = type(module)
                raise ValueError(
                    f"{name} is a {kind.__module__}.{kind.__qualname__}, which is more than BatchNorm: GroupNorm "
                    "cannot take its place, norm='frozen', 'folded' and 'detached' can be used"
                )
            norm = nn.GroupNorm(group_count(module.num_features), module.num_features, module.eps, device="meta")
            norm.register_parameter("weight", module.weight)
            norm.register_parameter("bias", module.bias)
            # Added: BatchNorm would compute something else.
            adapting.replace(name, norm, is_added=True)
            count += 1
    return count

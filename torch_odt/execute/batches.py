"""How many samples a batch has, and parts of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree


def count_samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The batch size: the first dimension of the first tensor that has one."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return int(leaf.shape[0])
    raise ValueError("the batch holds no tensor with a batch dimension")


def slice_batch(args: tuple[Any, ...], kwargs: dict[str, Any], samples: int, size: int) -> tuple[Any, Any]:
    """The first `size` samples of a batch: of each tensor whose first dimension is the batch."""

    def cut(leaf: Any) -> Any:
        is_batched = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples
        return leaf[:size] if is_batched and size < samples else leaf

    return pytree.tree_map(cut, (args, kwargs))

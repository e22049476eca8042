"""Which filters of a layer are worth most, by their weights alone.

H. Li et al., "Pruning Filters for Efficient ConvNets", ICLR 2017: a filter of small L1 norm makes small outputs, and
can go. MiniLearn (C. Profentzas et al., EWSN 2022) chooses so.
Y. He et al., "Filter Pruning via Geometric Median for Deep Convolutional Neural Networks Acceleration" (FPGM), CVPR
2019: what can go is the filter nearest to the geometric median of all, as others can stand for it, however large.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Criterion = Literal["l1", "geometric_median"]
_MOST_PRODUCTS = 2**31


def filter_scores(filters: Tensor, criterion: Criterion = "l1") -> Tensor:
    """What each filter is worth; those of the lowest scores go first.

    Choose "l1" where layers have filters that hardly respond. Choose "geometric_median" where norms differ little, or
    where large filters are alike: of several that are, it removes some. Neither looks at data.

    Args:
        filters: of shape (filters, ...); what lies behind the first dimension is taken as a vector. Where several
            layers lose a channel together, their filters of it stand one behind the other.
        criterion: "l1": the sum of absolute weights. "geometric_median": the sum of the Euclidean distances to all
            filters of the layer, g(x) = sum_j ||x - F_j||, of which the geometric median is the minimum (FPGM, equation
            4, over the filters themselves).

    Returns:
        float64 of shape (filters,).

    Raises:
        ValueError: there is no such criterion, or there are no filters.

    Example:
        >>> filters = torch.tensor([[0.0, 0.1], [5.0, 0.0], [5.0, 1.0], [9.0, 9.0]])
        >>> filter_scores(filters).argmin(), filter_scores(filters, "geometric_median").argmin()
        (tensor(0), tensor(2))
    """
    if criterion not in get_args(Criterion):
        raise ValueError(f"criterion={criterion!r}: choose one of {', '.join(map(repr, get_args(Criterion)))}")
    if filters.dim() < 1 or not filters.numel():
        raise ValueError(f"filters of shape {tuple(filters.shape)}: there is none to choose")
    rows = filters.detach().reshape(len(filters), -1)
    if criterion == "l1":
        return torch.linalg.vector_norm(rows, 1, dim=1, dtype=torch.float64)
    rows = rows.double()
    # Matrix products are much faster, but lose half of the digits where filters are close to each other.
    is_large = len(rows) * rows.numel() > _MOST_PRODUCTS
    mode = "use_mm_for_euclid_dist" if is_large else "donot_use_mm_for_euclid_dist"
    return torch.cdist(rows, rows, compute_mode=mode).sum(1)


def kept_filters(filters: Tensor, ratio: float, criterion: Criterion = "l1") -> Tensor:
    """The filters that stay when a share of them goes.

    Args:
        filters, criterion: see `filter_scores`.
        ratio: of the filters that go, in (0, 1); the number is rounded, and one filter stays at least.

    Returns:
        Indices, int64, ascending. Of equal filters the first ones stay.

    Raises:
        ValueError: the ratio is not in (0, 1); or as `filter_scores`.

    Example:
        >>> kept_filters(torch.tensor([[1.0], [-4.0], [2.0], [3.0]]), 0.5)
        tensor([1, 3])
    """
    if not 0 < ratio < 1:
        raise ValueError(f"ratio={ratio}: it is the share of the filters that go, between 0 and 1 without these")
    scores = filter_scores(filters, criterion)
    count = max(1, len(scores) - round(ratio * len(scores)))
    return torch.argsort(scores, descending=True, stable=True)[:count].sort().values

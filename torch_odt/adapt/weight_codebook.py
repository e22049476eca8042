"""A weight as numbers of 256 values that are its own: k-means in one dimension.

S. Han, H. Mao, W. Dally, "Deep Compression", ICLR 2016, section 3: weights that are shared by k-means; TinyTL stores
its frozen weights so.
"""

from __future__ import annotations

import torch
from torch import Tensor

CENTROIDS = 256
_ITERATIONS = 25
_BLOCKS = 2048


def make_codebook(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of a weight, and the values that they stand for.

    Lloyd's iterations over the sorted elements, 25 at most, from centroids whose density is the cube root of the
    elements' (P. Panter, W. Dite, "Quantization distortion in pulse-count modulation", 1951), which is best for many.
    Nothing is drawn: the same weight has the same codes everywhere. Where there are at most 256 different elements, the
    codes stand for these very values.

    Args:
        weight: of any shape and floating type.

    Returns:
        uint8 of the weight's shape and memory format, and 256 values of its type in ascending order, the largest
        repeated where there are fewer.

    Raises:
        ValueError: an element is NaN or infinite.

    Example:
        >>> codes, centroids = make_codebook(torch.tensor([[0.5, -1.0], [0.5, 2.0]]))
        >>> codes.tolist(), centroids[:3].tolist()
        ([[1, 0], [1, 2]], [-1.0, 0.5, 2.0])
    """
    elements = weight.detach().double().flatten()
    if not bool(elements.isfinite().all()):
        raise ValueError("the weight has elements that are NaN or infinite: there are no 256 values for them")
    ordered, _ = elements.sort()
    centroids = ordered.unique_consecutive()
    if len(centroids) > CENTROIDS:
        centroids = _lloyd(ordered, _spread(ordered))
    # The centroids as they are stored decide which is the nearest.
    stored = torch.cat([centroids, centroids[-1:].expand(CENTROIDS - len(centroids))]).to(weight.dtype)
    codes = torch.bucketize(elements, _borders(stored[: len(centroids)].double()))
    laid_out = torch.empty_like(weight, dtype=torch.uint8)
    return laid_out.copy_(codes.view(weight.shape)), stored


def read_codebook(codes: Tensor, centroids: Tensor) -> Tensor:
    """The weight that codes stand for, of their shape and the centroids' type."""
    if codes.dim() == 4 and not codes.is_contiguous():
        # Channels last, as convolutions like it.
        codes = codes.permute(0, 2, 3, 1)
        return centroids.index_select(0, codes.flatten().int()).view(codes.shape).permute(0, 3, 1, 2)
    return centroids.index_select(0, codes.flatten().int()).view(codes.shape)


def _borders(centroids: Tensor) -> Tensor:
    """Half way between neighbours."""
    return (centroids[1:] + centroids[:-1]) / 2


def _spread(ordered: Tensor) -> Tensor:
    """Centroids to start with, as dense as the cube root of the elements."""
    blocks = min(_BLOCKS, len(ordered) - 1)
    edges = ordered[torch.linspace(0, len(ordered) - 1, blocks + 1, device=ordered.device).long()]
    # Blocks of equally many elements: tails are in wide ones, where a histogram of equal widths would see nothing.
    widths = edges.diff()
    shares = torch.cat([widths.new_zeros(1), widths.pow(2 / 3).cumsum(0)])
    wanted = (torch.arange(CENTROIDS, dtype=ordered.dtype, device=ordered.device) + 0.5) / CENTROIDS * shares[-1]
    block = (torch.searchsorted(shares, wanted, right=True) - 1).clamp(max=blocks - 1)
    inside = (wanted - shares[block]) / shares.diff()[block]
    return edges[block] + inside * widths[block]


def _lloyd(ordered: Tensor, centroids: Tensor) -> Tensor:
    """Centroids that are the means of what is nearest to them; one to which nothing is nearest stays."""
    sums = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])
    ends = torch.tensor([0, len(ordered)], device=ordered.device)
    for _ in range(_ITERATIONS):
        inner = torch.searchsorted(ordered, _borders(centroids), right=True)
        cuts = torch.cat([ends[:1], inner, ends[1:]])
        counts = cuts.diff()
        means = sums[cuts].diff() / counts.clamp(min=1)
        moved = torch.where(counts > 0, means, centroids).sort().values
        if torch.equal(moved, centroids):
            break
        centroids = moved
    return centroids

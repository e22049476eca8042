"""The inputs of a data set in a few characters."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor

from torch_odt.adapt.weights_digest import add_to_digest

# Of 3 x 224 x 224 in float32 this many take 0.2 s to hash, and decoding them takes longer.
SAMPLES_READ = 512


def samples_digest(data: Any) -> str:
    """The same for the same inputs in the same order; labels make no difference.

    It reads at most 512 samples, evenly spread from the first to the last, so that it costs little beside a pass over
    the data: another data set, order or preparation is noticed, and a change of single samples in between is not.

    Args:
        data: as `store_outputs` takes it, with one sample at least.

    Raises:
        TypeError: a sample is none of what it should be.

    Example:
        >>> import torch
        >>> images = torch.ones(3, 4)
        >>> samples_digest(images) == samples_digest([(image, 7) for image in images])
        True
        >>> samples_digest(images) == samples_digest(images * 2)
        False
    """
    last = len(data) - 1
    count = min(len(data), SAMPLES_READ)
    digest = hashlib.sha256()
    for number in range(count):
        index = number * last // max(1, count - 1)
        for place, tensor in enumerate(inputs_of(data[index], index)):
            add_to_digest(digest, f"{index} {place}", tensor)
    return digest.hexdigest()[:16]


def inputs_of(sample: Any, index: int) -> tuple[Tensor, ...]:
    """What a mentor sees of a sample: all but the label, which stands last.

    Raises:
        TypeError: it is neither a tensor nor a tuple of tensors and a label.
    """
    inputs = (sample,) if isinstance(sample, Tensor) else sample
    if isinstance(inputs, (tuple, list)) and len(inputs) > 1:
        inputs = inputs[:-1]
    if not isinstance(inputs, (tuple, list)) or not all(isinstance(each, Tensor) for each in inputs):
        raise TypeError(
            f"sample {index} is a {type(sample).__name__}: it must be a tensor, or a tuple of tensors and a label"
        )
    return tuple(inputs)

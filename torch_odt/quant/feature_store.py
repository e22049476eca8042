"""The outputs of a frozen part of a network as its training set: int8, in memory or in files.

C. Profentzas, M. Almgren, O. Landsiedel, "MiniLearn: On-Device Learning for Low-Power IoT Devices", EWSN 2022: what
does not train is computed once for each sample, and its int8 outputs are kept in the place of the samples.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from torch_odt.adapt.layers import evaluating
from torch_odt.adapt.samples_digest import samples_digest
from torch_odt.adapt.weights_digest import weights_digest
from torch_odt.errors import StoredOutputsError
from torch_odt.quant.int8_range import Int8Range

_DESCRIPTION, _CODES, _LABELS = "features.json", "features.bin", "labels.bin"
_FORMAT, _VERSION = "torch_odt.feature_store", 1


@dataclass(frozen=True)
class _Origin:
    """Where features come from: digests of the front's weights and of the inputs, and how they are stored."""

    front: str
    inputs: str
    samples: int
    per_channel: bool


class FeatureStore(Dataset[tuple[Tensor, int]]):
    """Samples of int8 features and labels: a training set that takes a byte a number, dequantised when it is read.

    `store_features` makes it; `open` finds what it has left in a folder. A sample is `(features, label)`, features
    float32. A `DataLoader` reads batches of it, as from any data set; `batches` does so without one.

    Attributes:
        sample_shape: of one sample's features.
        labels: int64 of shape (samples,).
        range: what codes stand for.
        saturated: so many numbers lay outside of the range and were cut; 0 where the range was taken from these data.
        folder: where codes and labels lie; None in memory.

    Example:
        >>> data = [(torch.tensor([1.0, label]), label) for label in range(5)]
        >>> store = store_features(nn.Identity(), data)
        >>> len(store), store.nbytes
        (5, 58)
        >>> [(len(x), y.tolist()) for x, y in store.batches(2)]
        [(2, [0, 1]), (2, [2, 3]), (1, [4])]
    """

    def __init__(
        self,
        codes: np.ndarray[Any, Any],
        labels: Tensor,
        feature_range: Int8Range,
        *,
        saturated: int = 0,
        folder: Path | None = None,
    ) -> None:
        self._codes = codes
        self.labels = labels
        self.range = feature_range
        self.saturated = saturated
        self.folder = folder

    @classmethod
    def open(cls, folder: str | Path) -> FeatureStore:
        """What `store_features` has left in a folder; the file is mapped, so that a batch of it is in memory.

        Raises:
            StoredOutputsError: there is none, or it is damaged.
        """
        return _read(Path(folder))[1]

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return tuple(self._codes.shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of codes, labels and the range, in memory or on disk."""
        return self._codes.nbytes + self.labels.nbytes + self.range.nbytes

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> str | tuple[Any, ...]:
        # A mapped array would be pickled with all that is in the file.
        return super().__reduce__() if self.folder is None else (type(self).open, (self.folder,))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        features, labels = self.read([index])
        return features[0], int(labels[0])

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        features, labels = self.read(indices)
        return list(zip(features, labels.tolist(), strict=True))

    def read(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """`(features, labels)` of some samples, dequantised together.

        Raises:
            IndexError: there is no such sample.
        """
        wanted = np.asarray(indices, dtype=np.int64).reshape(-1)
        wrong = wanted[(wanted < -len(self)) | (wanted >= len(self))]
        if len(wrong):
            raise IndexError(f"there is no sample {wrong[0]}: the store holds {len(self)}")
        codes = torch.from_numpy(self._codes[wanted])
        return self.range.dequantize(codes), self.labels[torch.from_numpy(wanted)]

    def batches(
        self, size: int, *, generator: torch.Generator | None = None, drop_last: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of batches, each dequantised when its turn comes.

        Args:
            size: samples of a batch.
            generator: draws the order; the store's own order without one.
            drop_last: leave out what does not fill a batch: `TrainStep` plans each size once.
        """
        if size < 1 or (drop_last and size > len(self)):
            raise ValueError(f"size={size}: a batch has 1 to {len(self)} samples, as many as the store holds")
        order = torch.arange(len(self)) if generator is None else torch.randperm(len(self), generator=generator)
        for rows in order.split(size):
            if len(rows) == size or not drop_last:
                yield self.read(rows)


def feature_range(front: nn.Module, data: Any, *, per_channel: bool = False, batch_size: int = 32) -> Int8Range:
    """The range of a front's outputs over a data set, found by running it once and keeping nothing.

    Choose it to fix a range before samples arrive one by one, over data that are like them.

    Args:
        front, data, per_channel, batch_size: see `store_features`.

    Raises:
        FloatingPointError: an output is not finite; the sample is named.
        TypeError, ValueError: as `store_features`.

    Example:
        >>> feature_range(nn.Identity(), [(torch.tensor([0.0, 25.5]), 0)]).scale
        tensor(0.1000)
    """
    lowest: Tensor | None = None
    highest: Tensor | None = None
    for _, features, _ in _features(front, data, batch_size):
        by_channel = features.transpose(0, 1).flatten(1) if per_channel else features.reshape(1, -1)
        low, high = by_channel.aminmax(dim=1)
        lowest = low if lowest is None else torch.minimum(lowest, low)
        highest = high if highest is None else torch.maximum(highest, high)
    assert lowest is not None and highest is not None
    return Int8Range.over(*(each if per_channel else each[0] for each in (lowest, highest)))


def store_features(
    front: nn.Module,
    data: Any,
    folder: str | Path | None = None,
    *,
    per_channel: bool = False,
    fixed_range: Int8Range | None = None,
    batch_size: int = 32,
) -> FeatureStore:
    """Run a frozen front over a data set and keep its outputs as int8: the training set of what lies behind.

    Choose it where the front does not train, and the same samples are gone through several times: each is computed
    once, and takes a byte for each number that the front makes of it. Without `fixed_range` the front runs twice, first
    for the range of its outputs, so that nothing is held in float; each number then differs from the front's output by
    at most half a step.

    Args:
        front: takes a batch of inputs and returns one tensor; runs in evaluation mode without gradients, and is as
            before afterwards.
        data: with a length and an index, of samples `(input, label)`, the same whenever they are asked for.
        folder: made by this, for these features alone; they are kept in memory without one. Where the features of this
            front and these data are there already, nothing is computed.
        per_channel: a range for each channel (the first dimension of a sample's features) and not one for all: finer
            steps where channels differ in size, for 8 bytes a channel.
        fixed_range: what codes stand for, where that is known (`feature_range`); what lies outside is cut and counted.
        batch_size: samples that run at once.

    Raises:
        ValueError: there are no samples, or outputs differ in shape, or are not of one sample each.
        TypeError: a sample is no pair of a tensor and a whole number, or the front returns something else than a tensor
            of floats.
        FloatingPointError: an output is not finite; the sample is named.
        StoredOutputsError: the folder holds something else; it is left as it is.

    Example:
        >>> front = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        >>> data = [(torch.rand(1, 8, 8), 3)] * 10
        >>> store = store_features(front, data, per_channel=True)
        >>> store.sample_shape, store.nbytes
        ((4, 3, 3), 472)
    """
    _check_data(data)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: at least one sample runs at once")
    if folder is None:
        found = fixed_range or feature_range(front, data, per_channel=per_channel, batch_size=batch_size)
        return _write(front, data, found, batch_size, None)
    folder = Path(folder)
    origin = _Origin(weights_digest(front), samples_digest(data), len(data), per_channel)
    if folder.exists() and any(folder.iterdir()):
        return _require(folder, origin, fixed_range)
    found = fixed_range or feature_range(front, data, per_channel=per_channel, batch_size=batch_size)
    # The folder appears when all of it is there.
    partial = folder.with_name(f"{folder.name}.partial")
    if partial.exists() and not all(path.name in (_DESCRIPTION, _CODES, _LABELS) for path in partial.iterdir()):
        raise StoredOutputsError(f"{partial} holds something that is not ours: remove it, or give another folder")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    store = _write(front, data, found, batch_size, partial)
    _describe(store, origin, partial)
    partial.replace(folder)
    return FeatureStore.open(folder)


def _write(front: nn.Module, data: Any, found: Int8Range, batch_size: int, partial: Path | None) -> FeatureStore:
    codes: np.ndarray[Any, Any] | None = None
    labels = torch.empty(len(data), dtype=torch.int64)
    saturated = 0
    for start, features, targets in _features(front, data, batch_size):
        if codes is None:
            if found.scale.dim() and found.scale.shape != features.shape[1:2]:
                raise ValueError(f"the range has {len(found.scale)} channels, and features {features.shape[1]}")
            codes = _allocated((len(data), *features.shape[1:]), partial)
        codes[start : start + len(features)] = found.quantize(features).numpy()
        labels[start : start + len(features)] = targets
        saturated += int(found.is_outside(features).sum())
    assert codes is not None
    if isinstance(codes, np.memmap):
        codes.flush()
    return FeatureStore(codes, labels, found, saturated=saturated, folder=partial)


def _allocated(shape: tuple[int, ...], partial: Path | None) -> np.ndarray[Any, Any]:
    if partial is None:
        return np.empty(shape, dtype=np.int8)
    return np.memmap(partial / _CODES, dtype=np.int8, mode="w+", shape=shape)


def _features(front: nn.Module, data: Any, batch_size: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The number of a batch's first sample, its features and its labels."""
    _check_data(data)
    shape: torch.Size | None = None
    with evaluating(front), torch.no_grad():
        for start in range(0, len(data), batch_size):
            stop = min(start + batch_size, len(data))
            inputs, labels = default_collate([_sample(data, index) for index in range(start, stop)])
            features = front(inputs)
            if not isinstance(features, Tensor) or not features.is_floating_point():
                what = features.dtype if isinstance(features, Tensor) else type(features).__name__
                raise TypeError(f"the front returns {what}: it must be a tensor of floats")
            if features.dim() < 2 or len(features) != stop - start:
                raise ValueError(f"the front makes {tuple(features.shape)} of {stop - start} samples")
            if shape is not None and features.shape[1:] != shape:
                raise ValueError(f"features of sample {start} are {tuple(features.shape[1:])}, those before {shape}")
            shape = features.shape[1:]
            finite = features.flatten(1).isfinite().all(1)
            if not bool(finite.all()):
                raise FloatingPointError(f"features of sample {start + int(finite.int().argmin())} are not finite")
            yield start, features.float().cpu(), labels


def _check_data(data: Any) -> None:
    if not len(data):
        raise ValueError("the data have no samples: features of one at least are needed")


def _sample(data: Any, index: int) -> tuple[Tensor, int]:
    sample = data[index]
    if not isinstance(sample, (tuple, list)) or len(sample) != 2 or not isinstance(sample[0], Tensor):
        raise TypeError(f"sample {index} is a {type(sample).__name__}: it must be a pair of a tensor and a label")
    try:
        return sample[0], sample[1].__index__()
    except (AttributeError, TypeError) as error:
        raise TypeError(f"the label of sample {index} is {sample[1]!r}: it must be a whole number") from error


def _describe(store: FeatureStore, origin: _Origin, folder: Path) -> None:
    store.labels.numpy().tofile(folder / _LABELS)
    description = {
        "format": _FORMAT,
        "version": _VERSION,
        "origin": asdict(origin),
        "shape": store.sample_shape,
        "scale": store.range.scale.tolist(),
        "zero_point": store.range.zero_point.tolist(),
        "saturated": store.saturated,
    }
    (folder / _DESCRIPTION).write_text(json.dumps(description, indent=1), encoding="utf-8")


def _read(folder: Path) -> tuple[_Origin, FeatureStore]:
    path = folder / _DESCRIPTION
    if not path.is_file():
        raise StoredOutputsError(f"{folder} holds no features: there is no {_DESCRIPTION} in it")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if (found["format"], found["version"]) != (_FORMAT, _VERSION):
            raise StoredOutputsError(f"{path} is of format {found['format']} {found['version']}, not {_VERSION}")
        origin = _Origin(**found["origin"])
        shape = (origin.samples, *found["shape"])
        scale = torch.tensor(found["scale"], dtype=torch.float32)
        feature_range = Int8Range(scale, torch.tensor(found["zero_point"], dtype=torch.int32))
        saturated = int(found["saturated"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoredOutputsError(f"{path} is damaged: {error!r}") from error
    for name, expected in ((_CODES, math.prod(shape)), (_LABELS, 8 * origin.samples)):
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != expected:
            raise StoredOutputsError(f"{folder / name} has {size} bytes and should have {expected}: store them anew")
    codes = np.memmap(folder / _CODES, dtype=np.int8, mode="r", shape=shape)
    labels = torch.from_numpy(np.fromfile(folder / _LABELS, dtype=np.int64))
    return origin, FeatureStore(codes, labels, feature_range, saturated=saturated, folder=folder)


def _require(folder: Path, origin: _Origin, wanted: Int8Range | None) -> FeatureStore:
    """What lies in a folder, where it is what would be made."""
    found, store = _read(folder)
    differing = [name for name, value in asdict(origin).items() if asdict(found)[name] != value]
    if wanted is not None and not torch.equal(store.range.scale, wanted.scale):
        differing.append("range")
    if differing:
        raise StoredOutputsError(
            f"{folder} holds features of something else (other {', '.join(differing)}): remove it, or give another "
            "folder. Inputs that are augmented at random are never the same"
        )
    return store

"""What a mentor has answered for every sample of a data set, on disk: logits and, if wanted, hints.

A folder holds a description (JSON) and a file for the logits and for each hint: the samples one behind the other, all
of one size, so that a sample is found by its number and nothing else need be in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from torch_odt.adapt.samples_digest import samples_digest
from torch_odt.adapt.weights_digest import weights_digest
from torch_odt.errors import StoredOutputsError

DESCRIPTION = "outputs.json"
DTYPES = {"float16": torch.float16, "float32": torch.float32}
_FORMAT, _VERSION = "torch_odt.stored_outputs", 2
_NEVER_THE_SAME = "Inputs that are cropped or augmented at random are never the same: store those of fixed copies"


@dataclass(frozen=True)
class Origin:
    """Where stored outputs come from; those of another origin are refused.

    Attributes:
        mentor: a digest of the mentor's weights.
        samples: length of the data.
        inputs: a digest of the inputs of samples, evenly spread (see `samples_digest`).
        dtype: "float16" or "float32".
        layers: of the mentor, whose outputs are kept as hints.
    """

    mentor: str
    samples: int
    inputs: str
    dtype: str
    layers: tuple[str, ...]

    def require(self, other: Origin, folder: Path) -> None:
        """Raises StoredOutputsError where what lies in a folder (self) is not what is wanted (other)."""
        found, wanted = asdict(self), asdict(other)
        differing = [f"{name} is {found[name]} and not {wanted[name]}" for name in found if found[name] != wanted[name]]
        if differing:
            hint = f". {_NEVER_THE_SAME}" if self.inputs != other.inputs and self.samples == other.samples else ""
            raise StoredOutputsError(
                f"{folder} holds outputs of something else ({'; '.join(differing)}): remove it, or give another "
                f"folder{hint}"
            )


@dataclass(frozen=True)
class Description:
    """What lies in a folder.

    Attributes:
        origin: where it comes from.
        shapes: of one sample's logits and hints; empty before the first batch.
        done: so many samples are written.
    """

    origin: Origin
    shapes: tuple[tuple[int, ...], ...] = ()
    done: int = 0

    @property
    def files(self) -> list[str]:
        """The names of the files, in the order of `shapes`."""
        return ["logits.bin", *(f"hint-{number}.bin" for number in range(len(self.shapes) - 1))]

    @property
    def sample_bytes(self) -> list[int]:
        """What a sample takes in each file."""
        return [math.prod(shape) * DTYPES[self.origin.dtype].itemsize for shape in self.shapes]

    def write(self, folder: Path) -> None:
        """Put it into a folder: the new one or the old one is there, never half of it."""
        partial = folder / f"{DESCRIPTION}.partial"
        with partial.open("w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, "version": _VERSION, **asdict(self)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / DESCRIPTION)

    @classmethod
    def read(cls, folder: Path) -> Description:
        """Read what `write` wrote.

        Raises:
            StoredOutputsError: there is none, or it is damaged or of another version.
        """
        path = folder / DESCRIPTION
        if not path.is_file():
            raise StoredOutputsError(f"{folder} holds no stored outputs: there is no {DESCRIPTION} in it")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if (data["format"], data["version"]) != (_FORMAT, _VERSION):
                raise StoredOutputsError(
                    f"{path} is of format {data['format']} {data['version']}, not {_VERSION}: store the outputs anew"
                )
            origin = Origin(**{**data["origin"], "layers": tuple(data["origin"]["layers"])})
            found = cls(origin, tuple(map(tuple, data["shapes"])), data["done"])
            is_whole = origin.dtype in DTYPES and 0 <= found.done <= origin.samples
        except (ValueError, KeyError, TypeError) as error:
            raise StoredOutputsError(f"{path} is damaged: {error!r}") from error
        if not is_whole or (found.shapes and len(found.shapes) != 1 + len(origin.layers)):
            raise StoredOutputsError(f"{path} is damaged: what it says does not fit together")
        return found


class StoredOutputs:
    """A mentor's logits and hints for every sample of a data set, read back from disk by the sample's number.

    `store_outputs` makes them; this opens what it made in another process or on another machine (the folder can be
    copied), where the mentor need not be. The files are mapped: what is read takes a batch of memory, however many
    samples there are. Every process may read them, workers of a `DataLoader` included.

    Args:
        folder: what `store_outputs` was given.

    Attributes:
        folder: the same.
        origin: where the outputs come from.
        logits_shape: of one sample, `(classes,)` as a rule.
        hint_shapes: of one sample's hints, by the mentor's layer, in the order in which they are read back.
        disk_bytes: what the files take.

    Raises:
        StoredOutputsError: the folder holds none, or they are not whole.

    Example:
        >>> import tempfile
        >>> from torch_odt.adapt import store_outputs
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = store_outputs(nn.Linear(4, 3), torch.ones(10, 4), f"{folder}/outputs")
        ...     stored = StoredOutputs(f"{folder}/outputs")
        ...     (logits,) = stored.read([7, 2])
        ...     len(stored), logits.shape, logits.dtype
        (10, torch.Size([2, 3]), torch.float16)
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        description = Description.read(self.folder)
        self.origin = description.origin
        if description.done < self.origin.samples:
            raise StoredOutputsError(
                f"{self.folder} holds {description.done} of {self.origin.samples} samples: call store_outputs again, "
                "which goes on where it was interrupted"
            )
        self.logits_shape, *hints = description.shapes
        self.hint_shapes = dict(zip(self.origin.layers, hints, strict=True))
        self.disk_bytes = sum(description.sample_bytes) * self.origin.samples
        self._maps = [
            _mapped(self.folder / name, (self.origin.samples, *shape), self.origin.dtype)
            for name, shape in zip(description.files, description.shapes, strict=True)
        ]

    def __repr__(self) -> str:
        return f"StoredOutputs({str(self.folder)!r}): {len(self)} samples, logits {tuple(self.logits_shape)}"

    def __len__(self) -> int:
        return self.origin.samples

    def __reduce__(self) -> tuple[type[StoredOutputs], tuple[Path]]:
        # A mapped array would be pickled with all that is in the file.
        return type(self), (self.folder,)

    def read(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, ...]:
        """`(logits, *hints)` of some samples, `(n, ...)` each, in the type in which they are stored.

        Raises:
            IndexError: there is no such sample.
        """
        wanted = np.asarray(indices, dtype=np.int64).reshape(-1)
        wrong = wanted[(wanted < 0) | (wanted >= len(self))]
        if len(wrong):
            raise IndexError(f"there is no sample {wrong[0]}: {self.folder} holds those of 0 to {len(self) - 1}")
        return tuple(torch.from_numpy(mapped[wanted]) for mapped in self._maps)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """`(logits, *hints)` of one sample."""
        return tuple(tensor[0] for tensor in self.read([index]))

    def check_mentor(self, mentor: nn.Module) -> None:
        """Raises StoredOutputsError where a mentor has other weights than the one that computed these outputs."""
        digest = weights_digest(mentor)
        if digest != self.origin.mentor:
            raise StoredOutputsError(
                f"{self.folder} holds outputs of other weights (digest {self.origin.mentor}) than this mentor's "
                f"({digest}): store them anew in another folder"
            )

    def check_samples(self, data: Any) -> None:
        """Raises StoredOutputsError where data have another length, or other inputs, than what was stored from.

        It reads at most 512 samples, evenly spread.
        """
        if len(data) != len(self):
            raise StoredOutputsError(
                f"{self.folder} holds the outputs of {len(self)} samples, and these data have {len(data)}: outputs "
                "belong to samples by their number"
            )
        digest = samples_digest(data)
        if digest != self.origin.inputs:
            raise StoredOutputsError(
                f"{self.folder} holds the outputs of other inputs (digest {self.origin.inputs}) than these data have "
                f"({digest}), or of the same in another order. {_NEVER_THE_SAME}"
            )

    def beside(self, data: Any) -> BesideStoredOutputs:
        """The data with each target replaced by `(label, logits, *hints)`, as `DistillationLoss` takes it.

        Args:
            data: what was stored from: indexable, with a length, in the same order; its samples are tuples of inputs
                and, last, a label.

        Raises:
            StoredOutputsError: it has another length or other inputs; see `check_samples`.
        """
        return BesideStoredOutputs(data, self)


class BesideStoredOutputs(Dataset[tuple[Any, ...]]):
    """Samples `(*inputs, (label, logits, *hints))`; see `StoredOutputs.beside`."""

    def __init__(self, data: Any, stored: StoredOutputs) -> None:
        stored.check_samples(data)
        self._data = data
        self._stored = stored

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        sample = self._data[index]
        if not isinstance(sample, (tuple, list)) or len(sample) < 2:
            raise TypeError(f"sample {index} is a {type(sample).__name__}: it must be a tuple of inputs and a label")
        *inputs, label = sample
        return (*inputs, (label, *self._stored[index]))


def _mapped(path: Path, shape: tuple[int, ...], dtype: str) -> np.memmap[Any, Any]:
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    if not path.is_file() or path.stat().st_size != expected:
        size = f"{path.stat().st_size} bytes long" if path.is_file() else "not there"
        raise StoredOutputsError(f"{path} is {size}; it should have {expected} bytes: store the outputs anew")
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)

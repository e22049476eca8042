"""A mentor run once over a data set, and what it answers written to disk.

Distillation as it was published runs the mentor in every step (see `distillation`). What it answers to a sample that is
always shown alike is always the same: once stored, the device that trains the mentee never holds the mentor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from torch_odt.adapt.layer_outputs import Tap, logits_of
from torch_odt.adapt.layers import evaluating
from torch_odt.adapt.samples_digest import inputs_of, samples_digest
from torch_odt.adapt.stored_outputs import DESCRIPTION, DTYPES, Description, Origin, StoredOutputs
from torch_odt.adapt.weights_digest import weights_digest
from torch_odt.errors import StoredOutputsError

# What is done again after a loss of power; forcing every batch to the disk would take longer than computing it.
_SECONDS_BETWEEN_SYNCS = 5.0


def store_outputs(
    mentor: nn.Module,
    data: Any,
    folder: str | Path,
    *,
    layers: Sequence[str] = (),
    dtype: Literal["float16", "float32"] = "float16",
    batch_size: int = 64,
) -> StoredOutputs:
    """Run a mentor once over a data set and keep its logits and, if wanted, outputs of its layers on disk.

    The mentor runs in evaluation mode without gradients; afterwards it is as before. The folder appears when all is
    done. Until then a folder beside it, with `.partial` behind its name, holds what there is: called again after an
    interruption, this goes on there. Where the folder is there already, nothing is computed. One process at a time may
    write a folder.

    Args:
        mentor: returns a tensor of logits, or something that has `logits`.
        data: with a length and an index: a `Dataset`, or a tensor of inputs. A sample is an input, or a tuple of
            inputs and, last, a label, which the mentor does not see. A sample must be the same whenever it is asked
            for: without random crops, say. At most 512 of them, evenly spread, are read and compared by their digest
            with what a folder was made from.
        folder: made by this, for these outputs alone.
        layers: names of layers whose outputs are kept as hints, as `mentor.named_modules()` has them. A sample of them
            may take many times what its logits do.
        dtype: what numbers are rounded to; "float16" has three digits, and 65504 at most.
        batch_size: samples that run at once.

    Returns:
        What reads them back.

    Raises:
        StoredOutputsError: the folder (or its `.partial`) holds something else: outputs of a mentor of other weights,
            of data of another length or with other inputs, in another type or of other layers. It is left as it is.
        FloatingPointError: an output is not finite, or too large for the type.
        TypeError: the data, a sample or an output is none of what it should be.
        ValueError: there are no samples, there is no such layer, or it does not run exactly once in a pass.
        OSError: the disk is full, or cannot be written to; what is there stays for the next call.

    Example:
        >>> import tempfile
        >>> mentor = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> data = [(torch.ones(4), 2)] * 10
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     stored = store_outputs(mentor, data, f"{parent}/outputs", layers=["1"])
        ...     x, (label, logits, hint) = stored.beside(data)[3]
        ...     stored.disk_bytes, label, logits.shape, hint.shape
        (220, 2, torch.Size([3]), torch.Size([8]))
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: outputs are stored as {' or '.join(DTYPES)}")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: at least one sample runs at once")
    if not hasattr(data, "__getitem__"):
        raise TypeError(f"data is a {type(data).__name__}: give a Dataset or a tensor, whose samples have an index")
    samples = len(data)
    if not samples:
        raise ValueError("the data have no samples")
    folder = Path(folder)
    origin = Origin(weights_digest(mentor), samples, samples_digest(data), dtype, tuple(layers))
    if isinstance(layers, str):
        raise TypeError(f"layers={layers!r}: give a list of names, [{layers!r}]")
    if folder.is_file():
        raise StoredOutputsError(f"{folder} is a file: give a folder, new or of an earlier call")
    if folder.exists() and any(folder.iterdir()):
        Description.read(folder).origin.require(origin, folder)
        return StoredOutputs(folder)
    with ExitStack() as stack:
        taps = [Tap(mentor, name) for name in layers]
        for tap in taps:
            stack.callback(tap.remove)
        stack.enter_context(evaluating(mentor))
        stack.enter_context(torch.no_grad())
        writer = stack.enter_context(_Writer(folder, origin))
        for start in range(writer.done, samples, batch_size):
            inputs = _inputs(data, start, min(start + batch_size, samples))
            writer.append(_outputs(mentor, taps, inputs))
    writer.publish()
    return StoredOutputs(folder)


class _Writer:
    """Appends batches to the files of a partial folder, and makes that the folder once all is there."""

    def __init__(self, folder: Path, origin: Origin) -> None:
        self._folder = folder
        self._partial = folder.with_name(f"{folder.name}.partial")
        self._description = Description(origin)
        self._partial.mkdir(parents=True, exist_ok=True)
        if (self._partial / DESCRIPTION).exists():
            self._description = Description.read(self._partial)
            self._description.origin.require(origin, self._partial)
        elif any(self._partial.iterdir()):
            # Files without a description were begun, and nothing of them had reached the disk.
            foreign = [path.name for path in self._partial.iterdir() if path.suffix not in (".bin", ".partial")]
            if foreign:
                raise StoredOutputsError(f"{self._partial} holds {foreign[0]}, which is none of ours: remove it")
        self.done = self._description.done
        self._files: list[BinaryIO] = []
        self._closing = ExitStack()
        self._synced_at = time.monotonic()

    def __enter__(self) -> _Writer:
        if self._description.shapes:
            self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._closing:
            if self._files:
                self._sync()

    def append(self, outputs: list[Tensor]) -> None:
        """The outputs of the next samples."""
        shapes = tuple(tuple(output.shape[1:]) for output in outputs)
        if not self._description.shapes:
            self._description = Description(self._description.origin, shapes)
            self._open()
        elif shapes != self._description.shapes:
            raise StoredOutputsError(
                f"after {self.done} samples the mentor's outputs have the shapes {shapes} instead of "
                f"{self._description.shapes}: all samples must have outputs of one shape"
            )
        dtype = DTYPES[self._description.origin.dtype]
        for file, output in zip(self._files, outputs, strict=True):
            rounded = output.to(dtype)
            if not bool(torch.isfinite(rounded).all()):
                raise FloatingPointError(
                    f"an output behind sample {self.done} is not finite as {dtype}: the largest that is finite is "
                    f"{torch.finfo(dtype).max:g}; see whether the mentor's is, and store float32 if so"
                )
            file.write(rounded.cpu().contiguous().numpy().data)
        self.done += len(outputs[0])
        if time.monotonic() - self._synced_at >= _SECONDS_BETWEEN_SYNCS:
            self._sync()

    def publish(self) -> None:
        """Let the folder appear."""
        self._partial.replace(self._folder)

    def _open(self) -> None:
        for name, size in zip(self._description.files, self._description.sample_bytes, strict=True):
            path = self._partial / name
            path.touch()
            file = self._closing.enter_context(path.open("r+b"))
            self._files.append(file)
            if path.stat().st_size < self.done * size:
                raise StoredOutputsError(f"{path} is shorter than it was: remove {self._partial} and store anew")
            # What is behind the last samples that are known to be whole is written again.
            file.truncate(self.done * size)
            file.seek(self.done * size)

    def _sync(self) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        self._description = Description(self._description.origin, self._description.shapes, self.done)
        self._description.write(self._partial)
        self._synced_at = time.monotonic()


def _inputs(data: Any, start: int, stop: int) -> list[Tensor]:
    """The inputs of consecutive samples, as a batch."""
    if isinstance(data, Tensor):
        return [data[start:stop]]
    batch = default_collate([inputs_of(data[index], index) for index in range(start, stop)])
    return list(batch)


def _outputs(mentor: nn.Module, taps: list[Tap], inputs: list[Tensor]) -> list[Tensor]:
    """Logits and outputs of the layers for a batch."""
    for tap in taps:
        tap.open()
    try:
        outputs = [logits_of(mentor(*inputs)), *[tap.output() for tap in taps]]
    finally:
        for tap in taps:
            tap.close()
    for output, name in zip(outputs, ["the logits", *[f"layer {tap.name!r}" for tap in taps]], strict=True):
        if not output.is_floating_point():
            raise TypeError(f"{name} are {output.dtype}: only floating-point outputs are stored")
        if output.dim() < 1 or len(output) != len(inputs[0]):
            raise ValueError(f"{name} have the shape {tuple(output.shape)} for {len(inputs[0])} samples")
    return outputs

"""Batches that were computed once, kept in files and read back one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeptBatches:
    """Pairs of tensors, a file for each; only one is in memory at a time.

    Attributes:
        files: in the order in which they are read back.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     kept = KeptBatches.write([(torch.ones(2, 3), torch.zeros(2))], folder)
        ...     [inputs.shape for inputs, _ in kept]
        [torch.Size([2, 3])]
    """

    files: tuple[Path, ...]

    @classmethod
    def write(cls, batches: Iterable[tuple[Tensor, Tensor]], folder: str | Path) -> KeptBatches:
        """Write batches as they come.

        Raises:
            FileExistsError: the folder has something in it.
            OSError: it cannot be written to.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FileExistsError(f"{folder} is not empty: batches are kept in a folder of their own")
        files = []
        for number, batch in enumerate(batches):
            files.append(folder / f"{number:06}.pt")
            # A view would be written with all that it is a view of.
            torch.save(tuple(each.detach().clone() for each in batch), files[-1])
        return cls(tuple(files))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for file in self.files:
            inputs, target = torch.load(file, weights_only=True)
            yield inputs, target

    def __len__(self) -> int:
        return len(self.files)

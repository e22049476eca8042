"""Batches in files: what was written comes back, and no more than that is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torch_odt.adapt.kept_batches import KeptBatches


def test_views_are_written_without_what_they_are_views_of(tmp_path: Path) -> None:
    inputs, targets = torch.arange(40_000.0).reshape(400, 100), torch.arange(400)
    batches = list(zip(inputs.split(4), targets.split(4), strict=True))
    kept = KeptBatches.write(batches, tmp_path / "kept")
    assert len(kept) == 100
    for (x, y), (x_read, y_read) in zip(batches, kept, strict=True):
        assert torch.equal(x, x_read) and torch.equal(y, y_read)
    written = sum(file.stat().st_size for file in kept.files)
    assert written < 5 * (inputs.nbytes + targets.nbytes)


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with pytest.raises(FileExistsError, match="is not empty"):
        KeptBatches.write([], tmp_path)

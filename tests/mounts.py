"""Disks of our own for tests: small ones, which can be full, and such that cannot be written to."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, *, megabytes: int) -> Iterator[Path]:
    """Inside, a disk of so many megabytes lies in a new folder; where nothing may be mounted, the test is skipped."""
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def make_read_only(folder: Path) -> None:
    """Nobody can write to a mounted disk from now on: file modes do not keep the superuser from it."""
    _mount("-o", "remount,ro", str(folder))


def _mount(*words: str) -> None:
    try:
        subprocess.run(["mount", *words], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk of our own can be mounted: {error}")

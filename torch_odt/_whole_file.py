"""Files that are there as a whole or not at all, whoever else writes them at the same time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """An empty file beside `path`, to write to: it takes that place when the block ends, and goes where it raises.

    Each process has one of its own. Who may read the result is what it would be of a file that `open` makes.

    Raises:
        OSError: nothing can be written there.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder, whole_file(Path(folder) / "a.txt") as partial:
        ...     partial.write_text("all of it")
        9
    """
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".partial")
    os.close(number)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o666 & ~_umask())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

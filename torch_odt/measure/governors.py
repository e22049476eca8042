"""Governors of the processors' frequencies, where this user may set them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch_odt.measure.meter import Absent, read_text
from torch_odt.memory._files import SYSTEM_ROOT


def governors(root: Path = SYSTEM_ROOT) -> list[str] | Absent:
    """The governors that every processor has, or why there are none."""
    folders = _folders(root)
    if not folders:
        return Absent(f"no processor in {root / 'sys/devices/system/cpu'} has cpufreq")
    known: list[str] | None = None
    for folder in folders:
        text = read_text(folder / "scaling_available_governors")
        if isinstance(text, Absent):
            return text
        known = text.split() if known is None else [name for name in known if name in text.split()]
    return known or []


def current_governor(root: Path = SYSTEM_ROOT) -> str | Absent:
    """Of the first processor, or why it cannot be known."""
    folders = _folders(root)
    return read_text(folders[0] / "scaling_governor") if folders else Absent("there is no cpufreq")


@contextmanager
def governor(name: str, *, root: Path = SYSTEM_ROOT) -> Iterator[Absent | None]:
    """Sets a governor of all processors for the time of a block, and says why where it could not.

    An empty name leaves everything as it is. What was there before is there again afterwards, also after an error.

    Example:
        >>> with governor("") as refused:
        ...     print(refused)
        None
    """
    folders = _folders(root)
    before = [(folder, read_text(folder / "scaling_governor")) for folder in folders]
    refused = _set(folders, name, root) if name else None
    try:
        yield refused
    finally:
        if name:
            for folder, old in before:
                if not isinstance(old, Absent):
                    _write(folder, old)


def _set(folders: Sequence[Path], name: str, root: Path) -> Absent | None:
    known = governors(root)
    if isinstance(known, Absent):
        return known
    if name not in known:
        return Absent(f"there is no governor {name!r}: there are {', '.join(known) or 'none'}")
    for folder in folders:
        if (refused := _write(folder, name)) is not None:
            return refused
    return None


def _write(folder: Path, name: str) -> Absent | None:
    path = folder / "scaling_governor"
    try:
        path.write_text(name)
    except PermissionError:
        return Absent(f"no permission to write {path}")
    except OSError as error:
        return Absent(f"{path} cannot be written: {error.strerror}")
    return None


def _folders(root: Path) -> list[Path]:
    found = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq")
    return sorted(found, key=lambda path: int(path.parent.name.removeprefix("cpu")))

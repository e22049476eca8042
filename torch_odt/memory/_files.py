"""Files of numbers, as the kernel shows them under /proc and /sys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

SYSTEM_ROOT = Path("/")
_PART_BYTES = 1 << 16


def read_text(path: Path) -> str | None:
    """What a file says; None if it is absent or not to be read."""
    # Without the layers of a text file, which take several times as long and are asked for between operators.
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        parts = []
        while part := os.read(descriptor, _PART_BYTES):
            parts.append(part)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return b"".join(parts).decode()


def read_number(path: Path) -> int | None:
    """A number from a control file; None if it is absent or says "max"."""
    text = (read_text(path) or "").strip()
    return int(text) if text.isdigit() else None


def field(text: str | None, name: str) -> int | None:
    """The number behind a name in a file of `name value` lines."""
    for line in _lines_with(text or "", name):
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None


def _lines_with(text: str, name: str) -> Iterator[str]:
    """The lines that hold a name: to split all of them takes longer than the kernel does to write them."""
    at = text.find(name)
    while at >= 0:
        begin, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
        end = len(text) if end < 0 else end
        yield text[begin:end]
        at = text.find(name, end)

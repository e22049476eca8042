"""Text for terminals: tables, bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence

from torch_odt.memory._units import format_bytes

__all__ = ["bytes_text", "format_bytes", "render", "seconds_text"]

ABSENT = "–"


def bytes_text(count: int | None) -> str:
    """Bytes for people; a dash where nothing is known."""
    return ABSENT if count is None else format_bytes(count)


def seconds_text(seconds: float | None) -> str:
    """Seconds for people, three digits in the unit that suits; a dash where nothing is known.

    Example:
        >>> seconds_text(0.0123), seconds_text(1.234)
        ('12.3 ms', '1.23 s')
    """
    if seconds is None:
        return ABSENT
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 1000 * scale else f"{seconds / scale:.0f} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def render(rows: Sequence[Sequence[str]], header: Sequence[str] | None = None, indent: str = "  ") -> str:
    """A table without rules: the first column to the left, the others to the right.

    Example:
        >>> print(render([["plain", "1"], ["ours", "12"]], ["", "bytes"], indent=""))
               bytes
        plain      1
        ours      12
    """
    lines = [list(header), *map(list, rows)] if header is not None else [list(row) for row in rows]
    if not lines:
        return ""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(indent + _line(line, widths) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "  ".join([first, *rest]).rstrip()

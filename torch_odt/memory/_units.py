"""Numbers of bytes, from and to text."""

from __future__ import annotations

import operator
import re
from decimal import Decimal

UNIT_BYTES = {"B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    UNIT_BYTES[f"{_letter}B"] = 1000**_power
    UNIT_BYTES[f"{_letter}IB"] = 1024**_power

EXAMPLES = '"512MiB", "1.5 GB" or 536870912'


def parse_bytes(text: int | str) -> int:
    """The number of bytes that a text or an int stands for.

    Args:
        text: an int, or a number with a unit: B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024).
            Case and spaces do not matter.

    Returns:
        Bytes, at least 1.

    Raises:
        ValueError: it is not a positive number of bytes.

    Example:
        >>> parse_bytes("1.5 GB"), parse_bytes("512MiB")
        (1500000000, 536870912)
    """
    refusal = f"{text!r} is not a number of bytes: give a positive number such as {EXAMPLES}"
    if isinstance(text, bool):
        raise ValueError(refusal)
    if isinstance(text, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)\s*", text, re.IGNORECASE)
        unit = UNIT_BYTES.get((match[2] or "B").upper()) if match else None
        if match is None or unit is None:
            raise ValueError(refusal)
        amount = int(Decimal(match[1]) * unit)
        if not match[2] and 0 < amount < UNIT_BYTES["MIB"]:
            raise ValueError(f'{text!r} has no unit and would be {amount} bytes: did you mean "{match[1]}MiB"?')
    else:
        try:
            amount = operator.index(text)
        except TypeError:
            whole = " (a number of bytes is an int)" if isinstance(text, float) else ""
            raise ValueError(refusal + whole) from None
    if amount <= 0:
        raise ValueError(refusal)
    return amount


def format_bytes(count: int) -> str:
    """Bytes for people, in the unit that suits.

    Example:
        >>> format_bytes(3 * 2**19)
        '1.5 MiB'
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"

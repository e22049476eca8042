"""What arguments have to be, where an error of Python's own would not name them."""

from __future__ import annotations

from typing import Any, SupportsFloat, SupportsIndex


def require_numbers(**arguments: Any) -> None:
    """Raises TypeError with the argument's name where one is no number.

    Example:
        >>> require_numbers(lr=0.1)
        >>> require_numbers(lr="0.1")
        Traceback (most recent call last):
            ...
        TypeError: lr='0.1': it is a number
    """
    for name, value in arguments.items():
        if not isinstance(value, SupportsFloat):
            raise TypeError(f"{name}={value!r}: it is a number")


def require_whole_numbers(**arguments: Any) -> None:
    """Raises TypeError with the argument's name where one is no whole number; those of numpy are."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise TypeError(f"{name}={value!r}: it is a whole number")

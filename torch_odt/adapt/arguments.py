"""What arguments have to be, where an error of Python's own would not name them."""

from __future__ import annotations

from typing import Any, SupportsFloat


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

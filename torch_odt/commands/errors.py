"""What a user can put right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Something about the command line, a file or the environment is not as it must be; the text says what to do."""


@contextmanager
def as_user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Inside, errors of these kinds are the user's to put right."""
    try:
        yield
    except kinds as error:
        raise UserError(str(error)) from error

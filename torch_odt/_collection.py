"""Python's collector of garbage, and what must not wait for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Inside, the collector does not come by of itself.

    When it does, it looks at every object of the process, which takes as long as a training step, and runs callbacks
    that have nothing to do with what is going on.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

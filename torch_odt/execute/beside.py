"""A step that gives way to other programs, from its first call until it is closed."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_odt.runtime.background import Background, BackgroundRun, Releasing


class Beside:
    """Puts this process in the background when a step is first made, and back when it is closed.

    Args:
        options: how to live there.
        step: gives its memory back while training waits.
    """

    def __init__(self, options: Background, step: Releasing) -> None:
        self._options = options
        self._step = step
        self._entered = ExitStack()
        self.run: BackgroundRun | None = None

    @classmethod
    def of_value(cls, value: bool | Background, step: Releasing) -> Beside | None:
        """From what users give; None where a step is not in the background.

        Raises:
            TypeError: it is neither.
        """
        if value is False:
            return None
        # What is in the foreground does without.
        from torch_odt.runtime.background import Background

        if value is not True and not isinstance(value, Background):
            raise TypeError(f"background is True, False or a torch_odt.runtime.Background, not {value!r}")
        return cls(Background() if value is True else value, step)

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Inside, a step is made; before it, training waits while there is a reason to."""
        if self.run is None:
            # What undoes it must not come after the modules that it needs.
            atexit.register(_close, weakref.ref(self))
            self.run = self._entered.enter_context(self._options.applied(self._step))
        self.run.before_step()
        yield
        self.run.after_step()

    def close(self) -> None:
        """Be as before; the next step is in the background again."""
        self.run = None
        self._entered.close()


def _close(reference: weakref.ref[Beside]) -> None:
    beside = reference()
    if beside is not None:
        beside.close()

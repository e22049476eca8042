"""Signals that arrive while something must not be left half done."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_HELD = (signal.SIGTERM, signal.SIGINT)


class SignalGate:
    """Decides when the Python handlers of SIGINT and SIGTERM run, inside a `with` block.

    Choose it around work that is to be undone as a whole when a handler raises. A closed gate keeps signals until it is
    opened, or until the block ends. It begins closed, and a handler that raises closes it: what undoes the work must
    not be interrupted by a second signal. Outside of the main thread, where no handler runs, it does nothing, nor for
    signals whose handler is the system's.

    Example:
        >>> with SignalGate() as gate:
        ...     gate.open()  # what may be interrupted
        ...     gate.close()  # what may not
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._kept: list[int] = []
        self._is_closed = True
        self._is_over = False

    def __enter__(self) -> SignalGate:
        if threading.current_thread() is not threading.main_thread():
            return self
        try:
            for number in _HELD:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._handle)
        except BaseException:
            self._restore_handlers()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        try:
            self._restore_handlers()
        finally:
            self._is_over = True
            while self._kept:
                number = self._kept.pop(0)
                self._handlers[number](number, inspect.currentframe())

    def open(self) -> None:
        """Let handlers run, those of kept signals at once."""
        self._is_closed = False
        while self._kept and not self._is_closed:
            self._handle(self._kept.pop(0), inspect.currentframe())

    def close(self) -> None:
        """Keep what arrives from now on."""
        self._is_closed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_over:
            # Who set a handler inside the block may put this one back behind it.
            self._handlers[number](number, frame)
            return
        if self._is_closed:
            self._kept.append(number)
            return
        self._is_closed = True
        self._handlers[number](number, frame)
        self.open()

    def _restore_handlers(self) -> None:
        _put_back(self._handlers, self._handle)


class SignalWatch:
    """Notes that SIGINT or SIGTERM has come, inside a `with` block, and leaves what happens then to their handlers.

    Choose it around a wait that is to end when the process is asked to end, where a handler only takes note of that, as
    a `Checkpointer`'s does. Outside of the main thread, where no handler runs, it sees nothing, nor what the system
    handles itself.

    Attributes:
        has_seen: one has come, and its handler has returned.

    Example:
        >>> earlier = signal.signal(signal.SIGTERM, lambda number, frame: None)
        >>> with SignalWatch() as watch:
        ...     signal.raise_signal(signal.SIGTERM)
        >>> watch.has_seen
        True
        >>> _ = signal.signal(signal.SIGTERM, earlier)
    """

    def __init__(self) -> None:
        self.has_seen = False
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is threading.main_thread():
            for number in _HELD:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        # They stay known: who set a handler inside the block may put this one back behind it.
        _put_back(self._handlers, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._handlers[number](number, frame)
        self.has_seen = True


def _put_back(handlers: dict[int, Callable[[int, FrameType | None], Any]], own: object) -> None:
    """Those that were there before, but where others have been set meanwhile.

    One that is back may raise at once: the others are put back all the same.
    """
    left = list(handlers.items())
    try:
        while left:
            number, handler = left[0]
            if signal.getsignal(number) == own:
                signal.signal(number, handler)
            del left[0]
    finally:
        if left:
            _put_back(dict(left), own)

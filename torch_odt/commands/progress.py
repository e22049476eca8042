"""Progress on standard error: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

LINE_INTERVAL_SECONDS = 10.0
BAR_FORMAT = "{desc} {bar} {n_fmt}/{total_fmt}{postfix}"


class Progress:
    """Counts to a total and shows a status text beside the count.

    Args:
        label: what is being done.
        total: how many steps there are.
        done: how many of them have been done before.
        quiet: show nothing.
    """

    def __init__(self, label: str, total: int, *, done: int = 0, quiet: bool = False) -> None:
        self._label = label
        self._total = total
        self._done = done
        self._status = ""
        self._in_terminal = sys.stderr.isatty() and not quiet
        self._quiet = quiet
        self._shown_at = time.monotonic()
        self._bar: tqdm[None] | None = None
        if self._in_terminal:
            self._bar = tqdm(
                total=total, initial=done, desc=label, bar_format=BAR_FORMAT, file=sys.stderr, dynamic_ncols=True
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._status and kind is None:
            self._print_line()

    def advance(self, status: str) -> None:
        """One more step is done."""
        self._done += 1
        self._status = status
        if self._bar is not None:
            self._bar.set_postfix_str(status, refresh=False)
            self._bar.update()
        elif self._done < self._total and time.monotonic() - self._shown_at >= LINE_INTERVAL_SECONDS:
            self._print_line()

    def report(self, done: int, total: int, status: str) -> None:
        """So much of so much is done; for those who count themselves."""
        self._total = total
        self._done = done
        self._status = status
        is_due = time.monotonic() - self._shown_at >= LINE_INTERVAL_SECONDS
        if self._bar is not None:
            self._bar.total = total
            self._bar.n = done
            self._bar.set_postfix_str(status, refresh=False)
            self._bar.refresh()
        elif is_due:
            self._print_line()

    def say(self, text: str) -> None:
        """Lines above the bar."""
        if not self._quiet:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def _print_line(self) -> None:
        if not self._quiet:
            print(f"{self._label} {self._done}/{self._total}, {self._status}", file=sys.stderr, flush=True)
            self._shown_at = time.monotonic()

"""The forked child: whatever happens to it or to us, it is gone afterwards and the error says what happened."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from torch_odt.capture.child import ChildFailed, run_in_child


def sleep() -> None:
    time.sleep(60)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The children that a test makes; all of them must be gone, and waited for, when it ends."""
    pids: list[int] = []
    fork = os.fork

    def remember() -> int:
        pid = fork()
        pids.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", remember)
    yield pids
    assert pids
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_a_result_comes_back_whole(children: list[int]) -> None:
    content = bytes(range(256)) * (1 << 14)
    assert run_in_child(lambda: (content, os.getpid())) != (content, os.getpid())
    assert run_in_child(lambda: content) == content


@pytest.mark.parametrize(
    ("function", "reason"),
    [(die, "without a result \\(killed by SIGKILL\\)"), (lambda: os._exit(3), "\\(exit code 3\\)")],
)
def test_a_child_that_dies_is_named(function: Callable[[], None], reason: str, children: list[int]) -> None:
    with pytest.raises(ChildFailed, match=reason):
        run_in_child(function)


def test_a_child_that_does_not_answer_is_given_up(children: list[int]) -> None:
    started = time.monotonic()
    with pytest.raises(ChildFailed, match=r"no result after 0\.2 s"):
        run_in_child(sleep, deadline_seconds=0.2)
    assert time.monotonic() - started < 10


def test_an_interrupt_takes_the_child_along(children: list[int]) -> None:
    # Jobs that a shell runs in the background ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            run_in_child(sleep)
    finally:
        signal.signal(signal.SIGINT, before)


def test_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(11, "Resource temporarily unavailable")

    before = os.dup(0)
    os.close(before)
    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(ChildFailed, match="Resource temporarily unavailable"):
        run_in_child(sleep)
    after = os.dup(0)
    os.close(after)
    assert after == before, "a pipe is still open"

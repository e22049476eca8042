"""The forked child: whatever happens to it or to us, it is gone afterwards and the error says what happened."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from torch_odt.capture.child import ChildFailed, run_in_child


def sleep() -> None:
    time.sleep(60)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def assert_no_children() -> None:
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_result_comes_back_whole() -> None:
    content = bytes(range(256)) * (1 << 14)
    assert run_in_child(lambda: (content, os.getpid())) != (content, os.getpid())
    assert run_in_child(lambda: content) == content
    assert_no_children()


@pytest.mark.parametrize(
    ("function", "reason"),
    [(die, "without a result \\(killed by SIGKILL\\)"), (lambda: os._exit(3), "\\(exit code 3\\)")],
)
def test_a_child_that_dies_is_named(function: Callable[[], None], reason: str) -> None:
    with pytest.raises(ChildFailed, match=reason):
        run_in_child(function)
    assert_no_children()


def test_a_child_that_does_not_answer_is_given_up() -> None:
    started = time.monotonic()
    with pytest.raises(ChildFailed, match=r"no result after 0\.2 s"):
        run_in_child(sleep, deadline_seconds=0.2)
    assert time.monotonic() - started < 10
    assert_no_children()


def test_an_interrupt_takes_the_child_along() -> None:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run_in_child(sleep)
    assert_no_children()


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

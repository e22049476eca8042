"""Run a function in a forked child and bring back its result.

Tracing imports 50 to 90 MB of code and data that the process would keep. A forked child shares the model's
memory, pays for the tracing, and takes it along when it ends.
"""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# Tracing takes seconds; a child that is silent for so long waits for something that the fork has left behind.
DEADLINE_SECONDS = 600.0


class ChildFailed(RuntimeError):
    """The child could not do its work for a reason that lies in being a child; do it in this process."""


class ChildLate(ChildFailed):
    """The child had no result in time."""


def run_in_child(function: Callable[[], T], *, deadline_seconds: float = DEADLINE_SECONDS) -> T:
    """Call `function` in a forked child and return what it returned.

    However this ends, by an interrupt too, the child is gone afterwards.

    Args:
        function: must not need more than one thread; its result must pickle.
        deadline_seconds: how long to wait for the result.

    Raises:
        ChildFailed: the platform cannot fork, the child died, or its result does not pickle.
        ChildLate: it did not answer in time.
        Exception: what `function` raised, when that can be pickled.
    """
    if not hasattr(os, "fork") or sys.platform == "darwin":
        raise ChildFailed("this platform does not fork safely")
    reader, writer = os.pipe()
    pid = _fork(reader, writer)
    if pid == 0:
        os.close(reader)
        _serve(function, writer)
    try:
        os.close(writer)
        payload = _receive(reader, deadline_seconds)
        ending = _reap(pid)
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _reap(pid)
        raise
    finally:
        os.close(reader)
    return _unpack(payload, ending)


def _fork(reader: int, writer: int) -> int:
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of forking beside other threads; the child uses none of their state.
            warnings.simplefilter("ignore", DeprecationWarning)
            return os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        raise ChildFailed(f"no child process can be started ({error.strerror})") from error


def _receive(reader: int, seconds: float) -> bytes:
    """Everything that the child writes until it closes its end."""
    end = time.monotonic() + seconds
    pieces: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while selector.select(max(0.0, end - time.monotonic())):
            piece = os.read(reader, 1 << 20)
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
    raise ChildLate(f"the child had no result after {seconds:g} s")


def _reap(pid: int) -> str:
    """Wait for the child's end; returns how it ended, nothing when that was as it should."""
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        # Somebody else waits for all children, or SIGCHLD is ignored.
        return ""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""


def _unpack(payload: bytes, ending: str) -> Any:
    try:
        if ending or not payload:
            raise EOFError
        succeeded, content = pickle.loads(payload)
    except (EOFError, pickle.UnpicklingError) as error:
        raise ChildFailed(f"the child ended without a result ({ending or 'exit code 0'})") from error
    if succeeded:
        return content
    if isinstance(content, Exception):
        try:
            raise content
        finally:
            # Its traceback holds this frame, and with it the batch and all else that the frames above hold.
            del content
    raise ChildFailed(content)


def _serve(function: Callable[[], object], writer: int) -> None:
    """The child's whole life. It must never return into the parent's code, nor run the parent's exit handlers."""
    try:
        # The threads of the parent's OpenMP pool do not exist here.
        torch.set_num_threads(1)
        payload = _dump(function)
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(payload)
    finally:
        os._exit(0)


def _dump(function: Callable[[], object]) -> bytes:
    try:
        result = function()
    except Exception as error:
        if _is_fork_trouble(error):
            return pickle.dumps((False, str(error)))
        try:
            error.__cause__ = None
            payload = pickle.dumps((False, error))
            pickle.loads(payload)
            return payload
        except Exception:
            return pickle.dumps((False, "".join(traceback.format_exception(error))))
    try:
        return pickle.dumps((True, result))
    except Exception as error:
        return pickle.dumps((False, f"the result does not pickle: {error}"))


def _is_fork_trouble(error: BaseException | None) -> bool:
    """Whether autograd refused to work in a child of a process that has run a backward pass."""
    while error is not None:
        if "autograd's threading in combination with fork" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False

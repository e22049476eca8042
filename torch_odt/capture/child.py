"""Run a function in a forked child and bring back its result.

Tracing imports 50 to 90 MB of code and data that the process would keep. A forked child shares the model's
memory, pays for the tracing, and takes it along when it ends.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class ChildFailed(RuntimeError):
    """The child could not do its work for a reason that lies in being a child; do it in this process."""


def run_in_child(function: Callable[[], T]) -> T:
    """Call `function` in a forked child and return what it returned.

    Args:
        function: must not need more than one thread; its result must pickle.

    Raises:
        ChildFailed: the platform cannot fork, the child died, or its result does not pickle.
        Exception: what `function` raised, when that can be pickled.
    """
    if not hasattr(os, "fork") or sys.platform == "darwin":
        raise ChildFailed("this platform does not fork safely")
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of forking beside other threads; the child below uses none of their state.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(reader)
        _serve(function, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        payload = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not payload:
        raise ChildFailed(f"the child ended without a result (status {status})")
    succeeded, content = pickle.loads(payload)
    if succeeded:
        return content
    if isinstance(content, Exception):
        raise content
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

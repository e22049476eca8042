"""The largest batch whose training fits into a number of bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch_odt as odt
from torch_odt import memory
from torch_odt.errors import InfeasibleBudget
from torch_odt.measure.ending import is_out_of_memory
from torch_odt.measure.job import Job
from torch_odt.measure.memory import levels, memory_window
from torch_odt.measure.record import Cell
from torch_odt.measure.steps import PlainStep, Work
from torch_odt.measure.window import Window
from torch_odt.memory._units import format_bytes

_STEPS = 2
_MOST_TRIES = 12
# BatchNorm refuses a single value for each channel, so that training begins at two samples.
_LEAST_SAMPLES, _MOST_SAMPLES = 2, 1024


@dataclass(frozen=True)
class Tried:
    """What a batch took of memory, or would have taken at least, above the level before."""

    needed_bytes: int
    fits: bool


def largest_batch(job: Job, cell: Cell, work_of: Callable[[int], Work]) -> Cell:
    """The largest batch of which two training steps keep within `how.budget_bytes`, for both engines.

    Plain PyTorch may hold so much above the level before its step is made; freed blocks go back to the system at once,
    which is in its favour. torch_odt is given the same as its budget, and held to it. Memory is taken to grow with the
    batch by a straight line; the line's answer is tried, and what lies around it, until `how.search_seconds` are over.
    """
    limit = job.how.budget_bytes
    if limit is None:
        raise ValueError("the largest batch is that of a number of bytes: how.budget_bytes")
    memory.tune_malloc()
    attempt = _try_planned if cell.engine == "torch_odt" else _try_plain
    tried: dict[int, Tried] = {}
    end = time.monotonic() + job.how.search_seconds

    def fits(samples: int) -> Tried:
        if samples not in tried:
            tried[samples] = tried_or_refused(lambda: attempt(work_of(samples), limit), limit)
            memory.trim()
        return tried[samples]

    samples = search(fits, limit_bytes=limit, least=_LEAST_SAMPLES, is_over=lambda: time.monotonic() >= end)
    results: dict[str, int | float] = {"largest_batch": samples, "tries": len(tried)}
    if samples:
        results["needed_bytes"] = tried[samples].needed_bytes
    notes = [f"no more than {_MOST_SAMPLES} samples were tried"] if samples == _MOST_SAMPLES else []
    if not samples:
        needed = format_bytes(tried[_LEAST_SAMPLES].needed_bytes)
        notes.append(f"{format_bytes(limit)} are too little for {_LEAST_SAMPLES} samples, which take {needed} or more")
    if time.monotonic() >= end:
        notes.append(f"the search was ended after {job.how.search_seconds:.0f} s: a larger batch may fit")
    return replace(cell, limit_bytes=limit, results=results, notes=notes)


def search(
    fits: Callable[[int], Tried], *, limit_bytes: int, least: int, is_over: Callable[[], bool] = lambda: False
) -> int:
    """The largest number of samples that fits, to within a sixteenth of it; 0 if `least` does not.

    Args:
        fits: tries a number of samples. What needs more bytes than another must not fit if that does not.
        is_over: no other number is tried.

    Example:
        >>> search(lambda n: Tried(50 + 3 * n, 50 + 3 * n <= 100), limit_bytes=100, least=2)
        16
    """
    low, high = 0, _MOST_SAMPLES + 1
    points: dict[int, int] = {}
    guess = least
    for _ in range(_MOST_TRIES):
        outcome = fits(guess)
        if outcome.fits:
            low = guess
            points[guess] = outcome.needed_bytes
        else:
            high = guess
        if high - low <= max(1, low // 16) or high <= least or is_over():
            break
        guess = _next(points, limit_bytes, low, high)
    return low


def _next(points: dict[int, int], limit_bytes: int, low: int, high: int) -> int:
    """Where a straight line through the two highest readings meets the limit; then the middle of what is left."""
    if high <= _MOST_SAMPLES:
        return (low + high) // 2
    # What is far beyond all readings would take minutes, and says little.
    most = min(8 * low, _MOST_SAMPLES)
    if len(points) < 2:
        return min(2 * low, most)
    b, a = sorted(points)[-2:]
    slope = (points[a] - points[b]) / (a - b)
    line = int(a + (limit_bytes - points[a]) / slope) if slope > 0 else most
    # Where the line's answer fits, a little more is tried, which shuts it in from above.
    return min(max(line, low + max(1, low // 8)), most)


def tried_or_refused(attempt: Callable[[], Tried], limit_bytes: int) -> Tried:
    """What an attempt says; a batch for which there is no memory does not fit, wherever that shows."""
    try:
        return attempt()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return Tried(limit_bytes + 1, False)


def _try_plain(work: Work, limit_bytes: int) -> Tried:
    step = PlainStep(work)
    allocated = memory.stats().allocated_bytes or 0
    with memory.cap(allocated + limit_bytes), memory_window() as window:
        for _ in range(_STEPS):
            step()
    return _seen(window, limit_bytes)


def _try_planned(work: Work, limit_bytes: int) -> Tried:
    step = odt.TrainStep(work.model, work.loss_fn, work.optimizer, budget=odt.Budget(limit_bytes, of="training"))
    try:
        with memory_window() as window:
            for _ in range(_STEPS):
                step(*work.batch)
        smallest = step.plan.smallest_feasible_bytes
    except InfeasibleBudget as refusal:
        return Tried(refusal.smallest_feasible_bytes, False)
    finally:
        step.close()
    seen = _seen(window, limit_bytes)
    # A plan uses what it is given: how it grows with the batch is told by the smallest one.
    return Tried(smallest or seen.needed_bytes, seen.fits)


def _seen(window: Window, limit_bytes: int) -> Tried:
    base, peak = levels(window)
    return Tried(max(peak - base, 1), peak - base <= limit_bytes)

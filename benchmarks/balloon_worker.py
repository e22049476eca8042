"""The processes of `balloon.py`: one trains, one takes memory and gives it back, one tells what a fixed plan takes.

The trainer prints a line of JSON at its level, one after each step and one at the end; where the script changes, it
waits for a line. The balloon reads how many bytes to hold, a line each; it takes no more at once than the group has to
spare, and tells at the end how much of what it was to hold it had, as a share of all byte seconds. Between "wait" and
the next line it does nothing. The oracle, outside of the group, reads a budget a line, and answers with the seconds
of a step.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import mmap
import select
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MIB = 1 << 20
CHUNK_BYTES = 4 * MIB
MOST_CHUNKS = 4096
RESERVE_BYTES = 32 * MIB
# What the balloon leaves of the group; the trainer is to leave more, or it would not notice that more is wanted: some
# MiB of what it holds are not its plan's.
SPARE_BYTES = 12 * MIB
# The balloon takes a chunk so often while there is one, and looks so often for what is given back; its pages are
# huge ones and made by the kernel. It is to take memory, not the time of a trainer that has both processors otherwise.
TAKING_SECONDS, LOOKING_SECONDS = 0.005, 0.05
# Linux's MADV_POPULATE_WRITE, which Python's mmap has no name for.
POPULATE_WRITE = 23
MEASURED_STEPS, SETTLING_STEPS = 7, 2
Step = Callable[[Any, Any], float]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", type=Path)
    parser.add_argument("--way")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--stops", type=int, nargs="*", default=[], help="steps before which to wait")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    if options.group is not None:
        hold(options.group)
    else:
        train(options)


class Held:
    """Memory that is taken and given back in chunks."""

    def __init__(self) -> None:
        self._room = mmap.mmap(-1, MOST_CHUNKS * CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._room.madvise(mmap.MADV_HUGEPAGE)
        # Chunks begin where huge pages do.
        self._first = -ctypes.addressof(ctypes.c_char.from_buffer(self._room)) % CHUNK_BYTES
        self._count = 0

    @property
    def nbytes(self) -> int:
        return self._count * CHUNK_BYTES

    def take(self) -> None:
        self._room.madvise(POPULATE_WRITE, self._first + self.nbytes, CHUNK_BYTES)
        self._count += 1

    def give_back(self) -> None:
        self._count -= 1
        self._room.madvise(mmap.MADV_DONTNEED, self._first + self.nbytes, CHUNK_BYTES)


def hold(group: Path) -> None:
    """The balloon."""
    from torch_odt.memory._control_group import control_groups

    held = Held()
    target = 0
    wanted_byte_seconds = held_byte_seconds = 0.0
    now = time.perf_counter()
    say(ready=True)
    pause: float | None = None
    while True:
        is_told = bool(select.select([sys.stdin], [], [], pause)[0])
        before, now = now, time.perf_counter()
        wanted_byte_seconds += target * (now - before)
        held_byte_seconds += held.nbytes * (now - before)
        if is_told:
            line = sys.stdin.readline()
            if line == "wait\n":
                line = sys.stdin.readline()
                now = time.perf_counter()
            if line == "end\n":
                say(share=held_byte_seconds / wanted_byte_seconds if wanted_byte_seconds else 1.0)
            if not line or line == "end\n":
                return
            target = int(line)
        while held.nbytes > target:
            held.give_back()
        if held.nbytes + CHUNK_BYTES > target:
            pause = None
            continue
        (level,) = [level for found in control_groups() for level in found.levels if level.folder == group]
        pause = LOOKING_SECONDS
        if (level.headroom_bytes or 0) > SPARE_BYTES + CHUNK_BYTES:
            pause = TAKING_SECONDS
            held.take()


def train(options: argparse.Namespace) -> None:
    import torch
    import torchvision

    import torch_odt as odt

    # Of trainer and balloon, the system is to end this one.
    Path("/proc/self/oom_score_adj").write_text("1000")
    torch.manual_seed(0)
    model = torchvision.models.mobilenet_v2(weights=None, num_classes=10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if options.way == "accelerate" and importlib.util.find_spec("accelerate") is None:
        say(level_bytes=0, missing=True)
        sys.stdin.readline()
        return
    batches = make_batches(options)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    level_bytes = odt.memory.process_bytes()
    say(level_bytes=level_bytes)
    sys.stdin.readline()
    try:
        {"oracle": answer, "accelerate": find_batch_size}.get(options.way, follow)(options, model, optimizer, batches)
    except odt.InfeasibleBudget as refusal:
        say(smallest_bytes=refusal.smallest_feasible_bytes)
    say(growth_bytes=most_held_bytes() - level_bytes)


def make_batches(options: argparse.Namespace) -> Callable[[int], Iterator[tuple[Any, Any]]]:
    """`batches(batch_size)` goes through the images over and over again."""
    import torch
    from workloads import load_fashion_mnist, upscale

    count = 64 * options.batch_size
    if options.data_dir is None:
        generator = torch.Generator().manual_seed(1)
        images = torch.randint(256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        labels = torch.randint(10, (count,), generator=generator)
    else:
        images, labels = load_fashion_mnist(options.data_dir, count)

    def batches(batch_size: int) -> Iterator[tuple[Any, Any]]:
        while True:
            for part, target in zip(images.split(batch_size), labels.split(batch_size), strict=True):
                yield upscale(part, options.image_size).contiguous(memory_format=torch.channels_last), target

    return batches


def make_step(options: argparse.Namespace, model: Any, optimizer: Any, budget: Any) -> Any:
    from torch.nn.functional import cross_entropy

    import torch_odt as odt

    return odt.TrainStep(
        model, cross_entropy, optimizer, budget=budget, micro_batch=options.batch_size, cache=options.cache
    )


def follow(options: argparse.Namespace, model: Any, optimizer: Any, batches: Any) -> None:
    """Train as the way says."""
    import torch_odt as odt
    from torch_odt.runtime import ControlGroupHeadroom, Controller

    if options.way == "plain":
        run(options, plainly(model, optimizer), batches(options.batch_size), Pauses())
        return
    pauses = Pauses()
    controller = None
    if options.way == "torch_odt":
        controller = Controller(ControlGroupHeadroom(reserve=RESERVE_BYTES), log=options.log, clock=pauses.clock)
    step = make_step(options, model, optimizer, controller or odt.Budget(options.budget, of="training"))
    run(options, step, batches(options.batch_size), pauses, plan_bytes=lambda: step.plan.peak_bytes)
    if controller is not None:
        say(decisions=[decision.to_dict() for decision in controller.decisions])


class Pauses:
    """While the oracle's steps are measured, no time passes for the trainer."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def wait(self) -> None:
        begin = time.monotonic()
        sys.stdin.readline()
        self._seconds += time.monotonic() - begin

    def clock(self) -> float:
        return time.monotonic() - self._seconds


def run(
    options: argparse.Namespace,
    step: Step,
    batches: Iterator[tuple[Any, Any]],
    pauses: Pauses,
    **told: Callable[[], int],
) -> None:
    import torch

    torch.manual_seed(2)
    for index in range(options.steps):
        if index in options.stops:
            pauses.wait()
        images, labels = next(batches)
        begin = time.perf_counter()
        loss = float(step(images, labels))
        seconds = time.perf_counter() - begin
        say(loss=loss, seconds=seconds, **{name: value() for name, value in told.items()})


def plainly(model: Any, optimizer: Any) -> Step:
    from torch.nn.functional import cross_entropy

    def step(images: Any, labels: Any) -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def find_batch_size(options: argparse.Namespace, model: Any, optimizer: Any, batches: Any) -> None:
    """What accelerate offers: from the beginning with half the batch after an error that says out of memory."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=options.batch_size)
    def loop(batch_size: int) -> None:
        run(options, plainly(model, optimizer), batches(batch_size), Pauses())

    loop()


def answer(options: argparse.Namespace, model: Any, optimizer: Any, batches: Any) -> None:
    """The oracle: the median of some steps within each budget that is asked for, once they are planned."""
    import torch_odt as odt

    given = batches(options.batch_size)
    for line in sys.stdin:
        step = make_step(options, model, optimizer, odt.Budget(int(line), of="training"))
        seconds = []
        for _ in range(SETTLING_STEPS + MEASURED_STEPS):
            images, labels = next(given)
            begin = time.perf_counter()
            float(step(images, labels))
            seconds.append(time.perf_counter() - begin)
        step.close()
        say(seconds=statistics.median(seconds[SETTLING_STEPS:]))


def most_held_bytes() -> int:
    """The most that the process has held, without what it shares with files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, now, anonymous = (int(fields[name].split()[0]) << 10 for name in ("VmHWM", "VmRSS", "RssAnon"))
    return peak - now + anonymous


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()

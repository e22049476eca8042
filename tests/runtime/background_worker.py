"""A process in the background; lines on its standard input lead it from one stage to the next."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import psutil
import torch

from torch_odt.runtime import Background


def threads() -> list[dict[str, object]]:
    """What the kernel says of each thread."""
    found = []
    for path in Path("/proc/self/task").iterdir():
        thread = int(path.name)
        found.append(
            {
                "nice": os.getpriority(os.PRIO_PROCESS, thread),
                "policy": os.sched_getscheduler(thread),
                "cores": sorted(os.sched_getaffinity(thread)),
                "io": int(psutil.Process(thread).ionice().ioclass),
            }
        )
    return found


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


class Step:
    released = 0

    def release(self) -> None:
        self.released += 1
        tell(paused=True)


def main() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    core = min(os.sched_getaffinity(0))
    options = Background(threads=1, cores=frozenset({core}), pause_signals=(signal.SIGUSR1, signal.SIGUSR2))
    before, step = threads(), Step()
    with options.applied(step) as background:
        for _ in range(3):
            background.before_step()
            background.after_step(0.1)
        tell(before=before, inside=threads(), torch_threads=torch.get_num_threads(), core=core, notes=background.notes)
        sys.stdin.readline()
        background.before_step()
        tell(released=step.released, paused_seconds=background.paused_seconds)
    tell(after=threads(), usual=signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL)


if __name__ == "__main__":
    main()

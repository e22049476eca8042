"""A process in a control group, which tells what it reads of it; lines on its standard input lead it on."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from torch_odt.runtime.monitor import read_system

MIB = 1 << 20


def tell() -> None:
    print(json.dumps(asdict(read_system()), default=str), flush=True)
    sys.stdin.readline()


def want_more_than_there_is() -> None:
    """In a child, which the kernel is to choose when it must end a process of the group."""
    child = os.fork()
    if child == 0:
        Path("/proc/self/oom_score_adj").write_text("1000")
        bytearray(256 * MIB)
        os._exit(0)
    os.waitpid(child, 0)
    # The kernel takes back what it held a little later.
    time.sleep(0.5)


def main() -> None:
    # What has been read once takes its memory before it is watched.
    read_system()
    (Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
    tell()
    held = bytearray(64 * MIB)
    held[::4096] = bytes(len(range(0, len(held), 4096)))
    tell()
    want_more_than_there_is()
    tell()


if __name__ == "__main__":
    main()

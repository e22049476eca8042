"""What the meters say of a process, beside what the kernel tells whoever waits for that process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# What comes before and after the window is small against what is in it.
PROGRAM = """
import json, mmap, time
from torch_odt.measure import Window
from torch_odt.measure.clock import Clock, Events
from torch_odt.measure.memory import ProcessMemory

with Window([Clock(), Events(), ProcessMemory()], poll_seconds=0.005) as window:
    pages = mmap.mmap(-1, 800 << 20)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    for offset in range(0, len(pages), mmap.PAGESIZE):
        pages[offset] = 1
    time.sleep(0.05)
    until = time.process_time() + 4
    while time.process_time() < until:
        pass
print(json.dumps(window.record()))
"""

# Linux lets the highest resident size of a process begin with that of the one which started it, so a small one does.
PARENT = """
import json, os, subprocess, sys

process = subprocess.Popen([sys.executable, "-P", "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
record = json.loads(process.stdout.read() or "null")
_, status, usage = os.wait4(process.pid, 0)
fields = {name: getattr(usage, name) for name in dir(usage) if name.startswith("ru_")}
print(json.dumps({"record": record, "status": status, "usage": fields}))
"""


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="this system tells no resources of an ended process")
def test_readings_are_those_of_the_parent() -> None:
    command = [sys.executable, "-P", "-c", PARENT, PROGRAM]
    told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert told["status"] == 0
    record, usage = told["record"], told["usage"]
    clock, events, proc = record["clock"], record["getrusage"], record["proc"]
    # The start of Python and torch's import are not in the window.
    cpu_seconds = usage["ru_utime"] + usage["ru_stime"]
    assert 4 <= clock["user_seconds"] + clock["system_seconds"] <= cpu_seconds
    pages = (800 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert pages <= events["minor_page_faults"] <= usage["ru_minflt"] < 2 * pages
    # Linux counts in KiB. The start may have been higher for a moment only by what torch's import takes.
    assert proc["peak_resident_bytes"] == pytest.approx(usage["ru_maxrss"] * 1024, rel=0.02)
    rise = proc["peak_bytes"] - proc["begin_bytes"]
    assert rise == pytest.approx(800 << 20, rel=0.02)
    assert events["involuntary_context_switches"] <= usage["ru_nivcsw"]

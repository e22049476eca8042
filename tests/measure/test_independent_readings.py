"""What the meters say of a process, beside what the kernel, GNU time and perf tell of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# What comes before the window is told, as the process itself counts it: how long an import takes depends on what else
# runs. Nothing comes after it: to give 800 MiB back, and to end torch, takes the better part of a second.
PROGRAM = """
import json, mmap, os, resource, time
from torch_odt.measure import Window
from torch_odt.measure.clock import Clock, Events
from torch_odt.measure.memory import ProcessMemory

used = resource.getrusage(resource.RUSAGE_SELF)
before = {"cpu_seconds": used.ru_utime + used.ru_stime, "faults": used.ru_minflt}
with Window([Clock(), Events(), ProcessMemory()], poll_seconds=0.005) as window:
    pages = mmap.mmap(-1, 800 << 20)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    for offset in range(0, len(pages), mmap.PAGESIZE):
        pages[offset] = 1
    time.sleep(0.05)
    until = time.process_time() + 4
    while time.process_time() < until:
        pass
    pages.close()
print(json.dumps(window.record() | {"before": before}), flush=True)
os._exit(0)
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


def _counted(tool: list[str]) -> tuple[dict[str, Any], str]:
    """What the program tells and what a tool says of it."""
    ended = subprocess.run([*tool, sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True)
    return json.loads(ended.stdout), ended.stderr


def _assert_agree(record: dict[str, Any], cpu_seconds: float, faults: float) -> None:
    """The window beside what a tool counted of the whole process."""
    clock, before = record["clock"], record["before"]
    in_window = clock["user_seconds"] + clock["system_seconds"]
    assert in_window == pytest.approx(cpu_seconds - before["cpu_seconds"], rel=0.1)
    assert record["getrusage"]["minor_page_faults"] == pytest.approx(faults - before["faults"], rel=0.02)


def _number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, text
    return float(found[1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/usr/bin/time").exists(), reason="GNU time is not installed")
def test_readings_are_those_of_gnu_time() -> None:
    record, said = _counted(["/usr/bin/time", "-v"])
    cpu_seconds = sum(_number(rf"{mode} time \(seconds\): ([0-9.]+)", said) for mode in ("User", "System"))
    _assert_agree(record, cpu_seconds, _number(r"Minor \(reclaiming a frame\) page faults: (\d+)", said))
    highest_kib = _number(r"Maximum resident set size \(kbytes\): (\d+)", said)
    assert record["proc"]["peak_resident_bytes"] == pytest.approx(highest_kib * 1024, rel=0.02)


PERF = ["perf", "stat", "-x", ",", "-e", "task-clock,page-faults"]


def _counts_here() -> bool:
    if shutil.which("perf") is None:
        return False
    ended = subprocess.run([*PERF, "true"], capture_output=True, text=True)
    return ended.returncode == 0 and "not " not in ended.stderr


@pytest.mark.slow
@pytest.mark.skipif(not _counts_here(), reason="perf is not installed, or counts nothing here")
def test_readings_are_those_of_perf() -> None:
    record, said = _counted(PERF)
    milliseconds = _number(r"([0-9.]+),msec,task-clock", said)
    _assert_agree(record, milliseconds / 1e3, _number(r"(\d+),,page-faults", said))

"""Runs of cells: resumed, interrupted, cells that fail, budgets that are shares, governors."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
import torch
from sample_records import sample_machine
from sensors import write

from torch_odt.measure import run as run_module
from torch_odt.measure.ending import Shortage, is_out_of_memory
from torch_odt.measure.job import How, Job
from torch_odt.measure.meter import Absent
from torch_odt.measure.record import Cell, Record, Trace, append_line
from torch_odt.measure.run import Run, in_process

HOW = How(limit_bytes=1000)


def make_job(model: str, **more: object) -> Job:
    cell = Cell(suite="ubiquitous", model=model, batch_size=1, mode="training", engine="torch", threads=1)
    return Job(replace(cell, **more), HOW)  # type: ignore[arg-type]


class Measurer:
    """Gives every cell an outcome by its name, and remembers what it was asked for."""

    def __init__(self, **outcomes: str) -> None:
        self.jobs: list[Job] = []
        self._outcomes = outcomes

    def __call__(self, job: Job) -> Cell:
        self.jobs.append(job)
        outcome = self._outcomes.get(job.cell.model, "ok")
        if outcome == "interrupt":
            raise KeyboardInterrupt
        cell = replace(job.cell, outcome=outcome, limit_bytes=1000)  # type: ignore[arg-type]
        return replace(cell, step_seconds=[1.0], base_bytes=100, peak_bytes=500) if outcome == "ok" else cell

    @property
    def models(self) -> list[str]:
        return [job.cell.model for job in self.jobs]


def test_cells_that_are_there_are_not_measured_again_and_failed_ones_are(tmp_path: Path) -> None:
    out, jobs = tmp_path / "run.jsonl", [make_job("a"), make_job("b"), make_job("c")]
    first = Measurer(b="failed", c="out of memory")
    assert [cell.outcome for cell in Run(jobs, sample_machine(), out, first).go().cells] == [
        "ok", "failed", "out of memory",
    ]  # fmt: skip
    second = Measurer()
    going = Run([*jobs, make_job("d")], sample_machine(), out, second)
    assert len(going.waiting) == 2
    record = going.go()
    assert second.models == ["b", "d"]
    assert [cell.outcome for cell in record.cells] == ["ok", "ok", "out of memory", "ok"]
    assert {cell.key for cell in Record.read(out).cells} == {cell.key for cell in record.cells}


def test_another_optimizer_is_another_cell_and_old_records_are_of_sgd(tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    Run([make_job("a")], sample_machine(), out, Measurer()).go()
    out.write_text(out.read_text().replace('"optimizer": "sgd", ', "", 1))
    going = Run([make_job("a"), make_job("a", optimizer="adam")], sample_machine(), out, Measurer())
    assert [job.cell.optimizer for job in going.waiting] == ["adam"]


def test_what_ran_out_of_memory_is_tried_again_with_a_higher_limit(tmp_path: Path) -> None:
    out, job = tmp_path / "run.jsonl", make_job("a")
    Run([job], sample_machine(), out, Measurer(a="out of memory")).go()
    higher = Job(job.cell, replace(HOW, limit_bytes=2000))
    assert [len(Run([each], sample_machine(), out, Measurer()).waiting) for each in (job, higher)] == [0, 1]


def test_what_is_skipped_beforehand_is_recorded_and_not_measured(tmp_path: Path) -> None:
    measurer = Measurer()
    job = make_job("a", outcome="skipped", reason="because")
    (cell,) = Run([job], sample_machine(), tmp_path / "run.jsonl", measurer).go().cells
    assert (cell.outcome, cell.reason, measurer.jobs) == ("skipped", "because", [])


def test_an_interrupt_leaves_what_was_measured(tmp_path: Path) -> None:
    out, jobs = tmp_path / "run.jsonl", [make_job("a"), make_job("b"), make_job("c")]
    with pytest.raises(KeyboardInterrupt):
        Run(jobs, sample_machine(), out, Measurer(b="interrupt")).go()
    assert [cell.model for cell in Record.read(out).cells] == ["a"]
    again = Measurer()
    Run(jobs, sample_machine(), out, again).go()
    assert again.models == ["b", "c"]


def test_the_time_that_is_left_is_told(tmp_path: Path) -> None:
    going = Run([make_job("a"), make_job("b")], sample_machine(), tmp_path / "run.jsonl", Measurer())
    assert going.seconds_left is None
    told: list[float | None] = []
    going.go(done=lambda cell: told.append(going.seconds_left))
    assert told[0] is not None and told[0] >= 0 and told[1] == 0


def test_a_run_that_goes_on_knows_what_cells_took(tmp_path: Path) -> None:
    out, skipped = tmp_path / "run.jsonl", make_job("s", outcome="skipped", reason="so")
    append_line(out, sample_machine())
    append_line(out, replace(make_job("a").cell, measuring_seconds=30.0))
    append_line(out, replace(make_job("b", engine="torch_odt").cell, measuring_seconds=50.0))
    jobs = [make_job("a"), make_job("b", engine="torch_odt"), make_job("c"), skipped]
    going = Run(jobs, sample_machine(), out, Measurer())
    assert going.seconds_left == pytest.approx(80 / 4), "a planned cell is taken for three plain ones"
    going.go()
    assert all(cell.measuring_seconds is not None for cell in Record.read(out).cells)
    assert going.seconds_left == 0


def test_a_record_of_another_machine_is_not_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    append_line(out, sample_machine())
    other = replace(sample_machine(), processor="another")
    with pytest.raises(ValueError, match="measured with processor Cortex-A72, and this is another"):
        Run([], other, out, Measurer())


@pytest.mark.parametrize(
    ("budget", "plain", "expected"),
    [("50%", "ok", 200), ("300 B", "ok", 300), ("50%", "out of memory", 500), ("1KiB", "failed", 1024)],
)
def test_the_budget_is_bytes_or_a_share_of_what_plain_pytorch_took(
    tmp_path: Path, budget: str, plain: str, expected: int
) -> None:
    measurer = Measurer()
    ours = make_job("a", engine="torch_odt", budget=budget)
    going = Run([make_job("a"), ours], sample_machine(), tmp_path / "run.jsonl", lambda job: (
        replace(measurer(job), outcome=plain, limit_bytes=1000) if job.cell.engine == "torch" else measurer(job)
    ))  # fmt: skip
    going.go()
    how = measurer.jobs[-1].how
    assert how.budget_bytes == expected
    assert (how.smallest_tries > 0) == budget.endswith("%")


def test_a_share_beside_a_neighbour_is_that_of_plain_steps(tmp_path: Path) -> None:
    measurer = Measurer()
    jobs = [make_job("a")]
    for experiment, factors in (("long run", {}), ("neighbour", {"training": "background"})):
        jobs.append(make_job("a", engine="torch_odt", budget="25%", experiment=experiment, factors=factors))
    Run(jobs, sample_machine(), tmp_path / "run.jsonl", measurer).go()
    assert [job.how.budget_bytes for job in measurer.jobs] == [None, 100, 100]


def test_a_long_run_begins_as_cool_as_plain_pytorchs(tmp_path: Path) -> None:
    measurer = Measurer()
    traces = [Trace(quantity="temperature", label=label, unit="celsius", at_seconds=[0, 9], values=[celsius, 90.0])
              for label, celsius in (("cpu", 41.0), ("gpu", 48.0))]  # fmt: skip
    jobs = [make_job("a", experiment="long run", traces=traces), make_job("b", experiment="long run")]
    jobs += [
        make_job(model, engine="torch_odt", budget="1KiB", experiment=experiment)
        for model, experiment in (("a", "long run"), ("b", "long run"), ("a", "step"))
    ]
    Run(jobs, sample_machine(), tmp_path / "run.jsonl", measurer).go()
    assert [job.how.start_celsius for job in measurer.jobs] == [None, None, 48.0, None, None]


def test_a_share_of_what_is_not_known_is_skipped(tmp_path: Path) -> None:
    ours = make_job("a", engine="torch_odt", budget="50%")
    for number, jobs in enumerate(([ours], [make_job("a"), ours])):
        measurer = Measurer(a="failed")
        cell = Run(jobs, sample_machine(), tmp_path / f"{number}.jsonl", measurer).go().cells[-1]
        assert cell.outcome == "skipped" and "50% of what plain PyTorch took is not known" in cell.reason


def test_a_governor_that_cannot_be_set_skips_its_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "governor", lambda name: nullcontext(Absent("no permission") if name else None))
    jobs = [make_job("a", governor="powersave"), make_job("a")]
    measurer = Measurer()
    cells = Run(jobs, sample_machine(), tmp_path / "run.jsonl", measurer).go().cells
    assert [(cell.outcome, cell.reason) for cell in cells] == [("skipped", "no permission"), ("ok", "")]
    assert len(measurer.jobs) == 1


WORKER = """
import os, pathlib, signal, sys, time
from torch_odt.measure.job import Job
text = sys.stdin.read()
job = Job.from_json(text)
match job.cell.model:
    case "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    case "aborted":
        print("terminate called after throwing an instance of 'std::bad_alloc'", file=sys.stderr, flush=True)
        os.abort()
    case "slow":
        # A child of its own, as those that trace: it holds the pipe that the test reads.
        held = pathlib.Path(__file__).with_name("held")
        if held.exists() and os.fork() == 0:
            with held.open("w"):
                time.sleep(600)
        pid = pathlib.Path(__file__).with_name("pid")
        pid.with_suffix(".new").write_text(str(os.getpid()))
        pid.with_suffix(".new").rename(pid)
        time.sleep(600)
    case "again":
        from dataclasses import replace
        if not job.how.was_refused:
            print(Job(replace(job.cell, notes=["planned"]), replace(job.how, was_refused=True)).to_json())
            sys.exit(75)
    case "wrong":
        raise RuntimeError("it cannot be")
print("a line of a library's")
print(job.to_json())
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_worker_of_the_tests.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "a_worker_of_the_tests"


def test_processes_that_are_killed_or_fail_are_recorded(worker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shortage, "evidence", lambda self: "")
    measure = in_process(worker)
    assert measure(make_job("fine")).outcome == "ok"
    killed, wrong = measure(make_job("killed")), measure(make_job("wrong"))
    assert (killed.outcome, killed.reason) == ("failed", "the process was ended by SIGKILL")
    monkeypatch.setattr(Shortage, "evidence", lambda self: "memory was short")
    killed = measure(make_job("killed"))
    assert (killed.outcome, killed.reason, killed.limit_bytes) == ("out of memory", "memory was short", 1000)
    aborted = measure(make_job("aborted"))
    assert (aborted.outcome, aborted.reason) == ("out of memory", "std::bad_alloc")
    assert (wrong.outcome, wrong.reason) == ("failed", "RuntimeError: it cannot be")


def test_another_process_goes_on_with_what_one_has_learned(worker: str) -> None:
    cell = in_process(worker)(make_job("again"))
    assert cell.outcome == "ok" and cell.notes == ["planned"]


def test_an_interrupt_ends_the_cells_process(tmp_path: Path, worker: str) -> None:
    os.mkfifo(tmp_path / "held")
    opened: list[IO[bytes]] = []
    ended = threading.Event()

    def interrupt() -> None:
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        # Opened as soon as the child has opened its end.
        opened.append((tmp_path / "held").open("rb"))
        # Python looks for signals before it waits, not while: one that comes between the two is noticed with the next.
        while not ended.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            ended.wait(10)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        in_process(worker)(make_job("slow"))
    ended.set()
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    with opened[0] as held:
        # It ends when its child does, and not in 600 seconds.
        assert held.read() == b""


def test_a_process_that_waits_ends_with_its_parent() -> None:
    reader, writer = os.pipe()
    script = (
        "import os, signal, sys, time\n"
        "from torch_odt.measure.ending import end_with_parent\n"
        "ready, told = os.pipe()\n"
        "if os.fork() == 0:\n    end_with_parent(); os.write(told, b'x'); time.sleep(600)\n"
        "os.read(ready, 1); os.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", script], pass_fds=[writer]) as parent:
        os.close(writer)
        with os.fdopen(reader, "rb") as held:
            assert held.read() == b""
    assert parent.returncode == -signal.SIGKILL


def test_a_share_of_what_was_skipped_says_why(tmp_path: Path) -> None:
    plain = replace(make_job("a").cell, outcome="skipped", reason="no permission to write scaling_governor")
    ours = make_job("a", engine="torch_odt", budget="50%")
    going = Run([make_job("a"), ours], sample_machine(), tmp_path / "run.jsonl", lambda job: plain)
    cell = going.go().cells[-1]
    assert (cell.engine, cell.outcome, cell.reason) == ("torch_odt", "skipped", plain.reason)


def test_memory_was_short_where_kills_or_pressure_say_so(tmp_path: Path) -> None:
    pressure = "some avg10={} avg60=0.00 avg300=0.00 total=0"
    events = "sys/fs/cgroup/a/memory.events"
    write(tmp_path, {"proc/self/cgroup": "0::/a", events: "oom_kill 3", "proc/pressure/memory": pressure.format(0.0)})
    shortage = Shortage(tmp_path)
    assert shortage.evidence() == ""
    write(tmp_path, {"proc/pressure/memory": pressure.format(8.5)})
    assert shortage.evidence() == "the process was killed while memory was short"
    write(tmp_path, {events: "oom_kill 4"})
    assert shortage.evidence() == "the system killed the process for want of memory"
    write(tmp_path, {events: "oom_kill 3", "proc/vmstat": "oom_kill 7", "proc/pressure/memory": pressure.format(0.0)})
    assert Shortage(tmp_path).evidence() == ""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("the cap is reached"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_ways_to_run_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected

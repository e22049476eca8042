"""`torch-odt measure`, on tiny networks in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from terminals import Terminal

from torch_odt.commands.measure import _status
from torch_odt.measure.record import CATEGORIES, Cell, Machine, Record, append_line

FAILS_IN_TRAINING = """

class Fails(nn.Linear):
    def forward(self, x):
        if self.training:
            raise RuntimeError("not in training")
        return super().forward(x.flatten(1))


def fails():
    return Fails(3072, 10)
"""


@pytest.fixture
def measure(net: Path) -> tuple[str, ...]:
    words = ("measure", "--suite", "breakdown", "--model", f"{net}:make", "--sample", "3x32x32")
    return (*words, "--batch-sizes", "4", "--threads", "1", "--repetitions", "2", "--quick", "--budget", "1GiB")


@pytest.mark.slow
def test_cells_of_both_engines_and_all_reports(
    terminal: Terminal, measure: tuple[str, ...], net: Path, tmp_path: Path
) -> None:
    out, page, trace = tmp_path / "run.jsonl", tmp_path / "page.html", tmp_path / "trace.json"
    outcome = terminal(*measure, "--out", out, "--html", page, "--chrome-trace", trace, "--name", "a board")
    assert outcome.code == 0, outcome.err + outcome.out
    record = Record.read(out)
    assert record.machine.name == "a board" and record.machine.cores >= 1 and "torch" in record.machine.versions
    plain, planned = record.cells
    assert (plain.engine, planned.engine) == ("torch", "torch_odt")
    for cell in record.cells:
        assert cell.outcome == "ok" and len(cell.step_seconds) == cell.window_steps >= 2
        assert cell.parameters == 3 * 8 * 9 + 8 + 16 + 80 + 10
        assert cell.whole_peak_bytes is not None and cell.peak_bytes is not None and cell.base_bytes is not None
        assert cell.whole_peak_bytes >= cell.peak_bytes
        assert cell.reading("clock", "wall_seconds")
        assert set(cell.categories) in ({*CATEGORIES}, set())
    assert plain.flops == planned.flops > 0
    assert plain.prediction is None and {row.kind for row in plain.layers} >= {"Conv2d", "BatchNorm2d"}
    assert planned.prediction is not None and planned.prediction.peak_bytes > 0 and not planned.layers
    assert any("memory by layer is plain PyTorch's" in note for note in planned.notes)
    for cell in record.cells if plain.categories else ():
        (held,) = [trace.values for trace in cell.traces if trace.label == "process"]
        assert 0 <= max(held) <= 4 * (cell.training_bytes or 0) + (64 << 20)
    if plain.categories:
        # The allocator's count of the measured steps, and of the one that was followed.
        counted = plain.reading("allocator", "peak_allocated_bytes")
        assert sum(plain.categories.values()) == pytest.approx(counted, rel=0.02)
    assert "a board" in page.read_text() and json.loads(trace.read_text())
    assert "torch_odt" in outcome.out

    again = terminal(*measure, "--out", out)
    assert again.code == 0 and f"2 of 2 cells are in {out} already" in again.out
    text = terminal("measure", "--compare", out, out)
    assert text.code == 0 and "seconds of a step" in text.out


@pytest.mark.slow
def test_a_cell_without_memory_is_recorded(terminal: Terminal, measure: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    refused = terminal(*measure, "--limit", "1MiB")
    assert refused.code == 2 and "--limit 1MiB: a cell's process holds" in refused.err
    smallest = refused.err.split("the smallest useful limit is about ")[1].split()
    words = [word if word != "4" else "8192" for word in measure]
    outcome = terminal(*words, "--out", out, "--limit", "".join(smallest), "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert [cell["outcome"] for cell in document["cells"]] == ["out of memory", "out of memory"]
    assert all("Error" in cell["reason"] for cell in document["cells"])
    assert all(cell.limit_bytes > 1 << 20 for cell in Record.read(out).cells)


@pytest.mark.slow
def test_a_cell_that_fails_does_not_end_the_run(terminal: Terminal, measure: tuple[str, ...], net: Path) -> None:
    net.write_text(net.read_text() + FAILS_IN_TRAINING)
    words = [word.replace(":make", ":fails") for word in measure]
    outcome = terminal(*words, "--json")
    assert outcome.code == 1
    plain, planned = json.loads(outcome.out)["cells"]
    assert plain["outcome"] == planned["outcome"] == "failed" and "not in training" in plain["reason"]


@pytest.mark.slow
def test_an_interrupted_run_goes_on(measure: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    words = [word if word != "breakdown" else "architectures" for word in measure]
    command = [sys.executable, "-P", "-m", "torch_odt", *words, "--run-seconds", "600", "--out", str(out)]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _until(lambda: out.exists() and out.read_text().count('"kind": "cell"') >= 2)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    _until(lambda: not _group(process.pid))
    assert len(Record.read(out).cells) >= 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--budget", "x%"), "a share is written as 50%"),
        (("--budget", "30%,0%"), "--budget 0%: it must be above 0"),
        (("--budget", "30%", "--budget", "much"), "--budget: "),
        (("--budget", "much"), "--budget"),
        (("--budget", "0%"), "must be above 0"),
        (("--budget", "0"), "give a positive number"),
        (("--batch-sizes", ","), "names nothing"),
        (("--device", "nowhere"), "--device nowhere: torch cannot compute there"),
        (("--model", "nosuchnet"), "no model is called 'nosuchnet'"),
        (("--model", "reduced_resnet", "--model", "{net}:flat"), "give its samples' shape as --sample"),
        (("--model", "{net}:autoencoder", "--batch-sizes", "2,4"), "brings a batch of its own, of 4"),
        (("--limit", "much"), "--limit"),
        (("--out", "/"), "--out /: this is a folder; give a file in it"),
        (("--out", "nowhere/run.jsonl"), "there is no folder nowhere"),
        (("--compare", "a.jsonl", "b.jsonl"), "a.jsonl: No such file"),
        (("--batch-sizes", "0"), "not a whole number above 0"),
        (("--watts", "1,2,3"), "is not BUSY or BUSY,IDLE"),
    ],
)
def test_what_is_wrong_is_named(terminal: Terminal, net: Path, words: tuple[str, ...], text: str) -> None:
    net.write_text(net.read_text() + "\n\ndef flat():\n    return nn.Linear(7, 2)\n")
    outcome = terminal("measure", "--quick", *(word.replace("{net}", str(net)) for word in words))
    assert outcome.code == 2 and text in outcome.err


def test_a_record_of_another_machine_is_refused(terminal: Terminal, tmp_path: Path) -> None:
    from torch_odt.measure.record import Machine

    out = tmp_path / "run.jsonl"
    append_line(out, Machine(name="other", processor="another", cores=99))
    outcome = terminal("measure", "--quick", "--out", out)
    assert outcome.code == 2 and "give another --out" in outcome.err


def test_an_interrupt_says_how_to_go_on(
    terminal: Terminal, measure: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_odt.measure.run import Run

    def interrupted(self: Run, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "go", interrupted)
    out = tmp_path / "run.jsonl"
    for words in ((), ("--json",)):
        outcome = terminal(*measure, "--out", out, *words)
        assert outcome.code == 130 and f"the same command with --out {out} goes on from here" in outcome.err


def test_progress_names_experiment_and_threads() -> None:
    cell = Cell(suite="s", model="net", batch_size=8, mode="training", engine="torch", threads=2, experiment="long run")
    assert _status(cell, 7.0) == "net batch 8 long run, plain PyTorch, 2 threads: done, 7 s left"
    ours = replace(cell, experiment="step", engine="torch_odt", budget="30%", step_seconds=[0.5])
    assert _status(ours, None) == "net batch 8 training, torch_odt (30%), 2 threads: 500 ms"


def _until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


def _group(leader: int) -> list[int]:
    """The processes that a session still has."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def test_tensorboard_is_missed_before_anything_is_measured(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    out = tmp_path / "run.jsonl"
    outcome = terminal("measure", "--quick", "--tensorboard", tmp_path / "events", "--out", out)
    assert outcome.code != 0 and 'pip install "torch_odt[tensorboard]"' in outcome.err
    assert not out.exists()


def test_records_are_reported_on_and_compared_without_measuring(terminal: Terminal, tmp_path: Path) -> None:
    cell = Cell(suite="ubiquitous", model="lenet", batch_size=1, mode="training", engine="torch", threads=1)
    for name, one in (("old", cell), ("new", cell), ("other", replace(cell, batch_size=8))):
        append_line(tmp_path / f"{name}.jsonl", Machine(name="a board", processor="Cortex-A72"))
        append_line(tmp_path / f"{name}.jsonl", replace(one, step_seconds=[0.002]))
    page = tmp_path / "page.html"
    outcome = terminal("measure", "--report", tmp_path / "old.jsonl", "--html", page)
    assert outcome.code == 0 and "lenet" in outcome.out and "a board" in page.read_text(encoding="utf-8")
    outcome = terminal("measure", "--compare", tmp_path / "old.jsonl", tmp_path / "new.jsonl")
    assert outcome.out.startswith("new against old"), "machines of one name are told apart by their files"
    outcome = terminal("measure", "--compare", tmp_path / "old.jsonl", tmp_path / "new.jsonl", "--json")
    (row,) = outcome.document["rows"]
    assert outcome.document["names"] == ["old", "new"]
    assert (row["model"], row["quantity"], row["first"], row["ratio"]) == ("lenet", "step_seconds", 0.002, 1.0)
    outcome = terminal("measure", "--compare", tmp_path / "old.jsonl", tmp_path / "other.jsonl")
    assert outcome.out.startswith("old and other have no cell in common")

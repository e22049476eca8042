"""`torch-odt train --background`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from terminals import Terminal

from torch_odt.commands import background
from torch_odt.runtime.background import Background

FEW = ("--data", "digits", "--image-size", "16", "--batch-size", "4", "--budget", "64MiB", "--budget-of", "training")


@pytest.mark.slow
def test_a_run_in_the_background_is_a_process_of_its_own(net: Path) -> None:
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    environment.pop("OMP_WAIT_POLICY", None)
    words = ["train", "--model", f"{net}:make", *FEW, "--steps", "4", "--background", "--nice", "0", "--json"]
    line = [sys.executable, "-m", "torch_odt", *words]
    outcome = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    assert '"steps": 4' in outcome.stdout and "GOMP_SPINCOUNT" not in outcome.stderr


@pytest.mark.slow
def test_a_paused_run_ends_when_it_is_asked_to(net: Path, tmp_path: Path) -> None:
    """It makes one more step, and a checkpoint after it."""
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    beside = ["--background", "--nice", "0", "--threads", "1", "--pause-signals"]
    kept = ["--checkpoint-dir", str(tmp_path / "kept"), "--checkpoint-every", "1", "--epochs", "1000"]
    line = [sys.executable, "-m", "torch_odt", "train", "--model", f"{net}:make", *FEW, *beside, *kept, "--json"]

    def last_step() -> int:
        return max((int(path.name[5:13]) for path in (tmp_path / "kept").glob("step-*.safetensors")), default=0)

    def settled() -> int:
        """The last step once it has been the same for a while."""
        seen, since = -1, time.monotonic()
        while time.monotonic() - since < 3.0:
            if (now := last_step()) != seen:
                seen, since = now, time.monotonic()
            time.sleep(0.05)
        return seen

    with subprocess.Popen(line, env=environment, stdout=-1, stderr=-1, text=True) as process:
        deadline = time.monotonic() + 240
        while last_step() < 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert last_step() >= 3, "it has begun"
        process.send_signal(signal.SIGUSR1)
        paused_at = settled()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert paused_at >= 3 and last_step() == paused_at + 1
    assert f"Stopped after {paused_at + 1} steps" in errors


@pytest.mark.slow
def test_the_whole_line_goes_on_where_it_was_ended(net: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    few = ("--data", "digits", "--image-size", "16", "--batch-size", "50", "--budget", "auto", "--epochs", "2")
    beside = ("--background", "--nice", "0", "--threads", "1", "--checkpoint-every", "1")

    def line(name: str) -> list[str]:
        words = ("--checkpoint-dir", str(tmp_path / name), "--resume", "--save", str(tmp_path / f"{name}.safetensors"))
        return [sys.executable, "-m", "torch_odt", "train", "--model", f"{net}:make", *few, *beside, *words]

    whole = subprocess.run([*line("whole"), "--json"], env=environment, capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
    assert json.loads(whole.stdout)["decisions"][0]["action"] == "begin", "the budget follows what is available"
    with subprocess.Popen(line("ended"), env=environment, stdout=-1, stderr=-1, text=True) as process:
        deadline = time.monotonic() + 240
        while not [*(tmp_path / "ended").glob("step-*")] and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "--resume goes on" in errors, errors
    resumed = subprocess.run(line("ended"), env=environment, capture_output=True, text=True)
    assert resumed.returncode == 0 and "Resumed after" in resumed.stdout, resumed.stderr
    assert re.search(r"epoch 2 30/30, .*memory .* of .*, plan .*, .* a step", resumed.stderr), resumed.stderr
    weights = [load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "ended")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_options_arrive_and_every_step_is_told_of(
    terminal: Terminal, net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Background] = []
    told: list[str] = []
    make = background.make_background

    def harmless(arguments: Any) -> Background:
        asked.append(make(arguments))
        return Background(nice=0, scheduling="normal", idle_storage=False, threads=torch.get_num_threads())

    monkeypatch.setattr(background, "make_background", harmless)
    monkeypatch.setattr("torch_odt.runtime.background.BackgroundRun.before_step", lambda run: told.append("before"))
    monkeypatch.setattr(
        "torch_odt.runtime.background.BackgroundRun.after_step", lambda run, taken: told.append("after")
    )
    words = ("train", "--model", f"{net}:make", *FEW, "--steps", "2", "--background", "--nice", "19", "--threads", "2")
    limits = ("--pause-below-battery", "20", "--pause-above-temperature", "80")
    chosen = ("--least", "joules", "--cores", "0,1")
    outcome = terminal(*words, *limits, *chosen)
    assert outcome.code == 0, outcome.err
    expected = Background(
        nice=19,
        threads=2,
        cores=frozenset({0, 1}),
        least="joules",
        pause_below_battery_percent=20.0,
        pause_above_celsius=80.0,
    )
    assert asked and all(options == expected for options in asked)
    assert told == ["before", "after"] * 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--threads", "2"), "--threads is an option of --background"),
        (("--pause-signals",), "--pause-signals is an option of --background"),
        (("--least", "joules"), "--least is an option of --background"),
        (("--cores", "big"), "--cores is an option of --background"),
        (("--background", "--cores", "medium"), "neither"),
        (("--background", "--cores", "0,"), "neither"),
        (("--background", "--least", "watts"), "invalid choice"),
        (("--background", "--nice", "0", "--cores", "1000000"), "none of the cores"),
        (("--background", "--nice", "40"), "0 to 19"),
        (("--background", "--pause-below-battery", "0"), "above 0"),
    ],
)
def test_bad_options(terminal: Terminal, net: Path, words: tuple[str, ...], text: str) -> None:
    outcome = terminal("train", "--model", f"{net}:make", *FEW, *words)
    assert outcome.code == 2 and text in outcome.err

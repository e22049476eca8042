"""`torch-odt train --background`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
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
    outcome = terminal(*words, *limits)
    assert outcome.code == 0, outcome.err
    expected = Background(nice=19, threads=2, pause_below_battery_percent=20.0, pause_above_celsius=80.0)
    assert asked and all(options == expected for options in asked)
    assert told == ["before", "after"] * 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--threads", "2"), "--threads is an option of --background"),
        (("--pause-signals",), "--pause-signals is an option of --background"),
        (("--background", "--nice", "40"), "0 to 19"),
        (("--background", "--pause-below-battery", "0"), "above 0"),
    ],
)
def test_bad_options(terminal: Terminal, net: Path, words: tuple[str, ...], text: str) -> None:
    outcome = terminal("train", "--model", f"{net}:make", *FEW, *words)
    assert outcome.code == 2 and text in outcome.err

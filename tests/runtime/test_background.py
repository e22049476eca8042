"""Training in the background: what the kernel says of a real process, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_odt import Budget, OdtWarning, TrainStep
from torch_odt.runtime import Background
from torch_odt.runtime.own_threads import OwnThreads

WORKER = Path(__file__).with_name("background_worker.py")


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_real_process() -> None:
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    words = [sys.executable, str(WORKER)]
    with subprocess.Popen(words, stdin=-1, stdout=-1, text=True, env=environment) as process:
        assert process.stdin is not None
        told = answer(process)
        usual = told["before"][0]
        nice = max(usual["nice"], 10)
        expected = {"nice": nice, "policy": os.SCHED_BATCH, "cores": [told["core"]], "io": 3}
        assert len(told["inside"]) >= 2 and all(thread == expected for thread in told["inside"]), told
        assert told["torch_threads"] == 1 and told["notes"] == []
        process.send_signal(signal.SIGUSR1)
        process.stdin.write("\n")
        process.stdin.flush()
        assert answer(process) == {"paused": True}
        process.send_signal(signal.SIGUSR2)
        waited = answer(process)
        assert waited["released"] == 1 and waited["paused_seconds"] > 0
        after = answer(process)
        for thread in after["after"]:
            assert (thread["cores"], thread["policy"]) == (usual["cores"], usual["policy"])
            assert thread["nice"] in (usual["nice"], nice)
        assert after["usual"]
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_real_neighbour_is_noticed_and_the_settings_are_tried_again() -> None:
    """In a process of its own, for a priority does not rise again; the neighbour computes on every core."""
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    line = [sys.executable, str(Path(__file__).with_name("neighbour_worker.py"))]
    outcome = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=180)
    assert outcome.returncode == 0, outcome.stderr
    told = json.loads(outcome.stdout)
    assert told["choices_before"] >= 1
    is_noticed = told["choices_beside"] > told["choices_before"]
    if not is_noticed and told["others_cores"] > 0.3 * told["cores"]:
        pytest.skip(f"others keep {told['others_cores']:.1f} of {told['cores']} cores busy already")
    assert is_noticed, told


def test_what_the_system_refuses_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*parts: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    for name in ("setpriority", "sched_setscheduler", "sched_setaffinity"):
        monkeypatch.setattr(os, name, refuse)
    own = OwnThreads()
    own.set_nice(19)
    own.set_scheduling("idle")
    own.set_cores({0})
    refused = ["nice 19", 'scheduling "idle"', "cores [0]"]
    assert own.notes == [f"{what}: Operation not permitted" for what in refused]
    own.restore()
    assert len(own.notes) == 3, "what was not done needs no undoing"


def test_what_the_system_does_not_have_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("setpriority", "sched_setscheduler", "sched_setaffinity"):
        monkeypatch.delattr(os, name)
    own = OwnThreads()
    own.set_nice(19)
    own.set_scheduling("batch")
    own.set_cores({0})
    assert [note.split(":")[0] for note in own.notes] == ["nice 19", 'scheduling "batch"', "cores [0]"]


def test_threads_are_as_before_afterwards() -> None:
    before = torch.get_num_threads()
    quiet = Background(nice=0, scheduling="normal", idle_storage=False, threads=before + 1)
    with quiet.applied() as background:
        for _ in range(2):
            background.before_step()
            background.after_step()
        assert torch.get_num_threads() == before + 1 and background.setting is not None
    assert torch.get_num_threads() == before


def test_without_a_wait_policy_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    with (
        pytest.warns(OdtWarning, match="GOMP_SPINCOUNT"),
        Background(nice=0, scheduling="normal", idle_storage=False).applied(),
    ):
        pass


def test_joules_without_a_sensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_odt.runtime.background.find_sensors", lambda: [])
    quiet = Background(nice=0, scheduling="normal", idle_storage=False, threads=1, least="joules")
    with quiet.applied() as background:
        assert background.notes == ("no power sensor can be read: settings are chosen by seconds",)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nice": 20}, "0 to 19"),
        ({"nice": -1}, "0 to 19"),
        ({"scheduling": "fifo"}, "fifo"),
        ({"threads": 0}, "at least 1"),
        ({"cores": "medium"}, "medium"),
        ({"cores": frozenset()}, "names none"),
        ({"least": "watts"}, "watts"),
        ({"pause_signals": (10, 10)}, "two different"),
        ({"pause_below_battery_percent": 120.0}, "at most 100"),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Background(**options)


@pytest.mark.parametrize("name", ["nice", "duty", "threads", "pause_above_celsius", "pause_below_battery_percent"])
def test_a_number_is_no_text(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is a (whole )?number, not '5'"):
        Background(**{name: "5"})  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores are not bound here")
def test_cores_that_are_not_there() -> None:
    with (
        pytest.raises(ValueError, match="none of the cores"),
        Background(cores=frozenset({10**6}), threads=1).applied(),
    ):
        pass


def test_a_step_gives_its_memory_back_and_goes_on() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = Budget("64MiB", of="training")
    step = TrainStep(model, torch.nn.functional.cross_entropy, optimizer, budget=budget, cache=False)
    step.release()
    batch = torch.ones(256, 8), torch.zeros(256, dtype=torch.long)
    first = step(*batch)
    plan = step.plan
    step.release()
    assert step(*batch) < first
    assert step.plan is plan


@pytest.mark.parametrize("transactional", [False, True])
def test_a_step_in_the_background(transactional: bool) -> None:
    before = torch.get_num_threads()
    waits = [True, False, False]
    options = Background(
        nice=0, scheduling="normal", idle_storage=False, threads=before + 1, pause_when=lambda: waits.pop(0)
    )
    model = torch.nn.Linear(8, 2)
    step = TrainStep(
        model,
        torch.nn.functional.cross_entropy,
        torch.optim.SGD(model.parameters(), lr=0.1),
        budget=Budget("64MiB", of="training"),
        cache=False,
        background=options,
        transactional=transactional,
    )
    assert step.background is None and torch.get_num_threads() == before
    batch = torch.ones(4, 8), torch.zeros(4, dtype=torch.long)
    first = step(*batch)
    assert step.with_outputs(*batch)[0] < first
    assert step.background is not None and step.background.paused_seconds > 0 and not waits
    assert torch.get_num_threads() == before + 1
    step.close()
    assert step.background is None and torch.get_num_threads() == before


def test_what_is_no_background() -> None:
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="background is True, False"):
        TrainStep(model, None, optimizer, budget="1GiB", background="yes")  # type: ignore[arg-type]


def test_a_program_that_does_not_close_its_step_ends_well() -> None:
    program = """
import torch, torch_odt as odt
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
budget = odt.Budget("64MiB", of="training")
step = odt.TrainStep(model, torch.nn.functional.cross_entropy, optimizer, budget=budget, cache=False, background=True)
for _ in range(3):
    step(torch.ones(4, 8), torch.zeros(4, dtype=torch.long))
"""
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path), "GOMP_SPINCOUNT": "1000"}
    outcome = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0 and "Traceback" not in outcome.stderr, outcome.stderr


def test_more_threads_than_cores_are_told_of() -> None:
    options = Background(nice=0, scheduling="normal", idle_storage=False, threads=1000)
    with pytest.warns(OdtWarning, match="threads=1000 wait for each other"), options.applied() as background:
        assert "threads=1000" in background.notes[0]

"""The wait policy: one more start of the process, and a warning where that is not possible."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from torch_odt import OdtWarning
from torch_odt.runtime.wait_policy import GUARD, SPIN_COUNT, reexecute_with_wait_policy, warn_without_wait_policy


def test_the_process_is_started_anew_with_its_own_words() -> None:
    calls: list[Any] = []
    words = ["python", "-W", "error", "script.py", "--steps", "3"]
    reexecute_with_wait_policy(environment={"A": "1"}, words=words, execute=lambda *parts: calls.append(parts))
    environment = {"A": "1", "GOMP_SPINCOUNT": str(SPIN_COUNT), GUARD: "1"}
    assert calls == [(sys.executable, [sys.executable, *words[1:]], environment)]


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY", GUARD])
def test_once_and_never_against_the_user(name: str) -> None:
    def fail(*parts: object) -> None:
        raise AssertionError("it was started anew")

    reexecute_with_wait_policy(environment={name: "1"}, execute=fail)


def test_a_system_that_refuses() -> None:
    def refuse(*parts: object) -> None:
        raise PermissionError("no")

    with pytest.warns(OdtWarning, match=f"GOMP_SPINCOUNT={SPIN_COUNT}"):
        reexecute_with_wait_policy(environment={}, execute=refuse)


def test_too_late() -> None:
    with pytest.warns(OdtWarning, match="before Python starts"):
        warn_without_wait_policy({})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_without_wait_policy({"OMP_WAIT_POLICY": "PASSIVE"})


def test_a_real_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from torch_odt.runtime import reexecute_with_wait_policy\n"
        "print('start', flush=True)\n"
        "reexecute_with_wait_policy()\n"
        "print(os.environ['GOMP_SPINCOUNT'], sys.argv[1:])\n"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    words = [sys.executable, str(script), "a b"]
    outcome = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert outcome.stdout.splitlines() == ["start", "start", f"{SPIN_COUNT} ['a b']"]


def test_a_program_from_standard_input_goes_on(tmp_path: Path) -> None:
    program = "from torch_odt.runtime import reexecute_with_wait_policy\nreexecute_with_wait_policy()\nprint('made')\n"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    outcome = subprocess.run([sys.executable], input=program, env=environment, capture_output=True, text=True)
    assert outcome.stdout == "made\n" and "read from standard input" in outcome.stderr

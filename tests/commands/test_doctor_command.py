"""`torch-odt doctor`, on good days and bad."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from terminals import Terminal

from torch_odt import _extensions
from torch_odt.commands import doctor

EXTENSIONS = all(status.loaded for status in _extensions.status().values())


def states(document: dict[str, list[dict[str, str]]]) -> dict[str, str]:
    return {finding["topic"]: finding["state"] for finding in document["findings"]}


@pytest.mark.skipif(not EXTENSIONS, reason="needs the extension modules")
def test_fine(terminal: Terminal) -> None:
    outcome = terminal("doctor")
    assert outcome.code == 0
    assert "All is fine." in outcome.out


def test_without_extensions_it_says_what_to_do() -> None:
    environment = os.environ | {"TORCH_ODT_DISABLE_EXTENSIONS": "1"}
    command = [sys.executable, "-m", "torch_odt", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr == ""
    assert "unset TORCH_ODT_DISABLE_EXTENSIONS" in done.stdout
    document = json.loads(done.stdout)
    assert document["fine"] is False
    assert states(document)["module _C"] == states(document)["module _memory"] == "degraded"


@pytest.mark.skipif(not _extensions.has_kernels, reason="nothing is compiled")
@pytest.mark.parametrize(("word", "state"), [("baseline", "note"), ("avx512", "note"), ("sse9", "degraded")])
def test_the_cap_on_instruction_sets_is_reported(word: str, state: str) -> None:
    command = [sys.executable, "-m", "torch_odt", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TORCH_ODT_ISA": word})
    document = json.loads(done.stdout)
    assert states(document)["kernels"] == state
    assert ("OdtWarning: TORCH_ODT_ISA is 'sse9'" in done.stderr) == (word == "sse9")
    kernels = next(finding["what"] for finding in document["findings"] if finding["topic"] == "kernels")
    assert kernels.startswith("baseline") or word != "baseline"
    tables = {"scalar", "avx2", "avx_vnni", "avx512_vnni", "amx", "neon", "neon_dotprod", "neon_i8mm"}
    assert kernels.split("int8 by ")[1].split(",")[0].split(";")[0] in tables


def test_cache_that_cannot_be_written(terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_ODT_CACHE", str(tmp_path / "file" / "cache"))
    outcome = terminal("doctor", "--json")
    assert outcome.code == 1
    assert states(outcome.document)["cache"] == "degraded"


def test_little_memory(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_odt.memory.available_detail", lambda: {"system": 1 << 30, "cgroup_v2": 1 << 20})
    outcome = terminal("doctor")
    assert outcome.code == 1
    assert "cgroup_v2 leaves too little" in outcome.out


def test_absent_package_is_a_note(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OPTIONAL", {"no-such-package": ("nothing", "none")})
    outcome = terminal("doctor", "--json")
    assert states(outcome.document)["no-such-package"] == "note"

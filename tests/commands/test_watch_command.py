"""`torch-odt watch`, a few lines of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from terminals import Terminal

from torch_odt.commands import watch
from torch_odt.runtime.monitor import ControlGroupReading, Pressure, Reading

READING = Reading(
    at_seconds=1.0,
    process_bytes=100 << 20,
    available_bytes=120 << 20,
    limits={"system": 900 << 20, "cgroup_v2": 120 << 20},
    total_bytes=1 << 30,
    control_group=ControlGroupReading(Path("/group"), 300 << 20, 180 << 20, {"oom_kill": 2}, {}),
    pressure={"memory": Pressure(0.015, 0.0, 2.5)},
)


def test_lines_for_people(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "read_system", lambda: READING)
    outcome = terminal("watch", "--count", "2", "--interval", "0.001")
    assert outcome.code == 0, outcome.err
    first, second = outcome.out.splitlines()
    assert first[8:] == second[8:]
    assert "available 120.0 MiB (cgroup_v2) of 1.00 GiB" in first
    assert "control group 180.0 MiB of 300.0 MiB, 2 killed  swap –  waiting for memory 1.5%" in first


def test_this_system_as_json(terminal: Terminal) -> None:
    outcome = terminal("watch", "--count", "1", "--json")
    document = json.loads(outcome.out)
    assert document["available_bytes"] == min(document["limits"].values())
    assert document["total_bytes"] > document["process_bytes"] > 0


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_bad_intervals_are_refused(terminal: Terminal, text: str) -> None:
    assert terminal("watch", "--interval", text).code == 2

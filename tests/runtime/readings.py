"""Readings as a system might give them."""

from __future__ import annotations

from pathlib import Path

from torch_odt.runtime.monitor import ControlGroupReading, Reading

MIB = 1 << 20


def reading(process: int = 100, available: int = 500, group: tuple[int, int] | None = None) -> Reading:
    """Of a process and of what is available, in MiB; and of a control group's limit and use."""
    found = None if group is None else ControlGroupReading(Path("/group"), group[0] * MIB, group[1] * MIB, {}, {})
    limits = {"system": available * MIB}
    return Reading(0.0, process * MIB, available * MIB, limits, 4096 * MIB, control_group=found)

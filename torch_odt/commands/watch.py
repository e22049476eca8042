"""`torch-odt watch`: what the system says of memory, line by line, as the monitor sees it."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict

from torch_odt.commands import options
from torch_odt.commands.table import ABSENT, bytes_text
from torch_odt.runtime.monitor import ControlGroupReading, Pressure, Reading, read_system

NAME = "watch"
SUMMARY = "show what the system has left, again and again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="between two lines (default: 1)"
    )
    parser.add_argument("--count", type=options.positive_int, metavar="LINES", help="stop after so many lines")
    parser.add_argument("--json", action="store_true", help="print one JSON document a line")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and every warning")


def run(arguments: argparse.Namespace) -> int:
    """Print readings until there are enough, or until Ctrl-C."""
    shown = 0
    while arguments.count is None or shown < arguments.count:
        if shown:
            time.sleep(arguments.interval)
        reading = read_system()
        print(_document(reading) if arguments.json else _line(reading), flush=True)
        shown += 1
    return 0


def _document(reading: Reading) -> str:
    document = asdict(reading)
    if reading.control_group is not None:
        document["control_group"]["folder"] = str(reading.control_group.folder)
    return json.dumps(document)


def _line(reading: Reading) -> str:
    source = min(reading.limits, key=lambda name: reading.limits[name])
    parts = [
        time.strftime("%H:%M:%S"),
        f"available {bytes_text(reading.available_bytes)} ({source}) of {bytes_text(reading.total_bytes)}",
        f"control group {_group_text(reading.control_group)}",
        f"swap {bytes_text(reading.swap_used_bytes)}",
        f"waiting for {_pressure_text(reading.pressure)}",
    ]
    return "  ".join(parts)


def _group_text(group: ControlGroupReading | None) -> str:
    if group is None:
        return ABSENT
    kills = group.events.get("oom_kill", 0)
    text = f"{bytes_text(group.used_bytes)} of {bytes_text(group.limit_bytes)}"
    return f"{text}, {kills} killed" if kills else text


def _pressure_text(pressure: dict[str, Pressure]) -> str:
    return ", ".join(f"{kind} {each.some:.1%}" for kind, each in pressure.items()) or ABSENT


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value

"""The machine as a record names it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator

import psutil
import torch

from torch_odt.capture.machine import machine_name
from torch_odt.measure.governors import current_governor
from torch_odt.measure.meter import Absent
from torch_odt.measure.record import Machine
from torch_odt.measure.window import Window
from torch_odt.memory import available_detail, process_bytes

_PACKAGES = ("torch", "torch_odt", "torchvision", "timm")
_LOOK_SECONDS = 0.05


def describe_machine(name: str = "") -> Machine:
    """This machine, its sensors asked once; `name` is what the user calls it, else its host name."""
    processor, _, instruction_sets = machine_name().rsplit(", ", 2)
    governor = current_governor()
    return Machine(
        name=name or platform.node(),
        processor=processor,
        instruction_sets=tuple(instruction_sets.split()),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=min(psutil.virtual_memory().total, process_bytes() + min(available_detail().values())),
        governor="" if isinstance(governor, Absent) else governor,
        accelerator=torch.cuda.get_device_name(0) if torch.cuda.is_available() else _metal(),
        system=f"{platform.system()} {platform.release()}",
        versions={"python": platform.python_version(), **dict(_versions())},
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        absent=_absent_sensors(),
    )


def _metal() -> str:
    return "Apple's GPU" if torch.backends.mps.is_available() else ""


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue


def _absent_sensors() -> dict[str, str]:
    """By "source name", in the order of the meters."""
    with Window() as window:
        # Some ticks of the kernel's clock, or it says nothing of how busy cores are.
        time.sleep(_LOOK_SECONDS)
    return {
        f"{source} {name}": quantity.reason
        for source, quantities in window.quantities.items()
        for name, quantity in quantities.items()
        if isinstance(quantity, Absent)
    }

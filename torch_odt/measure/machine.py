"""The machine as a record names it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from torch_odt.capture.machine import machine_name
from torch_odt.measure.governors import current_governor
from torch_odt.measure.meter import Absent
from torch_odt.measure.record import Machine
from torch_odt.measure.window import Window
from torch_odt.memory._control_group import control_groups
from torch_odt.memory._files import SYSTEM_ROOT

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
        memory_bytes=memory_bytes(),
        governor="" if isinstance(governor, Absent) else governor,
        accelerator=_cards() if torch.cuda.is_available() else _metal(),
        system=f"{platform.system()} {platform.release()}",
        versions={"python": platform.python_version(), **dict(_versions())},
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        absent=_absent_sensors(),
    )


def memory_bytes(root: Path = SYSTEM_ROOT) -> int:
    """What this process could hold if nothing else ran: of the machine, or the tightest limit; not what is free."""
    groups = [level.limit_bytes for group in control_groups(root=root) for level in group.levels]
    limits = [limit for limit in groups if limit is not None]
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft_bytes, _ = resource.getrlimit(kind)
        if soft_bytes != resource.RLIM_INFINITY:
            limits.append(soft_bytes)
    return min([int(psutil.virtual_memory().total), *limits])


def _cards() -> str:
    """Their names; how many there are of each."""
    names = Counter(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in names.items())


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

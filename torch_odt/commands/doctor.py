"""`torch-odt doctor`: what this installation has, what it lacks, and what to do about it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import torch_odt
from torch_odt.cache import FOLDER_VARIABLE, default_folder
from torch_odt.commands import options
from torch_odt.commands.table import format_bytes

NAME = "doctor"
SUMMARY = "check the installation: exit code 0 if all is fine, 1 if something is degraded"

OPTIONAL = {
    "torchvision": ("models by name and image data sets", "vision"),
    "scikit-learn": ("the demo's digits", "demo"),
    "matplotlib": ("plots of plans", "plot"),
}
WITHOUT = {
    "_C": "operators run in Python: the same results, slower",
    "_memory": "no arena, no cap and no exact counts: budgets are kept by prediction alone",
}
SMALL_MEMORY_BYTES = 256 << 20


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic, what: where it stands in the report, and what was found.
        state: "fine", "note" (worth knowing), or "degraded".
        advice: what to do, unless all is fine.
    """

    topic: str
    what: str
    state: str = "fine"
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    options.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Look at everything and report."""
    findings = list(examine())
    degraded = [finding for finding in findings if finding.state == "degraded"]
    if arguments.json:
        options.print_json({"fine": not degraded, "findings": [asdict(finding) for finding in findings]})
    else:
        _print_report(findings, len(degraded))
    return 1 if degraded else 0


def examine() -> Iterator[Finding]:
    """Everything that is looked at, in the order of the report."""
    yield Finding("torch_odt", torch_odt.__version__)
    yield Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Finding("torch", f"{torch.__version__} ({_wheel()})")
    yield from _extensions()
    yield from _kernels()
    yield _cpu()
    yield _threads()
    yield from _memory()
    yield _cache()
    yield from _optional_packages()


def _wheel() -> str:
    if torch.version.cuda:
        return f"the wheel for CUDA {torch.version.cuda}, which holds more memory when idle than the one for CPUs"
    if torch.version.hip:
        return f"the wheel for ROCm {torch.version.hip}"
    return "the wheel for CPUs"


def _extensions() -> Iterator[Finding]:
    from torch_odt import _extensions as extensions

    for short, status in extensions.status().items():
        topic = f"module {short}"
        if status.loaded:
            yield Finding(topic, "loaded")
        else:
            effect = WITHOUT.get(short, "")
            yield Finding(topic, f"{status.reason}; {effect}", "degraded", _extension_advice(status.reason or ""))


def _extension_advice(reason: str) -> str:
    if "disabled" in reason:
        return "unset TORCH_ODT_DISABLE_EXTENSIONS"
    return "install a C++20 compiler and Python's headers, then reinstall torch_odt beside the torch it runs with"


def _kernels() -> Iterator[Finding]:
    from torch_odt import _extensions as extensions

    used, table = extensions.instruction_set(), extensions.int8_table()
    cap = os.environ.get(extensions.ISA_VARIABLE)
    if used is None:
        return
    used = f"{used}, int8 by {table}"
    if problem := extensions.why_uncapped():
        yield Finding("kernels", f"{used}; {problem}", "degraded", "name one of them, or unset it")
    elif cap:
        yield Finding("kernels", f"{used}, capped at {cap}", "note", f"unset {extensions.ISA_VARIABLE}, unless to test")
    else:
        yield Finding("kernels", used)


def _cpu() -> Finding:
    from torch_odt.capture.machine import machine_name

    return Finding("cpu", machine_name())


def _threads() -> Finding:
    policy = os.environ.get("OMP_WAIT_POLICY", "").upper()
    spin = os.environ.get("GOMP_SPINCOUNT", "")
    count = torch.get_num_threads()
    text = f"{count}, wait policy {policy.lower() or 'default'}" + (f", spin count {spin}" if spin else "")
    if count > 1 and not policy and not spin and "OpenMP" in torch.__config__.parallel_info():
        advice = "set GOMP_SPINCOUNT=10000, or steps take many times longer while other processes are busy"
        return Finding("threads", text, "note", advice)
    return Finding("threads", text)


def _memory() -> Iterator[Finding]:
    from torch_odt import memory

    detail = memory.available_detail()
    smallest = min(detail, key=lambda source: detail[source])
    parts = ", ".join(f"{source.replace('_', ' ')} {format_bytes(count)}" for source, count in sorted(detail.items()))
    held = format_bytes(memory.process_bytes())
    yield Finding("held now", f"{held} that the kernel cannot take back, before a model, data and an optimizer")
    if detail[smallest] < SMALL_MEMORY_BYTES:
        advice = f"raise the limit or free memory: {smallest} leaves too little to train"
        yield Finding("available", parts, "degraded", advice)
    else:
        yield Finding("available", parts)


def _cache() -> Finding:
    folder = default_folder()
    reason = _why_not_writable(folder)
    if reason is None:
        return Finding("cache", str(folder))
    advice = f"set {FOLDER_VARIABLE} to a folder that can be written to, or every start measures and plans anew"
    return Finding("cache", f"{folder}: {reason}", "degraded", advice)


def _why_not_writable(folder: Path) -> str | None:
    """Why no file can be made in a folder that may not exist yet; None if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _optional_packages() -> Iterator[Finding]:
    for package, (purpose, extra) in OPTIONAL.items():
        try:
            yield Finding(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package, f"not installed: {purpose}", "note", f'pip install "torch_odt[{extra}]"')


def _print_report(findings: list[Finding], degraded: int) -> None:
    marks: dict[str, Any] = {"fine": " ", "note": "i", "degraded": "!"}
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        print(f"{marks[finding.state]} {finding.topic:<{width}}  {finding.what}")
        if finding.advice:
            print(f"  {'':<{width}}  -> {finding.advice}")
    if degraded:
        print(f"\n{degraded} thing{'s are' if degraded > 1 else ' is'} degraded.")
    else:
        print("\nNothing is degraded." if any(f.state == "note" for f in findings) else "\nAll is fine.")

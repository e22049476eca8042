"""Devices that a plan may be made for without having them: what they compute, move and draw, in a small TOML file.

    description = "Raspberry Pi 4B+ (Cortex-A72)"
    flops_per_second = 2e9
    watts = 3.0

    [storage]
    read_latency_seconds = 5.1e-6
    read_bytes_per_second = 45.5e6
    write_latency_seconds = 18.5e-6
    write_bytes_per_second = 24.5e6
    watts = 0.15

`storage` may be left out: then nothing is paged. It may name `limit_bytes`, and whether transfers run beside ops
(`overlaps`, false unless it says so).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

from torch_odt.capture.costs import Costs, OpCost, TransferCosts
from torch_odt.capture.estimates import estimate, multiplications
from torch_odt.capture.graph import Op, TrainingGraph

_UNLIMITED_BYTES = 1 << 62
# Operations for each element of what an op returns, after POET's cost model; 1 for those that are not here.
_PER_ELEMENT = {
    "tanh": 100,
    "tanh_backward": 100,
    "gelu": 100,
    "gelu_backward": 100,
    "erf": 100,
    "sigmoid": 4,
    "sigmoid_backward": 4,
    "native_batch_norm": 2,
    "native_batch_norm_backward": 4,
    "native_layer_norm": 2,
    "native_layer_norm_backward": 4,
    "_softmax": 4,
    "_softmax_backward_data": 4,
    "_log_softmax": 4,
    "_log_softmax_backward_data": 4,
}


@dataclass(frozen=True)
class Device:
    """What a device is good for.

    Attributes:
        description: for people.
        flops_per_second: additions and multiplications, counted separately.
        watts: what it draws while it computes.
        storage: what paging costs; None where there is nothing to page to.
    """

    description: str
    flops_per_second: float
    watts: float
    storage: TransferCosts | None = None

    @classmethod
    def of_value(cls, value: str | Path | Device) -> Device | None:
        """What a `device=` may be given: a name, a TOML file, a device; None stands for this machine, by "this".

        Raises:
            ValueError, OSError: as for `load_device`.
        """
        if isinstance(value, Device):
            return value
        return None if value == "this" else load_device(value)


def device_names() -> tuple[str, ...]:
    """The devices that this package knows."""
    return tuple(sorted(path.name.removesuffix(".toml") for path in _folder().iterdir() if path.name.endswith(".toml")))


def load_device(name: str | Path) -> Device:
    """A device by its name, or from a TOML file.

    Raises:
        ValueError: there is no such device, or the file describes none; the text says what is wrong.
        OSError: the file cannot be read.

    Example:
        >>> load_device("cortex-a72").flops_per_second
        2000000000.0
    """
    path = Path(name)
    if path.suffix == ".toml":
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no TOML: {error}") from None
        return _device_from(text, str(path))
    if str(name) not in device_names():
        raise ValueError(f"there is no device {str(name)!r}; there are {', '.join(device_names())}, and .toml files")
    return _device_from((_folder() / f"{name}.toml").read_text(encoding="utf-8"), str(name))


def costs_on(graph: TrainingGraph, device: Device, measured: Costs | None = None) -> Costs:
    """What a graph's ops would cost on a device: their operations at its speed, as POET counts them.

    Args:
        graph: the step.
        device: where it is to run.
        measured: allocations are taken from here; from the shapes if None.
    """
    known = {} if measured is None else measured.ops
    ops = {op.index: _cost_on(graph, op, device, known.get(op.index)) for op in graph.ops}
    notes = [f"nothing was measured: seconds and joules are a model's, of {device.description}"]
    if measured is None:
        notes.append(
            "allocations are guessed from shapes, without what operators allocate inside: a step that is to follow the "
            "plan needs measured costs (`torch-odt profile`) to keep to it"
        )
    else:
        notes.append(f"allocations are those of {measured.machine}")
    return Costs(ops, machine=device.description, notes=notes, transfers=device.storage, watts=device.watts)


def _cost_on(graph: TrainingGraph, op: Op, device: Device, known: OpCost | None) -> OpCost:
    cost = known or estimate(graph, op)
    seconds = 0.0 if op.is_view else _operations(graph, op) / device.flops_per_second
    return replace(cost, seconds=seconds, source="estimated")


def _operations(graph: TrainingGraph, op: Op) -> int:
    """Additions and multiplications of a call."""
    products = 2 * multiplications(graph, op)
    if products:
        return products
    name = op.target.split(".")[1] if "." in op.target else op.target
    results = [graph.values[value].shape for value in op.results]
    largest = max((prod(shape) for shape in results), default=0)
    if "pool2d" in name and len(op.args) > 1 and isinstance(op.args[1], (list, tuple)):
        # A comparison or an addition for each element of the window, forward; the same scattered, backward.
        return 2 * prod(op.args[1]) * largest
    read = max((prod(graph.values[value].shape) for value in op.reads), default=0)
    return _PER_ELEMENT.get(name, 1) * max(largest, read if largest <= 1 else 0)


def _device_from(text: str, name: str) -> Device:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name} is no TOML: {error}") from None
    storage = data.pop("storage", None)
    wanted = {"description", "flops_per_second", "watts"}
    _check_names(name, data, wanted, wanted)
    if not isinstance(data["description"], str):
        raise ValueError(f"{name}: description is a text, not {data['description']!r}")
    _check_numbers(name, data, ("flops_per_second", "watts"))
    return Device(
        description=data["description"],
        flops_per_second=float(data["flops_per_second"]),
        watts=float(data["watts"]),
        storage=None if storage is None else _storage_from(storage, name),
    )


def _storage_from(data: Any, name: str) -> TransferCosts:
    if not isinstance(data, dict):
        raise ValueError(f"{name}: storage is a table")
    # Storage draws while it works; what waiting draws is this machine's own affair.
    known = {field.name for field in fields(TransferCosts)} - {"waiting_watts"}
    optional = {"limit_bytes", "overlaps"}
    _check_names(f"{name}: storage", data, known - optional, known)
    _check_numbers(f"{name}: storage", data, (known - {"overlaps"}) & data.keys())
    if not isinstance(data.get("overlaps", False), bool):
        raise ValueError(f"{name}: storage: overlaps is true or false, not {data['overlaps']!r}")
    return TransferCosts(**{"limit_bytes": _UNLIMITED_BYTES, "overlaps": False, **data})


def _check_names(name: str, data: dict[str, Any], required: set[str], known: set[str]) -> None:
    missing, unknown = sorted(required - data.keys()), sorted(data.keys() - known)
    if missing:
        raise ValueError(f"{name}: {missing[0]} is missing; a device has {', '.join(sorted(required))}")
    if unknown:
        raise ValueError(f"{name}: there is no {unknown[0]}; a device has {', '.join(sorted(known))}")


def _check_numbers(name: str, data: dict[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        value = data[key]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or (value == 0 and "latency" not in key and key != "watts"):
            raise ValueError(f"{name}: {key} is a number above 0, not {value!r}")


def _folder() -> Any:
    return resources.files("torch_odt.capture") / "devices"

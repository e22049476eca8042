"""The devices that torch trains on: waiting for them, and what torch counts of their memory."""

from __future__ import annotations

from typing import Any

import torch

from torch_odt.measure.meter import Absent, Quantity


def device_reason(device: str) -> str:
    """Why torch cannot compute on a device; empty where it can."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return ""


def synchronize(device: str) -> None:
    """Waits until what was asked of a device is done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device.startswith("mps"):
        torch.mps.synchronize()


def moved(value: Any, device: str) -> Any:
    """Tensors, also in tuples, lists and dictionaries, on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(moved(each, device) for each in value)
    if isinstance(value, dict):
        return {key: moved(each, device) for key, each in value.items()}
    return value


class DeviceMemory:
    """What torch allocates on a device that has memory of its own.

    On cuda torch counts the peaks of what tensors took ("allocated") and of what it holds of the device ("reserved").
    On mps there is none of the former; of the latter it is the highest of all looks: torch keeps what it was given.

    Args:
        device: as torch names it; on the CPU it is the process's memory that counts.
    """

    source = "device"

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._reserved_bytes = 0

    def begin(self) -> None:
        self._reserved_bytes = 0
        if self._device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(self._device)
        self.poll()

    def poll(self) -> None:
        if self._device.startswith("mps"):
            self._reserved_bytes = max(self._reserved_bytes, torch.mps.driver_allocated_memory())

    def end(self) -> dict[str, Quantity]:
        self.poll()
        if self._device.startswith("cuda"):
            return {
                "allocated_bytes": torch.cuda.memory_allocated(self._device),
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(self._device),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(self._device),
            }
        if self._device.startswith("mps"):
            return {
                "allocated_bytes": torch.mps.current_allocated_memory(),
                "peak_allocated_bytes": Absent("torch counts no peak on mps"),
                "peak_reserved_bytes": self._reserved_bytes,
            }
        return {"peak_allocated_bytes": Absent(_why_not(self._device))}


def _why_not(device: str) -> str:
    if device != "cpu":
        return f"the memory of {device} is not counted"
    has_one = torch.cuda.is_available() or torch.backends.mps.is_available()
    return "what is measured runs on the CPU" if has_one else "torch sees no accelerator"

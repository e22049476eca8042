"""The devices that torch trains on: waiting for them, and what they count of their own memory."""

from __future__ import annotations

from typing import Any

import torch

from torch_odt.measure.record import Reading


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


def reset_device_peak(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)


def device_memory(device: str) -> dict[str, dict[str, Reading]]:
    """What torch allocated on a device, by source, as meters tell it; nothing for the CPU."""
    if device.startswith("cuda"):
        peak = torch.cuda.max_memory_allocated(device)
        return {"cuda": {"peak_allocated_bytes": peak, "allocated_bytes": torch.cuda.memory_allocated(device)}}
    if device.startswith("mps"):
        absent = {"absent": "torch counts no peak on mps"}
        return {"mps": {"peak_allocated_bytes": absent, "allocated_bytes": torch.mps.current_allocated_memory()}}
    return {}

"""Looks at what `torch-odt measure` is asked for before the first cell, in a process of its own: `look`.

A user's model runs code of its own, which must not stay in the process that starts cells.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch_odt.commands.errors import UserError


@dataclass(frozen=True)
class OwnBatch:
    """The batch that a user's function brings."""

    batch_size: int
    input_shape: tuple[int, ...]


@dataclass(frozen=True)
class Seen:
    """What is known before the first cell.

    Attributes:
        held_bytes: by a cell's process before it makes a model.
        own_batches: by model, of those that bring one.
        error: what a user is to put right; empty if there is nothing.
    """

    held_bytes: int = 0
    own_batches: Mapping[str, OwnBatch] = field(default_factory=dict)
    error: str = ""


def look(shapes: Mapping[str, tuple[int, ...]], device: str) -> Seen:
    """Makes each model once, lets it score one sample, and asks torch for the device.

    Args:
        shapes: of one sample, by model.
        device: as torch names it.

    Raises:
        UserError: there is no such model, it does not take such samples, or torch cannot compute on the device.
    """
    command = [sys.executable, "-P", "-m", "torch_odt.commands.measure_check"]
    asked = json.dumps({"shapes": shapes, "device": device})
    ended = subprocess.run(command, input=asked, capture_output=True, text=True)
    lines = ended.stdout.splitlines()
    if ended.returncode or not lines:
        last = next(reversed(ended.stderr.split("\n")[:-1]), f"exit code {ended.returncode}")
        raise UserError(f"{', '.join(shapes) or device} cannot be looked at before the measurement: {last}")
    found = json.loads(lines[-1])
    if found["error"]:
        raise UserError(found["error"])
    own = {
        name: OwnBatch(each["batch_size"], tuple(each["input_shape"])) for name, each in found["own_batches"].items()
    }
    return Seen(found["held_bytes"], own)


def _seen(shapes: Mapping[str, list[int]], device: str) -> Seen:
    from torch_odt import memory
    from torch_odt.commands.models import load_task
    from torch_odt.measure.devices import device_reason

    memory.install()
    held_bytes = memory.process_bytes()
    if device != "cpu" and (reason := device_reason(device)):
        return Seen(error=f"--device {device}: torch cannot compute there: {reason}")
    own: dict[str, OwnBatch] = {}
    for name, shape in shapes.items():
        try:
            task = load_task(name, shape=(1, *shape), classes=10)
        except UserError as error:
            hint = "; give its samples' shape as --sample 3x32x32" if "does not take samples" in str(error) else ""
            return Seen(error=f"{error}{hint}")
        if task.brings_batch:
            first = _first_tensor(task.batch[0])
            if first is None or not first.dim():
                return Seen(error=f"--model {name}: the input of its batch holds no tensor of samples")
            own[name] = OwnBatch(first.shape[0], tuple(first.shape[1:]))
    return Seen(held_bytes, own)


def _first_tensor(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((found for each in inside if (found := _first_tensor(each)) is not None), None)


def main() -> int:
    """Answer on standard output."""
    asked = json.loads(sys.stdin.read())
    print("\n" + json.dumps(asdict(_seen(asked["shapes"], asked["device"]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

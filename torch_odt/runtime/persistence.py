"""Checkpoints: a training that is killed at any moment goes on from its last one, bit for bit.

The further course of a run depends on the model, the optimizer, the scheduler, the random generators and the place in
the data; all of it is written together or not at all.
"""

from __future__ import annotations

import random
import signal
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from torch_odt.errors import CheckpointError, OdtWarning, first_line
from torch_odt.runtime.state_file import read_state, write_state

__all__ = ["Checkpointer", "Resumed", "Stateful"]

_PATTERN = "step-*.safetensors"


class Stateful(Protocol):
    """What can tell its state and take it back: optimizers, schedulers, samplers, data loaders."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass(frozen=True)
class Resumed:
    """Where a training goes on.

    Attributes:
        step: the number that the checkpoint was saved under.
        values: what was saved beside: the epoch, the place in it.
        path: the checkpoint.
    """

    step: int
    values: dict[str, Any]
    path: Path


class Checkpointer:
    """Keeps the last checkpoints of a training in a folder, and takes up the newest one that is whole.

    Choose it for runs that may be killed, for memory, for power or by a scheduler: on any loop, plain or of this
    package. A file is written beside the others, forced to the disk and renamed, so that there is always a whole one.
    Every tensor has a checksum; a file that was damaged since is passed over, with a warning, for the one before.
    Saving copies no tensor, so it takes hardly any memory.

    Between two optimizer steps is the moment to save: gradients are no part of a checkpoint.

    Args:
        folder: made if it is not there; one for each training.
        model: what is trained; None where it does not change, as behind an `online_head`, which goes to `others`.
        optimizer: its optimizer, or None where there is none.
        scheduler: its scheduler of learning rates, or None.
        others: more that has a state, by name: samplers, a gradient scaler, an average of the weights.
        every_steps: `step_done` saves after each so many steps; None saves on a signal alone.
        keep: so many checkpoints stay, the newest ones.
        signals: after one of these, `step_done` saves and ends the process; another one of the same ends it at once.
            Signals reach the main thread alone: elsewhere none are watched.

    Raises:
        OSError: the folder cannot be made or written to.
        ValueError: `keep` or `every_steps` is no positive number, a name in `others` is taken, or nothing is given.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Checkpointer(folder, model=model, optimizer=optimizer, every_steps=100) as checkpointer:
        ...         resumed = checkpointer.resume()
        ...         for step in range(resumed.step if resumed else 0, 200):
        ...             path = checkpointer.step_done(step + 1)
        ...     path.name
        'step-00000200.safetensors'
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        others: Mapping[str, Stateful] | None = None,
        every_steps: int | None = None,
        keep: int = 3,
        signals: Iterable[signal.Signals] = (signal.SIGTERM,),
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, not {every_steps}")
        own: dict[str, Stateful | None] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        parts = {name: part for name, part in own.items() if part is not None}
        if taken := sorted({*parts, "random", "step", "values"} & {*(others or {})}):
            raise ValueError(f"{', '.join(taken)} in others: give it another name")
        if not parts and not others:
            raise ValueError("there is nothing to save: give a model and its optimizer, or others by name")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._parts = parts | dict(others or {})
        self._every_steps = every_steps
        self._keep = keep
        self._signals = tuple(signals)
        self._earlier: dict[signal.Signals, Any] = {}
        self._received: signal.Signals | None = None
        self._saved: Path | None = None
        for left in self.folder.glob(f"{_PATTERN}.partial"):
            left.unlink(missing_ok=True)

    def __enter__(self) -> Checkpointer:
        for number in self._signals:
            try:
                self._earlier[number] = signal.signal(number, self._on_signal)
            except ValueError:  # not the main thread
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._earlier.clear()

    @property
    def paths(self) -> list[Path]:
        """The checkpoints that there are, newest first."""
        return sorted(self.folder.glob(_PATTERN), key=_step_of, reverse=True)

    def save(self, step: int, **values: Any) -> Path:
        """Write a checkpoint now.

        Args:
            step: how many steps have been made.
            values: what else the loop needs to go on: numbers, text, tensors, lists and dicts of them.

        Returns:
            The file.

        Raises:
            OSError: it could not be written, as where the disk is full; earlier checkpoints are as they were.
            TypeError: a state or a value is of a kind that a file cannot hold.
        """
        state: dict[str, Any] = {name: part.state_dict() for name, part in self._parts.items()}
        state |= {"random": _random_state(), "step": step, "values": values}
        path = self.folder / f"step-{step:08d}.safetensors"
        write_state(path, state)
        self._saved = path
        for old in self.paths[self._keep :]:
            old.unlink(missing_ok=True)
        return path

    def step_done(self, step: int, **values: Any) -> Path | None:
        """Call it after every step: saves when it is time, or when a signal asked for it, which ends the process then.

        Returns:
            The newest checkpoint that this object has written; None before the first.

        Raises:
            SystemExit: a signal was received; the checkpoint is written.
            OSError, TypeError: as `save`.
        """
        is_due = self._every_steps is not None and step % self._every_steps == 0
        received = self._received
        if is_due or received is not None:
            self.save(step, **values)
        if received is not None:
            raise SystemExit(128 + received)
        return self._saved

    def resume(self) -> Resumed | None:
        """Put everything back as the newest whole checkpoint has it.

        Returns:
            Where to go on; None where the folder holds no checkpoint.

        Raises:
            CheckpointError: there are checkpoints, but none can be read.
            RuntimeError, ValueError: the checkpoint is of another model or another optimizer.
        """
        damaged: list[str] = []
        for path in self.paths:
            try:
                state = read_state(path)
            except (CheckpointError, OSError) as error:
                damaged.append(first_line(error))
                warnings.warn(f"{first_line(error)}; the checkpoint before it is taken", OdtWarning, stacklevel=2)
                continue
            self._put_back(state, path)
            return Resumed(state["step"], _copied(state["values"]), path)
        if damaged:
            raise CheckpointError(f"no checkpoint in {self.folder} can be read: {'; '.join(damaged)}")
        return None

    def _put_back(self, state: dict[str, Any], path: Path) -> None:
        if absent := [name for name in self._parts if name not in state]:
            raise CheckpointError(f"{path} has no state of {', '.join(absent)}: it is another training's")
        for name, part in self._parts.items():
            # A module copies what it is given; others may keep it, and are not to keep the file.
            part.load_state_dict(state[name] if isinstance(part, nn.Module) else _copied(state[name]))
        _set_random_state(state["random"])

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            raise SystemExit(128 + number)
        self._received = signal.Signals(number)


def _step_of(path: Path) -> int:
    digits = path.name.removeprefix("step-").removesuffix(".safetensors")
    return int(digits) if digits.isdigit() else -1


def _random_state() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"].clone())
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def _copied(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.clone(memory_format=torch.preserve_format)
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(_copied, tree))
    return tree

"""Checkpoints: a training that is killed at any moment goes on from its last one, bit for bit.

The further course of a run depends on the model, the optimizer, the scheduler, the random generators and the place in
the data; all of it is written together or not at all.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import signal
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torch_odt.errors import CheckpointError, OdtWarning, first_line, require_number
from torch_odt.runtime.state_file import read_state, write_state

if TYPE_CHECKING:
    from torch_odt.execute.kept_plans import PlanKeeper
    from torch_odt.execute.step import TrainStep

__all__ = ["Checkpointer", "Resumed", "Stateful"]

_PATTERN = "step-*.safetensors"
# Beside the parts, a checkpoint holds these.
_OWN = ("plans", "random", "step", "threads", "values")


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

    Between two optimizer steps is the moment to save: gradients are no part of a checkpoint. With `step`, one in the
    middle of an accumulation is refused, and `step_done` waits for its end.

    The number of threads of torch changes the last bits: where it is another one than when the checkpoint was written,
    `resume` warns.

    A folder belongs to one training: where it holds checkpoints, `resume` comes before the first step. What `resume`
    passes over is set aside as `*.damaged`, so that it is neither taken nor counted again.

    Args:
        folder: made if it is not there; one for each training.
        model: what is trained; None where it does not change, as behind an `online_head`, which goes to `others`.
        optimizer: its optimizer, or None where there is none.
        scheduler: its scheduler of learning rates, or None.
        step: the `TrainStep` that trains it. Its plans are kept, and followed after `resume`, whatever memory there is
            then: to plan anew may cut batches in another way, and then the last bits differ. What does not fit any more
            is planned anew, with a warning, and what a policy decides (see `Controller`) is not kept.
        others: more that has a state, by name: samplers, a gradient scaler, an average of the weights.
        every_steps: `step_done` saves after each so many steps; None saves on a signal alone.
        keep: so many checkpoints stay, the newest ones.
        signals: after one of these, `step_done` saves and ends the process; a second one ends it at once. One that no
            `step_done` has followed is handed on when the `with` block ends. Signals reach the main thread alone:
            elsewhere none are watched. In a forked child SIGINT is left to this process, and others end the child.

    Raises:
        OSError: the folder cannot be made.
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
        step: TrainStep | None = None,
        others: Mapping[str, Stateful] | None = None,
        every_steps: int | None = None,
        keep: int = 3,
        signals: Iterable[signal.Signals] = (signal.SIGTERM,),
    ) -> None:
        require_number("keep", keep, whole=True)
        if every_steps is not None:
            require_number("every_steps", every_steps, whole=True)
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, not {every_steps}")
        own: dict[str, Stateful | None] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        parts = {name: part for name, part in own.items() if part is not None}
        for name, part in {**parts, **(others or {})}.items():
            if not (callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))):
                raise TypeError(f"{name} has no state_dict and load_state_dict: {type(part).__name__} cannot be saved")
        if taken := sorted({*parts, *_OWN} & {*(others or {})}):
            raise ValueError(f"{', '.join(taken)} in others: give it another name")
        if not parts and not others:
            raise ValueError("there is nothing to save: give a model and its optimizer, or others by name")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._parts = parts | dict(others or {})
        self._keeper = None if step is None else _keeper_of(step)
        self._every_steps = every_steps
        self._is_due = False
        self._keep = keep
        self._signals = tuple(signals)
        self._earlier: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        self._received: signal.Signals | None = None
        self._saved: Path | None = None
        self._last_step: int | None = None
        self._is_of_others = bool(self.paths)

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
            # None stands for a handler that was not made in Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._earlier.clear()
        received, self._received = self._received, None
        if received is not None and error is None:
            signal.raise_signal(received)

    @property
    def paths(self) -> list[Path]:
        """The checkpoints that there are, newest first."""
        return self.paths_in(self.folder)

    @staticmethod
    def paths_in(folder: str | Path) -> list[Path]:
        """The checkpoints that a folder holds, newest first; none where there is no such folder."""
        return sorted(Path(folder).glob(_PATTERN), key=_step_of, reverse=True)

    def save(self, step: int, **values: Any) -> Path:
        """Write a checkpoint now.

        Args:
            step: how many steps have been made.
            values: what else the loop needs to go on: numbers, text, tensors, lists and dicts of them.

        Returns:
            The file.

        Raises:
            CheckpointError: the folder holds another run's checkpoints, which `resume` has not taken up; or the step is
                in the middle of an accumulation.
            OSError: it could not be written, as where the disk is full; earlier checkpoints are as they were.
            TypeError: a state or a value is of a kind that a file cannot hold.
            ValueError: a later step has been saved, or resumed from.
        """
        self._require_own_folder()
        if self._last_step is not None and step < self._last_step:
            raise ValueError(f"step {step} is before step {self._last_step}, which has been saved: count on from there")
        if calls := self._calls_before_update:
            raise CheckpointError(
                f"the step is in the middle of an accumulation, after {calls} calls, whose gradients a checkpoint does "
                "not hold: save after the call that completes it, or after flush()"
            )
        for left in self.folder.glob(f"{_PATTERN}.partial"):
            # Where it cannot be removed, nothing can be written either, and that tells why.
            with contextlib.suppress(OSError):
                left.unlink()
        state: dict[str, Any] = {name: part.state_dict() for name, part in self._parts.items()}
        state |= {"random": _random_state(), "threads": torch.get_num_threads(), "step": step, "values": values}
        if self._keeper is not None:
            state["plans"] = self._keeper.state()
        path = self.folder / f"step-{step:08d}.safetensors"
        write_state(path, state)
        self._saved, self._last_step, self._is_due = path, step, False
        others = [other for other in self.paths if other != path]
        for old in others[self._keep - 1 :]:
            old.unlink(missing_ok=True)
        return path

    def step_done(self, step: int, **values: Any) -> Path | None:
        """Call it after every step: saves when it is time, or when a signal asked for it, which ends the process then.

        In the middle of an accumulation both wait for its end.

        Returns:
            The newest checkpoint that this object has written; None before the first.

        Raises:
            SystemExit: a signal was received; the checkpoint is written.
            CheckpointError, OSError, TypeError, ValueError: as `save`.
        """
        self._require_own_folder()
        self._is_due |= self._every_steps is not None and step % self._every_steps == 0
        if self._calls_before_update == 0:
            if self._is_due or self._received is not None:
                self.save(step, **values)
            self.end_if_asked()
        return self._saved

    def end_if_asked(self) -> None:
        """End the process where a signal asked for it; call it where all that matters is saved, as in a validation.

        Raises:
            SystemExit: a signal was received.
        """
        received, self._received = self._received, None
        if received is not None:
            raise SystemExit(128 + received)

    def resume(self) -> Resumed | None:
        """Put everything back as the newest whole checkpoint has it.

        Returns:
            Where to go on; None where the folder holds no checkpoint.

        Raises:
            CheckpointError: there are checkpoints, but none can be read; or the newest one is of another model or
                another training. Nothing has been changed then.
            RuntimeError, ValueError: a part has refused its state, as one of another optimizer. All but modules are as
                they were.
        """
        passed_over: dict[Path, str] = {}
        for path in self.paths:
            try:
                state = read_state(path)
            except (CheckpointError, OSError) as error:
                passed_over[path] = first_line(error)
                warnings.warn(f"{first_line(error)}; the checkpoint before it is taken", OdtWarning, stacklevel=2)
                continue
            self._put_back(state, path)
            for other in passed_over:
                # It may still be worth a look; a folder that is read-only can be resumed from, too.
                with contextlib.suppress(OSError):
                    other.replace(other.with_name(f"{other.name}.damaged"))
            self._follow(state)
            self._is_of_others, self._last_step = False, state["step"]
            return Resumed(state["step"], _copied(state["values"]), path)
        if passed_over:
            raise CheckpointError(f"no checkpoint in {self.folder} can be read: {'; '.join(passed_over.values())}")
        return None

    @property
    def _calls_before_update(self) -> int:
        return 0 if self._keeper is None else self._keeper.calls_before_update

    def _follow(self, state: dict[str, Any]) -> None:
        """Beside what has a state: what else the bits depend on."""
        if self._keeper is not None and "plans" in state:
            self._keeper.follow(state["plans"])
        now, before = torch.get_num_threads(), state.get("threads")
        if before not in (None, now):
            warnings.warn(
                f"the checkpoint was written with {before} threads of torch, and there are {now} now: the last bits "
                f"will differ from those of a run that was not stopped. torch.set_num_threads({before}) keeps them, or "
                f"--threads {before} of torch-odt train",
                OdtWarning,
                stacklevel=3,
            )

    def _require_own_folder(self) -> None:
        if self._is_of_others:
            raise CheckpointError(
                f"{self.folder} holds checkpoints of an earlier run: go on from them with resume() before the first "
                "step, or give another folder"
            )

    def _put_back(self, state: dict[str, Any], path: Path) -> None:
        if absent := [name for name in self._parts if name not in state]:
            raise CheckpointError(f"{path} has no state of {', '.join(absent)}: it is another training's")
        modules = {name: part for name, part in self._parts.items() if isinstance(part, nn.Module)}
        for name, module in modules.items():
            if difference := _difference(module, state[name]):
                raise CheckpointError(f"{path} is not of this {name}: in its state_dict, {difference}")
        for name, part in self._parts.items():
            if isinstance(part, torch.optim.Optimizer) and (difference := _other_optimizer(part, state[name])):
                raise CheckpointError(f"{path} is not of this {name}: {difference}")
        # What is checked is loaded last: it takes the most memory to undo.
        with _undone_on_failure({name: part for name, part in self._parts.items() if name not in modules}) as others:
            for name, part in others.items():
                # They may keep what they are given, and are not to keep the file; a module copies it.
                part.load_state_dict(_copied(state[name]))
            for name, module in modules.items():
                module.load_state_dict(state[name])
            _set_random_state(state["random"])

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            if number == signal.SIGINT:
                return
            raise SystemExit(128 + number)
        received, self._received = self._received, signal.Signals(number)
        if received is not None:
            self._received = None
            raise SystemExit(128 + number)


def _keeper_of(step: TrainStep) -> PlanKeeper:
    # A run without a step does without what executes plans.
    from torch_odt.execute.kept_plans import PlanKeeper

    return PlanKeeper(step)


def _step_of(path: Path) -> int:
    digits = path.name.removeprefix("step-").removesuffix(".safetensors")
    return int(digits) if digits.isdigit() else -1


def _other_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> str:
    """What keeps an optimizer from taking a state, in words; empty where nothing does."""
    groups, others = optimizer.param_groups, saved["param_groups"]
    sizes, other_sizes = ([len(group["params"]) for group in each] for each in (groups, others))
    if sizes != other_sizes:
        return f"its groups have {other_sizes} parameters, and here they have {sizes}"
    # Schedulers add options of their own to groups.
    missing = sorted(set(optimizer.defaults) - set(others[0])) if others else []
    if missing:
        return f"it has no {', '.join(missing)}: resume with the optimizer that the run had"
    return ""


def _difference(module: nn.Module, saved: Mapping[str, Any]) -> str:
    """What keeps a module from taking a state, in words; empty where nothing does."""
    own = module.state_dict()
    if absent := [name for name in own if name not in saved]:
        return f"{absent[0]} is missing"
    if unknown := [name for name in saved if name not in own]:
        return f"there is {unknown[0]}, which the model has not"
    for name, tensor in own.items():
        # What is lazy takes any shape.
        if not isinstance(tensor, torch.Tensor) or is_lazy(tensor):
            continue
        shape = getattr(saved[name], "shape", None)
        if shape != tensor.shape:
            return f"{name} has shape {shape and tuple(shape)}, and the model's {tuple(tensor.shape)}"
    return ""


@contextlib.contextmanager
def _undone_on_failure(parts: Mapping[str, Stateful]) -> Iterator[Mapping[str, Stateful]]:
    """Inside, these take new states; where that fails, they get back those that they had."""
    # An optimizer takes other tensors in the place of those that it has, and these need no copy.
    before = {
        name: state if isinstance(part, torch.optim.Optimizer) else copy.deepcopy(state)
        for name, part in parts.items()
        for state in [part.state_dict()]
    }
    generators = _random_state()
    try:
        yield parts
    except BaseException:
        for name, part in parts.items():
            # One that refuses what it has given itself must not keep the others from theirs.
            with contextlib.suppress(Exception):
                part.load_state_dict(before[name])
        _set_random_state(generators)
        raise


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

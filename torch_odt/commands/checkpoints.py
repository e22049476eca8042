"""`--checkpoint-dir` and `--resume`: a run of `torch-odt train` that goes on where an earlier one was stopped."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import Sampler

import torch_odt as odt
from torch_odt.commands import options
from torch_odt.commands.errors import UserError, as_user_errors
from torch_odt.errors import CheckpointError
from torch_odt.runtime.persistence import Checkpointer

_EVERY_STEPS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument(
        "--checkpoint-dir", type=Path, metavar="DIR", help="keep checkpoints there, and write one at SIGTERM or Ctrl-C"
    )
    parser.add_argument(
        "--checkpoint-every",
        type=options.positive_int,
        default=_EVERY_STEPS,
        metavar="STEPS",
        help=f"steps from one checkpoint to the next (default: {_EVERY_STEPS})",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --checkpoint-dir")


def check(arguments: argparse.Namespace) -> None:
    """Before anything is loaded.

    Raises:
        UserError: there is nothing to resume from, or something that is not to be resumed.
    """
    folder: Path | None = arguments.checkpoint_dir
    if folder is None and arguments.resume:
        raise UserError("--resume needs --checkpoint-dir, the folder of the run that is to go on")
    if folder is not None and not arguments.resume and Checkpointer.paths_in(folder):
        raise UserError(f"{folder} holds checkpoints of an earlier run: add --resume, or give another folder")


@dataclass
class Position:
    """How far a run has come.

    Attributes:
        steps: made in all.
        epoch: the number of the current one, from 1.
        batches: of the current epoch that are done.
        losses, accuracies: of those.
        epochs: what was seen of each earlier epoch.
        batch_size: samples to a batch.
    """

    steps: int = 0
    epoch: int = 1
    batches: int = 0
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    batch_size: int = 0

    def step_done(self, loss: float, accuracy: float) -> None:
        """One more batch of the epoch."""
        self.steps += 1
        self.batches += 1
        self.losses.append(loss)
        self.accuracies.append(accuracy)

    def epoch_done(self, seen: dict[str, Any]) -> None:
        """The next epoch begins."""
        self.epochs.append(seen)
        self.epoch += 1
        self.batches = 0
        self.losses, self.accuracies = [], []


class Checkpoints:
    """The checkpoints of a run, or none where the user wants none.

    Args:
        step: what trains; after a resumption it follows the plans that it had.
    """

    def __init__(self, arguments: argparse.Namespace, step: odt.TrainStep) -> None:
        folder: Path | None = arguments.checkpoint_dir
        self._resumes: bool = arguments.resume
        self._checkpointer: Checkpointer | None = None
        if folder is not None:
            with as_user_errors(OSError):
                self._checkpointer = Checkpointer(
                    folder,
                    model=step.model,
                    optimizer=step.optimizer,
                    step=step,
                    every_steps=arguments.checkpoint_every,
                    signals=(signal.SIGTERM, signal.SIGINT),
                )

    def __enter__(self) -> Checkpoints:
        if self._checkpointer is not None:
            self._checkpointer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._checkpointer is not None:
            self._checkpointer.__exit__(kind, error, trace)

    def resume(self, batch_size: int) -> Position:
        """Where to begin; everything that has a state is as it was there.

        Raises:
            UserError: no checkpoint can be read, or the run had batches of another size.
        """
        if self._checkpointer is None or not self._resumes:
            return Position(batch_size=batch_size)
        with as_user_errors(CheckpointError, RuntimeError, ValueError):
            resumed = self._checkpointer.resume()
        if resumed is None:
            return Position(batch_size=batch_size)
        position = Position(**resumed.values)
        if position.batch_size not in (0, batch_size):
            raise UserError(f"batches of {batch_size}: the run that is to go on has batches of {position.batch_size}")
        return position

    def step_done(self, position: Position) -> None:
        """Save if it is time.

        Raises:
            SystemExit: the run was asked to end.
        """
        if self._checkpointer is not None:
            with self._told_of_end(position), _told_of_failure(self._checkpointer):
                self._checkpointer.step_done(position.steps, **vars(position))

    def save(self, position: Position) -> None:
        """Save in any case: a finished run can be given more steps, or epochs."""
        if self._checkpointer is not None:
            with _told_of_failure(self._checkpointer):
                self._checkpointer.save(position.steps, **vars(position))

    def end_if_asked(self, position: Position) -> None:
        """While nothing happens that a resumed run would not do again.

        Raises:
            SystemExit: the run was asked to end.
        """
        if self._checkpointer is not None:
            with self._told_of_end(position):
                self._checkpointer.end_if_asked()

    @contextmanager
    def _told_of_end(self, position: Position) -> Iterator[None]:
        assert self._checkpointer is not None
        try:
            yield
        except SystemExit:
            folder = self._checkpointer.folder
            print(f"\nStopped after {position.steps} steps; --resume goes on from {folder}", file=sys.stderr)
            raise


@contextmanager
def _told_of_failure(checkpointer: Checkpointer) -> Iterator[None]:
    """Inside, a checkpoint that cannot be written is the user's to put right.

    Raises:
        UserError: it has happened; the text says what there is to go on from.
    """
    try:
        yield
    except OSError as error:
        left = next((path.name for path in checkpointer.paths), None)
        ahead = "there is none before it" if left is None else f"--resume goes on from {left}"
        raise UserError(f"no checkpoint can be written to {checkpointer.folder}: {error}; {ahead}") from error


class Order(Sampler[int]):
    """The samples of an epoch, shuffled by the seed and the epoch's number: any epoch can be taken up anywhere.

    Attributes:
        epoch: the number of the epoch that is next.
        first: so many of its samples have been seen before.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
        self.epoch = 1
        self.first = 0

    def __len__(self) -> int:
        return self._count - self.first

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        yield from torch.randperm(self._count, generator=generator).tolist()[self.first :]

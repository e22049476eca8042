"""A training in a process of its own, which is killed again and again; `test_killed.py` judges what is left."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import torch_odt as odt
from torch_odt.runtime import Checkpointer, persistence

STEPS = 12
BUDGET = odt.Budget("256MiB", of="training")


class Training:
    """A few megabytes of state, dropout and running statistics."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        first, second = nn.Linear(64, 512), nn.Linear(512, 512)
        self.model = nn.Sequential(first, nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.2), second, nn.Linear(512, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step = odt.TrainStep(self.model, F.cross_entropy, self.optimizer, budget=BUDGET)

    def train(self, number: int) -> None:
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(number))
        self.step(inputs, torch.arange(32) % 3)

    def bits(self) -> bytes:
        state = [value for entry in self.optimizer.state.values() for value in entry.values()]
        tensors = [*self.model.state_dict().values(), *state, torch.get_rng_state()]
        return b"".join(tensor.numpy().tobytes() for tensor in tensors)


def train_to_the_end(folder: Path, report: int) -> None:
    """Go on from what is there, and leave `bits` when all steps are made.

    Args:
        report: a descriptor: "resumed N" is written there, "writing" before a checkpoint, and "saved N" after it.
    """
    training = Training()
    checkpointer = Checkpointer(
        folder, model=training.model, optimizer=training.optimizer, step=training.step, every_steps=1
    )
    resumed = checkpointer.resume()
    first = resumed.step if resumed else 0
    os.write(report, f"resumed {first}\n".encode())
    write = persistence.write_state

    def told(path: Path, state: object) -> None:
        os.write(report, b"writing\n")
        write(path, state)  # type: ignore[arg-type]

    persistence.write_state = told  # type: ignore[assignment]
    for number in range(first, STEPS):
        training.train(number)
        checkpointer.step_done(number + 1)
        os.write(report, f"saved {number + 1}\n".encode())
    # At once: this run may be killed here, too.
    (folder / "unfinished").write_bytes(training.bits())
    (folder / "unfinished").rename(folder / "bits")


def uninterrupted() -> bytes:
    """The bits of a run that nobody disturbs."""
    training = Training()
    for number in range(STEPS):
        training.train(number)
    return training.bits()


def seconds_of_writing(folder: Path) -> float:
    """What a checkpoint takes."""
    training = Training()
    training.train(0)
    checkpointer = Checkpointer(folder, model=training.model, optimizer=training.optimizer, step=training.step)
    began = time.perf_counter()
    checkpointer.save(1)
    return time.perf_counter() - began


def begin(folder: Path) -> tuple[int, int]:
    """A child that trains; its process, and the descriptor to read its reports from."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            train_to_the_end(folder, writing)
            code = 0
        os._exit(code)
    os.close(writing)
    return child, reading

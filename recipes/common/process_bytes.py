"""What training takes, measured in a process of its own."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

import torch_odt as odt
from torch_odt.execute.accounting import held_by_process
from torch_odt.measure import Absent, Window
from torch_odt.measure.memory import ProcessMemory

ROOMY = odt.Budget("8GiB", of="training")
WARM_UP_STEPS = 2
STEPS = 4
POLL_SECONDS = 0.002


@dataclass(frozen=True)
class TrainingBytes:
    """What a step takes.

    Attributes:
        process_bytes: the most that a process held, above its level before there was a model: weights, gradients, the
            optimizer's state, activations, buffers of libraries and the plan. Pages of files are no part of it, but
            for what is read from them in the measured steps.
        plan_bytes: what its plan says; None in plain PyTorch.
        trained_parameters: elements of what the optimizer trains.
        is_sampled: the kernel keeps no mark of a window's own, so that `process_bytes` is the most of looks every 2 ms,
            which what is held for less escapes.
        cpu_seconds: of the fastest of the measured steps, on its thread; other processes hardly change it.
    """

    process_bytes: int
    plan_bytes: int | None
    trained_parameters: int
    is_sampled: bool = False
    cpu_seconds: float | None = None


@dataclass(frozen=True)
class Training:
    """Steps on one batch, over and over.

    Attributes:
        step: makes one step.
        optimizer: what it trains with.
    """

    step: Callable[..., object]
    optimizer: torch.optim.Optimizer
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None

    def __call__(self) -> None:
        self.step(*self.args, **(self.kwargs or {}))


def training_bytes(make_training: Callable[..., Training], *arguments: Any) -> TrainingBytes:
    """Train in a new process and measure what that takes, behind two steps in which torch_odt captures and measures.

    Args:
        make_training: makes model, optimizer and batch; a function of a module, since the process imports it.
        arguments: what it is called with.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        measured = pool.apply(_measured, (make_training, arguments))
        # Leaving the block would terminate the worker, whose semaphores multiprocessing warns of then.
        pool.close()
        pool.join()
    return measured


def _measured(make_training: Callable[..., Training], arguments: tuple[Any, ...]) -> TrainingBytes:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _import_what_trains()
    level_bytes = held_by_process()
    training = make_training(*arguments)
    for _ in range(WARM_UP_STEPS):
        training()
    gc.collect()
    file_bytes = psutil.Process().memory_info().rss - odt.memory.process_bytes()
    seconds = []
    with Window([ProcessMemory()], poll_seconds=POLL_SECONDS) as window:
        for _ in range(STEPS):
            began = time.thread_time()
            training()
            seconds.append(time.thread_time() - began)
    found = window.quantities["proc"]
    marked, sampled = found["peak_resident_bytes"], found["peak_bytes"]
    is_sampled = isinstance(marked, Absent)
    peak_bytes = sampled if is_sampled else marked - file_bytes
    assert isinstance(peak_bytes, int)
    trained = {parameter for group in training.optimizer.param_groups for parameter in group["params"]}
    plan_bytes = training.step.plan.peak_bytes if isinstance(training.step, odt.TrainStep) else None
    parameters = sum(parameter.numel() for parameter in trained)
    return TrainingBytes(peak_bytes - level_bytes, plan_bytes, parameters, is_sampled, min(seconds))


def _import_what_trains() -> None:
    """Steps of a single layer: what the first ones of a process import and leave behind is no model's."""
    layer, x = torch.nn.Conv2d(3, 2, 3), torch.randn(2, 3, 8, 8)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(x).sum().backward()
    optimizer.step()
    odt.TrainStep(layer, torch.nn.functional.mse_loss, optimizer, budget=ROOMY, cache=False)(x, torch.zeros(2, 2, 6, 6))

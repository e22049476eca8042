"""`torch-odt train`: a classifier on images, inside a budget."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import torch_odt as odt
from torch_odt._whole_file import whole_file
from torch_odt.commands import adaptive, background, checkpoints, live, options
from torch_odt.commands.checkpoints import Checkpoints, Order
from torch_odt.commands.data import NAMES, ImageData, load_data
from torch_odt.commands.errors import UserError, as_user_errors
from torch_odt.commands.gauge import MemoryGauge
from torch_odt.commands.models import load_model
from torch_odt.commands.optimizers import add_arguments as add_optimizer
from torch_odt.commands.optimizers import make_optimizer
from torch_odt.commands.table import bytes_text, format_bytes, render, seconds_text
from torch_odt.commands.training import Record, beside_loop, laid_out, run_steps, validate
from torch_odt.errors import PagingError
from torch_odt.integrations.tensorboard import TensorBoardLog
from torch_odt.runtime.background import BackgroundRun

NAME = "train"
SUMMARY = "train a classifier on images inside a budget"


@dataclass
class Epoch:
    """One pass through the data, and what a validation made of it."""

    steps: int
    train_loss: float
    train_accuracy: float
    validation_loss: float
    validation_accuracy: float
    seconds: float


@dataclass
class Report:
    """What a run did.

    Attributes:
        peak_bytes: the most that the process held.
        workers_peak_bytes: the most that its child processes held for themselves.
        step_seconds: of a typical step.
        decisions: changes of the budget, with --adaptive.
    """

    model: str
    data: str
    classes: int
    budget: str
    budget_bytes: int
    idle_bytes: int
    peak_bytes: int = 0
    workers_peak_bytes: int = 0
    step_seconds: float | None = None
    saved: str | None = None
    epochs: list[Epoch] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    decisions: list[dict[str, Any]] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    options.add_model(parser, default=None)
    parser.add_argument("--data", required=True, metavar="NAME", help=f"{', '.join(NAMES)}, or a folder of images")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where fashion-mnist or cifar10 lies")
    parser.add_argument("--download", action="store_true", help="fetch the data set to --data-dir if it is not there")
    parser.add_argument("--image-size", type=options.positive_int, help="height and width (default: 96; folders 224)")
    options.add_budget(parser, default="auto", absent='"auto", most of what is available')
    options.add_planning_seconds(parser)
    parser.add_argument("--epochs", type=options.positive_int, default=1, help="passes through the data (default: 1)")
    parser.add_argument("--steps", type=options.positive_int, help="stop after so many steps")
    parser.add_argument("--batch-size", type=options.positive_int, default=32, help="(default: 32)")
    add_optimizer(parser)
    parser.add_argument("--workers", type=int, default=0, help="processes that load data (default: 0)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the weights there, as safetensors")
    parser.add_argument(
        "--transactional", action="store_true", help="undo a step that fails, and make it again where memory was short"
    )
    checkpoints.add_arguments(parser)
    adaptive.add_arguments(parser)
    background.add_arguments(parser)
    live.add_arguments(parser)
    options.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train, validate every epoch, save."""
    background.begin(arguments)
    options.check_folder("--save", arguments.save)
    options.check_planning(arguments)
    options.check_page_to(arguments)
    adaptive.check(arguments)
    checkpoints.check(arguments)
    budget = options.make_budget(arguments.budget, arguments.budget_of)
    torch.manual_seed(arguments.seed)
    data = load_data(
        arguments.data, data_dir=arguments.data_dir, image_size=arguments.image_size, download=arguments.download
    )
    model = load_model(
        arguments.model, classes=len(data.classes), image_size=data.image_size, channels_last=arguments.channels_last
    )
    optimizer = make_optimizer(arguments.optimizer, model, arguments.lr)
    record = Record()
    with (
        MemoryGauge() as gauge,
        beside_loop(budget) as step_budget,
        _saving_on_failure(arguments.save, model, record),
        live.tensorboard(arguments) as log,
    ):
        on_decision = None if log is None else log.decision
        with as_user_errors(ValueError, OSError):
            step = odt.TrainStep(
                model,
                F.cross_entropy,
                optimizer,
                budget=adaptive.controller_for(arguments, step_budget, on_decision) or step_budget,
                planner=arguments.planner,
                disable_rewrites=arguments.disable_rewrite,
                page_to=arguments.page_to,
                planning_seconds=arguments.planning_seconds,
                transactional=arguments.transactional,
            )
        with Checkpoints(arguments, step) as kept, background.in_background(arguments, step) as beside:
            report = _train(arguments, step, model, data, budget, gauge, record, kept, beside, log)
    if arguments.save is not None:
        save(model, arguments.save)
        report.saved = str(arguments.save)
    if arguments.json:
        options.print_json(asdict(report))
    else:
        print(_summary(report))
    return 0


@contextmanager
def _saving_on_failure(path: Path | None, model: nn.Module, record: Record) -> Iterator[None]:
    """Inside, a transfer that fails loses no step that was made: model and optimizer are as before the one that failed.

    Raises:
        PagingError: it has happened; the text says what was saved.
    """
    try:
        yield
    except PagingError as error:
        steps = len(record.losses)
        # What was there before must not give way to weights that have learnt nothing.
        if path is None or steps == 0:
            raise
        try:
            save(model, path)
        except UserError as refusal:
            raise PagingError(f"{error}; the weights after step {steps} are lost: {refusal}", error.fault) from error
        raise PagingError(f"{error}; the weights after step {steps} are saved in {path}", error.fault) from error


def _train(
    arguments: argparse.Namespace,
    step: odt.TrainStep,
    model: nn.Module,
    data: ImageData,
    budget: odt.Budget,
    gauge: MemoryGauge,
    record: Record,
    kept: Checkpoints,
    beside: BackgroundRun | None,
    log: TensorBoardLog | None,
) -> Report:
    resolved = budget.resolve(gauge.base_bytes)
    above = gauge.base_bytes if budget.of == "training" else 0
    limit = resolved.total_bytes - above
    report = Report(arguments.model, data.name, len(data.classes), str(budget), limit, gauge.base_bytes)
    training, validation, order = _loaders(arguments, data)
    batches = len(training)
    if not arguments.json:
        print(_introduction(arguments, data, report, batches), flush=True)
    position = kept.resume(batch_size=training.batch_size or 1)
    if position.steps and not arguments.json:
        print(f"Resumed after {position.steps} steps, in epoch {position.epoch}.\n", flush=True)
    if log is not None:
        log.first_step = position.steps
    report.epochs = [Epoch(**seen) for seen in position.epochs]
    remaining = (arguments.steps or arguments.epochs * batches) - position.steps + position.batches

    def step_done() -> None:
        if beside is not None:
            beside.after_step(record.seconds[-1])
        position.step_done(record.losses[-1], record.accuracies[-1])
        if log is not None:
            log.step(
                position.steps, loss=record.losses[-1], step_seconds=record.seconds[-1], process_bytes=gauge.now_bytes
            )
        kept.step_done(position)

    while position.epoch <= arguments.epochs and (count := min(batches, remaining)) >= max(1, position.batches):
        begin = time.monotonic()
        order.epoch, order.first = position.epoch, position.batches * (training.batch_size or 1)
        model.train()
        run_steps(
            step,
            laid_out(training, arguments.channels_last),
            steps=count - position.batches,
            record=record,
            memory_text=lambda: live.live_text(step, gauge, record, limit_bytes=limit, above_bytes=above),
            label=f"epoch {position.epoch}",
            done=position.batches,
            quiet=arguments.json,
            announce=None if len(record.losses) else lambda: f"\n{step.plan}\n",
            before_step=None if beside is None else beside.before_step,
            step_done=step_done,
        )
        # Whatever ends the validation, it goes on from here: validation draws random numbers.
        kept.save(position)
        held_out = laid_out(validation, arguments.channels_last)
        end_if_asked = partial(kept.end_if_asked, position)
        loss, accuracy = validate(model, held_out, count=len(validation), quiet=arguments.json, batch_done=end_if_asked)
        report.epochs.append(
            Epoch(
                steps=count,
                train_loss=_mean(position.losses),
                train_accuracy=_mean(position.accuracies),
                validation_loss=loss,
                validation_accuracy=accuracy,
                seconds=time.monotonic() - begin,
            )
        )
        if not arguments.json:
            print(f"  validation: loss {loss:.3f}, accuracy {accuracy:.1%}", flush=True)
        if position.batches == batches:
            position.epoch_done(asdict(report.epochs[-1]))
            kept.save(position)
        remaining -= count
    if not record.losses and not arguments.json:
        print(f"Nothing is left to train: {position.steps} steps are made. Give more --steps, or --epochs.", flush=True)
    report.peak_bytes, report.workers_peak_bytes = gauge.peak_bytes - above, gauge.children_peak_bytes
    report.step_seconds = record.step_seconds
    report.plan = step.plan.to_dict() if record.losses else {}
    if step.controller is not None:
        report.decisions = [decision.to_dict() for decision in step.controller.decisions]
        if not arguments.json:
            print(f"\n{adaptive.changes_text(step.controller)}")
    return report


def _loaders(arguments: argparse.Namespace, data: ImageData) -> tuple[DataLoader[Any], DataLoader[Any], Order]:
    """Training batches are all of one size where there are enough samples; validation takes smaller ones."""
    count = len(data.train)  # type: ignore[arg-type]
    size = min(arguments.batch_size, count)
    order = Order(count, arguments.seed)
    workers = arguments.workers
    training = DataLoader(
        data.train,
        batch_size=size,
        sampler=order,
        drop_last=True,
        # Of its own: an epoch that is taken up in its middle must not move the random numbers of the model.
        generator=torch.Generator(),
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return training, DataLoader(data.validation, batch_size=max(1, size // 4), num_workers=workers), order


def save(model: nn.Module, path: Path) -> None:
    """The plain model's state_dict as safetensors: it loads with `strict=True`."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        storage = tensor.untyped_storage().data_ptr()
        # The format holds neither shared tensors nor other layouts.
        tensors[name] = tensor.clone() if storage in seen else tensor
        tensors[name] = tensors[name].contiguous()
        seen.add(storage)
    try:
        with whole_file(path) as partial:
            save_file(tensors, partial)
    except OSError as error:
        raise UserError(f"--save {path}: {error.strerror or error}") from error


def _introduction(arguments: argparse.Namespace, data: ImageData, report: Report, batches: int) -> str:
    lines = [
        f"{report.model} on {data.name}: {len(data.train)} images to learn, "  # type: ignore[arg-type]
        f"{len(data.validation)} to validate with, "  # type: ignore[arg-type]
        f"{report.classes} classes, 3x{data.image_size}x{data.image_size}",
        f"{batches} batches of {min(arguments.batch_size, len(data.train))} an epoch; budget {report.budget}",  # type: ignore[arg-type]
    ]
    if arguments.workers:
        lines.append(
            f"The memory of {arguments.workers} loading process{'es' if arguments.workers > 1 else ''} is not this "
            "process's: it counts where a control group limits all of them together"
        )
    lines.append("The first step captures the model, measures its operators and plans.\n")
    return "\n".join(lines)


def _summary(report: Report) -> str:
    rows = [
        ["budget", bytes_text(report.budget_bytes)],
        ["peak", f"{bytes_text(report.peak_bytes)}"],
        ["idle before training", bytes_text(report.idle_bytes)],
    ]
    if report.workers_peak_bytes:
        rows.append(["child processes, beside", format_bytes(report.workers_peak_bytes)])
    rows.append(["time per step", seconds_text(report.step_seconds)])
    if report.epochs:
        rows.append(["validation accuracy", f"{report.epochs[-1].validation_accuracy:.1%}"])
    if report.saved:
        rows.append(["saved", report.saved])
    return "\n" + render(rows, indent="")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")

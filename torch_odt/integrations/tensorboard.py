"""TensorBoard: what a controller decides, what steps take, and what was measured, as scalars."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch_odt.measure.record import DEFAULT_OPTIMIZER, Cell, Record
from torch_odt.runtime.controller import Decision


class Writer(Protocol):
    """What is needed of `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def add_text(self, tag: str, text_string: str, global_step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoardLog:
    """Writes decisions and steps where TensorBoard finds them.

    Choose it where a run is watched in TensorBoard anyway; `Controller(log=...)` writes the same decisions as lines of
    JSON and needs nothing.

    Args:
        writer: a `SummaryWriter`, which stays the caller's to close; or a folder, for which one is made.
        first_step: how many steps a run that goes on had made before; decisions are counted from there.

    Raises:
        ImportError: a folder is given, and TensorBoard is not installed.

    Example:
        >>> from torch_odt.runtime import Controller
        >>> log = TensorBoardLog("runs/small")  # doctest: +SKIP
        >>> controller = Controller("80%", on_decision=log.decision)  # doctest: +SKIP
    """

    def __init__(self, writer: Writer | str | Path, *, first_step: int = 0) -> None:
        self.first_step = first_step
        self._writer = _open(writer) if isinstance(writer, str | Path) else writer

    def decision(self, decision: Decision) -> None:
        """A change of the budget; give it as `on_decision` to a `Controller`."""
        step = self.first_step + decision.step
        for name in ("budget_bytes", "allowed_bytes", "process_bytes", "available_bytes", "freed_bytes"):
            self._writer.add_scalar(f"odt/{name}", getattr(decision, name), step)
        self._writer.add_text("odt/decision", f"{decision.action}: {decision.reason}", step)

    def step(self, number: int, *, loss: float, step_seconds: float, process_bytes: int) -> None:
        """A step has been made.

        Args:
            number: of the step.
            process_bytes: that the process holds after it.
        """
        self._writer.add_scalar("odt/loss", loss, number)
        self._writer.add_scalar("odt/step_seconds", step_seconds, number)
        self._writer.add_scalar("odt/held_bytes", process_bytes, number)

    def close(self) -> None:
        """Everything is written."""
        self._writer.close()


def log_record(record: Record, writer: Writer | str | Path) -> None:
    """Write a record of measurements where TensorBoard finds it.

    Choose it to set runs against each other in TensorBoard, a folder for each; `torch_odt.measure.report.compare` does
    so with ratios and needs nothing. Numbers of steps are scalars over the size of the batch, traces over microseconds;
    what was not measured is a text.

    Args:
        record: what was measured.
        writer: a `SummaryWriter`, which stays the caller's to close; or a folder, for which one is made.

    Raises:
        ImportError: a folder is given, and TensorBoard is not installed.

    Example:
        >>> from pathlib import Path
        >>> log_record(Record.read(Path("run.jsonl")), "runs/board")  # doctest: +SKIP
    """
    target = _open(writer) if isinstance(writer, str | Path) else writer
    for cell in record.cells:
        _log_cell(cell, target)
    if target is not writer:
        target.close()


def _log_cell(cell: Cell, writer: Writer) -> None:
    details = [cell.experiment.replace(" ", "_"), cell.mode, f"{cell.threads}_threads"]
    optimizer = "" if cell.optimizer == DEFAULT_OPTIMIZER else cell.optimizer
    named = (cell.budget, cell.governor, "" if cell.device == "cpu" else cell.device, optimizer)
    given = [part for part in named if part]
    factors = [f"{name}_{value}" for name, value in cell.factors.items()]
    tag = "/".join(["measure", cell.suite, cell.model, *factors, *details, "_".join([cell.engine, *given])])
    if cell.outcome != "ok":
        writer.add_text(tag, f"{cell.outcome}: {cell.reason}", cell.batch_size)
        return
    joules = cell.joules_per_step()
    numbers = {
        "step_seconds": cell.median_seconds,
        "training_bytes": cell.training_bytes,
        "device_bytes": cell.device_bytes,
        "step_joules": None if joules is None else joules[0],
        **cell.results,
    }
    for name, value in numbers.items():
        if value is not None:
            writer.add_scalar(f"{tag}/{name}", value, cell.batch_size)
    for trace in cell.traces:
        for second, value in zip(trace.at_seconds, trace.values, strict=True):
            writer.add_scalar(f"{tag}/{trace.quantity}/{trace.label}_{trace.unit}", value, round(1e6 * second))


def require_tensorboard() -> None:
    """Before what takes long.

    Raises:
        ImportError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401
    except ImportError as error:
        raise ImportError('TensorBoard is not installed: pip install "torch_odt[tensorboard]"') from error


def _open(folder: str | Path) -> Writer:
    require_tensorboard()
    from torch.utils.tensorboard import SummaryWriter

    writer: Writer = SummaryWriter(str(folder))
    return writer

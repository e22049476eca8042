"""Time: of inference and training, for each sample of a batch, and how busy processors are."""

from __future__ import annotations

from torch_odt.measure.record import Cell, Record
from torch_odt.measure.report.figure import Figure, Panel
from torch_odt.measure.report.lines import Line, Side, lines
from torch_odt.measure.report.selection import grouped, model_of, ratio, sides_of, threads_hint, usual_steps
from torch_odt.measure.report.side_by_side import Measure, side_by_side
from torch_odt.measure.report.units import COUNT, SECONDS
from torch_odt.measure.report.ways import legend_of, series_of, styles_of


def step_times(record: Record) -> Figure:
    """Seconds of a step (Cai et al., Figures 1 and 8; Chen et al., Figures 3 to 5)."""
    cells = usual_steps(record)
    return side_by_side(
        cells,
        Measure(lambda cell: cell.median_seconds, SECONDS, "seconds of a step"),
        key="step-times",
        title="Time of a step: training against inference, torch_odt against plain PyTorch",
        hint="Medians; shorter is better. × inf.: times the same batch's inference; × plain: times plain PyTorch's."
        + _flops_hint(cells)
        + threads_hint(record, cells),
        why_absent=lambda cell: ["no step was timed"],
    )


def _flops_hint(cells: list[Cell]) -> str:
    """How much more training computes, to compare with how much longer it takes; and torch_odt beside that."""
    of_inference, of_plain = _flops_ratios(cells)
    if not of_inference:
        return ""
    planned = f"; torch_odt's takes {_between(of_plain)} times plain PyTorch's" if of_plain else ""
    return f" By floating-point operations, training takes {_between(of_inference)} times inference{planned}."


def _between(ratios: list[float]) -> str:
    low, high = f"{min(ratios):.2g}", f"{max(ratios):.2g}"
    return low if low == high else f"{low} to {high}"


def _flops_ratios(cells: list[Cell]) -> tuple[list[float], list[float]]:
    """Of plain PyTorch's training to its inference, and of torch_odt's training to plain PyTorch's."""
    of_inference, of_plain = [], []
    for batches in sides_of(cells).values():
        for side in batches.values():
            flops = {series.mode: cell.flops for series, cell in side.items() if series.way.engine == "torch"}
            if times := ratio(flops.get("training"), flops.get("inference") or None):
                of_inference.append(times)
            for series, cell in side.items():
                if series.way.engine == "torch_odt" and (times := ratio(cell.flops, flops.get("training") or None)):
                    of_plain.append(times)
    return of_inference, of_plain


def sample_times(record: Record) -> Figure:
    """Seconds for each sample over the size of a batch."""
    cells = [cell for cell in usual_steps(record) if cell.median_seconds and cell.batch_size]
    styles = styles_of(cells)
    panels, rows = [], []
    for model, each in grouped(cells, model_of).items():
        drawn = []
        for series, same in sorted(grouped(each, series_of).items(), key=lambda item: list(styles).index(item[0])):
            points = sorted({cell.batch_size: (cell.median_seconds or 0) / cell.batch_size for cell in same}.items())
            drawn.append(Line(series.name, styles[series], [x for x, _ in points], [y for _, y in points]))
            rows += [(model, series.name, str(x), SECONDS.text(y)) for x, y in points]
        batches = sorted({cell.batch_size for cell in each})
        if len(batches) > 1:
            x = Side("samples in a batch", COUNT, is_log=True, places=batches)
            y = Side("seconds per sample", SECONDS, includes_zero=True)
            chart = lines(drawn, x=x, y=y, description=f"seconds per sample over the batch, for {model}")
            panels.append(Panel(model, chart))
    return Figure(
        "sample-times",
        "Time per sample: small batches against large ones",
        "Where a line falls, a larger batch makes each sample cheaper." + threads_hint(record, cells),
        panels,
        legend_of(styles, cells) if panels else (),
        ("network", "series", "batch", "seconds per sample"),
        rows if panels else (),
        () if panels else ("No network was measured with several batch sizes.",),
        is_dense=True,
    )


def busy_processors(record: Record) -> Figure:
    """How many cores are busy in a step (Cai et al., Figure 2)."""
    cells = usual_steps(record)
    return side_by_side(
        cells,
        Measure(_busy_cores, COUNT, "busy cores, of any program"),
        key="busy-processors",
        title="Busy processors: training against inference",
        hint=f"The mean over the steps, all {record.machine.cores or ''} cores added up." + threads_hint(record, cells),
        why_absent=lambda cell: [_reason(cell) or "the load of cores was not read"],
    )


def _busy_cores(cell: Cell) -> float | None:
    names = [name for name in cell.quantities.get("psutil", {}) if name.endswith("_busy_share")]
    shares = [share for name in names if (share := cell.reading("psutil", name)) is not None]
    return sum(shares) if shares else None


def _reason(cell: Cell) -> str:
    readings = cell.quantities.get("psutil", {}).values()
    return next((str(each["absent"]) for each in readings if not isinstance(each, int | float)), "")

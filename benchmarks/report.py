"""What was measured, as a table and as a plot."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_STYLES = {
    "eager": ("#222222", "*"),
    "eager, tuned malloc": ("#8a8a8a", "*"),
    "micro-batches": ("#0072b2", "o"),
    "checkpoint_sequential": ("#009e73", "s"),
    "selective checkpoint, blocks": ("#cc79a7", "D"),
    "selective checkpoint, whole": ("#8f3f73", "d"),
    "memory_efficient=True": ("#56b4e9", "P"),
    "torch.compile": ("#e69f00", "^"),
    "torch_odt": ("#d62728", "o"),
}


def exactness(row: Row, has_masks_only: bool = False) -> str:
    """In a word: what a step's gradients and buffers are compared with plain PyTorch's."""
    check = row.get("check", {}).get("exact")
    if check is None:
        return "?"
    if check["gradients"]:
        return "exact" if check["buffers"] else "buffers differ"
    return "other masks" if has_masks_only and row["method"] == "micro-batches" else "inexact"


def masks_only(model: dict[str, Any]) -> bool:
    """Whether cutting the batch changes nothing but which dropout masks are drawn."""
    return model["model"] in ("bert_small", "squeezenet1_1")


def usable(model: dict[str, Any]) -> list[Row]:
    """The rows that ran to the end and were timed."""
    return [row for row in model["rows"] if "ratio" in row]


def print_table(result: dict[str, Any]) -> None:
    """One block per model, one line per configuration, the smallest peak last."""
    for model in result["models"]:
        layout = ", channels_last" if model["channels_last"] else ""
        print(f"\n{model['model']}{layout}")
        header = ("configuration", "peak", "anonymous", "from start", "s/step", "vs eager", "spread", "gradients")
        print(f"  {header[0]:34s}{header[1]:>9s}{header[2]:>11s}{header[3]:>12s}", end="")
        print(f"{header[4]:>9s}{header[5]:>10s}{header[6]:>13s}  {header[7]}")
        for row in sorted(usable(model), key=lambda r: -r["memory"]["peak_bytes"]):
            memory = row["memory"]
            highest = memory["highest_anonymous_from_start_bytes"] - memory["level_anonymous_bytes"]
            spread = f"{min(row['ratios']):.2f}..{max(row['ratios']):.2f}"
            print(f"  {row['label']:34s}{_mib(memory['peak_bytes']):>9s}", end="")
            print(f"{_mib(memory['peak_anonymous_bytes']):>11s}{_mib(highest):>12s}", end="")
            print(f"{row['seconds']:>9.3f}{row['ratio']:>9.2f}x{spread:>13s}  {exactness(row, masks_only(model))}")
        for row in model["rows"]:
            if "error" in row:
                print(f"  {row['label']:34s} failed: {row['error'].splitlines()[-1][:90]}")
    print("\nMiB above the level just before the step object is made (model and data in memory):")
    print(
        "peak = VmHWM of steps after the warm-up; anonymous = RssAnon + RssShmem, sampled; from start = the same from"
    )
    print(f"the level to exit, tracing and planning included. torch {result['machine']['torch']}")


def write_plot(result: dict[str, Any], path: Path) -> None:
    """Seconds of a step over eager's against peak bytes over eager's, one panel per model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    models = [model for model in result["models"] if any(row["method"] == "eager" for row in usable(model))]
    if not models:
        return
    columns = min(len(models), 4)
    lines = math.ceil(len(models) / columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(max(4.6 * columns, 7.5) + 0.6, 4.1 * lines + 1.3), squeeze=False
    )
    seen: dict[str, None] = {}
    for axis, model in zip(axes.flat, models, strict=False):
        _draw(axis, model, seen)
    for axis in axes.flat[len(models) :]:
        axis.axis("off")
    handles = [
        Line2D([], [], color=_STYLES[m][0], marker=_STYLES[m][1], linestyle="-" if m in _CURVES else "", label=m)
        for m in _STYLES
        if m in seen
    ]
    handles.append(
        Line2D([], [], color="#666666", marker="o", markerfacecolor="white", linestyle="", label="hollow: not exact")
    )
    figure.legend(handles=handles, loc="lower center", ncols=3 if columns < 3 else 5, fontsize=9.5, frameon=False)
    figure.suptitle("Time of a training step against the memory it takes (lower left is better)", fontsize=13)
    figure.tight_layout(rect=(0, (0.95 if columns < 3 else 0.65) / (4.1 * lines + 1.3), 1, 0.99))
    figure.savefig(path, dpi=150)
    plt.close(figure)


_CURVES = ("micro-batches", "checkpoint_sequential", "torch.compile", "torch_odt")


def _draw(axis: Any, model: dict[str, Any], seen: dict[str, None]) -> None:
    rows = usable(model)
    eager = next(row for row in rows if row["method"] == "eager")
    eager_seconds = eager["seconds"] / eager["ratio"]
    for method, (color, marker) in _STYLES.items():
        mine = sorted((r for r in rows if r["method"] == method), key=lambda r: r["value"] or 0)
        if not mine:
            continue
        seen[method] = None
        ours = method == "torch_odt"
        x = [row["memory"]["peak_bytes"] / 2**20 for row in mine]
        y = [row["ratio"] for row in mine]
        if method in _CURVES:
            axis.plot(
                x, y, color=color, linewidth=2.2 if ours else 1, alpha=1 if ours else 0.55, zorder=4 if ours else 2
            )
        for row, left, height in zip(mine, x, y, strict=True):
            exact = exactness(row, masks_only(model)) in ("exact", "other masks")
            size = 110 if marker == "*" else 52 if ours else 34
            face = color if exact else "white"
            axis.scatter(left, height, s=size, marker=marker, facecolor=face, edgecolor=color, linewidth=1.3, zorder=5)
    axis.axhline(1, color="#bbbbbb", linewidth=0.8, linestyle="--", zorder=1)
    axis.axvline(eager["memory"]["peak_bytes"] / 2**20, color="#bbbbbb", linewidth=0.8, linestyle="--", zorder=1)
    layout = ", channels_last" if model["channels_last"] else ""
    axis.set_title(f"{model['model']}{layout}\neager: {eager_seconds:.2f} s a step", fontsize=10.5)
    axis.set_xlabel("peak above the idle process (MiB)")
    axis.set_ylabel("seconds per step / eager's")
    axis.set_xlim(left=0)
    top = sorted(row["ratio"] for row in rows)[-1]
    axis.set_ylim(0.7 if min(row["ratio"] for row in rows) > 0.75 else 0, min(top * 1.06, 2.6))
    axis.grid(color="#eeeeee", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f}"


def read_results(paths: list[str]) -> dict[str, Any]:
    """One result from the files of several runs: of rows of the same name, the last file's counts.

    Of the options, those stay in which all runs agree.
    """
    results = [json.loads(Path(path).read_text()) for path in paths]
    models: dict[str, dict[str, Any]] = {}
    for model in (model for result in results for model in result["models"]):
        rows = {row["label"]: row for row in (*models.get(model["model"], {"rows": []})["rows"], *model["rows"])}
        models[model["model"]] = {**model, "rows": list(rows.values())}
    options = [result["machine"]["options"].items() for result in results]
    agreed = {key: value for key, value in options[-1] if all((key, value) in others for others in options)}
    return {"machine": {**results[-1]["machine"], "options": agreed}, "models": list(models.values())}


if __name__ == "__main__":
    measured = read_results(sys.argv[1:])
    print_table(measured)
    write_plot(measured, Path(sys.argv[1]).with_suffix(".png"))

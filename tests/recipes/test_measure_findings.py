"""The rules of the recipe on records that are made up: what is confirmed, what is not, and what cannot be known."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from recipes import measure_findings as recipe
from torch_odt.measure.record import Cell, Machine, OperatorTime, append_line

STEP = Cell(suite="ubiquitous", model="net", batch_size=1, mode="training", engine="torch", threads=1)


def swept(layer: str, width: int, depth: int, seconds: float) -> Cell:
    factors: dict[str, int | float | str] = {"layer": layer, "width": width, "depth": depth}
    rows = [
        OperatorTime(op="convolution_backward", direction="backward", seconds=0.8 * seconds, calls=1),
        OperatorTime(op="convolution", direction="forward", seconds=0.2 * seconds, calls=1),
    ]
    name = f"{layer} {width}x{depth}"
    return replace(STEP, model=name, factors=factors, step_seconds=[seconds], operators=rows)


def test_sweeps() -> None:
    sizes = [(width, depth) for width in (64, 256) for depth in (1, 4)]
    cells = [swept("convolution", width, depth, (width / 64) * depth**2) for width, depth in sizes]
    cells += [swept("fully connected", width, depth, 1e-3 * (width / 64) ** 2 * depth) for width, depth in sizes]
    cells += [swept("separable", width, 1, 0.3 * width / 64) for width in (64, 256)]
    assert recipe.convolutions_are_far_slower(cells).confirmed
    width = recipe.connected_layers_are_sensitive_to_width(cells)
    assert width.confirmed and "a doubling takes 4.00 times the time for the width" in width.numbers
    depth = recipe.convolutions_are_sensitive_to_depth(cells)
    assert depth.confirmed and "4.00 for the depth (1 to 4)" in depth.numbers
    assert recipe.separable_convolutions_are_faster(cells).numbers.endswith("0.30 at width 64, 0.30 at width 256")
    assert "100% of the backward pass and 80% of the step" in recipe.gradients_dominate_the_backward_pass(cells).numbers
    slow = [swept("separable", 64, 1, 9.0), swept("convolution", 64, 1, 1.0)]
    assert recipe.separable_convolutions_are_faster(slow).confirmed is False


def test_training_against_inference() -> None:
    training = replace(STEP, step_seconds=[0.9], flops=300, categories={"weights": 10, "activations": 90, "other": 500})
    inference = replace(STEP, mode="inference", step_seconds=[0.1], flops=100, categories={"weights": 10, "other": 500})
    found = recipe.training_takes_longer_than_its_flops([training, inference])
    assert found.confirmed and "times 9.0 to 9.0, operations 3.0 to 3.0" in found.numbers
    memory = recipe.training_takes_far_more_memory([training, inference])
    assert memory.confirmed and memory.numbers.startswith("10.0 (net at 1)")


def test_batches_and_threads() -> None:
    cells = [
        replace(STEP, model=model, batch_size=batch, threads=threads, step_seconds=[seconds])
        for model in ("net", "lenet")
        for batch, threads, seconds in ((1, 1, 1.0), (8, 1, 4.0), (1, 2, 2.0), (8, 2, 2.0))
    ]
    small = recipe.small_batches_cost_more_for_each_sample(cells)
    assert small.confirmed and "net at 1 2.0, net at 2 8.0" in small.numbers
    threads = recipe.more_threads_are_not_always_faster(cells)
    assert threads.confirmed and threads.numbers.endswith("lenet at 1 0.50, lenet at 8 2.00")
    others = [cell for cell in cells if cell.model == "net"]
    assert recipe.more_threads_are_not_always_faster(others).confirmed is None, "the finding is of LeNet"


def test_other_programs_are_slowed_by_training_in_the_background() -> None:
    def cell(training: str, speed: float) -> Cell:
        results: dict[str, int | float] = {"processor_operations_per_second": speed, "p50_seconds": 1 / speed}
        return replace(STEP, experiment="neighbour", factors={"training": training}, results=results)

    cells = [cell("none", 100.0), cell("foreground", 50.0), cell("background", 80.0)]
    found = recipe.training_slows_other_programs(cells)
    assert found.confirmed and "foreground: 50% slower, requests 2.0 times as long" in found.numbers
    assert recipe.training_slows_other_programs([*cells[:2], cell("background", 60.0)]).confirmed is False
    ours = replace(cell("background", 10.0), engine="torch_odt", budget="50%")
    both = recipe.training_slows_other_programs([*cells, ours])
    assert both.confirmed and "background by torch_odt: 90% slower, requests 10.0 times as long" in both.numbers


def test_another_optimizer_is_not_mixed_with_the_usual_one() -> None:
    cells = [replace(STEP, batch_size=batch, step_seconds=[seconds]) for batch, seconds in ((1, 1.0), (8, 4.0))]
    adam = replace(STEP, batch_size=64, step_seconds=[640.0], optimizer="adam")
    assert recipe.look([*cells, adam])[2] == recipe.look(cells)[2]
    assert "net at 1 2.0" in recipe.look(cells)[2].numbers


def profiled(*, clock: float, uncounted: float) -> Cell:
    rows = [
        OperatorTime(op="convolution", direction="forward", seconds=0.9, calls=1),
        OperatorTime(op="outside operators", direction="outside", seconds=0.14, calls=1),
    ]
    return replace(STEP, step_seconds=[2.0], operators=rows, profiled_seconds=clock, unprofiled_seconds=uncounted)


def test_operators_are_held_against_the_clock_of_the_same_steps() -> None:
    found = recipe.operators_add_up([profiled(clock=1.0, uncounted=0.8), profiled(clock=1.04, uncounted=0.8)])
    assert found.confirmed and "4.0% apart at most in 2 cells" in found.numbers and "30.0% longer" in found.numbers
    assert (
        recipe.operators_add_up([profiled(clock=1.04, uncounted=1.0), profiled(clock=0.9, uncounted=1.0)]).confirmed
        is False
    )


def test_what_the_record_lacks_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "run.jsonl", tmp_path / "findings.json"
    append_line(path, Machine(name="board", processor="Cortex-A72"))
    append_line(path, profiled(clock=1.0, uncounted=0.8))
    monkeypatch.setattr(sys, "argv", ["measure_findings.py", "--record", str(path), "--out", str(out)])
    assert recipe.main() == 1
    written = json.loads(out.read_text())
    assert [machine["processor"] for machine in written["machines"]] == ["Cortex-A72"]
    findings = written["findings"]
    assert [finding["confirmed"] for finding in findings if finding["paper"] != "check"] == [None] * 10
    assert findings[-1]["confirmed"]
    assert capsys.readouterr().out.count("not known") == 10

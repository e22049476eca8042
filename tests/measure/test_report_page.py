"""The page of a record: every figure with its axes, units, legend and numbers, whatever the record says or lacks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from html import escape
from pathlib import Path

import pytest
from html_page import Page
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_records import MIB, sample_cells, sample_machine, sample_record, write_sample

from torch_odt.measure.record import Cell, LayerMemory, Machine, OperatorTime, Prediction, Record, Trace
from torch_odt.measure.report import compare, page, table, write_page
from torch_odt.measure.report.lines import Line, Side, lines
from torch_odt.measure.report.units import COUNT

# What stands at the axes of each figure: across, and upwards (of bars: from top to bottom).
AXES = {
    "step-times": ("seconds of a step", "samples in a batch"),
    "sample-times": ("samples in a batch", "seconds per sample"),
    "threads": ("threads", "times the speed of 1 thread"),
    "busy-processors": ("busy cores, of any program", "samples in a batch"),
    "peak-memory": ("bytes above the level before the step was made", "samples in a batch"),
    "device-memory": ("bytes of the device's memory", "samples in a batch"),
    "memory-categories": ("bytes of tensors at their peak", "batch and way of a step"),
    "memory-over-time": ("seconds since the step began", "memory in bytes"),
    "layers": ("bytes of a training step", "layer, in the network's order"),
    "largest-batch": ("samples in the largest batch that fits", "network and limit"),
    "frontier": ("peak bytes above the level before", "seconds of a training step"),
    "phases": ("seconds of a step", "batch and way of making a step"),
    "operators": ("seconds of all calls in a step", "operator"),
    "step-energy": ("joules of a step", "samples in a batch"),
    "sample-energy": ("joules per sample", "samples in a batch"),
    "long-run": ("seconds since the run began", "temperature in degrees Celsius"),
    "layer-kinds": ("width (number of neurons or channels)", "seconds of a step of training"),
    "sweep-width": ("width (number of neurons or channels)", "seconds of a step of training"),
    "sweep-depth": ("depth (number of layers)", "seconds of a step of training"),
    "neighbours": ("a step of the training in seconds", "training beside it"),
}
TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=30).filter(
    lambda text: text == text.strip()
)
ODD = st.builds(lambda text: f"</svg><b>{text}\"'&", TEXTS)


def sections_of(text: str) -> dict[str, str]:
    """The HTML of each figure's section by the figure's id; of a figure without anything in it its line."""
    found = {match[1]: match[0] for match in re.finditer(r'<li id="([^"]+)">.*?</li>', text, re.DOTALL)}
    for section in re.findall(r"<section>.*?</section>", text, re.DOTALL):
        if match := re.search(r'<(?:figure|div) id="([^"]+)"', section):
            found[match[1]] = section
    return found


def drawn(key: str, record: Record | None = None) -> str:
    return sections_of(page(record or sample_record()))[key]


def spans(section: str, style: str) -> list[str]:
    return re.findall(rf'<span class="{style}"[^>]*>(.*?)</span>', section)


def legend_of(section: str) -> list[str]:
    return re.findall(r'<li><i class="swatch [^"]*"></i>(.*?)</li>', section)


def test_it_is_well_formed_and_asks_for_nothing() -> None:
    text = page(sample_record(), title="a board")
    found = Page(text)
    assert found.texts_in("h1") == found.texts_in("title") == ["a board"]
    assert not [a for _, a in found.elements if {"src", "href", "action", "srcset"} & a.keys()]
    assert not re.search(r"://|url\(|@import|<script", text)
    assert any(a.get("content") == "default-src 'none'; style-src 'unsafe-inline'" for _, a in found.elements)


def test_its_header_is_the_machine() -> None:
    found = Page(page(sample_record("my board")))
    facts = dict(zip(found.texts_in("dt"), found.texts_in("dd"), strict=True))
    assert found.texts_in("h1") == ["What training costs on my board"]
    assert facts["processor"] == "Cortex-A72" and facts["memory"] == "4.00 GiB" and facts["torch"] == "2.15.0"
    assert "rapl: no counter of packages in /sys/class/powercap" in found.texts_in("li")


@pytest.mark.parametrize("key", AXES)
def test_every_figure_has_axes_with_units_a_legend_and_its_numbers(key: str) -> None:
    section = drawn(key)
    found = Page(section)
    (title,) = found.texts_in("h2")
    assert len(title) > 15
    axes = re.findall(r'<div class="axis" data-axis="([xy])"><span class="title"[^>]*>(.*?)</span>', section)
    assert [axis for axis, _ in axes].count("x") == [axis for axis, _ in axes].count("y") == section.count("<svg ")
    across, upwards = AXES[key]
    assert {("x", escape(across)), ("y", escape(upwards))} <= set(axes)
    assert all(legend_of(section)) and legend_of(section)
    ticks = spans(section, "tick")
    assert len(ticks) >= 2 * section.count("<svg ")
    assert all(a["aria-label"] for tag, a in found.elements if tag == "svg")
    assert section.count("<details>") == 1
    assert len(found.texts_in("td")) >= 2 * len(found.texts_in("th"))


def test_ticks_carry_their_units() -> None:
    units = {"step-times": "ms|µs|s", "peak-memory": "MiB", "step-energy": "J|mJ", "memory-over-time": "MiB|ms|s|µs"}
    for key, unit in units.items():
        assert all(re.fullmatch(rf"0|[\d.]+ ({unit})", tick) for tick in spans(drawn(key), "tick")), key
    assert any(tick.endswith("°C") for tick in spans(drawn("long-run"), "tick"))
    assert any(tick.endswith("GHz") for tick in spans(drawn("long-run"), "tick"))


def test_bars_are_as_long_as_their_numbers() -> None:
    cells = [
        Cell(suite="s", model="net", batch_size=8, mode=mode, engine=engine, threads=1, step_seconds=seconds)
        for mode, engine, seconds in (
            ("inference", "torch", [1.0, 2.0, 9.0]),
            ("training", "torch", [6.0]),
            ("training", "torch_odt", [3.0]),
        )
    ]
    section = drawn("step-times", Record(sample_machine(), cells))
    paths = re.findall(r'<path class="block ([^"]+)" d="M0 [\d.]+H([\d.]+)V', section)
    lengths = {style: float(right) for style, right in paths}
    assert list(lengths) == ["line1", "line0", "line0 pale"]
    assert lengths["line0"] == pytest.approx(3 * lengths["line0 pale"], rel=1e-3)
    assert lengths["line1"] == pytest.approx(1.5 * lengths["line0 pale"], rel=1e-3)
    assert sorted(spans(section, "value")) == ["2.00 s", "3.00 s · 0.5× plain", "6.00 s · 3× inf."]


def test_parts_of_a_bar_lie_beside_each_other() -> None:
    cell = Cell(suite="s", model="net", batch_size=8, mode="training", engine="torch", threads=1,
                categories={"activations": 3 * MIB, "weights": MIB, "gradients": 0})  # fmt: skip
    section = drawn("memory-categories", Record(sample_machine(), [cell]))
    edges = re.findall(r'<path class="block (line\d)" d="M([\d.]+) [\d.]+H([\d.]+)V', section)
    weights, activations = ((style, float(left), float(right)) for style, left, right in edges)
    assert weights[0] == "line7" and activations[0] == "line0"
    assert weights[2] == activations[1] and activations[2] == pytest.approx(4 * weights[2], rel=1e-3)
    assert spans(section, "value") == ["4.0 MiB"]


def test_what_ran_out_of_memory_says_so() -> None:
    for key in ("step-times", "peak-memory", "step-energy"):
        section = drawn(key)
        assert spans(section, "value refused") == ["out of memory"]
        assert "training, 4 threads: out of memory (more than 900 MiB)" in section
        assert "failed (RuntimeError: it does not take samples of 3x32x32)" in section
    assert "skipped (no permission to set governors)" in drawn("threads")


def test_the_prediction_is_laid_over_every_pass() -> None:
    # The pass of half a second is stretched to one of a second.
    prediction = Prediction(peak_bytes=6 * MIB, step_seconds=1.0, at_seconds=[0.0, 0.25], resident_bytes=MIB, passes=2,
                            bytes={"kept": [MIB, 3 * MIB], "workspace": [0, MIB]})  # fmt: skip
    traces = [
        Trace(quantity="memory", label="weights", unit="bytes", at_seconds=[0, 2.0], values=[2 * MIB, 2 * MIB]),
        Trace(quantity="memory", label="activations", unit="bytes", at_seconds=[0, 1.0], values=[0, 4 * MIB]),
        Trace(quantity="memory", label="process", unit="bytes", at_seconds=[0, 0.5], values=[MIB, 6 * MIB]),
    ]
    cell = Cell(suite="s", model="net", batch_size=8, mode="training", engine="torch_odt", threads=1, traces=traces,
                prediction=prediction)  # fmt: skip
    section = drawn("memory-over-time", Record(sample_machine(), [cell]))
    (path,) = re.findall(r'<path class="line predicted" d="([^"]+)"', section)
    # Weights 2, resident 1, then 1 and 4 in the arena.
    highest = 1.14 * 8
    level = {value: f"{400 * (1 - value / highest):.2f}" for value in (4, 7)}
    assert path == f"M0 {level[4]}H250V{level[7]}H500V{level[4]}H750V{level[7]}H1000"
    assert section.count('<path class="line process"') == 1
    assert {"held by the process", "predicted by the plan"} <= set(legend_of(section))
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(<td>.*?)</tr>", section)]
    assert [row[1] for row in rows] == ["0 µs", "1.00 s", "2.00 s"]
    assert [row[-2:] for row in rows] == [["3.0 MiB", "4.0 MiB"], ["8.0 MiB", "4.0 MiB"], ["8.0 MiB", "7.0 MiB"]]
    assert [row[-3] for row in rows] == ["2.0 MiB", "6.0 MiB", "6.0 MiB"]


@pytest.mark.parametrize("key", ["memory-over-time", "operators"])
def test_charts_of_a_network_stand_in_a_row(key: str) -> None:
    """One that lacks torch_odt does not move all that follow."""
    titles = re.findall(r'<div class="panel( first)?"><h3>(.*?), batch', drawn(key))
    networks = [network for _, network in titles]
    assert len(set(networks)) > 1
    for i, (first, network) in enumerate(titles):
        assert bool(first) == (network not in networks[:i])


def test_long_traces_keep_their_peak() -> None:
    values = [0] * 50_000
    values[31_416] = 77 * MIB
    trace = Trace(quantity="memory", label="activations", unit="bytes", values=values,
                  at_seconds=[i / 1000 for i in range(len(values))])  # fmt: skip
    cell = Cell(suite="s", model="net", batch_size=8, mode="training", engine="torch", threads=1, traces=[trace])
    section = drawn("memory-over-time", Record(sample_machine(), [cell]))
    assert "at most 77.0 MiB" in section and section.count("77.0 MiB</td>") == 2
    assert len(section) < 100_000


def test_absent_energy_is_named_with_its_reason() -> None:
    quantities = {"rapl": {"package_energy_joules": {"absent": "no permission to read energy_uj"}}}
    cell = replace(sample_cells()[1], quantities=quantities)
    machine = replace(sample_machine(), absent={"battery battery_energy_joules": "there is none"})
    section = drawn("step-energy", Record(machine, [cell]))
    reasons = [
        "no energy from the processor's counter (RAPL): no permission to read energy_uj",
        "no energy from the battery: there is none",
        "no energy by a model: torch-odt measure --watts states what a busy core draws",
    ]
    assert Page(section).texts_in("li") == reasons
    assert "<svg" not in section and "0 J" not in section


def test_what_is_absent_is_told_once_and_named_where_others_have_it() -> None:
    quantities = {"rapl": {"package_energy_joules": {"absent": "closed"}}, "model": {}}
    lacking = [replace(cell, quantities=quantities) for cell in sample_cells() if cell.model in ("lenet", "alexnet")]
    having = [cell for cell in sample_cells() if cell.model == "googlenet" and cell.outcome == "ok"]
    reason = "no energy from the processor's counter (RAPL): closed"
    machine = replace(sample_machine(), absent={})
    ok = [cell for cell in lacking if cell.outcome == "ok"]
    for cells, text in ((ok, reason), ([*ok, *having], f"{reason} (lenet, alexnet)")):
        section = drawn("step-energy", Record(machine, cells))
        assert [each for each in Page(section).texts_in("li") if "RAPL" in each] == [text]


def test_a_machines_absences_are_a_line_for_each_reason() -> None:
    absent = {"rapl package_energy_joules": "none", "rapl memory_energy_joules": "none", "nvml": "no driver"}
    machine = replace(sample_machine(), absent=absent)
    lines = ["rapl (package energy joules, memory energy joules): none", "nvml: no driver"]
    assert Page(page(Record(machine, []))).texts_in("li")[-2:] == lines
    assert table(Record(machine, [])).endswith("This machine cannot measure\n  " + "\n  ".join(lines))


def test_a_long_run_names_the_sensors_it_lacked() -> None:
    cell = next(cell for cell in sample_cells() if cell.experiment == "long run")
    steps = [trace for trace in cell.traces if trace.quantity == "step"]
    machine = replace(sample_machine(), absent={"thermal highest_celsius": "no sensor"})
    section = drawn("long-run", Record(machine, [replace(cell, traces=steps)]))
    assert section.count("<svg ") == 1
    assert {"No temperature was read: no sensor.", "No frequency was read."} == set(Page(section).texts_in("li")[2:])
    # One way alone is named, too.
    assert legend_of(section) == [steps[0].label, "solid: plain PyTorch"]


def test_long_runs_of_both_engines_share_their_charts() -> None:
    section = drawn("long-run")
    title = "mobilenet_v2, 3x224x224, batch 16, 4 threads"
    quantities = ("temperature", "frequency", "step")
    assert Page(section).texts_in("h3") == [f"{title}: {quantity}" for quantity in quantities]
    # A sensor, four cores and the steps, of each of both.
    assert section.count('<path class="line line') == 2 * (1 + 4 + 1)
    assert section.count(' dashed" d="M') == 1 + 4 + 1
    assert "dashed: torch_odt (50%)" in legend_of(section)


def test_the_other_program_alone_stands_beside_trainings_of_both_engines() -> None:
    section = drawn("neighbours")
    conditions = ["none", *(f"{how}, {engine}" for engine in ("plain PyTorch", "torch_odt (50%)")
                            for how in ("foreground", "background"))]  # fmt: skip
    assert legend_of(section) == [f"training: {condition}" for condition in conditions]
    assert set(Page(section).texts_in("h3")) >= {"a step of the training, beside mentee, 3x32x32, batch 32"}
    # From the lowest bar upwards.
    assert spans(section, "value")[3:5] == ["52.63/s · 0.53×", "100/s"]
    assert spans(section, "value")[0] == "92.59/s · 0.93×"


def test_the_frontier_names_every_budget_and_keeps_optimizers_apart() -> None:
    steps = [cell for cell in sample_cells() if cell.model == "lenet" and cell.batch_size == 16 and cell.threads == 4]
    others = [replace(cell, optimizer="adam", step_seconds=[9.0]) for cell in steps if cell.mode == "training"]
    theirs = replace(steps[1], engine="executorch", step_seconds=[0.5])
    section = drawn("frontier", Record(sample_machine(), [*steps, *others, theirs]))
    title = "lenet, 3x224x224, batch 16"
    assert Page(section).texts_in("h3") == [title, f"{title}, adam"]
    marks = re.findall(r'<span class="mark [^"]*"[^>]*>(.*?)</span>', section)
    assert sorted(marks) == ["30%", "30%", "50%", "50%"]
    assert legend_of(section) == ["plain PyTorch", "torch_odt, measured", "ExecuTorch", "torch_odt, predicted"]
    dots = re.findall(r'<i class="dot (line\d)[^"]*" style="[^"]*" title="([^"]*)"', section)
    measured = [text for style, text in dots if style == "line1"]
    assert len(measured) == 4 and sum("9.00 s" in text for text in measured) == 2
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(<td>.*?)</tr>", section)]
    assert [row[1] for row in rows] == [
        "plain PyTorch", "torch_odt (30%)", "torch_odt (50%)", "ExecuTorch",
        "plain PyTorch (adam)", "torch_odt (30%, adam)", "torch_odt (50%, adam)",
    ]  # fmt: skip


def test_the_legend_of_a_frontier_has_a_line_where_dots_are_joined() -> None:
    cells = [cell for cell in sample_cells() if cell.model == "lenet" and cell.batch_size == 16 and cell.threads == 4]
    for budgets, style in (("50%", "line2"), ("30% 50%", "line2 dashed")):
        chosen = [cell for cell in cells if cell.budget in ("", *budgets.split())]
        section = drawn("frontier", Record(sample_machine(), chosen))
        assert re.findall(r'<i class="swatch ([^"]*)"></i>torch_odt, predicted', section) == [style]
        assert ('<path class="line line2 dashed"' in section) == ("dashed" in style)


def test_marks_give_way_to_each_other() -> None:
    def marks(*xs: float) -> list[tuple[str, str]]:
        line = Line("l", "line0", xs, [1.0] * len(xs), marks=[f"{x:g}" for x in xs])
        chart = lines([line], x=Side("x", COUNT), y=Side("y", COUNT), description="")
        return re.findall(r'<span class="mark ([^"]*)"[^>]*>(.*?)</span>', chart)

    assert marks(1, 50, 100) == [("behind", "1"), ("before", "50"), ("before", "100")]
    crowded = marks(1, 50, 51, 52, 100)
    sides = [("behind", "1"), ("before", "50"), ("behind", "51"), ("before", "52"), ("before", "100")]
    assert crowded == sides


def test_no_dot_goes_without_its_mark() -> None:
    """However many lie on each other: marks then stand above each other."""
    names = [f"{i}0%" for i in range(1, 9)]
    line = Line("l", "line0", [5.0] * 8 + [9.0], [7.0 + 0.01 * i for i in range(8)] + [20.0], marks=[*names, ""])
    chart = lines([line], x=Side("x", COUNT), y=Side("y", COUNT, includes_zero=True), description="")
    found = re.findall(r'<span class="mark (\w+)" style="left:[\d.]+%;bottom:([\d.]+)%">(.*?)</span>', chart)
    assert sorted(name for _, _, name in found) == names
    places = {(side, float(bottom)) for side, bottom, _ in found}
    assert len(places) == 8 and all(0 < bottom < 100 for _, bottom in places)


def test_two_optimizers_of_a_network_stand_beside_each_other() -> None:
    """Nothing of one is taken for the other's, and inference, which has none, is of both."""
    steps = [cell for cell in sample_cells() if cell.model == "lenet" and cell.batch_size == 16 and cell.threads == 4]
    adam = [
        replace(cell, optimizer="adam", step_seconds=[2 * (cell.median_seconds or 0)])
        for cell in steps
        if cell.mode == "training"
    ]
    names = ["plain PyTorch, inference", "plain PyTorch, training", "plain PyTorch (adam), training",
             "torch_odt (50%), training", "torch_odt (30%), training",
             "torch_odt (50%, adam), training", "torch_odt (30%, adam), training"]  # fmt: skip
    both, alone = Record(sample_machine(), [*steps, *adam]), Record(sample_machine(), [steps[0], *adam])
    sections = sections_of(page(both))
    assert legend_of(sections["step-times"]) == legend_of(sections["peak-memory"]) == names
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(<td>.*?)</tr>", sections["step-times"])]
    times = {row[2]: row[3:] for row in rows}
    assert times["plain PyTorch (adam), training"][1] == f"{2 * 3:.3g}"
    assert times["torch_odt (50%, adam), training"][2] == times["torch_odt (50%), training"][2] == "1"
    titles = Page(sections["memory-over-time"]).texts_in("h3")
    assert len(titles) == len(set(titles)) == 6 and sum("adam" in title for title in titles) == 3
    assert len(re.findall(r"<tr><td>", sections["all-cells"])) == len(both.cells)
    # Alone it has the colours that the usual one has.
    styles = re.findall(r'<li><i class="swatch ([^"]*)"></i>(.*?)</li>', drawn("step-times", alone))
    assert styles[:2] == [("line0 pale", "plain PyTorch, inference"), ("line0", "plain PyTorch (adam), training")]


def test_lines_of_several_ways_are_dashed_differently() -> None:
    cells = [cell for cell in sample_cells() if cell.model == "lenet" and cell.mode == "training"]
    cells += [replace(cell, budget="30%") for cell in cells if cell.engine == "torch_odt" and cell.threads == 1]
    cells += [replace(cells[0], engine="executorch", threads=threads) for threads in (1, 4)]
    section = drawn("threads", Record(sample_machine(), cells))
    assert legend_of(section) == ["batch 1", "batch 16", "solid: plain PyTorch", "dashed: torch_odt (50%)",
                                  "long-dashed: torch_odt (30%)", "dotted: ExecuTorch"]  # fmt: skip
    strokes = re.findall(r'<path class="line (line\d[^"]*)"', section)
    assert sorted(strokes) == ["line0", "line0 dashed", "line0 dotted", "line1", "line1 dashed", "line1 long-dashed"]


def test_a_figure_of_one_number_of_threads_says_which() -> None:
    step = next(cell for cell in sample_cells() if cell.model == "lenet" and cell.mode == "training")
    other = replace(step, model="other", threads=1)
    hint = "{}; the others are in the figure of threads and in the table of every cell."
    both = [replace(step, threads=threads, batch_size=batch) for threads in (1, 2) for batch in (1, 4)]
    for key in ("step-times", "sample-times", "peak-memory", "busy-processors"):
        assert hint.format("With 2 threads") in drawn(key, Record(sample_machine(), [*both, other]))
        assert "the figure of threads" not in drawn(key, Record(sample_machine(), [*both[:2], other]))
    more = [replace(other, threads=4), *(replace(other, batch_size=batch) for batch in (2, 3))]
    mixed = drawn("step-times", Record(sample_machine(), [*both, *more]))
    named = "With 1 thread (other, 3x224x224), 2 threads (lenet, 3x224x224)"
    assert hint.format(named) in mixed


def test_stated_watts_are_not_called_measured() -> None:
    sources = "a model of stated watts, not measured; the card's own counter (NVML)"
    assert f"Source: {escape(sources)}." in drawn("step-energy")


def test_the_share_of_convolution_gradients_is_told() -> None:
    cell = Cell(suite="s", model="net", batch_size=8, mode="training", engine="torch", threads=1, profiled_seconds=5.0,
                unprofiled_seconds=4.0,
                operators=[
                    OperatorTime(op="convolution", direction="forward", seconds=1.0, calls=1),
                    OperatorTime(op="convolution_backward", direction="backward", seconds=3.0, calls=1),
                    OperatorTime(op="relu_backward", direction="backward", seconds=1.0, calls=1),
                ])  # fmt: skip
    section = drawn("phases", Record(sample_machine(), [cell]))
    assert Page(section).texts_in("td")[-3:] == ["100.0%", "125.0%", "75.0%"]
    edges = {style: (float(left), float(right)) for style, left, right in
             re.findall(r'<path class="block (line\d)" d="M([\d.]+) [\d.]+H([\d.]+)V', section)}  # fmt: skip
    lengths = {style: right - left for style, (left, right) in edges.items()}
    assert lengths["line3"] == pytest.approx(3 * lengths["line1"], rel=1e-2)
    assert lengths["line0"] == pytest.approx(lengths["line1"], rel=1e-2)


def test_the_largest_network_of_each_kind_of_layer_is_broken_down() -> None:
    titles = Page(drawn("phases")).texts_in("h3")
    swept = [title for title in titles if " " in title.split(",")[0] or "convolution" in title or "separable" in title]
    names = ("fully connected 128x2", "convolution 128x2", "separable 128x2")
    assert swept == [f"{name}, 3x32x32" for name in names]


def test_no_cell_is_left_out() -> None:
    record = sample_record()
    rows = re.findall(r"<tr><td>", drawn("all-cells"))
    assert len(rows) == len(record.cells)


def test_a_record_without_cells_says_what_is_missing() -> None:
    text = page(Record(Machine(name="", processor=""), []))
    sections = sections_of(text)
    assert AXES.keys() < sections.keys()
    for key in AXES:
        (line,) = Page(sections[key]).texts_in("li")
        assert ": " in line and line.endswith(".")
    assert Page(text).texts_in("h2")[-1] == "What this record does not show" and "<figure" not in text
    assert Page(text).texts_in("h1") == ["What training costs on this device"]


@settings(max_examples=10, deadline=None)
@given(ODD, ODD, ODD)
def test_no_text_is_taken_for_the_page(name: str, reason: str, label: str) -> None:
    """Names of networks, operators, layers and sensors, budgets, factors and reasons."""
    plain = Page(page(sample_record()))
    step = next(cell for cell in sample_cells() if cell.prediction is not None)
    layer = LayerMemory(layer=label, kind=label, weights_bytes=MIB, gradients_bytes=0, optimizer_bytes=0,
                        activations_bytes=5)  # fmt: skip
    heat = Trace(quantity="temperature", label=label, unit="celsius", at_seconds=[0, 1], values=[40, 50])
    operator = OperatorTime(op=label, direction="forward", seconds=1.0, calls=3)
    cells = [
        replace(step, model=name, budget=label, operators=[operator], layers=[layer], notes=[reason]),
        replace(step, model=name, categories={label: 7}, results={label: 3.0}),
        replace(step, model=name, experiment="long run", traces=[heat]),
        replace(step, model=name, experiment="neighbour", factors={"training": label}, results={label: 3.0}),
        replace(step, model=name, factors={"layer": label, "width": 1, "depth": 2}),
        replace(step, model=name, batch_size=99, outcome="failed", reason=reason),
    ]
    machine = replace(sample_machine(name), absent={label: reason}, processor=label, versions={label: reason})
    record = Record(machine, cells)
    for text in (page(record), compare(record, sample_record(label)).page()):
        found = Page(text)
        assert {tag for tag, _ in found.elements} <= {tag for tag, _ in plain.elements}
        assert label in found.texts_in("dd")
    assert f"{label}: {reason}" in Page(page(record)).texts_in("li")
    assert reason in table(record)


IDENTITY = {"suite", "model", "batch_size", "mode", "engine", "threads", "experiment", "factors", "outcome"}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([f.name for f in fields(Cell) if f.name not in IDENTITY]), unique=True), st.data())
def test_partial_records_have_pages(lost: Sequence[str], data: st.DataObject) -> None:
    """Whatever later or interrupted runs leave out."""
    defaults = Cell(suite="", model="", batch_size=0, mode="training", engine="torch", threads=0)
    chosen = data.draw(st.lists(st.sampled_from(sample_cells()), min_size=1, max_size=12))
    cells = [replace(cell, **{name: getattr(defaults, name) for name in lost}) for cell in chosen]
    record = Record(sample_machine(), cells)
    sections = sections_of(page(record))
    assert AXES.keys() < sections.keys()
    for section in sections.values():
        found = Page(section)
        assert "<svg" in section or found.texts_in("li") or found.texts_in("td")
    assert table(record) and str(compare(record, sample_record()))


@pytest.mark.parametrize("seconds", [[0.0], [1e-9], [1e5]])
def test_numbers_at_the_edges_have_pages(seconds: list[float]) -> None:
    trace = Trace(quantity="memory", label="weights", unit="bytes", at_seconds=[0.0], values=[0])
    cell = Cell(suite="s", model="net", batch_size=0, mode="training", engine="torch", threads=1, step_seconds=seconds,
                base_bytes=5, peak_bytes=5, traces=[trace], categories={"weights": 0},
                operators=[OperatorTime(op="o", direction="outside", seconds=0.0, calls=0)],
                results={"largest_batch": 0})  # fmt: skip
    sized = [replace(cell, factors={"layer": "l", "width": width, "depth": 1}) for width in (0, 1, 1e9)]
    record = Record(sample_machine(), [cell, *sized, replace(cell, experiment="largest batch")])
    Page(page(record))
    assert spans(drawn("peak-memory", record), "value") == ["0 B"]


def test_an_accelerator_stands_beside_the_processor() -> None:
    cell = next(cell for cell in sample_cells() if cell.model == "lenet" and cell.mode == "training")
    section = drawn("step-times", Record(sample_machine(), [cell, replace(cell, device="cuda")]))
    assert {"plain PyTorch, training", "plain PyTorch (cuda), training"} == set(legend_of(section))
    assert section.count("<svg ") == 1


def test_it_is_written_of_what_was_read(tmp_path: Path) -> None:
    record = Record.read(write_sample(tmp_path / "run.jsonl"))
    assert page(record) == page(sample_record())
    write_page(record, tmp_path / "page.html", title="t")
    assert (tmp_path / "page.html").read_text("utf-8") == page(record, title="t")

"""The recipe's table, on a step that is traced and planned in seconds."""

from __future__ import annotations

import csv
import json
import math
import runpy
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_odt
from torch_odt.capture.costs import Costs
from torch_odt.capture.device import costs_on, load_device
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.schedule import PageIn, PageOut, Run, Schedule
from torch_odt.planning.simulate import simulate

RECIPE = Path(__file__).parents[2] / "recipes" / "poet_energy.py"
DEVICES = Path(torch_odt.__file__).parent / "capture" / "devices"
SMALL = ["--batch-size", "4", "--image-size", "64", "--time-limit", "1"]


@pytest.fixture(name="recipe", scope="module")
def _recipe() -> dict[str, Any]:
    return runpy.run_path(str(RECIPE))


def test_it_prints_and_writes_every_cell(
    recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--shares", "0.5", "0.2", "--deadlines", "1.2", "--planners", "poet", "capuchin", "--out", str(tmp_path)]
    status = recipe["main"]([*SMALL, *options])
    printed = capsys.readouterr().out
    with (tmp_path / "poet_energy.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    cells = json.loads((tmp_path / "poet_energy.json").read_text(encoding="utf-8"))
    places = {(row["planner"], row["budget_share"], row["deadline_share"]) for row in rows}
    assert len(rows) == len(cells) == len(places) == 8
    for cell in cells:
        if cell["fits"]:
            assert cell["peak_bytes"] <= cell["budget_bytes"]
            assert cell["extra_joules_share"] >= -1e-9
            assert f"{cell['extra_joules_share']:.2%}" in printed
    by_place = {(c["planner"], c["budget_share"], c["deadline_share"]): c for c in cells}
    for (planner, *place), cell in by_place.items():
        if planner == "capuchin" and cell["fits"]:
            assert by_place["poet", *place]["joules"] <= cell["joules"] + 1e-9
    # A step of so few samples is far from the paper's figure for Capuchin.
    assert status == 1 and "missed" in printed and "poet-remat was not asked for" in printed


def test_checkmate_never_pages(recipe: dict[str, Any]) -> None:
    options = recipe["parse_options"]([*SMALL, "--shares", "0.5", "--deadlines", "--planners", "checkmate"])
    (cell,) = recipe["compare"](recipe["trace"]("resnet18", 4, 64), "resnet18", "cortex-a72", options)
    assert cell.fits
    assert cell.written_bytes == cell.read_bytes == 0
    assert cell.extra_joules_share == pytest.approx(cell.extra_seconds_share)


@pytest.fixture(name="small", scope="module")
def _small(recipe: dict[str, Any]) -> tuple[TrainingGraph, Costs]:
    graph = recipe["trace"]("resnet18", 4, 64)
    return graph, costs_on(graph, load_device("cortex-a72"))


def joules_of(graph: TrainingGraph, costs: Costs, schedule: Schedule, device: str) -> float:
    """What the device's file says that the instructions draw, one after the other."""
    profile = tomllib.loads((DEVICES / f"{device}.toml").read_text(encoding="utf-8"))
    storage = profile["storage"]
    joules = []
    for instruction in schedule.instructions:
        if isinstance(instruction, Run):
            joules.append(profile["watts"] * costs.ops[instruction.op].seconds)
        elif isinstance(instruction, PageOut | PageIn):
            way = "write" if isinstance(instruction, PageOut) else "read"
            moving = graph.values[instruction.value].nbytes / storage[f"{way}_bytes_per_second"]
            joules.append(storage["watts"] * (storage[f"{way}_latency_seconds"] + moving))
    return math.fsum(joules)


@pytest.mark.parametrize("planner", ["poet", "poet-paging", "poet-remat", "capuchin", "auto"])
def test_joules_are_the_sum_of_what_instructions_draw(
    recipe: dict[str, Any], small: tuple[TrainingGraph, Costs], planner: str
) -> None:
    graph, costs = small
    everything = simulate(graph, costs, keep_all(graph, costs))
    schedule, _ = recipe["plan"](planner, graph, costs, int(0.98 * everything.peak_bytes), math.inf, 1.0)
    counted = simulate(graph, costs, schedule)
    assert joules_of(graph, costs, schedule, "cortex-a72") == pytest.approx(counted.joules, rel=1e-9)
    assert counted.joules > everything.joules


def test_a_step_costs_what_its_layers_compute(small: tuple[TrainingGraph, Costs]) -> None:
    """Convolutions and linear layers: the forward pass once, and as much again for each of both gradients."""
    import torchvision

    graph, costs = small
    model = torchvision.models.resnet18(num_classes=10)
    flops: list[int] = []

    def count(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        forward = 2 * weight[0].numel() * output.numel()
        flops.append(forward * (3 if inputs[0].shape[1] != 3 else 2))

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    model(torch.zeros(4, 3, 64, 64))
    everything = simulate(graph, costs, keep_all(graph, costs))
    layers_joules = 3.0 * sum(flops) / 2e9
    assert layers_joules < everything.joules < 1.03 * layers_joules


def test_less_memory_and_fewer_means_never_cost_less(
    recipe: dict[str, Any], small: tuple[TrainingGraph, Costs]
) -> None:
    graph, costs = small
    planners = ["poet", "poet-paging", "poet-remat"]
    shares = ["0.7", "0.1"]
    options = recipe["parse_options"](
        ["--time-limit", "0.6", "--shares", *shares, "--deadlines", "1.1", "--planners", *planners]
    )
    cells = list(recipe["compare"](graph, "resnet18", "cortex-a72", options))
    everything_joules = simulate(graph, costs, keep_all(graph, costs)).joules
    # What is found in so little time is not always the best.
    slack_joules = 2e-4 * everything_joules
    chosen = {(c.planner, c.deadline_share, c.budget_share): c for c in cells if c.fits}
    assert len([1 for planner, deadline, _ in chosen if deadline is None]) == 6
    for planner in planners:
        for deadline in (None, 1.1):
            own = [chosen[planner, deadline, float(s)] for s in shares if (planner, deadline, float(s)) in chosen]
            assert own
            for more, less in pairwise(own):
                assert more.joules <= less.joules + slack_joules
    for (planner, deadline, share), cell in chosen.items():
        assert cell.joules >= everything_joules * (1 - 1e-9)
        both = chosen["poet", deadline, share]
        assert both.joules <= cell.joules + slack_joules, planner


def make_cell(recipe: dict[str, Any], planner: str, extra: float, *, deadline: float | None = None, **more: Any) -> Any:
    usual: dict[str, Any] = {"budget_share": 0.5, "fits": True, "gap_share": None}
    return recipe["Cell"](
        model="m",
        device="d",
        planner=planner,
        budget_bytes=1,
        deadline_share=deadline,
        peak_bytes=1,
        joules=1 + extra,
        extra_joules_share=extra,
        seconds=1.0,
        extra_seconds_share=0.0,
        recompute_seconds=0.0,
        written_bytes=0,
        read_bytes=0,
        planning_seconds=0.0,
        **usual | more,
    )


def test_every_figure_stands_beside_its_target(recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    cells = [make_cell(recipe, name, extra) for name, extra in (("poet", 0.004), ("capuchin", 0.8))]
    late = (("poet", 0.002), ("poet-paging", 0.7), ("poet-remat", 0.9))
    cells += [make_cell(recipe, name, extra, deadline=1.1) for name, extra in late]
    assert recipe["print_verdicts"](cells) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {
        target: next(line for line in lines if target in line) for target in ("POET's", "Capuchin", "paging", "recomp")
    }
    assert "below 1%" in rows["POET's"] and "at most 0.40%" in rows["POET's"]
    assert "73% up to 141%" in rows["Capuchin"] and "80.0% to 80.0%" in rows["Capuchin"]
    assert "at most 41.1%" in rows["paging"] and "at most 47.3%" in rows["recomp"]
    assert all("40% fewer" in rows[name] for name in ("paging", "recomp"))
    assert all(line.endswith(" met") for line in rows.values())


@pytest.mark.parametrize(
    ("name", "extra", "deadline", "said"),
    [("poet", 0.011, None, "1.10%"), ("capuchin", 0.7, None, "70.0%"), ("poet-remat", 0.3, 1.1, "22.9%")],
)
def test_one_missed_target_is_a_failure(
    recipe: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    name: str,
    extra: float,
    deadline: float | None,
    said: str,
) -> None:
    own = [make_cell(recipe, "poet", 0.002, deadline=each) for each in (None, 1.1)]
    cells = [cell for cell in own if (name, deadline) != ("poet", cell.deadline_share)]
    assert recipe["print_verdicts"]([*cells, make_cell(recipe, name, extra, deadline=deadline)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.endswith("missed")]
    assert said in line


def test_what_cannot_be_judged_is_no_success(recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe["print_verdicts"]([]) == 1
    assert "No target could be judged" in capsys.readouterr().out
    assert recipe["print_verdicts"]([make_cell(recipe, "auto", 0.0)]) == 1
    printed = capsys.readouterr().out
    assert "poet was not asked for" in printed and "No target could be judged" in printed
    own = [make_cell(recipe, "poet", 0.0, deadline=deadline) for deadline in (None, 1.1)]
    others = [make_cell(recipe, "poet-remat", 0.0, deadline=1.1, fits=False)]
    assert recipe["print_verdicts"]([*own, *others]) == 0
    assert "poet-remat fits at none of 1 budgets" in capsys.readouterr().out


def test_a_poet_that_fits_nowhere_has_missed(recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    cells = [make_cell(recipe, "poet", 0.0, fits=False), make_cell(recipe, "poet", 0.0, fits=False, deadline=1.1)]
    assert recipe["print_verdicts"](cells) == 1
    assert capsys.readouterr().out.count("poet fits at none of 1 budgets") == 3
    cells = [make_cell(recipe, "poet", 0.0), make_cell(recipe, "poet", 0.0, fits=False, budget_share=0.1)]
    assert recipe["print_verdicts"](cells) == 1
    assert "at 1 of 2 budgets it does not fit" in capsys.readouterr().out


def test_published_baselines_know_nothing_of_energy(recipe: dict[str, Any], small: tuple[TrainingGraph, Costs]) -> None:
    graph, costs = small
    budget_bytes = int(0.98 * simulate(graph, costs, keep_all(graph, costs)).peak_bytes)
    for planner in ("capuchin", "pofo"):
        schedule, _ = recipe["plan"](planner, graph, costs, budget_bytes, math.inf, 1.0)
        thrifty, _ = recipe["plan"]("poet", graph, costs, budget_bytes, math.inf, 1.0)
        found, best = simulate(graph, costs, schedule), simulate(graph, costs, thrifty)
        assert found.joules > best.joules

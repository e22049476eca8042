"""Which cells there are: every suite, and what a user may choose."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from torch_odt.measure.job import How, Job
from torch_odt.measure.networks import CIFAR_SHAPE, NETWORKS, is_network, make_network
from torch_odt.measure.record import Cell
from torch_odt.measure.suites import SUITES, UBIQUITOUS, Choices

_LIMIT = {True: "128.0MiB", False: "512.0MiB"}


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("quick", [True, False])
def test_cells_are_told_apart_and_plain_ones_come_before_planned_ones(name: str, quick: bool) -> None:
    jobs = list(SUITES[name](Choices(quick=quick, cores=4)))
    keys = [job.cell.key for job in jobs]
    assert len(set(keys)) == len(keys)
    seen: set[tuple[object, ...]] = set()
    for job in jobs:
        cell = job.cell
        twin = (cell.experiment, cell.model, cell.batch_size, cell.threads, cell.governor, str(cell.factors))
        if cell.engine == "torch_odt":
            assert twin in seen and cell.budget == ("50%" if cell.experiment != "largest batch" else _LIMIT[quick])
        elif cell.mode == "training":
            seen.add(twin)
    assert {job.cell.engine for job in jobs} == {"torch", "torch_odt"}


def test_every_network_of_the_paper_is_measured_by_batch_threads_and_governor() -> None:
    choices = Choices(cores=4, batch_sizes=(2, 32), threads=(1, 4), governors=("performance", "powersave"))
    steps = [job.cell for job in SUITES["ubiquitous"](choices) if job.cell.experiment == "step"]
    count = Counter((cell.mode, cell.engine) for cell in steps)
    each = len(UBIQUITOUS) * 2 * 2 * 2
    assert count == {("inference", "torch"): each, ("training", "torch"): each, ("training", "torch_odt"): each}
    experiments = Counter(job.cell.experiment for job in SUITES["ubiquitous"](choices))
    assert experiments["largest batch"] == 2 * (len(UBIQUITOUS) - 1) and experiments["long run"] == 2


@pytest.mark.parametrize("name", SUITES)
def test_there_are_cells_for_each_budget(name: str) -> None:
    def cells(*budgets: str) -> list[Cell]:
        return [job.cell for job in SUITES[name](Choices(quick=True, cores=2, budgets=budgets))]

    one, three = cells("50%"), cells("50%", "30%", "64MiB")
    planned = [cell for cell in one if cell.engine == "torch_odt" and cell.experiment == "step"]
    more = [replace(cell, budget=budget) for budget in ("30%", "64MiB") for cell in planned]
    assert {cell.key for cell in three} == {cell.key for cell in (*one, *more)}
    assert len({cell.key for cell in three}) == len(three)
    ordered = [cell.budget for cell in cells("30%", "64MiB", "70%", "1GiB", "8%") if cell.model == planned[0].model
               and cell.engine == "torch_odt" and cell.experiment == "step"]  # fmt: skip
    assert ordered == ["70%", "30%", "8%", "1GiB", "64MiB"], "plans of smaller ones rest on what larger ones measured"


def test_what_takes_minutes_is_measured_with_both_engines() -> None:
    for name, experiment in (("ubiquitous", "long run"), ("architectures", "neighbour")):
        cells = [job.cell for job in SUITES[name](Choices(quick=True, budgets=("30%", "50%")))]
        chosen = Counter(
            (cell.engine, cell.budget, str(cell.factors.get("training", "")))
            for cell in cells
            if cell.experiment == experiment
        )
        conditions = ("foreground", "background") if experiment == "neighbour" else ("",)
        both = {(*way, how) for way in (("torch", ""), ("torch_odt", "30%")) for how in conditions}
        assert chosen.keys() == both | ({("torch", "", "none")} if experiment == "neighbour" else set())
        assert set(chosen.values()) == {1}


def test_sweeps_have_torch_odt_beside_them() -> None:
    for quick in (True, False):
        cells = [job.cell for job in SUITES["architectures"](Choices(quick=quick)) if "width" in job.cell.factors]
        plain = {cell.model for cell in cells if cell.engine == "torch"}
        planned = {cell.model for cell in cells if cell.engine == "torch_odt"}
        ends = {f"{kind}_{width}x{depth}" for kind in ("fully_connected", "convolution")
                for width in (64, 256) for depth in (1, 4)} | {"separable_64x1", "separable_256x1"}  # fmt: skip
        assert planned == (ends if quick else plain)


def test_another_device_is_measured_beside_the_processor() -> None:
    choices = Choices(quick=True, cores=2, device="cuda", models=("lenet",), batch_sizes=(4,))
    cells = [job.cell for job in SUITES["ubiquitous"](choices) if job.cell.device == "cuda"]
    assert {(cell.mode, cell.engine, cell.threads) for cell in cells} == {
        ("inference", "torch", 2), ("training", "torch", 2), ("training", "torch_odt", 2),
    }  # fmt: skip
    said = {(cell.engine, cell.outcome, cell.reason) for cell in cells}
    assert said == {("torch", "ok", ""), ("torch_odt", "skipped", "torch_odt trains on the CPU")}


def test_a_users_model_takes_the_users_samples() -> None:
    choices = Choices(quick=True, models=("net.py:make",), sample_shape=(1, 9, 9))
    cells = [job.cell for job in SUITES["breakdown"](choices)]
    assert {tuple(cell.input_shape) for cell in cells} == {(1, 9, 9)}
    assert all(job.how.layers for job in SUITES["breakdown"](choices))


def test_a_models_own_batch_is_measured_as_it_is() -> None:
    choices = Choices(quick=True, models=("a.py:make",), own_batches={"a.py:make": (3, (12,))})
    cells = [job.cell for job in SUITES["ubiquitous"](choices)]
    assert {cell.batch_size for cell in cells if cell.experiment != "largest batch"} == {3}
    assert {tuple(cell.input_shape) for cell in cells} == {(12,)}
    searches = [cell for cell in cells if cell.experiment == "largest batch"]
    assert len(searches) == 2 and all("a batch of its own" in cell.reason for cell in searches)


def test_jobs_travel() -> None:
    job = next(iter(SUITES["ubiquitous"](Choices(how=How(watts=(3.0, 1.0), budget_bytes=5)))))
    again = Job.from_json(job.to_json())
    assert again.how == job.how and again.to_json() == job.to_json()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # LeNet-5's; what the table of Chen et al. adds up to, and its 26.89 million are near it; by hand.
        ("lenet", 61_706),
        ("mentee", 29_125_770),
        ("fully_connected_64x8", 3072 * 64 + 7 * 64 * 64 + 8 * 64),
        ("convolution_128x2", 27 * 128 + 9 * 128 * 128 + 2 * 128),
        ("separable_64x1", 27 + 3 + 3 * 64 + 64),
    ],
)
def test_networks_have_the_papers_layers(name: str, parameters: int) -> None:
    assert is_network(name)
    assert sum(parameter.numel() for parameter in make_network(name).parameters()) == parameters


@pytest.mark.parametrize("name", ["reduced_mobilenet", "reduced_resnet"])
def test_networks_score_images(name: str) -> None:
    assert make_network(name, classes=7)(torch.ones(2, *CIFAR_SHAPE)).shape == (2, 7)
    assert not is_network("convolution_64")
    assert set(NETWORKS) == {"lenet", "mentee", "reduced_mobilenet", "reduced_resnet"}

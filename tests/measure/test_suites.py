"""Which cells there are: every suite, and what a user may choose."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from torch_odt.measure.job import How, Job
from torch_odt.measure.networks import CIFAR_SHAPE, NETWORKS, is_network, make_network
from torch_odt.measure.suites import SUITES, UBIQUITOUS, Choices


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
            assert twin in seen and cell.budget
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
    assert experiments["largest batch"] == 2 * (len(UBIQUITOUS) - 1) and experiments["long run"] == 1


def test_another_device_is_measured_beside_the_processor() -> None:
    choices = Choices(quick=True, cores=2, device="cuda", models=("lenet",), batch_sizes=(4,))
    cells = [job.cell for job in SUITES["ubiquitous"](choices) if job.cell.device == "cuda"]
    assert {(cell.mode, cell.engine, cell.threads) for cell in cells} == {
        ("inference", "torch", 2), ("training", "torch", 2),
    }  # fmt: skip


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

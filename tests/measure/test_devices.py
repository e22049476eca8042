"""Memory of devices that have their own, on ones that are made up."""

from __future__ import annotations

import types
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torch_odt import memory
from torch_odt.measure import cell as cell_module
from torch_odt.measure.cell import measure_cell
from torch_odt.measure.devices import DeviceMemory
from torch_odt.measure.job import How, Job
from torch_odt.measure.meter import Absent
from torch_odt.measure.record import Cell
from torch_odt.measure.steps import Work
from torch_odt.measure.window import Window

CELL = Cell(suite="ubiquitous", model="net", batch_size=4, mode="training", engine="torch", threads=1, device="cuda:1")


class Card:
    """A card that counts as torch does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.allocated = self.peak = self.reserved = 0
        for name in ("memory_allocated", "max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "synchronize", self.asked.append)

    def hold(self, nbytes: int) -> None:
        self.allocated = nbytes
        self.peak = max(self.peak, nbytes)
        self.reserved = max(self.reserved, 2 * nbytes)

    def memory_allocated(self, device: str) -> int:
        self.asked.append(device)
        return self.allocated

    def max_memory_allocated(self, device: str) -> int:
        return self.peak

    def max_memory_reserved(self, device: str) -> int:
        return self.reserved

    def reset_peak_memory_stats(self, device: str) -> None:
        self.asked.append(device)
        self.peak = self.reserved = self.allocated


def test_a_cards_peak_is_the_windows_own(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    card.hold(900)
    card.hold(100)
    with Window([DeviceMemory("cuda:1")], poll_seconds=60) as window:
        card.hold(300)
        card.hold(200)
    assert window.quantities["device"] == {
        "allocated_bytes": 200, "peak_allocated_bytes": 300, "peak_reserved_bytes": 600,
    }  # fmt: skip
    assert set(card.asked) == {"cuda:1"}


def test_where_torch_counts_no_peak_it_is_what_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = iter([50, 70, 60])
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: next(driver))
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 40)
    meter = DeviceMemory("mps")
    meter.begin()
    meter.poll()
    found = meter.end()
    assert (found["allocated_bytes"], found["peak_reserved_bytes"]) == (40, 70)
    assert found["peak_allocated_bytes"] == Absent("torch counts no peak on mps")
    cell = replace(CELL, quantities={"device": {"peak_allocated_bytes": {"absent": "no"}, "peak_reserved_bytes": 70}})
    assert cell.device_bytes == 70


@pytest.mark.parametrize(
    ("device", "has_card", "reason"),
    [
        ("cpu", False, "torch sees no accelerator"),
        ("cpu", True, "what is measured runs on the CPU"),
        ("xpu", False, "the memory of xpu is not counted"),
    ],
)
def test_without_memory_of_its_own_it_is_absent(
    monkeypatch: pytest.MonkeyPatch, device: str, has_card: bool, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_card)
    meter = DeviceMemory(device)
    meter.begin()
    assert meter.end() == {"peak_allocated_bytes": Absent(reason)}


def test_a_cell_on_a_card_records_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps are made on the CPU: what is tested is what is asked of the card, and recorded."""
    card = Card(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="a-b"))
    model = nn.Linear(4, 2)
    model.register_forward_hook(lambda *_: card.hold(500))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    work = Work(model, F.cross_entropy, optimizer, (torch.ones(4, 4), torch.zeros(4).long()))
    monkeypatch.setattr(memory, "is_tracking", lambda: False)
    monkeypatch.setattr(cell_module, "count_flops", lambda step: 7)
    found = measure_cell(Job(CELL, How(repetitions=2, idle_seconds=0.0)), lambda samples: work)
    assert found.outcome == "ok" and found.device_bytes == 500
    assert card.asked.count("cuda:1") >= 4, "each step waits for the card"
    assert not found.operators and not found.categories
    assert "operators and tensors are looked into on the CPU alone" in found.notes

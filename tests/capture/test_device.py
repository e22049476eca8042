"""Devices in files, and what a graph's ops cost on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_odt.capture.costs import TransferCosts
from torch_odt.capture.device import Device, costs_on, device_names, load_device
from torch_odt.execute.dry_run import measured

VALID = """
description = "a board"
flops_per_second = 1e6
watts = 0.5
[storage]
read_latency_seconds = 0.0
read_bytes_per_second = 2e6
write_latency_seconds = 0.001
write_bytes_per_second = 1e6
watts = 0.1
"""


def test_every_device_that_comes_along_can_be_read() -> None:
    assert set(device_names()) == {"cortex-a72", "cortex-m0", "cortex-m4f", "jetson-tx2"}
    for name in device_names():
        device = load_device(name)
        assert device.description and device.watts > 0 and device.storage is not None and not device.storage.overlaps


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    path.write_text(VALID)
    storage = TransferCosts(0.001, 1e6, 0.0, 2e6, 1 << 62, False, 0.1)
    assert load_device(path) == load_device(str(path)) == Device("a board", 1e6, 0.5, storage)
    path.write_text(VALID + "limit_bytes = 1000\noverlaps = true\n")
    assert load_device(path).storage == replace(storage, limit_bytes=1000, overlaps=True)
    path.write_text(VALID.split("[storage]")[0])
    assert load_device(path).storage is None


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("watts = 0.5", "", "board.toml: watts is missing; a device has description, flops_per_second, watts"),
        ("watts = 0.5", "watts = -1", "watts is a number above 0, not -1"),
        ("flops_per_second = 1e6", "flops_per_second = 0", "flops_per_second is a number above 0, not 0"),
        ("flops_per_second = 1e6", "flops_per_second = nan", "flops_per_second is a number above 0, not nan"),
        ("watts = 0.5", "watts = 0.5\nvolts = 3", "there is no volts; a device has"),
        ("watts = 0.1", "", "storage: watts is missing"),
        ("watts = 0.1", "watts = 0.1\noverlaps = 1", "overlaps is true or false, not 1"),
        ("watts = 0.1", "watts = 0.1\nsize = 1", "storage: there is no size"),
        ('"a board"', "7", "description is a text, not 7"),
        ("[storage]", "[storage", "is no TOML"),
    ],
)
def test_what_describes_no_device(tmp_path: Path, old: str, new: str, text: str) -> None:
    path = tmp_path / "board.toml"
    assert old in VALID
    path.write_text(VALID.replace(old, new))
    with pytest.raises(ValueError, match=text):
        load_device(path)


def test_a_file_of_other_bytes(tmp_path: Path) -> None:
    (path := tmp_path / "board.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"board\.toml is no TOML"):
        load_device(path)


def test_this_machine_is_none_of_them() -> None:
    board = Device("a board", 1e6, 0.5)
    assert Device.of_value("this") is None
    assert Device.of_value(board) is board
    assert Device.of_value("cortex-m0") == load_device("cortex-m0")


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"there is no device 'abacus'; there are cortex-a72, .*, and \.toml files"):
        load_device("abacus")
    with pytest.raises(OSError, match=r"nowhere\.toml"):
        load_device("nowhere.toml")


def test_operations_are_counted() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 6 * 6, 5))
    batch = (torch.randn(2, 3, 6, 6), torch.randint(5, (2,)))
    graph, costs = measured(model, nn.functional.cross_entropy, batch, cache=False)
    device = load_device("cortex-a72")
    on_device = costs_on(graph, device, costs)
    seconds: dict[str, float] = {}
    for op in graph.program:
        seconds[op.target.split(".")[1]] = on_device.seconds(op.index) * device.flops_per_second
    convolution = 2 * (2 * 8 * 6 * 6) * (3 * 3 * 3)
    assert seconds["convolution"] == convolution
    assert seconds["convolution_backward"] == convolution, "the images need no gradient"
    assert seconds["tanh"] == seconds["tanh_backward"] == 100 * 2 * 8 * 6 * 6
    assert seconds["addmm"] == 2 * 2 * 5 * 8 * 6 * 6
    assert on_device.watts == 3.0 and on_device.transfers == device.storage
    assert all(on_device.ops[i].events == cost.events for i, cost in costs.ops.items())
    assert any("Raspberry Pi" in note for note in on_device.notes)
    alone = costs_on(graph, device)
    assert alone.ops.keys() == on_device.ops.keys()

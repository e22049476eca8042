"""The file that a step pages to: how fast it is found to be, and which folders are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_odt as odt
from torch_odt._extensions import memory_module
from torch_odt.execute.page_file import open_page_file

pytestmark = pytest.mark.skipif(memory_module is None, reason="torch_odt._memory, and with it the pager, is not built")


def test_a_device_is_measured_without_drawing_random_numbers(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    opened = open_page_file(odt.PageFile(tmp_path, limit="8MiB"))
    assert torch.equal(torch.get_rng_state(), before)
    costs = opened.costs
    # Pages of several sizes leave holes.
    assert costs.limit_bytes == int(0.9 * (8 << 20)) and costs.overlaps
    for speed in (costs.read_bytes_per_second, costs.write_bytes_per_second):
        assert 1e5 < speed < 1e12
    assert 0 < costs.read_latency_seconds < 1 and 0 < costs.write_latency_seconds < 1
    assert opened.pager.stats()["pages"] == 0


def test_bad_input(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cases: list[tuple[Any, type[Exception], str]] = [
        (3, TypeError, "page_to takes a folder or a PageFile, not 3"),
        (tmp_path / "none", NotADirectoryError, "there is no folder"),
        (odt.PageFile(tmp_path, limit="1MiB"), ValueError, "may hold 1.0 MiB, .* are free; 2.0 MiB are the least"),
        (odt.PageFile(tmp_path, limit="a lot"), ValueError, "a lot"),
    ]
    if os.path.ismount("/dev/shm"):
        cases.append(("/dev/shm", ValueError, r"lies in memory \(tmpfs\): paging there frees nothing"))
    for page_to, error, text in cases:
        with pytest.raises(error, match=text):
            odt.TrainStep(model, F.cross_entropy, optimizer, budget="80%", page_to=page_to)
        with pytest.raises(error, match=text):
            odt.wrap(model, budget="80%", page_to=page_to)
    assert model._compiled_call_impl is None

"""A device that stops to answer is an error in good time; the step is whole before it, and goes on when it answers."""

from __future__ import annotations

import copy
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import paging_worker
import pytest
import torch
import torch.nn.functional as F
from exactness import WITH_GRADIENTS

import torch_odt as odt
from torch_odt._extensions import memory_module
from torch_odt.capture.costs import TransferCosts
from torch_odt.execute import page_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(memory_module is None, reason="torch_odt._memory, and with it the pager, is not built"),
]

PATIENCE_SECONDS = 2.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of our own, which can be made to hang."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(512 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", image], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", image, folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk of our own can be mounted: {error}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """No write ends inside of this; and if a bug waits for one in spite of that, not for long."""
    thaw = ["fsfreeze", "--unfreeze", str(folder)]
    rescue = threading.Timer(60, subprocess.run, [thaw])
    subprocess.run(["fsfreeze", "--freeze", folder], check=True)
    rescue.start()
    try:
        yield
    finally:
        rescue.cancel()
        subprocess.run(thaw, check=True)


def test_a_step_fails_in_good_time_and_can_be_repeated(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Transfers are so cheap for the planner that whatever has to go is paged.
    monkeypatch.setattr(page_file, "_measure", lambda _, limit_bytes: TransferCosts(0.0, 1e15, 0.0, 1e15, limit_bytes))
    monkeypatch.setattr(page_file, "_PATIENCE_SECONDS", PATIENCE_SECONDS)
    model, optimizer = paging_worker.make_training()
    batch = paging_worker.make_batch(0)
    probe = odt.plan(
        *(model, F.cross_entropy, batch),
        budget=odt.Budget("1GiB", of="training"),
        optimizer=optimizer,
        disable_rewrites=WITH_GRADIENTS,
        page_to=disk,
        cache=False,
    )
    assert probe.smallest_feasible_bytes is not None
    step = odt.TrainStep(
        *(model, F.cross_entropy, optimizer),
        budget=odt.Budget(probe.smallest_feasible_bytes, of="training"),
        disable_rewrites=WITH_GRADIENTS,
        page_to=disk,
        cache=False,
    )
    step(*batch)
    assert step.plan.schedule is not None and step._request.page_file is not None
    pager = step._request.page_file.pager
    before = copy.deepcopy(model.state_dict())
    with frozen(disk):
        start = time.monotonic()
        with pytest.raises(odt.PagingError, match="takes longer than 2 seconds"):
            step(*batch)
        assert time.monotonic() - start < 5 * PATIENCE_SECONDS
        assert 0 < pager.stats()["pages"] <= 2, "what no thread has begun is dropped at once"
        with pytest.raises(odt.PagingError, match="takes longer than 2 seconds"):
            step(*batch)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    step(*batch)
    assert pager.stats()["pages"] == pager.stats()["file_bytes"] == 0
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

"""`torch-odt train --checkpoint-dir`: a run that is stopped goes on as if it had not been."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mounts import mounted
from safetensors.torch import load_file
from terminals import Terminal

from torch_odt.commands import train
from torch_odt.runtime.persistence import Checkpointer

NET = """
from torch import nn


def make(num_classes=10):
    features = [nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(64, num_classes))
"""
STEPS_AN_EPOCH = 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", megabytes=1) as folder:
        yield folder


@pytest.fixture
def words(tmp_path: Path) -> tuple[Any, ...]:
    pytest.importorskip("sklearn")
    (tmp_path / "droppy.py").write_text(NET)
    few = ("--image-size", "16", "--batch-size", "450", "--budget", "64MiB", "--budget-of", "training")
    return ("train", "--model", f"{tmp_path / 'droppy.py'}:make", "--data", "digits", *few, "--optimizer", "adamw")


def weights(path: Path) -> list[torch.Tensor]:
    return list(load_file(path).values())


@pytest.mark.parametrize(
    ("stopped_after", "number"),
    [
        (2, signal.SIGTERM),
        (2, signal.SIGINT),
        (STEPS_AN_EPOCH, signal.SIGTERM),
        (STEPS_AN_EPOCH + 1, signal.SIGTERM),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(
    terminal: Terminal,
    words: tuple[Any, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stopped_after: int,
    number: signal.Signals,
) -> None:
    whole = terminal(*words, "--epochs", "2", "--save", tmp_path / "whole", "--json")
    assert whole.code == 0, whole.err
    assert [epoch["steps"] for epoch in whole.document["epochs"]] == [STEPS_AN_EPOCH] * 2
    save = Checkpointer.step_done

    def stop(self: Checkpointer, step: int, **values: Any) -> Path | None:
        if step == stopped_after:
            os.kill(os.getpid(), number)
        return save(self, step, **values)

    kept = ("--checkpoint-dir", tmp_path / "kept", "--epochs", "2")
    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "step_done", stop)
        stopped = terminal(*words, *kept)
    assert stopped.code == 128 + number
    assert f"Stopped after {stopped_after} steps; --resume goes on" in stopped.err
    assert len(list((tmp_path / "kept").iterdir())) == (1 if stopped_after <= STEPS_AN_EPOCH else 2)
    resumed = terminal(*words, *kept, "--resume", "--save", tmp_path / "resumed", "--json")
    assert resumed.code == 0, resumed.err
    assert all(map(torch.equal, weights(tmp_path / "whole"), weights(tmp_path / "resumed")))
    for one, other in zip(whole.document["epochs"], resumed.document["epochs"], strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_a_signal_in_a_validation_ends_it_at_once_and_loses_nothing(
    terminal: Terminal, words: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = terminal(*words, "--epochs", "2", "--save", tmp_path / "whole", "--json")
    batches: list[int] = []
    really = train.validate

    def stop(model: Any, held_out: Any, **options: Any) -> tuple[float, float]:
        def asking() -> Any:
            for batch in held_out:
                batches.append(len(batch))
                os.kill(os.getpid(), signal.SIGTERM)
                yield batch

        return really(model, asking(), **options)

    kept = ("--checkpoint-dir", tmp_path / "kept", "--epochs", "2")
    with monkeypatch.context() as patch:
        patch.setattr(train, "validate", stop)
        stopped = terminal(*words, *kept)
    assert stopped.code == 128 + signal.SIGTERM and len(batches) == 1
    assert f"Stopped after {STEPS_AN_EPOCH} steps; --resume goes on" in stopped.err
    resumed = terminal(*words, *kept, "--resume", "--save", tmp_path / "resumed", "--json")
    assert resumed.code == 0, resumed.err
    assert all(map(torch.equal, weights(tmp_path / "whole"), weights(tmp_path / "resumed")))
    for one, other in zip(whole.document["epochs"], resumed.document["epochs"], strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_a_full_disk_loses_only_the_work_since_the_last_checkpoint(
    terminal: Terminal, words: tuple[Any, ...], tmp_path: Path, small_disk: Path
) -> None:
    kept = ("--checkpoint-dir", small_disk, "--checkpoint-every", "1", "--epochs", "2", "--resume")
    assert terminal(*words, *kept, "--steps", "2").code == 0
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    failed = terminal(*words, *kept)
    assert failed.code == 2, failed.err
    assert "No space left on device" in failed.err
    assert "--resume goes on from step-00000002.safetensors" in failed.err
    filler.unlink()
    resumed = terminal(*words, *kept, "--save", tmp_path / "resumed")
    assert resumed.code == 0 and "Resumed after 2 steps" in resumed.out
    assert terminal(*words, "--epochs", "2", "--save", tmp_path / "whole").code == 0
    assert all(map(torch.equal, weights(tmp_path / "whole"), weights(tmp_path / "resumed")))


def test_a_finished_run_can_be_given_more_epochs(terminal: Terminal, words: tuple[Any, ...], tmp_path: Path) -> None:
    kept = ("--checkpoint-dir", tmp_path / "kept", "--resume")
    assert terminal(*words, *kept).code == 0, "nothing to resume is no error"
    again = terminal(*words, *kept)
    assert again.code == 0 and "Resumed after 3 steps, in epoch 2" in again.out
    more = terminal(*words, *kept, "--epochs", "2", "--save", tmp_path / "resumed")
    assert more.code == 0, more.err
    assert terminal(*words, "--epochs", "2", "--save", tmp_path / "whole").code == 0
    assert all(map(torch.equal, weights(tmp_path / "whole"), weights(tmp_path / "resumed")))


def test_a_run_that_was_cut_short_can_be_given_more_steps(
    terminal: Terminal, words: tuple[Any, ...], tmp_path: Path
) -> None:
    kept = ("--checkpoint-dir", tmp_path / "kept", "--resume", "--epochs", "2")
    assert terminal(*words, *kept, "--steps", "2").code == 0
    again = terminal(*words, *kept, "--steps", "2")
    assert again.code == 0 and "Nothing is left to train: 2 steps are made" in again.out
    more = terminal(*words, *kept, "--steps", "5", "--save", tmp_path / "resumed")
    assert more.code == 0 and "Resumed after 2 steps, in epoch 1" in more.out
    assert terminal(*words, "--epochs", "2", "--steps", "5", "--save", tmp_path / "whole").code == 0
    assert all(map(torch.equal, weights(tmp_path / "whole"), weights(tmp_path / "resumed")))


def test_batches_of_another_size_are_not_the_same_run(
    terminal: Terminal, words: tuple[Any, ...], tmp_path: Path
) -> None:
    kept = ("--checkpoint-dir", tmp_path / "kept", "--resume")
    assert terminal(*words, *kept, "--steps", "1").code == 0
    other = terminal(*words, *kept, "--batch-size", "300", "--steps", "2")
    assert other.code == 2 and "batches of 300: the run that is to go on has batches of 450" in other.err


def test_an_earlier_run_is_not_overwritten(terminal: Terminal, words: tuple[Any, ...], tmp_path: Path) -> None:
    kept = ("--checkpoint-dir", tmp_path / "kept")
    assert terminal(*words, *kept, "--steps", "1").code == 0
    outcome = terminal(*words, *kept)
    assert outcome.code == 2 and "add --resume" in outcome.err
    outcome = terminal(*words, "--resume")
    assert outcome.code == 2 and "--resume needs --checkpoint-dir" in outcome.err

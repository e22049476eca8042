"""A run that is stopped goes on bit for bit, whatever was done to its process or its files."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from mounts import make_read_only, mounted
from torch import nn

import torch_odt as odt
from torch_odt.runtime import Background
from torch_odt.runtime.persistence import Checkpointer

STEPS = 8


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Training:
    """A network with everything that has a state: running statistics, dropout, momentum, a schedule."""

    def __init__(self) -> None:
        self.model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3), nn.Flatten(), nn.Linear(64, 2)
        )
        self.model.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)

    def step(self) -> None:
        noise = torch.tensor(np.random.rand() + random.random(), dtype=torch.float32)
        self.optimizer.zero_grad()
        (self.model(torch.randn(5, 3, 6, 6) + noise)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    def checkpointer(self, folder: Path, **options: object) -> Checkpointer:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return Checkpointer(folder, **parts, **options)  # type: ignore[arg-type]

    def bits(self) -> list[bytes]:
        tensors = [*self.model.state_dict().values()]
        tensors += [t for state in self.optimizer.state.values() for t in state.values()]
        return [t.contiguous().numpy().tobytes() for t in tensors]


def new_training() -> Training:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    return Training()


def undisturbed() -> list[bytes]:
    training = new_training()
    for _ in range(STEPS):
        training.step()
    return training.bits()


@pytest.mark.parametrize("stopped_at", [1, 3, STEPS - 1])
def test_a_resumed_run_is_an_undisturbed_one_bit_for_bit(tmp_path: Path, stopped_at: int) -> None:
    first = new_training()
    for _ in range(stopped_at):
        first.step()
    first.checkpointer(tmp_path).save(stopped_at, epoch=2, seen=torch.arange(3))
    first.step()
    second = Training()
    resumed = second.checkpointer(tmp_path).resume()
    assert resumed is not None and resumed.step == stopped_at
    assert resumed.values["epoch"] == 2 and torch.equal(resumed.values["seen"], torch.arange(3))
    for _ in range(resumed.step, STEPS):
        second.step()
    assert second.bits() == undisturbed()


def names(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("step-").replace(".safetensors", "") for path in folder.iterdir())


def test_checkpoints_of_an_earlier_run_are_not_mixed_with_those_of_a_new_one(tmp_path: Path) -> None:
    earlier = Training().checkpointer(tmp_path)
    for step in (100, 200, 300):
        earlier.save(step)
    new = Training().checkpointer(tmp_path, every_steps=10)
    with pytest.raises(odt.CheckpointError, match=r"an earlier run.*resume\(\) before the first step"):
        new.step_done(1)
    with pytest.raises(odt.CheckpointError, match="an earlier run"):
        new.save(10)
    resumed = new.resume()
    assert resumed is not None and resumed.step == 300
    with pytest.raises(ValueError, match="step 10 is before step 300"):
        new.save(10)
    assert new.step_done(310) == tmp_path / "step-00000310.safetensors"
    assert names(tmp_path) == ["00000200", "00000300", "00000310"]


def test_what_was_just_written_stays(tmp_path: Path) -> None:
    training = Training()
    checkpointer = training.checkpointer(tmp_path, keep=1)
    path = checkpointer.save(5)
    (tmp_path / "step-00000900.safetensors").write_bytes(path.read_bytes())
    assert checkpointer.save(6).exists()


def test_a_damaged_checkpoint_is_set_aside_and_never_counted_again(tmp_path: Path) -> None:
    training = Training()
    checkpointer = training.checkpointer(tmp_path, keep=2)
    checkpointer.save(200)
    checkpointer.save(300).write_bytes(b"")
    again = training.checkpointer(tmp_path, keep=1)
    with pytest.warns(odt.OdtWarning, match="the checkpoint before it is taken"):
        resumed = again.resume()
    assert resumed is not None and resumed.step == 200
    assert again.save(250).exists()
    assert names(tmp_path) == ["00000250", "00000300.damaged"]
    resumed = training.checkpointer(tmp_path).resume()
    assert resumed is not None and resumed.step == 250


def test_an_empty_folder_has_nothing_to_resume(tmp_path: Path) -> None:
    assert Training().checkpointer(tmp_path / "new" / "folder").resume() is None


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    checkpointer = Training().checkpointer(tmp_path, every_steps=2, keep=2)
    written = [checkpointer.step_done(step) for step in range(1, 10)]
    assert [None if path is None else path.name[10:13] for path in written] == [None, *(f"00{n}" for n in "22446688")]
    assert [path.name for path in checkpointer.paths] == ["step-00000008.safetensors", "step-00000006.safetensors"]
    assert sorted(tmp_path.iterdir()) == sorted(checkpointer.paths)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    training = Training()
    checkpointer = training.checkpointer(tmp_path)
    checkpointer.save(1)
    kept = training.bits()
    training.step()
    path = checkpointer.save(2)
    data = path.read_bytes()
    flipped = data[:-9] + bytes([data[-9] ^ 16]) + data[-8:]
    path.write_bytes({"truncated": data[:-20], "flipped": flipped, "empty": b""}[damage])
    with pytest.warns(odt.OdtWarning, match=r"step-00000002.*damaged.*the checkpoint before it is taken"):
        resumed = checkpointer.resume()
    assert resumed is not None and resumed.step == 1
    parameters = len(training.model.state_dict())
    assert training.bits()[:parameters] == kept[:parameters]


def test_nothing_but_damaged_checkpoints_is_an_error(tmp_path: Path) -> None:
    checkpointer = Training().checkpointer(tmp_path)
    checkpointer.save(1).write_bytes(b"")
    with pytest.warns(odt.OdtWarning), pytest.raises(odt.CheckpointError, match=r"no checkpoint in .* can be read"):
        checkpointer.resume()


def test_checkpoints_may_be_read_only(tmp_path: Path) -> None:
    training = Training()
    path = training.checkpointer(tmp_path).save(1)
    path.chmod(0o444)
    resumed = training.checkpointer(tmp_path).resume()
    assert resumed is not None and resumed.path == path
    written = path.read_bytes()
    training.step()
    assert path.read_bytes() == written, "what was resumed is no part of the file any more"


def test_another_training_is_refused(tmp_path: Path) -> None:
    training = Training()
    training.checkpointer(tmp_path).save(1)
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters())
    with pytest.raises(RuntimeError, match="state_dict"):
        Checkpointer(tmp_path, model=other, optimizer=optimizer).resume()
    with pytest.raises(odt.CheckpointError, match="no state of average"):
        training.checkpointer(tmp_path, others={"average": training.model}).resume()


@pytest.mark.parametrize("refused", ["model", "optimizer", "scheduler"])
def test_what_is_refused_changes_nothing(tmp_path: Path, refused: str) -> None:
    training = new_training()
    training.step()
    training.checkpointer(tmp_path).save(1)
    other = Training()
    other.step()
    if refused == "model":
        # Of all else, the last layer's bias is the last thing that torch itself would look at.
        other.model[-1].bias = nn.Parameter(torch.zeros(3))
    elif refused == "optimizer":
        other.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    else:
        take = other.scheduler.load_state_dict
        answers = iter([refuse, take])
        other.scheduler.load_state_dict = lambda state: next(answers)(state)  # type: ignore[method-assign]
    before, generators = other.bits(), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    rates = other.scheduler.state_dict() | {"lr": other.optimizer.param_groups[0]["lr"]}
    with pytest.raises((RuntimeError, ValueError)):
        other.checkpointer(tmp_path).resume()
    assert other.bits() == before
    assert other.scheduler.state_dict() | {"lr": other.optimizer.param_groups[0]["lr"]} == rates
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert np.random.get_state()[1].tolist() == generators[2]


def refuse(state: object) -> None:
    raise ValueError("not this one")


def test_bad_options_are_named(tmp_path: Path) -> None:
    training = Training()
    for options, text in (
        ({"keep": 0}, "keep must be"),
        ({"every_steps": 0}, "every_steps must be"),
        ({"others": {"model": training.model}}, "model in others"),
    ):
        with pytest.raises(ValueError, match=text):
            training.checkpointer(tmp_path, **options)
    for options, text in (
        ({"keep": "3"}, "keep is a whole number, not '3'"),
        ({"every_steps": 2.5}, "every_steps is a whole number"),
        ({"others": {"epoch": 7}}, "epoch has no state_dict"),
    ):
        with pytest.raises(TypeError, match=text):
            training.checkpointer(tmp_path, **options)


def test_a_full_disk_leaves_what_there_was(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", megabytes=1) as disk:
        training = Training()
        checkpointer = training.checkpointer(disk, others={"average": nn.Linear(300, 300)}, keep=1)
        size = checkpointer.save(1).stat().st_size
        assert 2 * size < 1 << 20 < 3 * size
        (disk / "other").write_bytes(bytes((1 << 20) - 2 * size))
        before = {path: path.read_bytes() for path in disk.iterdir()}
        with pytest.raises(OSError, match="No space left on device"):
            checkpointer.save(2)
        assert {path: path.read_bytes() for path in disk.iterdir()} == before
        resumed = checkpointer.resume()
        assert resumed is not None and resumed.step == 1
        (disk / "other").unlink()
        assert checkpointer.save(2).exists() and len(list(disk.iterdir())) == 1


def test_a_disk_that_is_read_only_can_be_resumed_from(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", megabytes=1) as disk:
        training = new_training()
        training.checkpointer(disk).save(1)
        training.step()
        damaged = training.checkpointer(disk)
        damaged.resume()
        damaged.save(2).write_bytes(b"")
        (disk / "step-00000003.safetensors.partial").touch()
        make_read_only(disk)
        other = Training()
        checkpointer = other.checkpointer(disk)
        with pytest.warns(odt.OdtWarning, match=r"step-00000002.*the checkpoint before it is taken"):
            resumed = checkpointer.resume()
        assert resumed is not None and resumed.step == 1
        for _ in range(STEPS):
            other.step()
        with pytest.raises(OSError, match="Read-only"):
            checkpointer.save(STEPS)
        assert names(disk) == ["00000001", "00000002", "00000003.partial"]
    first = new_training()
    for _ in range(STEPS):
        first.step()
    assert other.bits() == first.bits()


def test_a_signal_saves_and_ends_the_loop(tmp_path: Path) -> None:
    training = new_training()
    with training.checkpointer(tmp_path) as checkpointer, pytest.raises(SystemExit) as ended:
        for step in range(1, STEPS + 1):
            training.step()
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            assert checkpointer.step_done(step) is None
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    resumed = training.checkpointer(tmp_path).resume()
    assert resumed is not None and resumed.step == 3


@pytest.mark.parametrize("is_background_outside", [False, True])
def test_a_signal_in_a_pause_saves_after_one_more_step(tmp_path: Path, is_background_outside: bool) -> None:
    """Whichever of the two was entered first: the loop waits for a condition that would never end."""
    training, asked = new_training(), []

    def paused() -> bool:
        asked.append(True)
        if len(asked) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return len(asked) > 2

    options = Background(
        nice=0, scheduling="normal", idle_storage=False, threads=torch.get_num_threads(), pause_when=paused
    )
    checkpointer = training.checkpointer(tmp_path)
    with ExitStack() as entered, pytest.raises(SystemExit) as ended:
        if not is_background_outside:
            entered.enter_context(checkpointer)
        background = entered.enter_context(options.applied())
        if is_background_outside:
            entered.enter_context(checkpointer)
        for step in range(1, STEPS + 1):
            background.before_step()
            training.step()
            background.after_step()
            checkpointer.step_done(step)
    assert ended.value.code == 128 + signal.SIGTERM
    assert names(tmp_path) == ["00000003"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_that_no_step_follows_is_handed_on(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with Training().checkpointer(tmp_path) as checkpointer:
            checkpointer.step_done(1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == []
        assert heard == [signal.SIGTERM]
        with pytest.raises(KeyError), Training().checkpointer(tmp_path):
            os.kill(os.getpid(), signal.SIGTERM)
            raise KeyError("the error that ends the run is not hidden")
        with pytest.raises(SystemExit) as ended, Training().checkpointer(tmp_path) as checkpointer:
            checkpointer.end_if_asked()
            os.kill(os.getpid(), signal.SIGTERM)
            checkpointer.end_if_asked()
        assert ended.value.code == 128 + signal.SIGTERM
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_is_not_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`signal.signal` gives None for it, and takes none."""
    really = signal.signal
    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", lambda number, handler: really(number, handler) and None)
        with Training().checkpointer(tmp_path):
            patch.setattr(signal, "signal", really)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_forked_child_ends_at_a_signal_and_leaves_interrupts_to_its_parent(tmp_path: Path) -> None:
    """As a worker of a DataLoader is to: it has the parent's handlers."""
    with Training().checkpointer(tmp_path, signals=(signal.SIGTERM, signal.SIGINT)):
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGTERM)
                os._exit(1)
            except SystemExit as end:
                os._exit(int(end.code or 0))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with Training().checkpointer(tmp_path), pytest.raises(SystemExit):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
    assert not list(tmp_path.iterdir())


def test_others_alone_are_enough_and_nothing_is_too_little(tmp_path: Path) -> None:
    optimizer = new_training().optimizer
    Checkpointer(tmp_path, others={"mine": optimizer}).save(3)
    resumed = Checkpointer(tmp_path, others={"mine": new_training().optimizer}).resume()
    assert resumed is not None and resumed.step == 3
    with pytest.raises(ValueError, match="nothing to save"):
        Checkpointer(tmp_path)


def test_another_optimizer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    training = new_training()
    training.step()
    training.checkpointer(tmp_path).save(1)
    other = new_training()
    before = {name: tensor.clone() for name, tensor in other.model.state_dict().items()}
    other.optimizer = torch.optim.Rprop(other.model.parameters())
    with pytest.raises(odt.CheckpointError, match="resume with the optimizer that the run had"):
        Checkpointer(tmp_path, model=other.model, optimizer=other.optimizer).resume()
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.model.state_dict().items())

"""`torch-odt train`, a few steps of it."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file
from tensorboard_writer import Written
from terminals import Terminal
from torch import nn

import torch_odt as odt
from torch_odt import Budget, InfeasibleBudget, PagingError, TrainStep, memory
from torch_odt.commands.train import save
from torch_odt.commands.training import beside_loop, laid_out, validate

FEW = ("--image-size", "16", "--batch-size", "4", "--budget", "64MiB", "--budget-of", "training")
MAKE_STEP = TrainStep.with_outputs


def plain_model(net: Path, classes: int) -> nn.Module:
    spec = importlib.util.spec_from_file_location("net", net)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.make(classes)
    assert isinstance(model, nn.Module)
    return model


def test_folder_of_images(terminal: Terminal, net: Path, image_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    words = ("train", "--model", f"{net}:make", "--data", image_folder, *FEW, "--epochs", "2", "--save", path)
    outcome = terminal(*words, "--channels-last")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("validation: loss") == 2
    assert "peak" in outcome.out
    plain_model(net, 2).load_state_dict(load_file(path), strict=True)


def test_digits_as_json(terminal: Terminal, net: Path) -> None:
    words = ("train", "--model", f"{net}:make", "--data", "digits", *FEW, "--steps", "3", "--optimizer", "adamw")
    outcome = terminal(*words, "--json")
    assert outcome.code == 0, outcome.err
    document = outcome.document
    assert [epoch["steps"] for epoch in document["epochs"]] == [3]
    assert document["budget_bytes"] == 64 << 20
    assert document["plan"]["peak_bytes"] <= 64 << 20


def test_it_may_plan_longer(terminal: Terminal, net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    class Recording(odt.TrainStep):
        def __init__(self, *parts: Any, planning_seconds: float, **options: Any) -> None:
            asked.append(planning_seconds)
            super().__init__(*parts, planning_seconds=planning_seconds, **options)

    monkeypatch.setattr(odt, "TrainStep", Recording)
    words = ("train", "--model", f"{net}:make", "--data", "digits", *FEW, "--steps", "1", "--planning-seconds", "0.2")
    assert terminal(*words).code == 0
    assert asked == [0.2]


def test_packed_fashion_mnist(terminal: Terminal, net: Path, packed_fashion_mnist: Path) -> None:
    words = ("train", "--model", f"{net}:make", "--data", "fashion-mnist", "--data-dir", packed_fashion_mnist)
    outcome = terminal(*words, *FEW, "--steps", "2")
    assert outcome.code == 0, outcome.err


def test_workers_are_named(terminal: Terminal, net: Path, image_folder: Path) -> None:
    words = ("train", "--model", f"{net}:make", "--data", image_folder, *FEW, "--steps", "1", "--workers", "1")
    outcome = terminal(*words)
    assert outcome.code == 0, outcome.err
    assert "1 loading process is not this process's" in outcome.out


def test_infeasible_budget(terminal: Terminal, net: Path) -> None:
    words = ("train", "--model", f"{net}:make", "--data", "digits", "--image-size", "16")
    outcome = terminal(*words, "--budget", "1kB", "--budget-of", "training")
    assert outcome.code == 2
    assert "smallest feasible" in outcome.err


def test_same_seed_same_weights(terminal: Terminal, net: Path, image_folder: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        words = ("train", "--model", f"{net}:make", "--data", image_folder, *FEW, "--steps", "2")
        assert terminal(*words, "--seed", "5", "--save", tmp_path / name).code == 0
    first, second = load_file(tmp_path / "first"), load_file(tmp_path / "second")
    assert all(torch.equal(first[name], second[name]) for name in first)


def fail_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many steps are made; the transfers of the next one fail."""
    done = []

    def with_outputs(self: TrainStep, *args: Any) -> Any:
        if len(done) == steps:
            raise PagingError("paging out 4096 bytes: no space left on device", "full")
        done.append(None)
        return MAKE_STEP(self, *args)

    monkeypatch.setattr(TrainStep, "with_outputs", with_outputs)


def test_a_failed_transfer_loses_no_step(
    terminal: Terminal, net: Path, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("train", "--model", f"{net}:make", "--data", image_folder, *FEW, "--seed", "5")
    assert terminal(*words, "--steps", "1", "--save", tmp_path / "whole").code == 0
    fail_after(1, monkeypatch)
    outcome = terminal(*words, "--steps", "2", "--save", tmp_path / "part")
    assert outcome.code == 2
    assert "no space left on device" in outcome.err
    assert f"the weights after step 1 are saved in {tmp_path / 'part'}" in outcome.err
    whole, part = load_file(tmp_path / "whole"), load_file(tmp_path / "part")
    assert whole.keys() == part.keys()
    assert all(torch.equal(part[name], whole[name]) for name in whole)
    assert part["1.num_batches_tracked"] == 1


def test_a_failed_transfer_where_nothing_can_be_saved(
    terminal: Terminal, net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("train", "--model", f"{net}:make", "--data", "digits", *FEW, "--steps", "2")
    fail_after(0, monkeypatch)
    (tmp_path / "older").write_text("weights")
    outcome = terminal(*words, "--save", tmp_path / "older", "--json")
    assert outcome.code == 2
    assert outcome.document["error"] == "PagingError" and "saved" not in outcome.document["message"]
    assert (tmp_path / "older").read_text() == "weights"
    fail_after(1, monkeypatch)
    (tmp_path / "taken").mkdir()
    outcome = terminal(*words, "--save", tmp_path / "taken")
    assert outcome.code == 2
    assert "no space left on device" in outcome.err and "weights after step 1 are lost: --save" in outcome.err


def test_shared_and_strided_tensors_are_saved(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)])
    model.to(memory_format=torch.channels_last)
    model[2].weight = model[1].weight
    save(model, tmp_path / "out.safetensors")
    (tmp_path / "other").touch()
    assert (tmp_path / "out.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_validation_counts_and_restores_the_mode() -> None:
    model = nn.Linear(2, 2, bias=False)
    nn.init.eye_(model.weight)
    images = torch.tensor([[3.0, 0.0], [0.0, 3.0], [3.0, 0.0]])
    loss, accuracy = validate(model, [(images, torch.tensor([0, 1, 1]))])
    assert accuracy == pytest.approx(2 / 3)
    assert loss > 1
    assert model.training


def test_layout_of_batches() -> None:
    batch = (torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.long))
    images, _ = next(laid_out([batch], channels_last=True))
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_a_budget_of_training_has_room_for_the_loop() -> None:
    given = Budget("100MiB", of="training")
    with pytest.raises(InfeasibleBudget) as refusal, beside_loop(given) as inside:
        assert inside.of == "training" and int(inside.amount) == 92 << 20
        raise InfeasibleBudget(inside, 200 << 20)
    assert refusal.value.smallest_feasible_bytes == 208 << 20
    assert "100.0 MiB" in str(refusal.value)
    for whole in (Budget("100MiB"), Budget("50%", of="training")):
        with beside_loop(whole) as inside:
            assert inside is whole


def test_a_budget_that_follows_what_is_available(terminal: Terminal, net: Path, tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    words = ("train", "--model", f"{net}:make", "--data", "digits", "--image-size", "16", "--batch-size", "4")
    outcome = terminal(*words, "--steps", "3", "--adaptive", "--reserve", "32MiB", "--decisions", log)
    assert outcome.code == 0, outcome.err
    assert "the budget has not changed" in outcome.out
    assert "a step" in outcome.err and "plan" in outcome.err
    assert json.loads(log.read_text())["action"] == "begin"


def test_the_live_line_of_a_fixed_budget(terminal: Terminal, net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_odt.commands.live.read_celsius", lambda: 48.2)
    outcome = terminal("train", "--model", f"{net}:make", "--data", "digits", *FEW, "--steps", "2")
    assert outcome.code == 0, outcome.err
    assert re.search(r"memory [\d.]+ \w+ of 64\.0 MiB, plan [\d.]+ [MK]iB, [\d.]+ m?s a step, 48 °C", outcome.err)


@pytest.mark.skipif(not memory.install(), reason="torch_odt._memory, which refuses allocations, is not built")
@pytest.mark.filterwarnings("ignore:an attempt of a step was undone:torch_odt.errors.OdtWarning")
def test_a_step_without_memory_is_made_again(terminal: Terminal, net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TrainStep] = []

    def with_outputs(self: TrainStep, *args: Any) -> Any:
        made.append(self)
        with refused(2 if len(made) == 2 else 1 << 30):
            return MAKE_STEP(self, *args)

    monkeypatch.setattr(TrainStep, "with_outputs", with_outputs)
    words = ("train", "--model", f"{net}:make", "--data", "digits", *FEW, "--steps", "2")
    assert terminal(*words).code != 0, "an ordinary step ends the run"
    made.clear()
    outcome = terminal(*words, "--transactional")
    assert outcome.code == 0, outcome.err
    assert len(made) == 2 and len(made[1].last_retries) == 1


def test_tensorboard(terminal: Terminal, net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Written] = []

    class Module(types.ModuleType):
        def SummaryWriter(self, folder: str) -> Written:
            assert folder == str(tmp_path)
            made.append(Written())
            return made[-1]

    words = ("train", "--model", f"{net}:make", "--data", "digits", *FEW, "--steps", "2", "--tensorboard", tmp_path)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Module("tensorboard"))
    assert terminal(*words, "--adaptive").code == 0
    (written,) = made
    assert {("odt/loss", 1), ("odt/loss", 2), ("odt/budget_bytes", 0)} <= written.scalars.keys() and written.is_closed
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    refusal = terminal(*words)
    assert refusal.code == 2 and "TensorBoard is not installed" in refusal.err


def test_words_that_belong_to_adaptive_budgets(terminal: Terminal, net: Path) -> None:
    words = ("train", "--model", f"{net}:make", "--data", "digits", *FEW)
    assert "--reserve belongs to --adaptive" in terminal(*words, "--reserve", "1GiB").err
    assert "'much' is not a number of bytes" in terminal(*words, "--adaptive", "--reserve", "much").err

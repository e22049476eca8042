"""The recipe from end to end on a few digits; what is missed is named; and its parts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recipes import tinytl_transfer
from recipes.common import spoken_digits, transfer_task
from recipes.common.process_bytes import Training, TrainingBytes
from recipes.common.transfer_task import (
    Augmentation,
    Samples,
    TransferTask,
    accuracy,
    make_task,
    other_speakers,
    pretrained,
)
from recipes.common.transfer_ways import Way, adapt, make_network, make_step
from torch_odt.adapt.lite_residual import LiteResidual
from torch_odt.commands.data import ImageData


@pytest.mark.slow
def test_ways_to_adapt_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(tinytl_transfer, "training_bytes", _counted)
    small = {"image-size": 32, "width": 0.1, "source-samples": 64, "samples": 16, "test-samples": 16}
    small |= {"pretrain-epochs": 1, "epochs": 1, "rates": 0.01, "seeds": 1, "networks": "proxyless_mobile"}
    arguments = [f"--{name}={value}" for name, value in (small | {"measured-size": 32, "micro-batches": 8}).items()]
    arguments += ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]
    code = tinytl_transfer.main(arguments)
    report = json.loads((tmp_path / "tinytl_transfer_proxyless_mobile_digits_augmented_width_0.1.json").read_text())
    assert len(report["accuracies"]) == len(tinytl_transfer.TRAINED)
    [rows] = report["bytes"].values()
    trained = {name: row["trained_parameters"] for name, row in rows.items()}
    assert trained["torch_odt last"] < trained["plain norm+last"] == trained["torch_odt norm+last"]
    assert trained["torch_odt lite+bias, pretrained modules"] < trained["plain full"] == trained["torch_odt full"]
    assert code == (1 if report["missed"] else 0)
    assert ("missed:" in capsys.readouterr().out) == bool(report["missed"])


def test_what_is_missed_is_named() -> None:
    def reached(value: float) -> tinytl_transfer.Accuracies:
        return tinytl_transfer.Accuracies({}, 0.01, [value])

    rows = {str(way): reached(0.8) for way in tinytl_transfer.COMPARED}
    rows["plain full"] = reached(0.84)
    assert tinytl_transfer._missed_accuracies(rows) == [
        "the task does not count: full fine-tuning reaches 84.0%, the classifier alone 80.0%",
        "torch_odt lite+bias, 8 bits (affine), pretrained modules reaches 80.0%, full fine-tuning 84.0%",
    ]
    rows["torch_odt last"] = reached(0.7)
    rows[str(tinytl_transfer.TINYTL)] = reached(0.836)
    assert tinytl_transfer._missed_accuracies(rows) == []
    # Samples held out say which modules count, and not those of the test.
    rows[str(tinytl_transfer.NEW_MODULES)] = tinytl_transfer.Accuracies({0.01: 0.7, 0.03: 0.9}, 0.03, [0.82])
    assert tinytl_transfer._missed_accuracies(rows) == [
        "torch_odt lite+bias, 8 bits (affine) reaches 82.0%, full fine-tuning 84.0%"
    ]
    taken = dict.fromkeys(map(str, tinytl_transfer.JUDGED), TrainingBytes(100, None, 1))
    taken["plain full"], taken["plain norm+last"] = TrainingBytes(799, None, 1), TrainingBytes(500, None, 1)
    assert tinytl_transfer._missed_bytes("net", taken) == [
        "net: torch_odt bias, 8 bits (affine) takes 7.99 times less than plain full, not 8"
    ]


def test_plain_and_torch_odt_train_the_same_selection() -> None:
    for trains in ("full", "norm+last", "last"):
        names = []
        for engine in ("plain", "torch_odt"):
            model = make_network("proxyless_mobile", 5, 0.1)
            chosen = {id(p) for p in adapt(model, Way(trains, engine), 3, 32)}  # type: ignore[arg-type]
            names.append({name for name, parameter in model.named_parameters() if id(parameter) in chosen})
            assert model.classifier.out_features == 3
        assert names[0] == names[1]


def test_lora_trains_its_factors_and_the_classifier_in_both_engines() -> None:
    pytest.importorskip("peft")
    for engine in ("plain", "torch_odt"):
        model = make_network("proxyless_mobile", 5, 0.1)
        chosen = {id(p) for p in adapt(model, Way("LoRA", engine), 3, 32)}  # type: ignore[arg-type]
        names = {name for name, parameter in model.named_parameters() if id(parameter) in chosen}
        assert names == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        factors = {name for name in names if ".lora_" in name}
        assert names - factors == {"classifier.weight", "classifier.bias"}
        adapted = {model.get_submodule(name.split(".lora_")[0]).base_layer.kernel_size for name in factors}
        assert adapted == {(1, 1)}
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        assert bool(norms) == (engine == "plain")


def test_no_lite_module_runs_beside_the_first_block() -> None:
    model = make_network("proxyless_mobile", 5, 0.1)
    adapt(model, Way("lite+bias"), 3, 32)
    lites = [name for name, module in model.named_modules() if isinstance(module, LiteResidual)]
    assert len(lites) == 19 and not any(name.startswith("blocks.0.") for name in lites)


def test_plain_micro_batches_add_up_to_the_batch() -> None:
    gradients = []
    for micro_batch in (8, 1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        x, y = torch.randn(8, 3, 2, 2), torch.arange(8) % 3
        make_step(model, optimizer, Way("full", "plain"), micro_batch)(x, y)
        gradients.append(model[1].weight.grad)
    torch.testing.assert_close(*gradients)


def test_a_task_has_other_classes_than_its_source_and_no_sample_twice() -> None:
    pictures = [(torch.full((3, 4, 4), float(n)), n % 4) for n in range(40)]
    data = ImageData("few", pictures[:30], pictures[30:], list("abcd"), 4)  # type: ignore[arg-type]
    task = make_task(data, [1, 3], source=10, train=6, held_out=6, test=5)
    assert task.classes == 2
    assert all(int(image[0, 0, 0]) % 2 for image in task.source.images)
    parts = [{int(image[0, 0, 0]) for image in part.images} for part in (task.train, task.held_out, task.test)]
    assert [len(part) for part in parts] == [6, 6, 5]
    assert len(set.union(*parts)) == 17 and all(number % 2 == 0 for part in parts for number in part)
    assert [int(label) * 2 for label in task.test.labels] == [int(image[0, 0, 0]) % 4 for image in task.test.images]


def test_samples_for_training_that_are_left_are_tested_with_where_there_are_too_few() -> None:
    pictures = [(torch.full((3, 4, 4), float(n)), n % 2) for n in range(40)]
    data = ImageData("few", pictures[:36], pictures[36:], ["a", "b"], 4)  # type: ignore[arg-type]
    task = make_task(data, [1], source=10, train=5, held_out=5, test=6)
    parts = [{int(image[0, 0, 0]) for image in part.images} for part in (task.train, task.held_out, task.test)]
    assert [len(part) for part in parts] == [5, 5, 6] and len(set.union(*parts)) == 16
    assert {36, 38} < parts[2]
    few = make_task(data, [1], source=10, train=12, held_out=2, test=6)
    assert [len(part.labels) for part in (few.train, few.held_out)] == [12, 2]


def test_other_speakers_are_adapted_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def of(voice: float, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((count, 1, 32, 40), voice), torch.arange(count) % 3

    voices = {"ann": 1.0, "bob": 2.0, "cid": 3.0, "dan": 4.0}
    speakers = {name: spoken_digits.Samples(of(voice, 9), of(voice, 3)) for name, voice in voices.items()}
    monkeypatch.setattr(transfer_task, "load_speakers", lambda data_dir, cache: speakers)
    sizes = {"image_size": 24, "source_samples": 99, "samples": 6, "test_samples": 10}
    task = other_speakers(argparse.Namespace(data_dir=tmp_path, cache=tmp_path, **sizes))
    parts = (task.source, task.train, task.held_out, task.test)
    assert [len(part.labels) for part in parts] == [18, 6, 6, 10] and task.classes == 3
    voices_of = [set(part.images.round().unique().tolist()) for part in parts]
    assert voices_of[0] == {3.0, 4.0} and all(found <= {1.0, 2.0} for found in voices_of[1:])
    assert all(part.images.shape[1:] == (3, 24, 24) and not part.mirrors for part in parts)
    fewer = other_speakers(argparse.Namespace(data_dir=tmp_path, cache=tmp_path, **sizes), held_out=2)
    assert [len(part.labels) for part in (fewer.train, fewer.held_out, fewer.test)] == [6, 2, 10]


def test_pretraining_is_remembered(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(128) % 2
    images = torch.randn(128, 3, 4, 4, generator=draw) * 0.1 + labels[:, None, None, None]
    samples, cache = Samples(images, labels), tmp_path / "weights.pt"

    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 2))

    first = pretrained(make, samples, 3, cache)
    assert accuracy(first, samples) > 0.9
    again = pretrained(make, samples, 0, cache)
    assert all(map(torch.equal, first.state_dict().values(), again.state_dict().values()))


def test_pretraining_that_diverges_keeps_nothing(tmp_path: Path) -> None:
    samples = Samples(torch.randn(64, 3, 4, 4), torch.arange(64) % 2)

    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Linear(8, 2))

    with pytest.raises(FloatingPointError, match="learning rate of 1e\\+30"):
        pretrained(make, samples, 8, tmp_path / "weights.pt", rate=1e30)
    assert not list(tmp_path.iterdir())


def _counted(make_training: Callable[..., Training], *arguments: Any) -> TrainingBytes:
    """In the place of a process that trains and is measured, which takes long: what would train in it."""
    trained = make_training(*arguments).optimizer.param_groups[0]["params"]
    return TrainingBytes(100, None, sum(parameter.numel() for parameter in trained))


def test_images_are_changed_each_in_its_own_way_and_by_nothing_stay_as_they_are() -> None:
    images, draw = torch.randn(1, 3, 24, 24).expand(4, 3, 24, 24).contiguous(), torch.Generator().manual_seed(0)
    torch.testing.assert_close(Augmentation(0, 0, 0, 0, 0)(images, draw), images, rtol=0, atol=1e-4)
    changed = Augmentation(0.3, 0.2, 0.1, 0.2, 0.2)(images, draw)
    assert changed.isfinite().all() and len({float(image.sum()) for image in changed}) == 4
    brighter = Augmentation(0, 0, 0, 0, 0.5)(images, draw) - images
    assert float((brighter - brighter[:, :1, :1, :1]).abs().max()) < 1e-4 and float(brighter.abs().max()) <= 0.5


def test_what_is_held_out_and_tested_with_is_not_augmented() -> None:
    samples = Samples(torch.randn(8, 3, 8, 8), torch.arange(8) % 2, mirrors=False)
    task = TransferTask(samples, samples, samples, samples).augmented(Augmentation(0.3, 0.2, 0.1, 0.2, 0.2))
    assert (task.held_out, task.test) == (samples, samples)
    for each in (task.source, task.train.part(0, 8)):
        [(images, _)] = each.batches(8, torch.Generator().manual_seed(0))
        assert not torch.equal(images.sort(0).values, samples.images.sort(0).values)

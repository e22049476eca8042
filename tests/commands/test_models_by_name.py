"""Models that the command line can name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torch_odt.commands.errors import UserError
from torch_odt.commands.models import load_model, load_task, torchvision_names


@pytest.mark.parametrize("name", ["squeezenet1_1", "googlenet", "shufflenet_v2_x0_5"])
def test_torchvision_model_scores_the_classes_asked_for(name: str) -> None:
    model = load_model(name, classes=7).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 7)


def test_transformer_is_made_for_the_image_size() -> None:
    model = load_model("vit_b_32", classes=3, image_size=64).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 3)


def test_image_size_that_a_model_cannot_have() -> None:
    with pytest.raises(UserError, match="cannot be built for images of 50 pixels"):
        load_model("vit_b_32", classes=3, image_size=50)


def test_only_classifiers_are_offered() -> None:
    names = torchvision_names()
    assert "mobilenet_v2" in names
    assert not {"fasterrcnn_resnet50_fpn", "raft_large", "r3d_18"} & set(names)


def test_channels_last(net: Path) -> None:
    model = load_model(f"{net}:make", classes=4, channels_last=True)
    assert next(model.parameters()).is_contiguous(memory_format=torch.channels_last)


def test_own_model_gets_the_number_of_classes(net: Path) -> None:
    task = load_task(f"{net}:make", shape=(2, 3, 8, 8), classes=4)
    assert task.model(task.batch[0]).shape == (2, 4)
    assert task.batch[1].max() < 4


def test_probing_a_model_leaves_it_as_it_was(net: Path) -> None:
    model = load_task(f"{net}:make", shape=(2, 3, 8, 8), classes=4).model
    assert model.training
    assert dict(model.named_buffers())["1.num_batches_tracked"] == 0


def test_same_seed_same_task(net: Path) -> None:
    first, second = (load_task(f"{net}:make", shape=(2, 3, 8, 8), classes=4, seed=3) for _ in range(2))
    assert torch.equal(first.batch[0], second.batch[0])
    assert torch.equal(next(first.model.parameters()), next(second.model.parameters()))


def test_own_loss_and_batch(net: Path) -> None:
    task = load_task(f"{net}:autoencoder", shape=(1,), classes=10)
    assert task.loss_fn(task.model(task.batch[0]), task.batch[1]).dim() == 0


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("absent", "it has make, autoencoder"),
        ("not_a_model", "must return a torch.nn.Module"),
        ("broken", "KeyError"),
        ("no_scores", "returns no class scores"),
    ],
)
def test_own_file_that_does_not_do(net: Path, function: str, text: str) -> None:
    with pytest.raises(UserError, match=text):
        load_task(f"{net}:{function}", shape=(2, 3, 8, 8), classes=4)


def test_own_file_that_is_no_python(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text("def make(:")
    with pytest.raises(UserError, match="cannot be imported: SyntaxError"):
        load_model(f"{path}:make", classes=4)


def test_input_that_a_model_does_not_take(net: Path) -> None:
    with pytest.raises(UserError, match="does not take samples of 5x8x8"):
        load_task(f"{net}:make", shape=(2, 5, 8, 8), classes=4)


def test_a_loss_of_its_own_is_not_dropped_silently(net: Path) -> None:
    with pytest.raises(UserError, match="return the module alone"):
        load_model(f"{net}:autoencoder", classes=10)

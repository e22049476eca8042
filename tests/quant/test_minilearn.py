"""MiniLearn on small networks: each step does what it says, and the whole learns what the classes are."""

from __future__ import annotations

import copy
import functools
import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.quant import MiniLearn, load_int8_weights_, minilearn_, store_int8_weights_, train_on_features

CLASSES = [4, 1]


def test_a_smaller_network_learns_the_classes_from_stored_features(tmp_path: Path) -> None:
    model, data = _net(), _data(48)
    store_int8_weights_(model)
    front = copy.deepcopy(model[0])
    made = minilearn_(
        model, data, at="2", classes=CLASSES, epochs=8, head_epochs=2, batch_size=8, folder=tmp_path / "f"
    )
    assert made.model is model and not model.training
    assert _accuracy(model, _data(40, seed=1)) == 1
    assert made.pruning.kept.keys() == {"3", "8"} and len(made.pruning.kept["3"]) == 4
    assert model[3].codes.shape == (4, 8, 3, 3) and model[10].codes.shape == (2, 5)
    # The front is what it was, to the bit.
    assert torch.equal(model[0].codes, front.codes) and torch.equal(model[0].scale, front.scale)
    assert made.losses[-1] < made.losses[0] and len(made.losses) == 8 and len(made.head_losses) == 2
    assert made.weight_bytes == sum(each.nbytes for each in model.state_dict().values())
    assert made.weight_bytes < 0.5 * made.weight_bytes_before
    assert made.in_float == () and made.samples == 48
    assert (
        made.feature_bytes
        == 48 * (8 * 5 * 5 + 8) + 8
        == sum(each.stat().st_size for each in (tmp_path / "f").glob("*.bin")) + 8
    )
    assert "classes    4, 1" in str(made) and "3: 4 filters stay" in str(made)


def test_the_model_comes_back_from_its_state_dict_bit_for_bit() -> None:
    model, x = _net(), _x(4)
    minilearn_(model, _data(16), at="2", classes=CLASSES, epochs=1, head_epochs=1, criterion="geometric_median")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = load_int8_weights_(_net(), torch.load(file, weights_only=True))
    assert torch.equal(fresh.eval()(x), model(x))


def test_parts_are_the_model_before_and_after_each_step() -> None:
    model, x = _net(), _x(3)
    flow = MiniLearn(model, x, at="2", classes=CLASSES)
    data = _data(12)

    def whole() -> Tensor:
        model.eval()
        parts = (flow.front, flow.body, flow.head)
        y = functools.reduce(lambda value, part: part.eval()(value), parts, x)
        torch.testing.assert_close(flow.back.eval()(flow.front(x)), y)
        return y

    torch.testing.assert_close(whole(), model(x))
    store = flow.store_features(data)
    before = model(x)
    flow.prune_(0.5)
    torch.testing.assert_close(whole(), model(x))
    assert before.shape == (3, 6) and model(x).shape == (3, 2)
    optimizer = torch.optim.SGD(flow.back.parameters(), lr=0.1)
    train_on_features(flow.back, store, optimizer, epochs=1, batch_size=4)
    frozen = {name: value.clone() for name, value in flow.front.state_dict().items()}
    weight = model[3].weight.detach()
    flow.requantize_()
    torch.testing.assert_close(whole(), model(x))
    largest = weight.abs().amax((1, 2, 3), keepdim=True)
    assert bool(((model[3].weight - weight).abs() <= largest / 254 * (1 + 1e-5)).all())
    body = {name: value.clone() for name, value in flow.body.state_dict().items()}
    assert [name for name, each in flow.back.named_parameters() if each.requires_grad] == [
        "8.weight", "8.bias", "10.weight", "10.bias",
    ]  # fmt: skip
    features = flow.head_features(store)
    expected = flow.body(store.read(range(12))[0])
    assert bool(((features.read(range(12))[0] - expected).abs() <= 0.501 * features.range.scale).all())
    train_on_features(flow.head, features, torch.optim.SGD(flow.head.parameters(), lr=0.1), epochs=2)
    for part, state in ((flow.front, frozen), (flow.body, body)):
        assert all(torch.equal(value, state[name]) for name, value in part.state_dict().items())
    assert flow.finish_() == ("8", "10")
    torch.testing.assert_close(whole(), model(x))
    assert not any(each.dim() > 1 for each in model.parameters())


def test_it_trains_by_steps_inside_of_a_budget_to_the_same_network() -> None:
    budget = odt.Budget("1GiB", of="training")
    models = [_net(), _net()]
    for model, make_step in zip(models, (None, functools.partial(odt.TrainStep, budget=budget)), strict=True):
        minilearn_(
            model, _data(16), at="2", classes=CLASSES, epochs=2, head_epochs=1, batch_size=8, make_step=make_step
        )
    x = _x(4)
    torch.testing.assert_close(models[0](x), models[1](x), atol=1e-2, rtol=1e-2)
    assert sum(int((a - b).abs().max() > 1) for a, b in _codes(*models)) == 0


def test_residual_networks_lose_what_may_go() -> None:
    models = pytest.importorskip("torchvision.models")
    model = models.resnet18(num_classes=6)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    flow = MiniLearn(model, x, at="layer1.1.relu", classes=CLASSES)
    pruning = flow.prune_(0.75)
    assert "layer2.0.conv1" in pruning.kept and not any(name.startswith("layer1") for name in pruning.kept)
    assert model.layer4[1].conv2.weight.shape[:2] == (128, 128) and model.fc.weight.shape == (2, 128)
    assert [name for name, _ in flow.head.named_parameters()] == ["fc.weight", "fc.bias"]
    assert "layer3.0.downsample.0" in flow.requantize_()
    torch.testing.assert_close(flow.head.eval()(flow.body(flow.front(x))), model.eval()(x))


def test_bad_input_is_named_and_leaves_the_model() -> None:
    model, data = _net(), _data(8)
    stored = store_int8_weights_(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"at='nowhere'.*but behind 2 \(\(8, 5, 5\)\)"):
        minilearn_(model, data, at="nowhere", classes=CLASSES)
    with pytest.raises(ValueError, match=r"classes=\[4, 6\]: the model has those of 0 to 5; 6 is none"):
        minilearn_(model, data, at="2", classes=[4, 6])
    with pytest.raises(ValueError, match=r"classes=\[\].*one at least"):
        minilearn_(model, data, at="2", classes=[])
    with pytest.raises(ValueError, match=r"classes=\[4, 4\].*each once"):
        minilearn_(model, data, at="2", classes=[4, 4])
    for ratio in (0, 1, 1.5):
        with pytest.raises(ValueError, match=rf"ratio={ratio}: it is the share"):
            minilearn_(model, data, at="2", ratio=ratio)
    with pytest.raises(ValueError, match=r"no samples"):
        minilearn_(model, [], at="2")
    assert len(stored) == 4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match=r"sample 0 has the label 4, which is none of \[1, 2\]"):
        minilearn_(model, data, at="2", classes=[1, 2])


def test_training_that_cannot_go_on_says_so() -> None:
    flow = MiniLearn(_net(), torch.ones(1, 1, 12, 12), at="2")
    store = flow.store_features(_data(8))
    optimizer = torch.optim.SGD(flow.back.parameters(), lr=1e30)
    with pytest.raises(ValueError, match=r"epochs=0"):
        train_on_features(flow.back, store, optimizer, epochs=0)
    with pytest.raises(FloatingPointError, match=r"in epoch \d: try a smaller learning rate"):
        train_on_features(flow.back, store, optimizer, epochs=9, batch_size=2)


def _net() -> nn.Sequential:
    """Six classes; the front ends behind "2"."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16),
            nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 6),
        )  # fmt: skip


def _data(count: int, *, seed: int = 0) -> list[tuple[Tensor, int]]:
    """Bright left halves are of class 4, bright right halves of class 1."""
    draw = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(count):
        x = torch.randn(1, 12, 12, generator=draw) / 2
        x[..., slice(0, 6) if number % 2 == 0 else slice(6, 12)] += 1.5
        samples.append((x, CLASSES[number % 2]))
    return samples


def _x(samples: int) -> Tensor:
    return torch.randn(samples, 1, 12, 12, generator=torch.Generator().manual_seed(3))


def _accuracy(model: nn.Module, data: list[tuple[Tensor, int]]) -> float:
    with torch.no_grad():
        scores = model(torch.stack([x for x, _ in data]))
    return float((scores.argmax(1) == torch.tensor([CLASSES.index(y) for _, y in data])).float().mean())


def _codes(*models: nn.Module) -> list[tuple[Tensor, ...]]:
    states = [model.state_dict() for model in models]
    names = [name for name in states[0] if name.endswith("codes")]
    return [tuple(state[name].int() for state in states) for name in names]

"""Micro-batches are the same step where the analysis says so, and it says why where they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.capture.micro_batches import Captured, Step, capture, check_equal, cut, run_full, run_micro, separate
from torch_odt.capture.batch_axis import NotSeparable, analyse, valid_targets


def classify(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
    logits = model(args[0])
    return F.cross_entropy(logits, args[1]), logits


def own_loss(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
    output = model(**kwargs)
    return output.loss, output.logits


def with_loss(loss: Callable[..., Tensor]) -> Step:
    def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        return loss(model(args[0]), *args[1:]), None

    return step


def linear_step(loss: Callable[..., Tensor], *extra: Tensor, micro_size: int = 2) -> Captured:
    torch.manual_seed(0)
    return separate(nn.Linear(6, 5), with_loss(loss), torch.randn(4, 6), *extra, size=4, micro_size=micro_size)


def images(size: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 3, size, size), torch.randint(0, 10, (4,))


@pytest.mark.parametrize("name", ["squeezenet1_1", "alexnet", "convnext_tiny", "resnet18"])
def test_torchvision_models(name: str) -> None:
    import torchvision

    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(num_classes=10)
    model.train(name != "resnet18")
    captured = separate(model, classify, *images(64), size=4, micro_size=2)
    assert captured.separation.loss_kind == "mean"
    assert captured.separation.result_axes == {0: 0}
    check_equal(captured)


@pytest.mark.parametrize("activation", [nn.Hardswish, nn.Hardsigmoid, nn.Mish, nn.PReLU, nn.SiLU])
def test_activations(activation: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), activation(), nn.Linear(5, 3))
    check_equal(separate(model, classify, torch.randn(4, 6), torch.tensor([0, 2, 1, 1]), size=4, micro_size=2))


@pytest.mark.slow
def test_vgg() -> None:
    import torchvision

    torch.manual_seed(0)
    check_equal(separate(torchvision.models.vgg11(num_classes=10), classify, *images(32), size=4, micro_size=1))


def test_vision_transformer_whose_attention_merges_the_batch_with_the_sequence() -> None:
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, dropout=0.1, num_classes=10)
    check_equal(separate(model, classify, *images(32), size=4, micro_size=2))


@pytest.mark.parametrize("masked", [True, False])
def test_bert(masked: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, num_labels=3)).train()
    ids = torch.randint(0, 100, (4, 16))
    inputs = {"input_ids": ids, "labels": torch.randint(0, 3, (4,))}
    if masked:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][1, 9:] = 0
    check_equal(separate(model, own_loss, **inputs, size=4, micro_size=2))


def test_autoencoder() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.GroupNorm(2, 4), nn.GELU(), nn.ConvTranspose2d(4, 1, 2, 2))
    x = torch.randn(6, 1, 8, 8)
    captured = separate(model, with_loss(F.mse_loss), x, x.clone(), size=6, micro_size=2)
    assert captured.separation.count_value is None
    check_equal(captured)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.out = nn.Linear(8, 30)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embed(ids)))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ignored_targets_weigh_the_micro_batches(smoothing: float) -> None:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        shifted = targets[:, 1:].reshape(-1)
        return F.cross_entropy(logits[:, :-1].reshape(-1, 30), shifted, ignore_index=-100, label_smoothing=smoothing)

    torch.manual_seed(0)
    ids = torch.randint(0, 30, (4, 7))
    targets = ids.clone()
    targets[0, 2:] = -100
    targets[3, 5:] = -100
    captured = separate(Language(), with_loss(loss), ids, targets, size=4, micro_size=2)
    assert captured.separation.ignore_index == -100
    given = [v for v in captured.micro.inputs if captured.micro.values[v].kind == "input"]
    table = dict(zip(given, (ids[:2], targets[:2]), strict=True))
    assert valid_targets(captured.micro, captured.separation, table) == 1 + 6
    check_equal(captured)


def test_a_micro_batch_without_valid_targets_is_skipped() -> None:
    targets = torch.tensor([1, 2, -100, -100])
    check_equal(linear_step(F.cross_entropy, targets))


def test_sum_of_losses() -> None:
    captured = linear_step(lambda y: y.square().sum())
    assert captured.separation.loss_kind == "sum"
    check_equal(captured)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y: y.square().sum() / y.size(0),
        lambda y: y.square().sum() * (1 / y.size(0)),
        lambda y: (y.square() / y.size(0)).sum(),
        lambda y: y.square().sum(1).mean() + y.abs().mean() * 0.1 + 3.0,
        lambda y: y.softmax(1).log().mean(),
        lambda y: y.cumsum(1).flip(1).square().mean(),
        lambda y: y.t().reshape(5, -1, 1).square().mean(),
    ],
)
def test_means(loss: Callable[[Tensor], Tensor]) -> None:
    captured = linear_step(loss)
    assert captured.separation.loss_kind == "mean"
    check_equal(captured)


def test_an_axis_other_than_the_first() -> None:
    torch.manual_seed(0)
    axes = {0: 1, 1: 1}
    x, y = torch.randn(3, 4, 6), torch.randn(3, 4, 5)
    captured = separate(nn.Linear(6, 5), with_loss(F.mse_loss), x, y, size=4, micro_size=2, axes=axes)
    assert list(captured.separation.input_axes.values()) == [1, 1]
    check_equal(captured)


TARGETS = torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("loss", "extra", "reason"),
    [
        (lambda y: y.softmax(0).square().mean(), (), "_softmax works along the batch axis"),
        (lambda y: (y @ y.t()).square().mean(), (), "combines each sample with every other one"),
        (lambda y: torch.log(y.square().mean()), (), "log is not linear"),
        (lambda y: (y - y.mean(0)).square().mean(), (), "combines samples with a sum or mean over the batch"),
        (lambda y: (y.flip(0) * y).mean(), (), "flip works along the batch axis"),
        (lambda y: y.cumsum(0).mean(), (), "cumsum works along the batch axis"),
        (lambda y, t: F.cross_entropy(y, t, weight=torch.arange(1.0, 6.0)), (TARGETS,), "weighted by class"),
        (lambda y, t: F.cross_entropy(y, t) + y.square().mean(), (TARGETS,), "adds values that depend differently"),
        (lambda y: y[0].square().mean(), (), "takes single samples"),
        (lambda y: y[:2].square().mean(), (), "takes some samples"),
        (lambda y: y.max(), (), "works along the batch axis"),
        (lambda y: y.square().sum() + 1.0, (), "adds a constant to a sum"),
        (lambda y: (y * y.size(0)).square().mean(), (), "depends on the size of the batch"),
        (lambda y: (y.t().sum(1) * y).mean(), (), "combines samples with a sum"),
    ],
)
def test_coupled_samples_are_refused(loss: Callable[..., Tensor], extra: tuple[Tensor, ...], reason: str) -> None:
    with pytest.raises(NotSeparable, match=reason):
        linear_step(loss, *extra)


def test_a_sum_divided_by_the_same_number_for_every_batch_stays_a_sum() -> None:
    captured = linear_step(lambda y: y.square().sum() / 4)
    assert captured.separation.loss_kind == "sum"
    check_equal(captured)


def test_batch_norm_in_training_mode_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    with pytest.raises(NotSeparable, match=r"BatchNorm in training mode .* \(1\)"):
        separate(model, classify, *images(8), size=4, micro_size=2)


class NormalisedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


def test_a_backward_that_couples_samples_is_refused() -> None:
    with pytest.raises(NotSeparable):
        linear_step(lambda y: NormalisedGradient.apply(y).square().mean())


def test_lstm() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(8, 16, 2, batch_first=True, dropout=0.1), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.lstm(x)[0][:, -1])

    torch.manual_seed(0)
    batch = torch.randn(4, 6, 8), torch.randint(0, 5, (4,))
    check_equal(separate(Classifier(), classify, *batch, size=4, micro_size=2))


def test_sizes_out_of_order_are_an_error() -> None:
    graph = capture(nn.Linear(6, 5), with_loss(lambda y: y.mean()), ((torch.randn(4, 6),), {}))
    with pytest.raises(ValueError, match="no part of a batch"):
        analyse(graph, graph, 4, 4)


BLOCKS: list[Callable[[Tensor], Tensor]] = [
    torch.tanh,
    lambda y: y.softmax(-1),
    lambda y: F.layer_norm(y, (4,)),
    lambda y: y - y.mean(1, keepdim=True),
    lambda y: y.reshape(-1, 2).square().reshape(-1, 4),
    lambda y: y.t().sigmoid().t(),
    lambda y: torch.cat([y[:, :2], y[:, 2:].exp()], 1),
    lambda y: y - y.mean(0),
    lambda y: y.roll(1, 0),
    lambda y: y / y.size(0),
    lambda y: y.t().reshape(-1, 4) * 1.0,
]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(range(len(BLOCKS))), max_size=3), st.booleans())
def test_what_is_not_refused_is_exact(blocks: list[int], mean: bool) -> None:
    def loss(y: Tensor) -> Tensor:
        for block in blocks:
            y = BLOCKS[block](y)
        return y.square().mean() if mean else y.square().sum()

    torch.manual_seed(0)
    model, batch = nn.Linear(3, 4), ((torch.randn(4, 3),), {})
    full = capture(model, with_loss(loss), batch)
    micro = capture(model, with_loss(loss), cut(batch, 0, 2))
    try:
        separation = analyse(full, micro, 4, 2)
    except NotSeparable:
        return
    captured = Captured(model, batch, full, micro, separation)
    torch.testing.assert_close(run_micro(captured).loss, run_full(captured).loss)
    check_equal(captured, tolerance=1e-4)

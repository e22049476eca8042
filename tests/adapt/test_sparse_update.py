"""Sparse update: plain PyTorch's gradients of the same selection, and a graph that holds nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from adapted_steps import assert_trained_alike, train_both
from models import MOBILENET_V2, ModelCase, case_named
from torch import Tensor, nn
from torchvision.models import mobilenet_v2

import torch_odt as odt
from torch_odt.adapt import Scheme, sparse_update_
from torch_odt.adapt.step_bytes import step_bytes, step_graph
from torch_odt.capture.direct_depthwise import GRAD_INPUT

SCHEMES = {
    "mobilenet_v2": Scheme(
        20,
        {
            "features.12.conv.0.0": 1 / 4,
            "features.13.conv.1.0": 1 / 2,
            "features.14.conv.0.0": 1,
            "features.15.conv.2": 1 / 8,
        },
    ),
    "resnet18": Scheme(6, {"layer3.0.conv2": 1 / 8, "layer4.0.downsample.0": 1 / 2, "layer4.1.conv1": 1}),
}


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18"])
def test_trains_what_plain_training_of_the_same_selection_does(name: str) -> None:
    case = case_named(name)
    model = case.model()
    sparse_update_(model, SCHEMES[name], classes=5)
    assert_trained_alike(train_both(model, _batches(case, classes=5)))


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18"])
def test_gradients_are_slices_of_those_of_plain_pytorch(name: str) -> None:
    case = case_named(name)
    x, y = _batches(case, count=1)[0]
    whole, adapted = case.model().eval().double(), case.model().eval().double()
    scheme = SCHEMES[name]
    adaptation = sparse_update_(adapted, scheme)
    F.cross_entropy(whole(x.double()), y).backward()
    F.cross_entropy(adapted.eval()(x.double()), y).backward()
    theirs = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for parameter_name in adaptation.trained:
        gradient = adapted.get_parameter(parameter_name).grad
        expected = theirs[parameter_name.replace("trained_weight", "weight")]
        if parameter_name.endswith("trained_weight"):
            layer = adapted.get_submodule(parameter_name.rpartition(".")[0])
            dim = getattr(layer, "dim", 1)
            expected = expected.index_select(dim, layer.kept)  # type: ignore[union-attr,arg-type]
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)


def test_linear_layers_train_in_part() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 4))
    adaptation = sparse_update_(model, Scheme(1, {"0": 1 / 4, "2": 1 / 2}))
    assert adaptation.trained == ("0.trained_weight", "2.bias", "2.trained_weight", "4.weight", "4.bias")
    batches = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(3)]
    assert_trained_alike(train_both(model, batches))


def test_micro_batches_add_up_to_the_batch() -> None:
    torch.manual_seed(0)
    model = _small_network()
    sparse_update_(model, Scheme(2, {"3": 1 / 2}))
    batches = [(torch.randn(8, 3, 16, 16), torch.randint(4, (8,))) for _ in range(2)]
    assert_trained_alike(train_both(model, batches, micro_batch=2))


def test_bytes_fall_with_the_ratio() -> None:
    batch = (torch.randn(16, 3, 32, 32), torch.randint(4, (16,)))
    peaks = []
    for ratio in (1.0, 1 / 2, 1 / 4, 1 / 8):
        model = _small_network()
        sparse_update_(model, Scheme(0, {"3": ratio, "9": ratio}))
        peaks.append(_bytes(model, batch))
    assert peaks == sorted(set(peaks), reverse=True)


def test_nothing_runs_backward_before_the_earliest_layer_that_trains() -> None:
    batch = (torch.randn(2, 3, 16, 16), torch.randint(4, (2,)))
    convolutions = []
    for biases in (1, 2, 3):
        model = _small_network()
        sparse_update_(model, Scheme(biases))
        targets = _backward_targets(model, batch)
        convolutions.append(sum(map(targets.count, ("aten.convolution_backward.default", GRAD_INPUT))))
    assert convolutions == [0, 1, 2]


def test_gradients_of_slices_do_not_outlive_their_updates() -> None:
    model = _small_network()
    adaptation = sparse_update_(model, Scheme(2, {"3": 1 / 2, "6": 1}))
    batch = (torch.randn(2, 3, 16, 16), torch.randint(4, (2,)))
    optimizer = torch.optim.SGD(adaptation.parameters(), lr=0.1, momentum=0.9)
    step = odt.TrainStep(model, nn.CrossEntropyLoss(), optimizer, budget=odt.Budget("1GiB", of="training"))
    step(*batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    states = {id(parameter): state["momentum_buffer"].shape for parameter, state in optimizer.state.items()}
    assert states == {id(parameter): parameter.shape for parameter in adaptation.parameters()}


def test_unload_writes_the_slices_into_ordinary_weights() -> None:
    model = MOBILENET_V2.model().eval()
    keys, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    x = _batches(MOBILENET_V2, count=1)[0][0]
    adaptation = sparse_update_(model, SCHEMES["mobilenet_v2"])
    with torch.no_grad():
        for parameter in adaptation.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    adapted = model.eval()(x)
    trained = model.features[12].conv[0][0].trained_weight.detach().clone()
    kept = model.features[12].conv[0][0].kept
    assert adaptation.unload() is model
    assert list(model.state_dict()) == keys
    assert [type(module) for module in model.modules()] == kinds
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model.features[12].conv[0][0].weight[:, kept], trained)
    torch.testing.assert_close(model.eval()(x), adapted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18"])
def test_a_state_dict_tells_which_channels_train(name: str) -> None:
    case = case_named(name)
    trained, other = case.model(seed=1), case.model(seed=2)
    here = sparse_update_(trained, SCHEMES[name], classes=5)
    there = sparse_update_(other, SCHEMES[name], classes=5, channels="random", seed=3)
    x, y = _batches(case, classes=5)[0]
    with torch.no_grad():
        for parameter in here.parameters():
            parameter.mul_(1.5)
    other.load_state_dict(trained.state_dict())
    assert torch.equal(other.eval()(x), trained.eval()(x))
    F.cross_entropy(other(x), y).backward()
    F.cross_entropy(trained(x), y).backward()
    gradients = [[parameter.grad for parameter in model.parameters()] for model in (other, trained)]
    assert all(ours is theirs is None or torch.equal(ours, theirs) for ours, theirs in zip(*gradients, strict=True))
    there.merge()
    torch.testing.assert_close(other(x), trained(x), rtol=1e-4, atol=1e-5)


def test_a_scheme_that_does_not_fit_leaves_the_model_as_it_was() -> None:
    model = _small_network()
    with pytest.raises(ValueError, match="'2' is no linear layer"):
        sparse_update_(model, Scheme(1, {"2": 1}), classes=9)
    circular = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="'0' has padding_mode='circular'"):
        sparse_update_(circular, Scheme(0, {"0": 1 / 2}), classes=9)
    with pytest.raises(TypeError, match=r"scheme is a str: give a Scheme; Scheme\.load"):
        sparse_update_(model, "scheme.json")  # type: ignore[arg-type]
    assert isinstance(model[1], nn.BatchNorm2d)
    assert circular[2].out_features == 2


def test_frozen_weights_in_8_bits_train_alike() -> None:
    model = MOBILENET_V2.model()
    adaptation = sparse_update_(model, SCHEMES["mobilenet_v2"], classes=5, weight_bits=8)
    assert any("frozen weights are stored in 8 bits" in note for note in adaptation.notes)
    assert adaptation.after.weight_bytes < adaptation.before.weight_bytes / 2
    assert_trained_alike(train_both(model, _batches(MOBILENET_V2, classes=5)))


def test_weights_in_8_bits_are_made_once_at_a_time() -> None:
    batch = (torch.randn(1, 3, 16, 16), torch.randint(4, (1,)))
    peaks = {}
    for bits in (8, 32):
        model = nn.Sequential(
            nn.Conv2d(3, 512, 1, bias=False), nn.BatchNorm2d(512), nn.ReLU6(), nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(512, 512, 1, bias=False), nn.BatchNorm2d(512), nn.ReLU6(),
            nn.Conv2d(512, 512, 1, bias=False), nn.BatchNorm2d(512), nn.ReLU6(), nn.Flatten(), nn.Linear(512, 4),
        )  # fmt: skip
        sparse_update_(model, Scheme(2), weight_bits=bits)  # type: ignore[arg-type]
        peaks[bits] = _bytes(model, batch)
    whole = 4 * 512 * 512
    assert peaks[8] < peaks[32] + whole / 2


def test_weights_have_8_bits_or_32() -> None:
    with pytest.raises(ValueError, match="weight_bits=4"):
        sparse_update_(_small_network(), Scheme(1), weight_bits=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="channels='best'"):
        sparse_update_(_small_network(), Scheme(1), channels="best")  # type: ignore[arg-type]


def test_a_plan_travels_where_an_activation_is_kept_for_a_mean(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pooled = nn.Sequential(nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), *pooled)
    model.to(memory_format=torch.channels_last)
    adaptation = sparse_update_(model, Scheme(1))
    batch = (torch.randn(1, 3, 16, 16).to(memory_format=torch.channels_last), torch.randint(4, (1,)))
    assert "aten.hardtanh_backward.default" in _backward_targets(model, batch)
    optimizer = torch.optim.SGD(adaptation.parameters(), lr=0.0)
    step = odt.TrainStep(model, F.cross_entropy, optimizer, budget=odt.Budget("1GiB", of="training"), cache=False)
    loss = step(*batch)
    step.plan.save(tmp_path / "plan")
    assert torch.equal(odt.TrainStep(model, F.cross_entropy, optimizer, plan=tmp_path / "plan")(*batch), loss)


def _small_network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs, groups in ((3, 16, 1), (16, 32, 1), (32, 32, 32), (32, 24, 1)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, padding=1, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4))


def _bytes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> int:
    return step_bytes(model, nn.CrossEntropyLoss(), batch, optimizer=_sgd(model))


def _backward_targets(model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[str]:
    graph = step_graph(model, nn.CrossEntropyLoss(), batch, optimizer=_sgd(model))
    return [op.target for op in graph.program if op.phase == "backward"]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def _batches(case: ModelCase, *, count: int = 2, classes: int = 10) -> list[tuple[Tensor, Tensor]]:
    return [(args[0], args[1] % classes) for args, _ in case.batches(count)]


@pytest.mark.parametrize("batch", [8, 1])
def test_images_that_end_as_one_pixel_keep_to_their_plan(batch: int) -> None:
    # What convolutions return of such images has other strides than a trace says, which the next one looks at.
    model = mobilenet_v2(width_mult=0.35, num_classes=3)
    adaptation = sparse_update_(model, Scheme(8, {"features.17.conv.0.0": 1, "features.16.conv.0.0": 1 / 4}))
    optimizer = torch.optim.SGD(adaptation.parameters(), lr=0.01)
    step = odt.TrainStep(model, F.cross_entropy, optimizer, budget=odt.Budget("1GiB", of="training"), cache=False)
    # A departure is a warning, which is an error here.
    step(torch.randn(batch, 3, 32, 32), torch.arange(batch) % 3)

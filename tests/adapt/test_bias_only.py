"""Biases and the classifier train: the same gradients as in plain PyTorch, and nothing kept for frozen weights."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision
from adapted_steps import assert_trained_alike, peak_bytes, train_both
from models import MOBILENET_V2, ModelCase, case_named
from torch import nn

import torch_odt as odt
from torch_odt.adapt.step_bytes import step_graph


@pytest.mark.parametrize("name", [pytest.param("mobilenet_v2", marks=pytest.mark.slow), "resnet18"])
def test_trains_what_plain_training_of_the_same_selection_does(name: str) -> None:
    case = case_named(name)
    model = case.model()
    odt.adapt.bias_only_(model, classes=5)
    assert_trained_alike(train_both(model, _batches(case, classes=5)))


def test_takes_a_fraction_of_a_full_update() -> None:
    case = MOBILENET_V2
    batch = _batches(case, count=1)[0]
    full = case.model()
    adapted = copy.deepcopy(full)
    odt.adapt.bias_only_(adapted)
    assert peak_bytes(adapted, batch) < peak_bytes(full, batch) / 3


@pytest.mark.parametrize("norm", ["frozen", "folded"])
def test_of_a_sample_nothing_is_kept_but_bits_and_the_classifiers_input(norm: str) -> None:
    model = torchvision.models.mobilenet_v2(width_mult=0.35, num_classes=10)
    adaptation = odt.adapt.bias_only_(model, classes=5, norm=norm)
    batch = (torch.randn(7, 3, 32, 32), torch.randint(5, (7,)))
    optimizer = torch.optim.SGD(adaptation.parameters(), lr=0.1)
    graph = step_graph(model, nn.functional.cross_entropy, batch, optimizer=optimizer)
    forward, backward = graph.program[: graph.boundary], graph.program[graph.boundary :]
    kept = {v for op in forward for v in op.writes} & {v for op in backward for v in op.reads}
    shapes = {graph.values[v].shape for v in kept if graph.values[v].dtype != "uint8"}
    assert {shape for shape in shapes if 7 in shape} == {(7, 1280), (7, 5)}


def test_a_named_planner_trains_adapted_models_alike() -> None:
    case = case_named("resnet18")
    model = case.model()
    odt.adapt.bias_only_(model, classes=5)
    assert_trained_alike(train_both(model, _batches(case, classes=5), planner="chen"))


def test_statistics_stay_in_training_mode() -> None:
    case = MOBILENET_V2
    model = case.model()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    odt.adapt.bias_only_(model)
    model.train()(case.batches(1)[0][0][0])
    assert all(torch.equal(model.get_buffer(name), buffer) for name, buffer in before.items())


def test_unload_gives_the_structure_back_and_keeps_what_was_trained() -> None:
    model = MOBILENET_V2.model()
    keys, flags = list(model.state_dict()), [parameter.requires_grad for parameter in model.parameters()]
    kinds = [type(module) for module in model.modules()]
    adaptation = odt.adapt.bias_only_(model)
    with torch.no_grad():
        model.features[0][1].bias.add_(1)
    assert adaptation.unload() is model
    assert list(model.state_dict()) == keys
    assert [type(module) for module in model.modules()] == kinds
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert bool((model.features[0][1].bias == 1).all())
    adaptation.unload()
    assert str(adaptation).startswith("bias_only of MobileNetV2, taken back")
    with pytest.raises(ValueError, match="bias_only was taken back by unload"):
        adaptation.parameters()


def test_the_summary_says_what_trains() -> None:
    adaptation = odt.adapt.bias_only_(MOBILENET_V2.model(), classes=5)
    text = str(adaptation)
    trained = sum(parameter.numel() for parameter in adaptation.parameters())
    assert f"{trained:,} of" in text
    assert "54 tensors" in text


def test_a_transformer_is_told_what_its_norms_keep() -> None:
    adaptation = odt.adapt.bias_only_(case_named("vit_b_16").model())
    assert "25 layers normalize" in str(adaptation)


def test_a_model_without_biases_is_refused_and_left_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"no layer but the classifier '2' has a bias.*Conv2d"):
        odt.adapt.bias_only_(model, classes=7)
    assert model[2].out_features == 2
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_head_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match="head='features' is no linear layer"):
        odt.adapt.bias_only_(MOBILENET_V2.model(), head="features")
    adaptation = odt.adapt.bias_only_(MOBILENET_V2.model(), head="features.18.0", classes=5)
    assert "though classifier.1 is registered as the last layer" in adaptation.notes[0]
    with pytest.raises(ValueError, match=r"no linear layer or convolution.*ReLU"):
        odt.adapt.bias_only_(nn.Sequential(nn.ReLU()))


def _batches(case: ModelCase, *, count: int = 2, classes: int = 10) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(args[0], args[1] % classes) for args, _ in case.batches(count)]


@pytest.mark.parametrize("verb", ["bias_only_", "tinytl_"])
def test_gradients_are_those_of_the_model_as_it_was(verb: str) -> None:
    model = MOBILENET_V2.model().eval().double()
    plain = copy.deepcopy(model)
    x, y = _batches(MOBILENET_V2, count=1)[0]
    options = {"input_size": x.shape[-1]} if verb == "tinytl_" else {}
    adaptation = getattr(odt.adapt, verb)(model, **options)
    for each in (model, plain):
        nn.functional.cross_entropy(each.eval()(x.double()), y).backward()
    theirs = {name: parameter.grad for name, parameter in plain.named_parameters()}
    shared = [name for name in adaptation.trained if ".lite." not in name]
    assert len(shared) == 54
    for name in shared:
        torch.testing.assert_close(model.get_parameter(name).grad, theirs[name], rtol=1e-8, atol=1e-12)


def test_biases_of_recurrent_layers_train() -> None:
    model = nn.ModuleList([nn.LSTM(4, 8), nn.Linear(8, 2)])
    assert odt.adapt.bias_only_(model).trained == ("0.bias_ih_l0", "0.bias_hh_l0", "1.weight", "1.bias")

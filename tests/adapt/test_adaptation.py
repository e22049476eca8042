"""The way back: merged models compute what adapted ones do, and moves and second names are not forgotten."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.adapt import Adaptation, Scheme
from torch_odt.adapt.frozen_batch_norm import FrozenBatchNorm
from torch_odt.adapt.lite_residual import LiteResidual
from torch_odt.adapt.stored_weights import StoredConv2d
from torch_odt.errors import OdtWarning

SIZE = 16


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class _Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def _network() -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        _Block(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    )
    for _ in range(3):
        model(_images())
    return model


def _images() -> Tensor:
    return torch.randn(6, 3, SIZE, SIZE)


def _train(adaptation: Adaptation) -> None:
    optimizer = torch.optim.SGD(adaptation.parameters(), lr=0.1)
    adaptation.model.train()
    for _ in range(3):
        optimizer.zero_grad()
        adaptation.model(_images()).square().mean().backward()
        optimizer.step()


_sparse = partial(odt.adapt.sparse_update_, scheme=Scheme(2, {"0": 1 / 3, "2.branch.0": 1 / 4}), classes=5)
ROOMY = odt.Budget("4GiB", of="training")
_tinytl = partial(odt.adapt.tinytl_, classes=5, input_size=SIZE)
METHODS: dict[str, Callable[[nn.Module], Adaptation]] = {
    "sparse_update": _sparse,
    "bias_only": partial(odt.adapt.bias_only_, classes=5),
    "bias_only of folded norms": partial(odt.adapt.bias_only_, classes=5, norm="folded"),
    "tinytl": partial(_tinytl, blocks={_Block: "branch"}),
    "tinytl of whole blocks": partial(_tinytl, blocks={_Block: ""}),
    "tinytl in 8 bits": partial(_tinytl, blocks={_Block: "branch"}, weight_bits=8),
    "tinytl of norms": partial(_tinytl, mode="norm+last"),
    "tinytl of groups": partial(_tinytl, mode="full", norm="group", weight_standardization=True),
    "tinytl of frozen groups": partial(_tinytl, mode="bias", norm="group", weight_standardization=True),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_merged_model_computes_what_was_trained(method: str) -> None:
    model, x = _network(), _images()
    start = model.eval()(x)
    adaptation = METHODS[method](model)
    _train(adaptation)
    trained = model.eval()(x)
    assert trained.shape == (6, 5) and start.shape == (6, 2)
    assert "merged" not in str(adaptation) and adaptation.merge() is model
    assert str(adaptation).splitlines()[0].endswith(", merged")
    torch.testing.assert_close(model(x), trained, rtol=1e-4, atol=1e-5)
    assert all(parameter.requires_grad for parameter in model[0].parameters())
    assert type(model[5]) is nn.Linear and model[5].out_features == 5
    kinds = {type(module).__name__ for module in model.modules()}
    assert not kinds & {"FrozenBatchNorm", "SparseConv", "SparseLinear", "StoredConv2d", "StoredLinear"}
    lite = [module for module in model.modules() if isinstance(module, LiteResidual)]
    assert len(lite) == (1 if "blocks" in getattr(METHODS[method], "keywords", {}) else 0)
    # What was kept is the model's now.
    adaptation.unload()
    torch.testing.assert_close(model(x), trained, rtol=1e-4, atol=1e-5)


def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(TypeError, match="adapt the model itself"):
        odt.adapt.bias_only_(torch.compile(_network()))  # type: ignore[arg-type]


def test_a_step_tells_that_a_merged_model_trains_more_than_its_optimizer() -> None:
    model, x = _network(), _images()
    adaptation = odt.adapt.bias_only_(model, classes=5)
    optimizer = torch.optim.SGD(adaptation.parameters(), lr=0.1)
    step = odt.TrainStep(model.train(), nn.CrossEntropyLoss(), optimizer, budget=ROOMY, cache=False)
    y = torch.arange(6) % 5
    step(x, y)
    adaptation.merge()
    with pytest.warns(OdtWarning, match="the optimizer lacks .* make it anew"):
        step(x, y)
    step(x, y)


def test_a_wrapped_model_tells_of_an_optimizer_that_was_made_before() -> None:
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adaptation = odt.adapt.bias_only_(model, classes=5)
    with pytest.warns(OdtWarning, match="holds 2 parameters that the model does not have, and lacks 2"):
        odt.wrap(model, budget=ROOMY, optimizer=optimizer, cache=False)
    adaptation.merge()
    assert all(each.requires_grad for each in model.parameters())


def test_what_was_taken_back_cannot_be_merged() -> None:
    adaptation = odt.adapt.bias_only_(_network(), classes=5)
    adaptation.unload()
    with pytest.raises(ValueError, match=r"bias_only was taken back by unload\(\).*Call merge\(\)"):
        adaptation.merge()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("leave", ["unload", "merge"])
def test_a_copy_has_its_own_way_back(method: str, leave: str) -> None:
    model = _network()
    adaptation = METHODS[method](model)
    _train(adaptation)
    adapted = _described(model)
    copied = copy.deepcopy(adaptation)
    getattr(copied, leave)()
    assert str(_described(model)) == str(adapted)
    getattr(adaptation, leave)()
    assert str(_described(copied.model)) == str(_described(model))


def _described(model: nn.Module) -> list[Any]:
    """What it is made of, what trains, and every value."""
    values = [(name, tensor.tolist()) for name, tensor in model.state_dict().items()]
    return [str(model), [parameter.requires_grad for parameter in model.parameters()], values]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("leave", ["unload", "merge"])
def test_a_model_that_was_moved_comes_back_whole(method: str, leave: str) -> None:
    model, x = _network(), _images()
    adaptation = METHODS[method](model)
    model.double().eval()
    adapted = model(x.double())
    getattr(adaptation, leave)()
    result = model(x.double())
    assert {tensor.dtype for tensor in (*model.parameters(), *model.buffers())} <= {torch.float64, torch.int64}
    assert not any(module.training for module in model.modules())
    if leave == "merge":
        torch.testing.assert_close(result, adapted, rtol=1e-4, atol=1e-5)


def test_statistics_that_were_loaded_after_a_move_come_back() -> None:
    model = _network()
    adaptation = odt.adapt.bias_only_(model)
    model.double()
    model[1].running_mean.fill_(3)
    adaptation.unload()
    assert type(model[1]) is nn.BatchNorm2d
    assert torch.equal(model[1].running_mean, torch.full((8,), 3.0, dtype=torch.float64))


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.again, self.norm_again = self.first, self.norm
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_again(self.again(self.norm(self.first(x))))
        result: Tensor = self.head(x.mean((2, 3)))
        return result


@pytest.mark.parametrize(
    ("options", "conv", "norm"),
    [({"weight_bits": 8}, StoredConv2d, FrozenBatchNorm), ({"norm": "group"}, nn.Conv2d, nn.GroupNorm)],
)
def test_a_module_of_two_names_is_replaced_under_both(
    options: dict[str, Any], conv: type[nn.Module], norm: type[nn.Module]
) -> None:
    model, x = _Twice().eval(), torch.randn(2, 3, 6, 6)
    before, first, old_norm = model(x), model.first, model.norm
    adaptation = odt.adapt.tinytl_(model, mode="bias", **options)
    assert model.again is model.first and type(model.first) is conv
    assert model.norm_again is model.norm and type(model.norm) is norm
    assert model(x).shape == before.shape
    adaptation.unload()
    assert model.again is model.first is first and model.norm_again is model.norm is old_norm
    torch.testing.assert_close(model(x), before, rtol=2e-2, atol=2e-2)


def test_a_model_that_is_itself_the_classifier_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the model \(Linear\) itself cannot be replaced"):
        odt.adapt.bias_only_(nn.Linear(3, 2), classes=5)


def test_a_new_convolution_has_the_geometry_of_the_old_one() -> None:
    head = nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2, padding_mode="reflect")
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), head), torch.randn(1, 3, 9, 9)
    shape = model(x).shape
    adaptation = odt.adapt.bias_only_(model, classes=6)
    assert (model[1].dilation, model[1].groups, model[1].padding_mode) == ((2, 2), 2, "reflect")
    assert model(x).shape == (1, 6, *shape[2:])
    adaptation.unload()
    with pytest.raises(ValueError, match="a convolution of 2 groups"):
        odt.adapt.bias_only_(model, classes=5)


def test_what_came_last_is_taken_back_first() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    head = model[2]
    first = odt.adapt.bias_only_(model, classes=5)
    second = odt.adapt.bias_only_(model, classes=3)
    with pytest.raises(ValueError, match="Linear that bias_only has put into the model is not in it any more"):
        first.unload()
    assert model[2].out_features == 3
    second.unload()
    assert first.unload()[2] is head


def test_a_resumed_step_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def made() -> tuple[odt.TrainStep, odt.runtime.Checkpointer]:
        torch.manual_seed(0)
        model = _network()
        optimizer = torch.optim.Adam(METHODS["tinytl in 8 bits"](model).parameters(), lr=0.01)
        step = odt.TrainStep(model, nn.functional.cross_entropy, optimizer, budget=odt.Budget("1GiB", of="training"))
        return step, odt.runtime.Checkpointer(tmp_path, model=model, optimizer=optimizer, step=step)

    batches = [(_images(), torch.randint(5, (6,))) for _ in range(4)]
    step, checkpointer = made()
    losses = []
    for number, batch in enumerate(batches):
        losses.append(step(*batch))
        if number == 1:
            checkpointer.save(2)
    step, checkpointer = made()
    assert checkpointer.resume().step == 2  # type: ignore[union-attr]
    assert [step(*batch) for batch in batches[2:]] == losses[2:]


@pytest.mark.parametrize("options", [{"norm": "detached"}, {"weight_bits": 8}])
def test_what_came_last_is_merged_first(options: dict[str, Any]) -> None:
    model = _network()
    first = odt.adapt.bias_only_(model, norm="folded" if "weight_bits" in options else "frozen")
    second = odt.adapt.tinytl_(model, mode="bias", **options)
    model.eval()
    x = _images()
    with torch.no_grad():
        expected = model(x)
        with pytest.raises(ValueError, match="has put into the model is not in it any more"):
            first.merge()
        torch.testing.assert_close(model(x), expected)
        second.merge()
        first.merge()
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    assert sum(type(module) is nn.BatchNorm2d for module in model.modules()) == 2


def test_parameters_that_were_loaded_in_place_of_others_train_again() -> None:
    model = _network()
    adaptation = odt.adapt.bias_only_(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    adaptation.unload()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_parameters_that_a_later_method_has_renamed_are_not_left_out() -> None:
    model = _network()
    first = odt.adapt.bias_only_(model)
    second = METHODS["tinytl of whole blocks"](model)
    with pytest.raises(ValueError, match=r"2\.branch\.1\.bias of bias_only has another name by now"):
        first.parameters()
    assert len(second.parameters()) == len(second.trained)


def test_trained_slices_are_counted_once() -> None:
    model = _network()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    adaptation = odt.adapt.sparse_update_(model, Scheme(0, {"0": 1 / 3}))
    assert (adaptation.before.parameters, adaptation.after.parameters) == (parameters, parameters)


class _Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)
        self.steps = [self.conv, self.norm]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return self.head(x.mean((2, 3)))


def test_a_layer_that_a_list_holds_is_named() -> None:
    with pytest.raises(ValueError, match=r"_Listed has norm in its steps, too, a list, .* nn\.ModuleList"):
        odt.adapt.bias_only_(_Listed())


def test_hooks_that_do_not_run_are_named() -> None:
    model = _network()
    model[1].register_forward_hook(lambda *_: None)
    assert odt.adapt.bias_only_(model).notes[0] == "1 has hooks, which do not run while another module is in its place"


@pytest.mark.parametrize("method", ["sparse_update", "bias_only", "tinytl in 8 bits"])
@pytest.mark.parametrize("door", ["step", "wrap"])
def test_it_trains_alike_by_either_door_and_in_few_bytes(method: str, door: str) -> None:
    model, loss_fn = _network(), nn.functional.cross_entropy
    METHODS[method](model)
    plain = copy.deepcopy(model)
    batch = (torch.randn(32, 3, 64, 64), torch.randint(5, (32,)))
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, plain)]
    plenty = odt.plan(model, loss_fn, batch, budget=odt.Budget("1GiB", of="training"), optimizer=optimizers[0])
    least = plenty.smallest_feasible_bytes
    if door == "step":
        assert least < plenty.peak_bytes
        budget = odt.Budget((least + plenty.peak_bytes) // 2, of="training")
        step = odt.TrainStep(model, loss_fn, optimizers[0], budget=budget, cache=False)
        step(*batch)
        assert step.plan.peak_bytes < plenty.peak_bytes
    else:
        wrapped = odt.wrap(model, budget=odt.Budget("1GiB", of="training"), cache=False)
        loss_fn(wrapped(batch[0]), batch[1]).backward()
        optimizers[0].step()
    loss_fn(plain(batch[0]), batch[1]).backward()
    optimizers[1].step()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-4, atol=1e-6)


def test_the_order_counts_also_where_nothing_was_replaced() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    first = odt.adapt.bias_only_(model)
    second = odt.adapt.tinytl_(model, mode="full")
    for take_back in (first.unload, first.merge):
        with pytest.raises(ValueError, match=r"tinytl \(full\) has changed the model after bias_only: call unload"):
            take_back()
    copied = copy.deepcopy(second)
    copied.unload()
    with pytest.raises(ValueError, match="has changed the model after"):
        first.unload()
    second.unload()
    assert not model[0].weight.requires_grad
    first.unload()
    assert all(parameter.requires_grad for parameter in model.parameters())
    third = odt.adapt.bias_only_(model)
    first.unload()
    odt.adapt.tinytl_(model, mode="full")
    with pytest.raises(ValueError, match="has changed the model after bias_only"):
        third.unload()


def test_what_is_kept_to_be_given_back_is_told_until_it_is_let_go() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 100))
    adaptation = odt.adapt.bias_only_(model, classes=5)
    assert adaptation.kept_bytes == 100 * (8 + 1) * 4
    assert "3.5 KiB for unload(), until merge()" in str(adaptation)
    adaptation.merge()
    assert adaptation.kept_bytes == 0
    assert "unload(), until" not in str(adaptation)


def test_a_bias_that_a_later_method_trains_is_kept_where_its_norm_was_folded() -> None:
    model = _network()
    folded = odt.adapt.sparse_update_(model, Scheme(0, {"2.branch.0": 1 / 4}), norm="folded")
    later = odt.adapt.bias_only_(model)
    _train(later)
    model.eval()
    x = _images()
    with torch.no_grad():
        expected = model(x)
        later.merge()
        folded.merge()
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_a_weight_of_two_layers_that_trains_is_told() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7))
    model[2].weight = model[0].weight
    assert odt.adapt.bias_only_(model).notes == ("0.weight is 2.weight, too, and trains in all of these",)


def test_what_a_later_method_has_merged_stays() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    first, second = (odt.adapt.bias_only_(model, classes=classes) for classes in (5, 7))
    second.merge()
    with pytest.raises(ValueError, match="if that was merged, it stays, and this can only be merged, too"):
        first.unload()
    assert first.merge()[2].out_features == 7

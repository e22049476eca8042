"""A step's modules and tensors, found once, and what is asked of all of them together."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_odt import _extensions
from torch_odt.execute.named_tensors import StepTensors, detached, forms_of, note_changed
from torch_odt.execute.optimizer_updates import updates_of

BUILT = [
    pytest.param(True, marks=pytest.mark.skipif(_extensions.memory_module is None, reason="not built")),
    False,
]


@pytest.fixture(params=BUILT, ids=["compiled", "python"], autouse=True)
def _compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(_extensions, "memory_module", None)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.norm(self.first(x)))


class Weighted(nn.Module):
    """A loss with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("offset", torch.zeros(()))

    def forward(self, found: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(found, target) * self.scale + self.offset


def changes() -> dict[str, Callable[[nn.Module], object]]:
    def rename(model: nn.Module) -> None:
        # The same objects in the same order, under another name.
        model.__dict__["renamed"] = model.__dict__.pop("note")

    def move(model: nn.Module) -> None:
        # A child's last attribute becomes the next one's first.
        held = {"note": vars(model.first).pop("note"), **vars(model.norm)}
        vars(model.norm).clear()
        vars(model.norm).update(held)

    def replace_parameter(model: nn.Module) -> None:
        model.first.weight = nn.Parameter(model.first.weight.detach())

    def replace_class(model: nn.Module) -> None:
        model.norm.__class__ = nn.BatchNorm2d

    return {
        "mode": lambda model: model.eval(),
        "attribute": lambda model: setattr(model.norm, "eps", 1e-3),
        "new attribute": lambda model: setattr(model.norm, "other", None),
        "name": rename,
        "place": move,
        "parameter": replace_parameter,
        "buffer": lambda model: model.norm.register_buffer("running_mean", torch.zeros(4)),
        "child": lambda model: setattr(model, "norm", nn.BatchNorm1d(4)),
        "no child": lambda model: model.register_module("norm", None),
        "hook": lambda model: model.norm.register_forward_hook(print),
        "class": replace_class,
        "all attributes": lambda model: setattr(model.norm, "__dict__", dict(vars(nn.BatchNorm1d(4)))),
    }


@pytest.mark.parametrize("change", changes())
def test_they_are_found_anew_where_modules_hold_something_else(change: str) -> None:
    model, loss = Tied(), Weighted()
    model.note, model.first.note = "kept", "kept"
    tensors = StepTensors(model, loss)
    with torch.no_grad():
        model.first.weight.mul_(2)
    model.first.weight.requires_grad_(False)
    assert StepTensors.current(model, loss, tensors) is tensors
    changes()[change](model)
    found = StepTensors.current(model, loss, tensors)
    assert found is not tensors and StepTensors.current(model, loss, found) is found
    assert list(found.parameters.values()) == [*model.parameters(), loss.scale] or model.again is model.first


def test_other_models_and_losses_are_looked_at() -> None:
    model, loss = Tied(), Weighted()
    tensors = StepTensors(model, loss)
    other, other_loss = Tied(), Weighted()
    assert StepTensors.current(other, loss, tensors).modules[0] is other
    assert StepTensors.current(model, other_loss, tensors).modules[-1] is other_loss
    tensors.let_go()
    assert StepTensors.current(model, loss, tensors) is not tensors


def test_functions_may_reach_other_modules_by_now() -> None:
    model, held = Tied(), [nn.Identity()]
    plain = StepTensors(model, F.mse_loss)
    assert StepTensors.current(model, F.mse_loss, plain) is plain

    def loss(found: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(weighted(found), target)

    weighted: nn.Module = held[0]
    tensors = StepTensors(model, loss)
    assert StepTensors.current(model, loss, tensors) is tensors
    weighted = nn.Linear(4, 4)
    found = StepTensors.current(model, loss, tensors)
    assert found is not tensors and len(found.parameters) == len(tensors.parameters) + 2


def test_all_are_found_under_all_of_their_names() -> None:
    model, loss = Tied(), Weighted()
    tensors = StepTensors(model, loss)
    expected = dict(model.named_parameters(remove_duplicate=False)) | {"loss_fn:scale": loss.scale}
    assert list(tensors.parameters) == list(expected)
    assert all(tensors.parameters[name] is parameter for name, parameter in expected.items())
    assert list(tensors.buffers) == [name for name, _ in model.named_buffers()] + ["loss_fn:offset"]
    assert tensors.modules == [model, model.first, model.norm, loss]
    assert StepTensors(model, F.mse_loss).modules == [model, model.first, model.norm]


@pytest.mark.parametrize(
    "other",
    [
        lambda t: t.detach(),
        lambda t: t.detach().double().requires_grad_(),
        lambda t: t.detach().t().requires_grad_(),
        lambda t: t.detach()[:2].clone().requires_grad_(),
        lambda t: t.detach().unsqueeze(0).clone().requires_grad_(),
        lambda t: None,
    ],
)
def test_what_differs_has_another_form(other: Callable[[Tensor], Tensor | None]) -> None:
    one = torch.randn(3, 4, requires_grad=True)
    assert forms_of([one, None]) == forms_of([one.detach().clone().requires_grad_(), None])
    assert hash(forms_of([one])) == hash(forms_of([one.detach().clone().requires_grad_()]))
    assert forms_of([one]) != forms_of([other(one)])
    assert forms_of([one]) != forms_of([one, one])


def test_addresses_tell_where_tensors_lie_and_of_what_they_are_a_part() -> None:
    one = torch.randn(3)
    assert forms_of([one], addresses=True) == forms_of([one.view(3)], addresses=True)
    assert forms_of([one], addresses=True) != forms_of([one.clone()], addresses=True)
    part = torch.randn(5)[:3]
    assert forms_of([part], addresses=True) != forms_of([part.clone()], addresses=True)


def test_detached_tensors_are_the_same_memory() -> None:
    model = Tied()
    found = detached(dict(model.named_parameters()))
    assert list(found) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert found[name].data_ptr() == parameter.data_ptr() and not found[name].requires_grad
        assert type(found[name]) is Tensor
        with torch.no_grad():
            found[name].add_(1)
        assert parameter._version == found[name]._version


def test_changes_are_noted_but_for_tensors_of_inference() -> None:
    one, other = torch.zeros(2), torch.zeros(2)
    with torch.inference_mode():
        frozen = torch.zeros(2)
    note_changed([one, one, frozen, other[:1]])
    assert (one._version, other._version) == (2, 1), "a view is changed with its base"


def change_storage(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.first.weight.data = torch.randn(8, 4)[:4]


def freeze(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.first.weight.requires_grad_(False)


def hook(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.first.weight.register_hook(lambda gradient: gradient)


def share(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.norm.bias.data = model.first.bias.data


def replace_parameter(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.first.weight = nn.Parameter(torch.randn(4, 4))


def begin_momentum(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["momentum"] = 0.9


def leave_out(model: Any, optimizer: torch.optim.Optimizer) -> None:
    del optimizer.param_groups[0]["params"][0]


def hook_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)


CHANGES = (change_storage, freeze, hook, share, replace_parameter, begin_momentum, leave_out, hook_step)


@pytest.mark.parametrize("change", CHANGES)
def test_updates_are_found_anew_where_something_has_changed(change: Callable[..., None]) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = updates_of(optimizer, StepTensors(model, None), ())
    assert before is not None
    assert updates_of(optimizer, StepTensors(model, None), (), before=before) is before
    change(model, optimizer)
    after = updates_of(optimizer, StepTensors(model, None), (), before=before)
    assert after is not None and after is not before
    assert after.signature != before.signature
    assert updates_of(optimizer, StepTensors(model, None), (), "why", after) is not after
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    assert updates_of(other, StepTensors(model, None), (), before=after) is not after


def test_scripted_modules_are_found_in_each_call() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(model)
    tensors = StepTensors(scripted, F.mse_loss)
    assert list(tensors.parameters) == ["0.weight", "0.bias"]
    assert StepTensors.current(scripted, F.mse_loss, tensors) is not tensors

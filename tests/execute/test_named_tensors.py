"""A step's modules and tensors, found once, and what is asked of all of them together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_odt import _extensions
from torch_odt.execute.named_tensors import StepTensors, detached, forms_of
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

"""The optimizer's step inside of the backward pass: the bits of `torch.optim`, and gradients that are gone."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_steps import PLENTY, Net, make_batches, plain_step
from torch import Tensor, nn

import torch_odt as odt
from torch_odt import memory
from torch_odt.capture import parameter_updates
from torch_odt.capture.rewrite import inexact_rewrites

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(**options: Any) -> MakeOptimizer:
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.1} | options)


def adam(**options: Any) -> MakeOptimizer:
    return lambda parameters: torch.optim.Adam(parameters, **{"lr": 0.01} | options)


def adamw(**options: Any) -> MakeOptimizer:
    return lambda parameters: torch.optim.AdamW(parameters, **{"lr": 0.01} | options)


UPDATED = {
    "sgd": sgd(),
    "sgd-momentum": sgd(momentum=0.9),
    "sgd-dampening": sgd(momentum=0.9, dampening=0.3),
    "sgd-nesterov-decay": sgd(momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd-maximize": sgd(momentum=0.9, maximize=True),
    "adam": adam(),
    "adam-amsgrad-decay": adam(amsgrad=True, weight_decay=0.01),
    "adamw": adamw(),
    "adamw-maximize": adamw(maximize=True),
}


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> odt.TrainStep:
    usual = {"budget": PLENTY, "disable_rewrites": inexact_rewrites()}
    return odt.TrainStep(model, F.cross_entropy, optimizer, **usual | options)


def assert_same(ours: nn.Module, plain: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q), name
    own, expected = (optimizer.state_dict() for optimizer in optimizers)
    assert own["param_groups"] == expected["param_groups"]
    assert own["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert own["state"][index].keys() == state.keys()
        for name, tensor in state.items():
            assert torch.equal(own["state"][index][name], tensor), name


def train_both(
    make_optimizer: MakeOptimizer,
    *,
    model: nn.Module | None = None,
    groups: Callable[[nn.Module], Any] = lambda model: model.parameters(),
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    between: Callable[[int, nn.Module, torch.optim.Optimizer], None] | None = None,
    batches: list[tuple[Tensor, Tensor]] | None = None,
    **options: Any,
) -> tuple[odt.TrainStep, nn.Module]:
    """Three steps of `TrainStep` and of a plain loop, equal in every bit of parameters and optimizer state."""
    ours = Net(norm=True) if model is None else model
    plain = copy.deepcopy(ours)
    optimizers = [make_optimizer(groups(m)) for m in (ours, plain)]
    schedulers = [make_scheduler(optimizer) for optimizer in optimizers] if make_scheduler else []
    step = make_step(ours, optimizers[0], **options)
    for index, batch in enumerate(batches or make_batches(3)):
        if between is not None:
            between(index, ours, optimizers[0])
            between(index, plain, optimizers[1])
        loss = step(*batch)
        assert torch.equal(loss, plain_step(plain, batch, optimizers[1]))
        for scheduler in schedulers:
            scheduler.step()
        assert_same(ours, plain, *optimizers)
    return step, plain


def is_updated(step: odt.TrainStep) -> bool:
    return any(note.endswith("(update_in_backward)") for note in step.plan.notes)


def reason_to_wait(step: odt.TrainStep) -> str:
    assert not is_updated(step)
    (note,) = (note for note in step.plan.notes if note.startswith("the optimizer makes its step after"))
    return note


@pytest.mark.parametrize("make_optimizer", UPDATED.values(), ids=UPDATED)
def test_every_bit_is_torch_optims(make_optimizer: MakeOptimizer) -> None:
    step, _ = train_both(make_optimizer)
    assert is_updated(step)
    assert all(p.grad is None for p in step.model.parameters())
    assert not any("departed" in note for note in step.plan.notes)


def test_parameter_groups_and_schedulers() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        assert isinstance(model, Net)
        rest = [p for module in (model.norm, model.head) for p in module.parameters()]
        return [{"params": model.first.parameters(), "lr": 0.5, "weight_decay": 0.1}, {"params": rest}]

    def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=4)

    step, _ = train_both(sgd(momentum=0.9), groups=groups, make_scheduler=one_cycle)
    assert is_updated(step)


def test_an_optimizer_that_changes_while_training() -> None:
    """Weight decay is another computation with another temporary; a loaded state is other tensors."""

    def between(index: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if index == 1:
            optimizer.param_groups[0]["weight_decay"] = 0.1
        if index == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    step, _ = train_both(sgd(momentum=0.9), between=between)
    assert is_updated(step)


def test_a_parameter_that_the_optimizer_does_not_hold_keeps_its_gradient() -> None:
    step, plain = train_both(adamw(), groups=lambda model: [p for p in model.parameters() if p.dim() > 1])
    for p, q in zip(step.model.parameters(), plain.parameters(), strict=True):
        if p.dim() > 1:
            assert p.grad is None
        else:
            assert q.grad is not None and p.grad is not None


def test_a_parameter_with_a_hook_keeps_its_gradient_and_waits() -> None:
    seen: list[Tensor] = []
    model = Net()
    model.head.weight.register_hook(seen.append)
    step, _ = train_both(sgd(momentum=0.9), model=model)
    assert len(seen) == 3 and seen[-1] is model.head.weight.grad
    assert model.head.weight.grad is not None and model.head.bias.grad is None
    assert is_updated(step)
    assert "1 gradients are kept for the optimizer's step: a hook looks at it" in step.plan.notes


def test_tied_parameters_are_updated_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    train_both(adam(), model=Tied())


def test_inside_a_small_budget() -> None:
    """Activations are recomputed from parameters that have not been updated by then."""
    layers = [layer for _ in range(10) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    batches = [(torch.randn(8, 3, 64, 64), labels) for _, labels in make_batches(3, size=8)]
    optimizer = sgd(momentum=0.9)(model.parameters())
    keeping = odt.plan(model, F.cross_entropy, batches[0], budget=PLENTY, optimizer=optimizer).peak_bytes
    step, _ = train_both(
        sgd(momentum=0.9), model=model, batches=batches, budget=odt.Budget(keeping * 2 // 3, of="training")
    )
    assert step.plan.recomputed_ops > 0 and is_updated(step)


def test_the_gradients_do_not_exist_at_once() -> None:
    if not memory.is_tracking():
        pytest.skip("torch_odt._memory is not built")
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)), nn.Linear(256, 3))
    batch = (torch.randn(4, 256), torch.tensor([0, 1, 2, 1]))
    peaks = {}
    for disabled in ((), ("update_in_backward",)):
        optimizer = adamw()(model.parameters())
        step = make_step(model, optimizer, disable_rewrites=disabled)
        step(*batch)
        optimizer.zero_grad()
        memory.reset_peak()
        before = memory.stats().allocated_bytes or 0
        step(*batch)
        peaks[disabled] = (memory.stats().peak_bytes or 0) - before
    gradients = sum(p.nbytes for p in model.parameters())
    assert peaks[("update_in_backward",)] > gradients > 2 * peaks[()]


@pytest.mark.parametrize(
    ("make_optimizer", "options", "text"),
    [
        (sgd(), {"clip_grad_norm": 1.0}, "clipping needs the norm of all gradients"),
        (sgd(), {"accumulation_steps": 2}, "gradients of 2 calls are accumulated"),
        (sgd(), {"micro_batch": 2}, "gradients are summed over 2 micro-batches"),
        (sgd(foreach=True), {}, "foreach=True"),
        (sgd(lr=torch.tensor(0.1)), {}, "a hyperparameter is a tensor (lr)"),
        (lambda parameters: torch.optim.RMSprop(parameters), {}, "RMSprop makes its step as a whole"),
    ],
)
def test_what_needs_all_gradients_waits_and_the_plan_says_why(
    make_optimizer: MakeOptimizer, options: dict[str, Any], text: str
) -> None:
    model = Net()
    step = make_step(model, make_optimizer(model.parameters()), **options)
    step(*make_batches(1)[0])
    assert text in reason_to_wait(step)
    assert all(p.grad is not None for p in model.parameters())


def test_an_optimizer_with_hooks_makes_its_own_step() -> None:
    model = Net()
    optimizer = sgd()(model.parameters())
    step = make_step(model, optimizer)
    step(*make_batches(1)[0])
    assert is_updated(step)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad is not None for p in model.parameters()]))
    step(*make_batches(1)[0])
    assert seen == [[True] * 6]
    assert "hooks" in reason_to_wait(step)


def test_a_loss_that_is_no_number_raises_before_anything_is_updated() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    optimizer = sgd(momentum=0.9)(model.parameters())
    step = make_step(model, optimizer, nonfinite="raise")
    (x, y), good = make_batches(2)
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        step(x * float("nan"), y)
    assert is_updated(step) and not optimizer.state
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    step(*good)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["sgd-momentum", "adam"])
def test_state_that_comes_after_a_failed_first_step_is_kept(name: str) -> None:
    """What the failed step has made for the optimizer must not take the place of what it got elsewhere."""
    model = Net()
    optimizer = UPDATED[name](model.parameters())
    step = make_step(model, optimizer, nonfinite="raise")
    (x, y), good = make_batches(2)
    small = (good[0][:2], good[1][:2])
    with pytest.raises(FloatingPointError):
        step(x * float("nan"), y)
    plain = copy.deepcopy(model)
    plain_optimizer = UPDATED[name](plain.parameters())
    for batch in (small, good, small):
        assert torch.equal(step(*batch), plain_step(plain, batch, plain_optimizer))
        assert_same(model, plain, optimizer, plain_optimizer)


class Shared(nn.Module):
    """Two parameters in one memory: what updates one of them changes the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.third.weight = nn.Parameter(self.second.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def test_parameters_that_share_memory_keep_their_gradients() -> None:
    model, plain = Shared(), Shared()
    plain.load_state_dict(model.state_dict())
    optimizers = [sgd()(m.parameters()) for m in (model, plain)]
    step = make_step(model, optimizers[0])
    for batch in make_batches(3):
        assert torch.equal(step(*batch), plain_step(plain, batch, optimizers[1]))
        assert_same(model, plain, *optimizers)
    assert model.second.weight.grad is not None and model.second.bias.grad is None
    note = "2 gradients are kept for the optimizer's step: other tensors lie in the parameter's memory"
    assert note in step.plan.notes


def test_another_optimizer_takes_over() -> None:
    model = Net()
    step = make_step(model, sgd(momentum=0.9)(model.parameters()))
    first, second = make_batches(2)
    step(*first)
    plain = copy.deepcopy(model)
    step.optimizer, plain_optimizer = (sgd(lr=0.5, momentum=0.9)(m.parameters()) for m in (model, plain))
    assert torch.equal(step(*second), plain_step(plain, second, plain_optimizer))
    assert_same(model, plain, step.optimizer, plain_optimizer)


def test_a_step_of_the_users_own_under_a_scheduler_is_called() -> None:
    model = Net()
    optimizer = sgd()(model.parameters())
    called, step_of_class = [], optimizer.step
    optimizer.step = types.MethodType(lambda _, *args: called.append(step_of_class(*args)), optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    called.clear()
    step = make_step(model, optimizer)
    step(*make_batches(1)[0])
    assert len(called) == 1 and "replaced" in reason_to_wait(step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_type_does_not_matter(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    model, plain = (nn.Linear(6, 3) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    batches = make_batches(2)
    optimizers = [adam()(m.parameters()) for m in (model, plain)]
    torch.set_default_dtype(dtype)
    try:
        step = make_step(model, optimizers[0])
        for batch in batches:
            step(*batch)
            plain_step(plain, batch, optimizers[1])
        assert_same(model, plain, *optimizers)
        assert optimizers[0].state[model.weight]["step"].dtype == optimizers[1].state[plain.weight]["step"].dtype
    finally:
        torch.set_default_dtype(before)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 9),
    piece=st.sampled_from([16, 64, 1 << 18]),
    transposed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    name=st.sampled_from(sorted(UPDATED)),
)
def test_pieces_change_no_bit(
    rows: int, columns: int, piece: int, transposed: bool, dtype: torch.dtype, name: str
) -> None:
    """Whatever the size of a piece, and wherever the elements of a gradient lie."""
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    start, *gradients = (torch.randn(rows, columns, generator=generator).to(dtype) for _ in range(3))
    ours, plain = start.clone(), nn.Parameter(start.clone())
    optimizer = UPDATED[name]([plain])
    options = optimizer.param_groups[0]
    rule = "sgd" if isinstance(optimizer, torch.optim.SGD) else "adam"
    state: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameter_updates, "_PIECE_ELEMENTS", piece)
        for number, gradient in enumerate(gradients):
            plain.grad = gradient
            optimizer.step()
            if number == 0:
                kept = optimizer.state.get(plain, {})
                state = [torch.zeros_like(tensor) for tensor in kept.values()]
            given_gradient = gradient.t().contiguous().t() if transposed else gradient
            parameter_updates.update(rule, options, ours, given_gradient, *state, is_first=number == 0)
            assert torch.equal(ours, plain)
    for own, expected in zip(state, optimizer.state.get(plain, {}).values(), strict=True):
        assert torch.equal(own, expected)

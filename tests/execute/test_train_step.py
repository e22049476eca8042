"""`TrainStep` against a plain loop: every way to call it, every optimizer, and whatever users do between two steps."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_steps import PLENTY, Net, assert_equal_models, make_batches, make_step, plain_step, train_both
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.capture.batch_state import NotSeparable


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": weights}, {"params": others, "lr": 3e-2, "weight_decay": 0.0}]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_with_parameter_groups(name: str) -> None:
    train_both(Net(), make_batches(3), OPTIMIZERS[name], groups=in_groups)


class OwnLoss(nn.Module):
    """As the models of transformers: takes its labels and returns an object with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(x)
        found = {"logits": logits}
        return found if labels is None else {"loss": F.cross_entropy(logits, labels), **found}


@pytest.mark.parametrize("own", [True, False], ids=["own loss", "loss_fn of outputs and batch"])
def test_batches_by_keyword(own: bool) -> None:
    plain, ours = (lambda m: (m, copy.deepcopy(m)))(OwnLoss())
    loss_fn = None if own else lambda outputs, batch: F.cross_entropy(outputs["logits"], batch["labels"])
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    step = make_step(ours, loss_fn, optimizer=optimizer)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in make_batches(3):
        loss, outputs = step.with_outputs(x=x, labels=y)
        optimizer.zero_grad()
        expected = plain(x=x, labels=y)
        expected["loss"].backward()
        optimizer.step()
        assert torch.equal(loss, expected["loss"])
        assert outputs.keys() == expected.keys()
        assert all(torch.equal(outputs[k], expected[k]) and not outputs[k].requires_grad for k in expected)
    assert_equal_models(ours, plain)


class CountedLoss(nn.Module):
    """A loss with class weights, and a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([0.2, 1.0, 2.0]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(outputs, target, self.weight)


def test_a_loss_module_with_buffers() -> None:
    plain_loss, our_loss = CountedLoss(), CountedLoss()
    train_both(Net(), make_batches(3), loss_fn=our_loss, plain_loss_fn=plain_loss)
    assert our_loss.calls == plain_loss.calls == 3


class Shapes(nn.Module):
    """Returns its outputs in the shape that is asked for."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.net, self.shape = Net(), shape

    def forward(self, x: Tensor) -> Any:
        y = self.net(x)
        return {"tensor": y, "tuple": (y, 2 * y), "dict": {"logits": y, "name": "n", "twice": [y, y]}}[self.shape]


@pytest.mark.parametrize("shape", ["tensor", "tuple", "dict"])
@pytest.mark.parametrize("micro_batch", [None, 2])
def test_outputs_on_request(shape: str, micro_batch: int | None) -> None:
    model = Shapes(shape)

    def loss_fn(outputs: Any, target: Tensor) -> Tensor:
        leaf = {"tensor": lambda: outputs, "tuple": lambda: outputs[0], "dict": lambda: outputs["logits"]}[shape]()
        return F.cross_entropy(leaf, target)

    step = odt.TrainStep(
        model,
        loss_fn,
        torch.optim.SGD(model.parameters(), lr=0.1),
        budget=PLENTY,
        micro_batch=micro_batch,
    )
    for x, y in make_batches(2):
        with torch.no_grad():
            expected = model(x)
        _, outputs = step.with_outputs(x, y)
        assert type(outputs) is type(expected)
        ours, plain = (torch.utils._pytree.tree_leaves(o) for o in (outputs, expected))
        assert len(ours) == len(plain)
        for a, b in zip(ours, plain, strict=True):
            if isinstance(b, Tensor):
                torch.testing.assert_close(a, b)
                assert not a.requires_grad
            else:
                assert a == b


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=8),
    ],
    ids=["StepLR", "OneCycleLR"],
)
def test_learning_rate_schedulers(make: Callable[[torch.optim.Optimizer], Any]) -> None:
    train_both(Net(), make_batches(5), OPTIMIZERS["momentum"], make_scheduler=make)


def test_optimizer_hooks_fire_once_a_step() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    step = odt.TrainStep(model, F.cross_entropy, optimizer, budget=PLENTY)
    assert calls == []
    for batch in make_batches(3):
        step(*batch)
    assert calls == ["before", "after"] * 3


def triple(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3)


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(x))))


class Branches(nn.Module):
    """Cannot be captured: a branch on data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if x.sum().item() < 1e9 else self.net(-x)


class Remembers(Branches):
    """It holds what it has seen last."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach() + 1
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:not captured")
def test_what_a_model_without_a_graph_replaces_is_freed_in_the_same_call() -> None:
    model = Remembers()
    model.seen = torch.zeros(3)
    before = weakref.ref(model.seen)
    step = make_step(model)
    step(*make_batches(1)[0])
    assert not step.plan.captured and before() is None


@pytest.mark.filterwarnings("ignore:not captured")
@pytest.mark.parametrize("make", [Net, Tied, Branches])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_gradient_hooks(make: Callable[[], nn.Module], accumulation_steps: int) -> None:
    """Hooks of tensors replace the gradient of one backward pass; those after accumulation see the sum."""
    plain = make()
    ours = copy.deepcopy(plain)
    seen: dict[str, list[Tensor]] = {"plain": [], "ours": []}
    for name, model in (("plain", plain), ("ours", ours)):
        parameter = next(model.parameters())
        parameter.register_hook(lambda g: g.clamp(-1e-3, 1e-3) * 2)
        parameter.register_hook(lambda g, log=seen[name]: log.append(g.clone()))
        if accumulation_steps == 1:
            parameter.register_post_accumulate_grad_hook(triple)
    step = make_step(ours, optimizer=torch.optim.SGD(ours.parameters(), lr=0.1), accumulation_steps=accumulation_steps)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for index, batch in enumerate(make_batches(4)):
        step(*batch)
        if index % accumulation_steps == 0:
            optimizer.zero_grad()
        # TrainStep scales to the mean of the samples so far; for equal batches the sum of halves is the same.
        share = 1 / (index % accumulation_steps + 1)
        if share != 1:
            for p in plain.parameters():
                p.grad.mul_(share)
        (F.cross_entropy(plain(batch[0]), batch[1]) * share).backward()
        if (index + 1) % accumulation_steps == 0:
            optimizer.step()
    assert len(seen["ours"]) == len(seen["plain"]) == 4
    for a, b in zip(seen["ours"], seen["plain"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    assert_equal_models(ours, plain, exact=False)


def test_clipping() -> None:
    train_both(Net(), make_batches(4), clip_grad_norm=1e-2)


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_accumulation_of_uneven_batches_is_the_mean_of_all_samples(micro_batch: int | None) -> None:
    ours = Net()
    plain = copy.deepcopy(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    options = {"budget": PLENTY, "accumulation_steps": 3, "micro_batch": micro_batch}
    step = odt.TrainStep(ours, F.cross_entropy, optimizer, **options)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for seed in (1, 2):
        batches = [make_batches(1, size=size, seed=seed + size)[0] for size in (4, 6, 3)]
        before = copy.deepcopy(ours.state_dict())
        for index, batch in enumerate(batches):
            assert all(torch.equal(before[k], v) for k, v in ours.state_dict().items())
            step(*batch)
            assert all(p.grad is not None for p in ours.parameters()), index
        whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
        plain_step(plain, whole, plain_optimizer)
        assert_equal_models(ours, plain, exact=False)


def test_flush_takes_the_step_of_an_incomplete_group() -> None:
    ours = Net()
    plain = copy.deepcopy(ours)
    step = odt.TrainStep(
        ours,
        F.cross_entropy,
        torch.optim.SGD(ours.parameters(), lr=0.1),
        budget=PLENTY,
        accumulation_steps=4,
    )
    step.flush()
    assert_equal_models(ours, plain)
    batches = make_batches(2)
    for batch in batches:
        step(*batch)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
    step.flush()
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    plain_step(plain, whole, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert_equal_models(ours, plain, exact=False)
    step.flush()
    assert_equal_models(ours, plain, exact=False)


def test_gradients_that_are_not_used_up_stay_until_the_next_call() -> None:
    model = Net()
    step = make_step(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    kept: list[list[Tensor]] = []
    for x, y in make_batches(2):
        step(x, y)
        expected = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None and torch.equal(parameter.grad, gradient)
            assert parameter.grad.is_contiguous() == gradient.is_contiguous()
        kept.append([p.grad for p in model.parameters()])
    assert all(a is not b for a, b in zip(*kept, strict=True))


class Shared(nn.Module):
    """Two parameters with one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] * (self.a + self.b)


def test_equal_gradients_of_two_parameters_are_two_tensors() -> None:
    model = Shared()
    train_both(model, make_batches(3), clip_grad_norm=1e-2)
    step = make_step(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    step(*make_batches(1)[0])
    assert torch.equal(model.a.grad, model.b.grad)
    model.a.grad.zero_()
    assert model.b.grad.abs().sum() > 0


def test_tied_weights() -> None:
    train_both(Tied(), make_batches(3), OPTIMIZERS["adamw"], clip_grad_norm=0.1)


class Masked(Net):
    """Writes into the rows that a mask picks: how much that allocates depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[x[:, 0] < 0] = torch.ones(6)
        return super().forward(x)


def test_an_index_by_a_mask_stays_within_the_plan() -> None:
    model = Masked()
    step = train_both(model, make_batches(6))
    arena = step._request.arena
    if arena is not None:
        assert arena.stats()["smaller"] > 0, "some mask leaves a row out"
        assert set(arena.stats()["misses"].values()) == {0}


@pytest.mark.parametrize("planner", ["keep-all", "chen", "dtr", "sage", "melon", "min-cut", "auto"])
def test_planners_give_equal_bits(planner: str) -> None:
    train_both(Net(norm=True), make_batches(3), planner=planner)


@pytest.mark.parametrize("door", [make_step, functools.partial(odt.wrap, budget=PLENTY)])
def test_an_unknown_planner_is_refused_with_the_names(door: Callable[..., Any]) -> None:
    with pytest.raises(odt.PlanError, match=r"'nonsense'.*keep-all, chen, .*melon"):
        door(Net(), planner="nonsense")


def test_the_plan_is_there_after_the_first_call() -> None:
    model = Net()
    step = odt.TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), budget=PLENTY)
    with pytest.raises(RuntimeError, match="before the first call"):
        _ = step.plan
    step(*make_batches(1)[0])
    assert step.plan.captured and step.plan.batch == 4 and step.plan.peak_bytes > 0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_forced_micro_batch_is_exact(size: int) -> None:
    step = train_both(Net(), make_batches(3), micro_batch=size, exact=False)
    assert step.plan.micro_batch == size


def test_a_forced_micro_batch_is_refused_where_samples_influence_each_other() -> None:
    model = Net(norm=True)
    before = copy.deepcopy(model.state_dict())
    step = odt.TrainStep(
        model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), budget=PLENTY, micro_batch=2
    )
    with pytest.raises(NotSeparable, match="BatchNorm"):
        step(*make_batches(1)[0])
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_batch_is_not_cut_when_an_output_over_all_of_it_is_wanted() -> None:
    x, labels = make_batches(1, size=8)[0]
    step = make_step(OwnLoss(), None, micro_batch=4)
    step(x=x, labels=labels)
    assert step.plan.micro_batch == 4
    with pytest.raises(NotSeparable, match="over the whole batch"):
        step.with_outputs(x=x, labels=labels)
    step = make_step(OwnLoss(), None)
    loss, outputs = step.with_outputs(x=x, labels=labels)
    assert torch.equal(outputs["loss"], loss)

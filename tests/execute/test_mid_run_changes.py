"""What users change between two steps: modes, batches, trainable parameters, attributes, the step object itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from small_steps import Net, assert_equal_models, make_batches, make_step, plain_step, sgd, train_both
from torch import Tensor, nn

import torch_odt as odt


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def test_state_dict_loads_strictly_into_a_plain_model_mid_run() -> None:
    model = Net(norm=True)
    names = list(model.state_dict())
    step = make_step(model)
    for batch in make_batches(2):
        step(*batch)
    assert list(model.state_dict()) == names
    plain = Net(norm=True)
    plain.load_state_dict(model.state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True))
    for batch in make_batches(1, seed=9):
        step(*batch)
    model.load_state_dict(plain.state_dict(), strict=True)
    step(*make_batches(1)[0])


def test_validation_between_steps() -> None:
    def validate(index: int, model: nn.Module) -> None:
        model.eval()
        with torch.no_grad():
            F.cross_entropy(model(make_batches(1, size=16)[0][0]), make_batches(1, size=16)[0][1])
        model.train()

    train_both(Net(norm=True, dropout=0.3), make_batches(4), between=validate)


def test_batch_norm_frozen_by_eval_while_training() -> None:
    def freeze(index: int, model: nn.Module) -> None:
        model.norm.train(index < 2)

    step = train_both(Net(norm=True), make_batches(4), between=freeze)
    assert len(step._prepared) == 2


def test_a_smaller_last_batch() -> None:
    batches = [*make_batches(2, size=6), *make_batches(1, size=5), *make_batches(2, size=6), *make_batches(1, size=1)]
    step = train_both(Net(dropout=0.3), batches)
    assert step.plan.batch == 1 and len(step._prepared) == 3


class Wide(nn.Module):
    """Activations and optimizer state of several megabytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.ReLU())))
        self.head = nn.Linear(512, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def wide_batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 512), torch.randint(3, (size,))


def test_what_earlier_steps_hold_is_not_counted_twice_when_the_batch_changes() -> None:
    """The arena and the optimizer's state exist by then; a smaller batch needs no larger budget."""
    model = Wide()
    with pytest.raises(odt.InfeasibleBudget) as refusal:
        make_step(model, optimizer=torch.optim.AdamW(model.parameters()), budget=odt.Budget(4096, of="training"))(
            *wide_batch(1024)
        )
    budget = odt.Budget(refusal.value.smallest_feasible_bytes + (4 << 20), of="training")
    step = make_step(model, optimizer=torch.optim.AdamW(model.parameters()), budget=budget)
    step(*wide_batch(1024))
    step(*wide_batch(1024))
    step(*wide_batch(1000))
    assert step.plan.peak_bytes <= budget.resolve(0).growth_bytes


def test_gradients_of_an_accumulation_are_not_counted_twice_when_the_batch_changes() -> None:
    model = Wide()

    def new_step(budget: odt.Budget) -> odt.TrainStep:
        return make_step(model, optimizer=torch.optim.SGD(model.parameters()), budget=budget, accumulation_steps=2)

    with pytest.raises(odt.InfeasibleBudget) as refusal:
        new_step(odt.Budget(4096, of="training"))(*wide_batch(256))
    step = new_step(odt.Budget(refusal.value.smallest_feasible_bytes + (1 << 20), of="training"))
    step(*wide_batch(256))
    step(*wide_batch(250))


@pytest.mark.parametrize("adam", [False, True])
def test_parameters_frozen_and_freed_mid_run(adam: bool) -> None:
    def freeze(index: int, model: nn.Module) -> None:
        model.first.requires_grad_(index >= 2)

    make = (lambda p: torch.optim.Adam(p, lr=1e-2)) if adam else sgd
    step = train_both(Net(), make_batches(5), make, between=freeze)
    assert len(step._prepared) == 2


def test_state_made_after_the_first_step_lies_outside_the_arena() -> None:
    model = Net()
    model.first.requires_grad_(False)
    step = make_step(model, optimizer=torch.optim.Adam(model.parameters()))
    for index, batch in enumerate(make_batches(5)):
        model.first.requires_grad_(index >= 2)
        step(*batch)
    if odt.memory.is_tracking():
        assert odt.memory.stats().arena is not None
        assert odt.memory.stats().arena.live_blocks == 0


class Convolution(nn.Module):
    """Its kernel is another one without oneDNN, and allocates otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.convolution(x)).mean((2, 3)))


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of the context manager that turns oneDNN off
def test_torch_settings_change() -> None:
    step = make_step(Convolution())
    batch = torch.randn(4, 3, 8, 8), torch.randint(3, (4,))
    step(*batch)
    with torch.backends.mkldnn.flags(enabled=False):
        step(*batch)
    step(*batch)
    assert len(step._prepared) == 2
    if step._request.arena is not None:
        assert set(step._request.arena.stats()["misses"].values()) == {0}


def test_the_model_changes_its_dtype() -> None:
    model = Net()
    step = make_step(model)
    x, y = make_batches(1)[0]
    step(x, y)
    model.to(torch.float64)
    plain = copy.deepcopy(model)
    loss = step(x.double(), y)
    expected = F.cross_entropy(plain(x.double()), y)
    assert loss.dtype == torch.float64 and torch.equal(loss, expected.detach())


def test_a_step_after_close() -> None:
    model = Net(norm=True)
    plain = copy.deepcopy(model)
    step, optimizer = make_step(model), sgd(plain.parameters())
    for batch in make_batches(3):
        step(*batch)
        plain_step(plain, batch, optimizer)
        step.close()
        with pytest.raises(RuntimeError, match="before the first call"):
            _ = step.plan
    assert_equal_models(model, plain)


def test_two_steps_in_one_process() -> None:
    models = [Net(norm=True), Net(dropout=0.2)]
    plains = copy.deepcopy(models)
    steps = [make_step(m) for m in models]
    optimizers = [sgd(p.parameters()) for p in plains]
    for batch in make_batches(3):
        for step, plain, optimizer in zip(steps, plains, optimizers, strict=True):
            state = torch.get_rng_state()
            step(*batch)
            torch.set_rng_state(state)
            plain_step(plain, batch, optimizer)
    for model, plain in zip(models, plains, strict=True):
        assert_equal_models(model, plain)


def test_equal_runs_are_equal() -> None:
    first = Net(norm=True, dropout=0.3)
    second = copy.deepcopy(first)
    losses: list[list[Tensor]] = []
    for model in (first, second):
        torch.manual_seed(11)
        step = make_step(model)
        losses.append([step(*batch) for batch in make_batches(4)])
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))
    assert_equal_models(first, second)


class IdleDraw(nn.Module):
    """Draws numbers that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        unread = torch.randn_like(x) * 2
        del unread
        return self.net(x)


@pytest.mark.parametrize("planner", ["keep-all", "chen", "melon", "min-cut", "auto"])
def test_draws_that_nobody_reads_are_made(planner: str) -> None:
    train_both(IdleDraw(), make_batches(3), planner=planner)


def test_draws_that_nobody_reads_are_made_once_for_all_micro_batches() -> None:
    step = train_both(IdleDraw(), make_batches(3), micro_batch=2, exact=False)
    assert step.plan.micro_batch == 2

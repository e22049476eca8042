"""`wrap`: the loop untouched, every number plain PyTorch's."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from awkward import Clamp
from torch import nn
from torch.nn import functional as F

from torch_odt import Budget, InfeasibleBudget, OdtWarning, memory
from torch_odt.execute import wrap as wrap_module
from torch_odt.execute import wrap_session
from torch_odt.execute.wrap import plan_of, session_of, set_budget, unwrap, wrap
from torch_odt.execute.wrap_plan import StepPlan

# torch.compile itself warns of this and that.
pytestmark = pytest.mark.filterwarnings("default", "error::torch_odt.errors.OdtWarning")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def training(amount: str | int) -> Budget:
    return Budget(amount, of="training")


def wrapped(model: nn.Module, budget: Budget | None = None, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A wrapped model and a plain copy of it."""
    reference = copy.deepcopy(model)
    return wrap(model, budget=budget or training("1GiB"), cache=False, **options), reference


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Dropout(0.2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU6(inplace=True),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))


class DictOutput(Conv):
    def forward(self, x: torch.Tensor) -> Any:
        features = self.features(x)
        return {"logits": self.head(features.mean((2, 3))), "parts": [features, None, 3]}


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 12, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(F.gelu(self.block(x)))


class GraphBreak(Conv):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        x = x * 2 if x.sum() > 0 else x.flip(0)
        return self.head(torch.sin(x).mean((2, 3)))


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Clamp.apply(self.linear(x))


class ReturnsWhatItKeeps(nn.Module):
    """Results that are needed in the backward pass, views of each other, and an input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.sigmoid(self.linear(x))
        return hidden, hidden[:, :2], hidden * 2, x


class Counting(nn.Module):
    counter: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("counter", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter += 1
        return self.linear(x) * self.counter


def images(batch: int, size: int = 16) -> torch.Tensor:
    return torch.randn(batch, 3, size, size)


def rows(batch: int) -> torch.Tensor:
    return torch.randn(batch, 6)


def sequences(batch: int) -> torch.Tensor:
    return torch.randn(batch, 7, 6)


def tokens(batch: int) -> torch.Tensor:
    return torch.randint(0, 30, (batch, 9))


def frozen_conv() -> nn.Module:
    model = Conv()
    model.features[0].requires_grad_(False)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "conv": (Conv, images),
    "dict output": (DictOutput, images),
    "lstm": (Lstm, sequences),
    "tied weights": (TiedLanguageModel, tokens),
    "used twice": (UsedTwice, rows),
    "graph break": (GraphBreak, images),
    "custom function": (CustomFunction, rows),
    "returns what it keeps": (ReturnsWhatItKeeps, rows),
    "counting": (Counting, rows),
    "frozen": (frozen_conv, images),
}


def loss_of(outputs: Any) -> torch.Tensor:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    total = leaves[0].sum() * 0
    for weight, leaf in enumerate(leaves, 1):
        total = total + weight * leaf.square().mean()
    return total


def step(model: nn.Module, x: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and backward; the loss and the state of the random number generator afterwards."""
    torch.manual_seed(seed)
    loss = loss_of(model(x))
    loss.backward()
    return loss.detach(), torch.get_rng_state()


def assert_same(model: nn.Module, reference: nn.Module, tolerance: float = 0.0) -> None:
    for (name, ours), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (plain.grad is None), name
        if plain.grad is not None:
            torch.testing.assert_close(ours.grad, plain.grad, rtol=tolerance, atol=tolerance, msg=name)
    assert list(model.state_dict()) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=tolerance, atol=tolerance, msg=name)


def planned_step(model: nn.Module) -> StepPlan:
    step = session_of(model).ledger.step
    assert step is not None
    return step


def predicted_bytes(model: nn.Module) -> int:
    return planned_step(model).peak_bytes


def graph_count(model: nn.Module) -> int:
    return len(planned_step(model).executors)


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_plain_pytorch(case: str) -> None:
    make, batch = CASES[case]
    torch.manual_seed(0)
    model, reference = wrapped(make(), planner="keep-all")
    optimizers = [torch.optim.SGD(m.parameters(), 0.01, momentum=0.9) for m in (model, reference)]
    for seed in range(3):
        x = batch(4)
        (loss, rng), (plain_loss, plain_rng) = step(model, x, seed), step(reference, x, seed)
        assert torch.equal(loss, plain_loss)
        assert torch.equal(rng, plain_rng)
        # AOTAutograd adds the gradients of a result and of its views in another order than eager.
        assert_same(model, reference, tolerance=1e-6 if case == "returns what it keeps" else 0.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.load_state_dict(reference.state_dict())
    plan = plan_of(model)
    assert plan.captured and plan.schedule is not None
    assert any("graph break" in note for note in plan.notes) == (case == "graph break")
    assert not session_of(model).calls.waiting


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_torchvision_models_below_the_memory_of_keeping_all(name: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model, reference = wrapped(getattr(torchvision.models, name)(num_classes=10), planner="melon")
    for seed in range(3):
        x = images(4, 64)
        step(model, x, seed)
        if seed == 1:
            set_budget(model, training(int(session_of(model).used_bytes() + 0.8 * predicted_bytes(model))))
        step(reference, x, seed)
        assert_same(model, reference, tolerance=1e-4)
        model.zero_grad()
        reference.zero_grad()
        reference.load_state_dict(model.state_dict())
    assert graph_count(model) == 1


def test_evaluation_in_between_and_a_smaller_last_batch() -> None:
    torch.manual_seed(0)
    model, reference = wrapped(Conv(), planner="keep-all")
    runners = []
    for epoch in range(3):
        for batch in (4, 4, 2):
            x = images(batch)
            step(model, x, epoch)
            step(reference, x, epoch)
        model.eval()
        reference.eval()
        x = images(4)
        with torch.no_grad():
            assert torch.equal(model(x), reference(x))
        assert torch.equal(model(x), reference(x))
        model.train()
        reference.train()
        assert_same(model, reference, tolerance=1e-5)
        runners.append(session_of(model).runner_count)
    assert runners[0] == runners[-1], "later epochs compile nothing"


def test_gradients_accumulate() -> None:
    torch.manual_seed(0)
    model, reference = wrapped(Conv(), planner="keep-all")
    for seed in range(3):
        x = images(4)
        step(model, x, seed)
        step(reference, x, seed)
    assert_same(model, reference, tolerance=1e-6)


def test_two_forward_passes_before_one_backward_pass() -> None:
    torch.manual_seed(0)
    model, reference = wrapped(UsedTwice(), planner="keep-all")
    for _ in range(3):
        first, second = rows(4), rows(4)
        for m in (model, reference):
            m.zero_grad()
            (m(first) * m(second)).sum().backward()
        assert_same(model, reference, tolerance=1e-6)
    assert graph_count(model) == 2


def test_retain_graph_and_a_second_backward_pass() -> None:
    torch.manual_seed(0)
    model, reference = wrapped(Conv(), planner="keep-all")
    x = images(4)
    for seed in range(2):
        for m in (model, reference):
            m.zero_grad()
            torch.manual_seed(seed)
            loss = loss_of(m(x))
            loss.backward(retain_graph=True)
            loss.backward()
            with pytest.raises(RuntimeError):
                loss.backward()
    assert_same(model, reference, tolerance=1e-6)


def test_an_input_that_requires_gradients() -> None:
    torch.manual_seed(0)
    model, reference = wrapped(Conv(), planner="keep-all")
    gradients = []
    for m in (model, reference):
        x = images(4).mul(0).add(0.5).requires_grad_()
        step(m, x)
        gradients.append(x.grad)
    assert_same(model, reference, tolerance=1e-6)
    torch.testing.assert_close(*gradients)


def test_autocast_outside() -> None:
    torch.manual_seed(0)
    model, reference = wrapped(Conv(), planner="keep-all")
    x = images(4)
    for seed in range(2):
        for m in (model, reference):
            torch.manual_seed(seed)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(m(x))
            loss.backward()
    assert_same(model, reference, tolerance=2e-2)


def test_a_forward_pass_without_backward_frees_its_memory() -> None:
    model, _ = wrapped(ReturnsWhatItKeeps())
    calls = session_of(model).calls
    for _ in range(3):
        outputs = model(rows(4))
        assert len(calls.waiting) == 1
        del outputs
        gc.collect()
        assert not calls.waiting


def test_values_changed_between_forward_and_backward_are_noticed() -> None:
    model, _ = wrapped(Conv())
    loss = loss_of(model(images(4)))
    with torch.no_grad():
        model.head.weight.add_(1.0)  # type: ignore[operator, union-attr]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_model_remains_what_it_is() -> None:
    model = Conv()
    keys = list(model.state_dict())
    assert wrap(model, budget=training("1GiB"), cache=False) is model
    step(model, images(2))
    assert type(model) is Conv
    assert list(model.state_dict()) == keys
    twin = copy.deepcopy(model)
    with pytest.raises(ValueError, match="not wrapped"):
        plan_of(twin)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    loaded.load_state_dict(model.state_dict(), strict=True)
    assert loaded._compiled_call_impl is None
    assert unwrap(model)._compiled_call_impl is None


def test_a_reset_of_dynamo_does_no_harm() -> None:
    torch.manual_seed(0)
    model, reference = wrapped(Conv(), planner="keep-all")
    for seed in range(4):
        if seed == 2:
            torch._dynamo.reset()
        x = images(2)
        step(model, x, seed)
        step(reference, x, seed)
    assert_same(model, reference, tolerance=1e-6)


def test_errors_of_the_model_surface_as_they_are() -> None:
    class Raises(Conv):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 3:
                raise KeyError("three")
            return super().forward(x)

    model, reference = wrapped(Raises())
    with pytest.raises(KeyError, match="three"):
        model(images(3))
    wrong = torch.randn(2, 4, 8, 8)
    with pytest.raises(RuntimeError) as plain:
        reference(wrong)
    with pytest.raises(RuntimeError) as ours:
        model(wrong)
    assert str(ours.value) == str(plain.value)
    step(model, images(2))
    step(reference, images(2))
    assert plan_of(model).captured


class Deep(nn.Module):
    """A chain whose activations are most of what a step holds."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(6)]
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 1), *blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean((2, 3))


class DeepWithBreak(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = len(self.layers) // 2
        x = self.layers[:half](x)
        torch._dynamo.graph_break()
        return self.layers[half:](x).mean((2, 3))


class DeepUncaptured(Deep):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


needs_allocator = pytest.mark.skipif(not memory.install(), reason="the memory extension is missing")


def peak_of(call: Callable[[], object]) -> int:
    """The allocator's peak while something runs, above the level before."""
    level = memory.stats().allocated_bytes
    memory.reset_peak()
    call()
    peak = memory.stats().peak_bytes
    assert peak is not None and level is not None
    return peak - level


@needs_allocator
def test_the_peak_is_what_was_planned_and_a_budget_too_small_is_refused() -> None:
    torch.manual_seed(0)
    model, reference = wrapped(Deep(), planner="melon")
    x = images(8, 32)
    for seed in range(3):
        step(model, x, seed)
        model.zero_grad()
    full = predicted_bytes(model)

    def peak_of_a_step() -> int:
        return peak_of(lambda: step(model, x))

    assert peak_of_a_step() <= 1.02 * full + 4096
    model.zero_grad()
    tight = full * 6 // 10
    session = session_of(model)
    set_budget(model, training(session.used_bytes() + tight))
    reference.load_state_dict(model.state_dict())
    assert peak_of_a_step() <= tight
    assert plan_of(model).recomputed
    step(reference, x)
    assert_same(model, reference, tolerance=1e-5)

    model.zero_grad()
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    set_budget(model, training(session.used_bytes() + full // 20))
    with pytest.raises(InfeasibleBudget) as refused:
        model(x)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    set_budget(model, training(refused.value.smallest_feasible_bytes))
    step(model, x)


def test_a_model_that_cannot_be_captured_is_checkpointed_with_a_warning() -> None:
    class Hidden(Conv):
        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    torch.manual_seed(0)
    model, reference = wrapped(Hidden())
    x = images(4)
    with pytest.warns(OdtWarning, match="cannot be captured"):
        step(model, x)
    step(reference, x)
    for seed in range(2):
        step(model, x, seed)
        step(reference, x, seed)
    assert_same(model, reference)
    assert not plan_of(model).captured


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="takes an nn"):
        wrap(lambda x: x, budget="1GiB")  # type: ignore[type-var]
    with pytest.raises(ValueError):
        wrap(Conv(), budget="a lot")
    with pytest.raises(ValueError, match="on meta"):
        wrap(Conv().to("meta"), budget="1GiB")


def test_what_torch_compile_returned_is_refused() -> None:
    with pytest.raises(TypeError, match="wrap the model itself"):
        wrap(torch.compile(nn.Linear(3, 2)), budget="1GiB")


@needs_allocator
def test_graphs_around_a_break_share_one_budget() -> None:
    torch.manual_seed(0)
    model, reference = wrapped(DeepWithBreak())
    x = images(8, 32)
    for seed in range(3):
        step(model, x, seed)
        step(reference, x, seed)
        model.zero_grad()
    session = session_of(model)
    full, runners = predicted_bytes(model), session.runner_count
    assert runners == 2
    tight = full * 6 // 10
    set_budget(model, training(session.used_bytes() + tight))
    reference.load_state_dict(model.state_dict())
    reference.zero_grad()
    assert peak_of(lambda: step(model, x)) <= tight
    step(reference, x)
    assert_same(model, reference)
    assert plan_of(model).recomputed and session.runner_count == runners, "planned anew, not compiled"
    assert any("2 graphs, planned together" in note for note in plan_of(model).notes)


@needs_allocator
def test_what_lies_outside_of_the_graphs_is_measured_and_said() -> None:
    model, _ = wrapped(Deep())
    x = images(8, 32)
    step(model, x)
    (before,) = [line for line in plan_of(model).lines if line.label == "loss"]
    assert "estimated" in before.note
    for _ in range(2):
        step(model, x)
    (after,) = [line for line in plan_of(model).lines if line.label == "loss"]
    assert "measured" in after.note and after.nbytes > 0


@needs_allocator
def test_gradients_and_state_are_counted_as_such() -> None:
    model, _ = wrapped(Deep())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    nbytes = sum(p.nbytes for p in model.parameters())
    gc.collect()
    before = {name: count.allocated_bytes for name, count in (memory.stats().by_category or {}).items()}
    for _ in range(3):
        optimizer.zero_grad()
        model(images(2, 16)).sum().backward()
        optimizer.step()
    after = memory.stats().by_category or {}
    assert after["gradient"].allocated_bytes - before["gradient"] == nbytes
    assert after["optimizer"].allocated_bytes - before["optimizer"] == nbytes


def test_a_second_start_plans_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for start in range(2):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = wrap(Deep(), budget=training("1GiB"), cache=tmp_path)
        if start:
            monkeypatch.setattr(wrap_session, "auto", lambda *_, **__: pytest.fail("planned again"))
        for seed in range(3):
            step(model, images(2, 16), seed)
        assert plan_of(model).schedule is not None


@needs_allocator
def test_a_validation_pass_that_does_not_fit_is_refused() -> None:
    model, _ = wrapped(Deep())
    step(model, images(8, 32))
    step(model, images(8, 32))
    session = session_of(model)
    set_budget(model, training(session.used_bytes() + (8 << 20)))
    many = images(256, 64)
    with torch.no_grad(), pytest.raises(InfeasibleBudget, match="keeps nothing") as refused:
        model.eval()(many)
    set_budget(model, training(refused.value.smallest_feasible_bytes))
    with torch.no_grad():
        peak = peak_of(lambda: model(many))
    assert 8 << 20 < peak <= refused.value.smallest_feasible_bytes


@needs_allocator
def test_the_fallback_obeys_the_budget() -> None:
    torch.manual_seed(0)
    model, reference = wrapped(DeepUncaptured())
    x = images(8, 64)
    with pytest.warns(OdtWarning, match="cannot be captured"):
        step(model, x)
    step(reference, x)
    model.zero_grad()
    full = peak_of(lambda: step(model, x, 1))
    step(reference, x, 1)
    session = session_of(model)
    model.zero_grad()
    set_budget(model, training(session.used_bytes() + full * 7 // 8))
    assert peak_of(lambda: step(model, x, 2)) <= full * 7 // 8
    reference.zero_grad()
    step(reference, x, 2)
    assert_same(model, reference)

    set_budget(model, training(session.used_bytes() + (1 << 20)))
    with pytest.raises(InfeasibleBudget, match="nothing more to checkpoint") as refused:
        model(x)
    with torch.no_grad(), pytest.raises(InfeasibleBudget, match="keeps nothing"):
        model(x)
    model.zero_grad()
    set_budget(model, training(refused.value.smallest_feasible_bytes))
    step(model, x)


def test_too_many_shapes_end_in_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrap_module, "_RECOMPILE_LIMIT", 2)
    torch.manual_seed(0)
    model, reference = wrapped(Conv())
    batches = [images(count) for count in (2, 3, 4, 5)]
    with pytest.warns(OdtWarning, match="cannot be captured.*[Rr]ecompile"):
        for x in batches:
            step(model, x)
    for x in batches:
        step(reference, x)
    assert_same(model, reference)
    assert not plan_of(model).captured

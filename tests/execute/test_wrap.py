"""`wrap`: the loop untouched, every number plain PyTorch's."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
from torch import nn
from wrapped_models import (
    CASES,
    Conv,
    ReturnsWhatItKeeps,
    UsedTwice,
    assert_same,
    graph_count,
    images,
    loss_of,
    predicted_bytes,
    rows,
    step,
    training,
    wrapped,
)

from torch_odt import OdtWarning
from torch_odt.execute.wrap import plan_of, session_of, set_budget, unwrap, wrap

# torch.compile itself warns of this and that.
pytestmark = [
    pytest.mark.filterwarnings("default", "error::torch_odt.errors.OdtWarning"),
    pytest.mark.usefixtures("fresh_dynamo"),
]


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
    assert wrap(model, budget=training("1GiB")) is model
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
    with pytest.raises(TypeError, match="hand in the model itself"):
        wrap(torch.compile(nn.Linear(3, 2)), budget="1GiB")
    compiled = nn.Linear(3, 2)
    compiled.compile()
    with pytest.raises(TypeError, match=r"model\.compile\(\)"):
        wrap(compiled, budget="1GiB")

"""Bad input: a clear error before anything has changed, or a defined result."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_steps import PLENTY, Net, assert_equal_models, make_batches, make_step, plain_step, sgd
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.errors import LossError, OdtWarning


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return copy.deepcopy(
        [list(model.state_dict().values()), [p.grad for p in model.parameters()], optimizer.state_dict()]
    )


def assert_same_state(before: list[Any], after: list[Any]) -> None:
    torch.testing.assert_close(before[0], after[0], rtol=0, atol=0)
    assert [g is None for g in before[1]] == [g is None for g in after[1]]
    assert str(before[2]) == str(after[2])


# torch.compile itself warns of this and that.
@pytest.mark.filterwarnings("default")
def test_a_compiled_model_is_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(TypeError, match="hand in the model itself"):
        make_step(torch.compile(model))  # type: ignore[arg-type]
    model.compile()
    with pytest.raises(TypeError, match=r"model\.compile\(\)"):
        make_step(model)
    with pytest.raises(TypeError, match=r"model\.compile\(\)"):
        odt.plan(model, F.cross_entropy, (torch.ones(2, 3), torch.tensor([0, 1])), budget=PLENTY)


@pytest.mark.parametrize("of", ["training", "process"])
@pytest.mark.parametrize("amount", [1, 4096, "1MiB"])
def test_an_absurd_budget_is_refused_beforehand(of: Any, amount: int | str) -> None:
    model = Net(norm=True, dropout=0.3)
    optimizer = torch.optim.Adam(model.parameters())
    step = make_step(model, optimizer=optimizer, budget=odt.Budget(amount, of=of))
    before, random_state = state_of(model, optimizer), torch.get_rng_state()
    with pytest.raises(odt.InfeasibleBudget, match="smallest feasible") as refusal:
        step(*make_batches(1)[0])
    assert_same_state(before, state_of(model, optimizer))
    assert torch.equal(torch.get_rng_state(), random_state)
    named = refusal.value.smallest_feasible_bytes
    level = odt.memory.process_bytes()
    assert named > level // 2 if of == "process" else named < level
    second = make_step(model, optimizer=optimizer, budget=odt.Budget(named, of=of))
    second(*make_batches(1)[0])
    assert second.plan.captured


@pytest.mark.parametrize("of", ["training", "process"])
def test_the_named_budget_is_accepted_for_a_larger_model(of: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 900, 3))
    batch = torch.randn(16, 3, 32, 32), torch.randint(3, (16,))
    with pytest.raises(odt.InfeasibleBudget) as refusal:
        make_step(model, budget=odt.Budget("2MiB", of=of))(*batch)
    step = make_step(model, budget=odt.Budget(refusal.value.smallest_feasible_bytes, of=of))
    step(*batch)
    step(*batch)
    assert step.plan.peak_bytes <= refusal.value.smallest_feasible_bytes


@pytest.mark.parametrize("budget", ["lots", "", "12 parrots", "0%", "-5MiB", None, 3.5])
def test_a_budget_that_is_none(budget: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        make_step(Net(), budget=budget)


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (lambda o, t: F.cross_entropy(o, t, reduction="none"), r"shape \(4,\)"),
        (lambda o, t: F.cross_entropy(o, t).item(), "float"),
        (lambda o, t: None, "NoneType"),
        (lambda o, t: F.cross_entropy(o.detach(), t), "does not depend"),
        (None, "hold no loss"),
    ],
    ids=["vector", "number", "nothing", "detached", "no loss of its own"],
)
def test_a_loss_that_cannot_be_trained_on(loss_fn: Callable[..., Any] | None, text: str) -> None:
    model = Net()
    optimizer = sgd(model.parameters())
    step = make_step(model, loss_fn, optimizer=optimizer)
    before = state_of(model, optimizer)
    batch = make_batches(1)[0]
    with pytest.raises(LossError, match=text):
        step(*(batch if loss_fn is not None else batch[:1]))
    assert_same_state(before, state_of(model, optimizer))


def test_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        make_step(Net().requires_grad_(False), optimizer=sgd(Net().parameters()))
    with pytest.raises(ValueError, match="no trainable parameter"):
        make_step(nn.ReLU(), optimizer=sgd(Net().parameters()))


def test_nothing_left_to_train() -> None:
    model = Net()
    step = make_step(model)
    step(*make_batches(1)[0])
    model.requires_grad_(False)
    with pytest.raises(LossError, match="does not depend"):
        step(*make_batches(1)[0])


def test_a_batch_of_another_shape_or_dtype() -> None:
    """The model's own error; the next good batch trains as if nothing had been."""
    model = Net()
    plain = copy.deepcopy(model)
    step, optimizer = make_step(model), sgd(plain.parameters())
    good = make_batches(2)
    step(*good[0])
    plain_step(plain, good[0], optimizer)
    for bad in (torch.randn(4, 7), torch.randn(4, 6).double(), torch.ones(4, 6, dtype=torch.long)):
        with pytest.raises(RuntimeError, match=r"shape|dtype|same"):
            step(bad, good[0][1])
    with pytest.raises((ValueError, RuntimeError), match=r"batch|size"):
        step(good[0][0], good[0][1][:3])
    step(*good[1])
    plain_step(plain, good[1], optimizer)
    assert_equal_models(model, plain)


def test_a_batch_without_tensors() -> None:
    step = make_step(Net())
    for args in ((1, 2), ([], {})):
        with pytest.raises(ValueError, match="no tensor with a batch dimension"):
            step(*args)


def test_an_empty_batch_is_as_in_plain_pytorch() -> None:
    step = make_step(Net(), nonfinite="ignore")
    assert torch.isnan(step(torch.randn(0, 6), torch.zeros(0, dtype=torch.long)))


def nan_batch() -> tuple[Tensor, Tensor]:
    x, y = make_batches(1)[0]
    return x * float("nan"), y


def test_a_loss_that_is_no_number_warns() -> None:
    model = Net()
    plain = copy.deepcopy(model)
    with pytest.warns(odt.NonFiniteLossWarning, match="the loss is nan") as caught:
        make_step(model)(*nan_batch())
    assert Path(caught[0].filename).name == Path(__file__).name
    plain_step(plain, nan_batch(), sgd(plain.parameters()))
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.isnan(), b.isnan())


def test_a_loss_that_is_no_number_raises_before_the_optimizer_steps() -> None:
    model = Net()
    plain = copy.deepcopy(model)
    step = make_step(model, nonfinite="raise")
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        step(*nan_batch())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    batch, optimizer = make_batches(1)[0], sgd(plain.parameters())
    step(*batch)
    plain_step(plain, batch, optimizer)
    assert_equal_models(model, plain)


def test_a_loss_that_is_no_number_may_be_ignored() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.isnan(make_step(Net(), nonfinite="ignore")(*nan_batch()))


def test_a_failed_call_ends_its_accumulation() -> None:
    model = Net()
    plain = copy.deepcopy(model)
    step = make_step(model, nonfinite="raise", accumulation_steps=2)
    batches = make_batches(2)
    step(*batches[0])
    with pytest.raises(FloatingPointError):
        step(*nan_batch())
    for batch in batches:
        step(*batch)
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    plain_step(plain, whole, sgd(plain.parameters()))
    assert_equal_models(model, plain, exact=False)


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    model = Net()
    plain = copy.deepcopy(model)
    step, batch = make_step(model, cache=file / "cache"), make_batches(1)[0]
    with pytest.warns(OdtWarning, match="cannot be used"):
        step(*batch)
    plain_step(plain, batch, sgd(plain.parameters()))
    assert_equal_models(model, plain)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "a step takes a batch"),
        ((torch.ones(2, 6),), "there is no target"),
        (((torch.ones(2, 6), torch.zeros(2)),), r"step\(\*batch\)"),
        (({"x": torch.ones(2, 6)},), r"step\(\*\*batch\)"),
    ],
)
def test_a_batch_that_is_laid_out_in_another_way(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        make_step(Net())(*arguments)


def test_parts_that_are_mixed_up() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="the optimizer is a function"):
        odt.TrainStep(model, optimizer, F.cross_entropy, budget="1GiB")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the loss_fn is a SGD"):
        odt.TrainStep(model, optimizer, optimizer, budget="1GiB")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="holds no parameter of this model"):
        odt.TrainStep(Net(), F.cross_entropy, optimizer, budget="1GiB")


def test_an_optimizer_that_needs_a_closure() -> None:
    model = Net()
    with pytest.raises(ValueError, match=r"LBFGS needs a closure"):
        make_step(model, optimizer=torch.optim.LBFGS(model.parameters()))


def test_a_model_on_another_device() -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ValueError, match=r"first\.weight is on meta.*model\.cpu\(\)"):
        make_step(model)


def test_a_batch_on_another_device() -> None:
    x, y = make_batches(1)[0]
    with pytest.raises(TypeError, match="on meta"):
        make_step(Net())(x.to("meta"), y)


def test_inputs_that_require_gradients() -> None:
    x, y = make_batches(1)[0]
    with pytest.raises(TypeError, match="requires gradients; detach"):
        make_step(Net())(x.requires_grad_(), y)


@pytest.mark.parametrize(
    "options", [{"accumulation_steps": 0}, {"nonfinite": "cry"}, {"micro_batch": 0}, {"micro_batch": -1}]
)
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        make_step(Net(), budget=PLENTY, **options)


def test_an_optimizer_from_before_parameters_were_replaced_is_told() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    last = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]
    head = model.get_submodule(last)
    assert isinstance(head, nn.Linear)
    model.set_submodule(last, nn.Linear(head.in_features, head.out_features))
    step = make_step(model, optimizer=optimizer)
    with pytest.warns(OdtWarning, match=rf"holds 2 parameters that the model does not have, and lacks 2 .*{last}"):
        step(*make_batches(1)[0])


def test_what_the_optimizer_leaves_out_is_noted() -> None:
    model = Net()
    first, *others = model.parameters()
    step = make_step(model, optimizer=torch.optim.SGD([first], lr=0.1))
    step(*make_batches(1)[0])
    wanted = f"{len(others)} parameters that require gradients are not the optimizer's"
    assert any(note.startswith(wanted) for note in step.plan.notes)
    whole = make_step(Net())
    whole(*make_batches(1)[0])
    assert not any("not the optimizer's" in note for note in whole.plan.notes)


def test_a_parameter_whose_elements_share_memory_is_refused_before_anything_changes() -> None:
    model = Net()
    name, parameter = next(iter(model.named_parameters()))
    parameter.data = parameter.data.flatten()[:1].clone().expand(parameter.shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = state_of(model, optimizer)
    with pytest.raises(ValueError, match=rf"{name} share memory.*train_int8_"):
        make_step(model, optimizer=optimizer)(*make_batches(1)[0])
    assert_same_state(before, state_of(model, optimizer))


def test_classes_and_texts_in_the_place_of_objects_and_numbers_are_named() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"the model is the class Linear: give an object of it, Linear\(\.\.\.\)"):
        odt.TrainStep(nn.Linear, nn.CrossEntropyLoss(), optimizer, budget=1 << 30)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"the loss_fn is the class CrossEntropyLoss"):
        odt.TrainStep(model, nn.CrossEntropyLoss, optimizer, budget=1 << 30)
    with pytest.raises(TypeError, match="clip_grad_norm='1': it is a number"):
        odt.TrainStep(model, nn.CrossEntropyLoss(), optimizer, budget=1 << 30, clip_grad_norm="1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"not 512000000\.0: bytes are a whole number, 512000000"):
        odt.TrainStep(model, nn.CrossEntropyLoss(), optimizer, budget=512e6)  # type: ignore[arg-type]

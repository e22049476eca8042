"""Operators that compiled code calls on a table: they do what Python's calls do; and what is left to Python."""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_odt as odt
from torch_odt import _extensions
from torch_odt.capture.graph import Op, Ref, refs
from torch_odt.capture.operators import resolve
from torch_odt.capture.overwrite import function_of
from torch_odt.execute import executor
from torch_odt.execute.native_calls import native_call
from torch_odt.execute.one_operator import Number, OneOperator, OperatorUse
from torch_odt.execute.profiler_marks import UPDATE

pytestmark = pytest.mark.skipif(_extensions.memory_module is None, reason="torch_odt._memory is not built")
ATEN = torch.ops.aten


def op_of(args: tuple[Any, ...], writes: list[int | None], **kwargs: Any) -> Op:
    return Op(0, "", args, kwargs, tuple(dict.fromkeys(refs(args))), (), tuple(writes))


def called(function: Callable[..., Any], op: Op, *values: Tensor | None, results: int = 1) -> list[Tensor | None]:
    """What a compiled call puts behind the values of a table."""
    call = native_call(op, function, {})
    assert call is not None
    table = [*values, *[None] * results]
    call(table)
    assert all(after is before for after, before in zip(table, values, strict=False))
    return table[len(values) :]


def test_arguments_and_defaults_are_those_of_python() -> None:
    x, w, b = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(4)
    op = op_of((Ref(0), Ref(1), Ref(2), [1, 1], [1, 1], [1, 1], False, [0, 0], 1), [3])
    (found,) = called(ATEN.convolution.default, op, x, w, b)
    assert torch.equal(found, torch.conv2d(x, w, b, 1, 1))
    (found,) = called(ATEN.sum.dim_IntList, op_of((Ref(0), [0, 2]), [1], keepdim=True, dtype=torch.float64), x)
    assert torch.equal(found, x.sum([0, 2], keepdim=True, dtype=torch.float64))
    (found,) = called(ATEN.clone.default, op_of((Ref(0),), [1], memory_format=torch.channels_last), x)
    assert found is not None and found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("number", [2, 0.5, True])
def test_a_number_in_the_place_of_a_tensor_promotes_as_a_number(number: Any) -> None:
    x = torch.arange(4, dtype=torch.int32)
    for _ in range(2):
        (found,) = called(ATEN.mul.Tensor, op_of((Ref(0), number), [1]), x)
        assert found.dtype == (x * number).dtype and torch.equal(found, x * number)


def test_several_results_of_which_some_are_dropped_or_absent() -> None:
    x, w, g = torch.randn(1, 2, 4, 4), torch.randn(3, 2, 3, 3), torch.randn(1, 3, 4, 4)
    rest = ([3], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    op = op_of((Ref(0), Ref(1), Ref(2), *rest, [False, True, True]), [3, None, 4])
    table: list[Tensor | None] = [g, x, w, g, None]
    call = native_call(op, ATEN.convolution_backward.default, {})
    assert call is not None
    call(table)
    expected = ATEN.convolution_backward(g, x, w, *rest, [False, True, True])
    assert table[3] is None and torch.equal(table[4], expected[2])


def test_tensors_in_lists_with_and_without_gaps() -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    op = op_of(([Ref(1), Ref(0), Ref(1)], 1), [2])
    call = native_call(op, ATEN.cat.default, {})
    assert call is not None
    for first, second in ((x, y), (y, x)):
        table: list[Tensor | None] = [first, second, None]
        call(table)
        assert torch.equal(table[2], torch.cat([second, first, second], 1))
    rows = torch.tensor([2, 0])
    (found,) = called(ATEN.index.Tensor, op_of((Ref(0), [None, Ref(1)]), [2]), x, rows)
    assert torch.equal(found, x[:, rows])


def test_what_stands_for_a_shape_is_no_value() -> None:
    op = op_of((Ref(0),), [1])
    call = native_call(op, ATEN.zeros_like.default, {0: torch.empty(2, 5)})
    table: list[Tensor | None] = [None, None]
    call(table)
    assert torch.equal(table[1], torch.zeros(2, 5))


def test_an_operator_in_place_returns_the_tensor_itself() -> None:
    x = torch.ones(3)
    (found,) = called(ATEN.relu_.default, op_of((Ref(0),), [1]), x)
    assert found is x


@pytest.mark.parametrize(
    ("target", "args", "overwrites", "results"),
    [
        ("aten.relu.default", (Ref(0),), 0, 1),
        ("aten.add.Tensor", (Ref(0), Ref(1)), 0, 1),
        ("aten.mul.Tensor", (Ref(0), Ref(1)), 1, 1),
        ("aten.addcmul.default", (Ref(2), Ref(0), Ref(1)), 0, 1),
        ("aten.tanh_backward.default", (Ref(0), Ref(1)), 0, 1),
        ("torch_odt.clamp_with_mask.default", (Ref(0), 0.0, 0.5, False), 0, 2),
    ],
)
def test_what_overwrites_an_argument_puts_its_result_there(
    target: str, args: tuple[Any, ...], overwrites: int, results: int
) -> None:
    values = [torch.randn(4, 5) for _ in range(3)]
    expected = resolve(target)(*[values[arg.value] if isinstance(arg, Ref) else arg for arg in args])
    writes = tuple(range(3, 3 + results))
    op = Op(0, target, args, {}, tuple(dict.fromkeys(refs(args))), (), writes, overwrites=overwrites)
    for call in (native_call(op, function_of(op), {}), executor._python_call(op, function_of(op), {})):
        table: list[Any] = [*(value.clone() for value in values), *[None] * results]
        overwritten = table[overwrites]
        assert call is not None
        call(table)
        assert table[3] is overwritten
        for found, wanted in zip(table[3:], [expected] if results == 1 else expected, strict=True):
            assert torch.equal(found, wanted)


def test_errors_are_those_of_python() -> None:
    x = torch.ones(2, 3)
    cases: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = [
        (ATEN.mm.default, (Ref(0), Ref(0)), (x, x)),
        (ATEN.select.int, (Ref(0), 0, 9), (x, 0, 9)),
        (ATEN.to_sparse_csr.default, (Ref(0), 7), (x, 7)),
    ]
    for function, args, given in cases:
        with pytest.raises(Exception) as expected:
            function(*given)
        call = native_call(op_of(args, [1]), function, {})
        assert call is not None
        with pytest.raises(expected.type) as found:
            call([x, None])
        assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]
    with pytest.raises(RuntimeError, match="uses value 0, which is not in memory"):
        called(ATEN.relu.default, op_of((Ref(0),), [1]), None)


def test_what_is_left_to_python() -> None:
    def own(x: Tensor) -> Tensor:
        return x

    assert native_call(op_of((Ref(0),), [1]), own, {}) is None
    # Its results are a list.
    assert native_call(op_of((Ref(0), 2), [1, 2]), ATEN.split.Tensor, {}) is None
    # An argument that the operator does not take.
    assert native_call(op_of((Ref(0), "no"), [1]), ATEN.sum.dim_IntList, {}) is None
    assert native_call(op_of((Ref(0),), [1], out=Ref(1)), ATEN.relu.default, {}) is None


LIBRARY = torch.library.Library("torch_odt_tests", "DEF")
LIBRARY.define("cube(Tensor x) -> Tensor")
LIBRARY.define("cube_backward(Tensor gradient, Tensor x) -> Tensor")


def cube_backward(gradient: Tensor, x: Tensor) -> Tensor:
    with torch.enable_grad():
        again = x.detach().requires_grad_()
        made = again**3
    return torch.autograd.grad(made, again, gradient)[0]


LIBRARY.impl("cube", lambda x: x * x * x, "CPU")
LIBRARY.impl("cube_backward", cube_backward, "CPU")


def test_a_kernel_of_others_may_use_autograd_itself() -> None:
    x, gradient = torch.randn(3), torch.randn(3)
    function = torch.ops.torch_odt_tests.cube_backward.default
    with torch.no_grad():
        (found,) = called(function, op_of((Ref(0), Ref(1)), [2]), gradient, x)
    assert found is not None
    torch.testing.assert_close(found, gradient * 3 * x**2)


def test_arguments_that_a_call_from_python_would_refuse_are_left_to_it() -> None:
    assert native_call(op_of((Ref(0), 1, 2), [1]), ATEN.relu.default, {}) is None
    assert native_call(op_of((Ref(0), [0]), [1], dim=[0]), ATEN.sum.dim_IntList, {}) is None


def test_a_table_that_is_too_small_is_refused() -> None:
    module: Any = _extensions.memory_module
    call = native_call(op_of((Ref(0),), [1]), ATEN.relu.default, {})
    assert call is not None
    with pytest.raises(IndexError, match="no value 1"):
        call([torch.ones(2)])
    for code in ((None, 3, None), (None, 3, "output")):
        with pytest.raises(IndexError, match="no value 3"):
            module.Instructions([code]).run([None], None, 0, 1, None)


@pytest.mark.parametrize("link", ["attribute", "hook"])
def test_a_step_that_its_optimizer_leads_back_to_is_collected(link: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = odt.TrainStep(model, nn.functional.mse_loss, optimizer, budget="1GiB", cache=False)
    step(torch.ones(3, 4), torch.ones(3, 2))
    if link == "attribute":
        optimizer.owner = step  # type: ignore[attr-defined]
    else:
        optimizer.register_state_dict_pre_hook(lambda _, owner=step: owner)
    ended = weakref.ref(step), weakref.ref(model)
    del model, optimizer, step
    gc.collect()
    assert [each() for each in ended] == [None, None]


class Interrupted(Exception):
    pass


def test_signals_are_heard_between_compiled_calls() -> None:
    def stop(*_: Any) -> None:
        raise Interrupted

    module: Any = _extensions.memory_module
    call = native_call(op_of((Ref(0), Ref(0)), [1]), ATEN.mm.default, {})
    # For minutes, if nothing ended it.
    instructions = module.Instructions([(call, -1, None)] * 1_000_000)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            instructions.run([torch.ones(128, 128), None], None, 0, 1_000_000, None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_value_that_is_not_there_cannot_be_delivered() -> None:
    module: Any = _extensions.memory_module
    with pytest.raises(RuntimeError, match="delivers a value that is not in memory"):
        module.Instructions([(None, 0, "output")]).run([None], None, 0, 1, None)


def test_numbers_are_read_in_each_call() -> None:
    cell, x, y = torch.zeros(1, dtype=torch.float64), torch.randn(3), torch.randn(3)
    use = OperatorUse(ATEN.add.Tensor, (Ref(1), Ref(0), Number(cell)), (2,))
    call = native_call(op_of((Ref(0), Ref(1)), [2]), OneOperator(use, torch.add), {})
    assert call is not None
    for rate in (-0.5, 2.0):
        cell.fill_(rate)
        table: list[Tensor | None] = [x, y, None]
        call(table)
        assert torch.equal(table[2], torch.add(y, x, alpha=rate))
    wrong = OperatorUse(ATEN.add.Tensor, (Ref(1), Ref(0), Number(torch.zeros(2))), (2,))
    assert native_call(op_of((Ref(0), Ref(1)), [2]), OneOperator(wrong, torch.add), {}) is None


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gaps", "transposed"])
def test_what_is_to_lie_alike_is_copied_where_it_does_not(layout: str) -> None:
    """In-place sums of tensors that lie differently walk through memory in another order."""
    gradient = torch.randn(4, 3, 5, 5)
    if layout == "channels_last":
        gradient = gradient.contiguous(memory_format=torch.channels_last)
    elif layout == "gaps":
        gradient = torch.randn(4, 3, 5, 10)[..., ::2]
    elif layout == "transposed":
        gradient = torch.randn(3, 4, 5, 5).transpose(0, 1)
    before = gradient.clone()
    for memory_format in (torch.contiguous_format, torch.channels_last):
        weight = torch.randn(4, 3, 5, 5).contiguous(memory_format=memory_format)
        expected = weight.add(torch.empty_like(weight).copy_(gradient), alpha=-0.1)
        cell = torch.tensor([-0.1], dtype=torch.float64)
        use = OperatorUse(ATEN.add_.Tensor, (Ref(0), Ref(1), Number(cell)), (None,), alike=(0, 1))
        called(OneOperator(use, torch.add), op_of((Ref(0), Ref(1)), []), weight, gradient, results=0)
        assert torch.equal(weight, expected) and torch.equal(gradient, before)


def test_plain_descent_is_a_call_of_compiled_code() -> None:
    """With the rates of a scheduler, and noted at the parameters."""
    plain, model = (nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    optimizers = [
        torch.optim.SGD([{"params": m[0].parameters()}, {"params": m[2].parameters(), "lr": 0.3}], lr=0.1)
        for m in (plain, model)
    ]
    rates = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    loss_fn = nn.functional.cross_entropy
    step = odt.TrainStep(model, loss_fn, optimizers[1], budget=odt.Budget("64MiB", of="training"))
    for _ in range(3):
        x, y = torch.randn(6, 4), torch.randint(3, (6,))
        versions = [parameter._version for parameter in model.parameters()]
        loss = loss_fn(plain(x), y)
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
        assert torch.equal(step(x, y), loss.detach())
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
        assert all(p._version > before for p, before in zip(model.parameters(), versions, strict=True))
        for each in rates:
            each.step()
    assert step._current is not None and step._current.program is not None
    (part,) = step._current.program.parts.values()
    updates = [op.index for op in part.graph.program if op.target == "odt.update"]
    module: Any = _extensions.memory_module
    assert part.first._calls is not None and len(updates) == 4
    assert all(isinstance(part.first._calls[index], module.OperatorCall) for index in updates)


def test_updates_have_their_name_in_profiles() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = odt.TrainStep(model, nn.functional.cross_entropy, optimizer, budget=odt.Budget("64MiB", of="training"))
    batch = torch.randn(6, 4), torch.randint(3, (6,))
    step(*batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step(*batch)
    marked = [event for event in profiler.events() if event.name == UPDATE]
    assert len(marked) == 2
    assert all(any(child.name == "aten::add_" for child in event.cpu_children) for event in marked)


def test_a_call_that_fails_before_its_loss_changes_no_version() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = odt.TrainStep(
        model, nn.functional.cross_entropy, optimizer, budget=odt.Budget("64MiB", of="training"), nonfinite="raise"
    )
    labels = torch.randint(3, (6,))
    step(torch.randn(6, 4), labels)
    loss = nn.functional.cross_entropy(model(torch.randn(6, 4)), labels)
    with pytest.raises(FloatingPointError):
        step(torch.full((6, 4), torch.nan), labels)
    loss.backward()
    assert model.weight.grad is not None

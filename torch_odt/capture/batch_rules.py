"""How operators treat the batch axis: one rule each, in one table.

A rule gets a `Call` and returns the `State` of its results (one for all of them, or one each). It raises `NotSeparable`
when micro-batches would compute something else. A rule lists in `free` the arguments that may differ between the two
graphs; all others are compared before it is called. This file holds arithmetic, new tensors, reductions and matrix
products; `batch_views` adds what moves elements, `batch_layers` layers and losses, `batch_indexing` look-ups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_odt.capture.batch_state import (
    SAME,
    SAMPLES,
    Call,
    Kind,
    NotSeparable,
    Operand,
    State,
    added,
    align,
    contracted,
    linear,
    multiplied,
    require_exact,
    scaled,
    state_by_shape,
)

Result = State | list[State]
RuleFunction = Callable[[Call], Result]


@dataclass(frozen=True, slots=True)
class Rule:
    function: RuleFunction
    free: frozenset[str]


RULES: dict[str, Rule] = {}


def rule(*names: str, free: Sequence[str] = ()) -> Callable[[RuleFunction], RuleFunction]:
    """Make a function the rule of operators: "mm" or "add.Tensor" of aten, "torch_odt::name" of this package; a name
    without overload means "default"."""

    def register(function: RuleFunction) -> RuleFunction:
        for name in names:
            package, _, own = name.rpartition("::")
            overload = own if "." in own else f"{own}.default"
            RULES[f"{package or 'aten'}.{overload}"] = Rule(function, frozenset(free))
        return function

    return register


def wrap_dim(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


def wrap_dims(dims: int | Sequence[int] | None, ndim: int) -> list[int]:
    """Dimensions as a list of non-negative ones; none given means all."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(ndim))
    return [wrap_dim(d, ndim) for d in ([dims] if isinstance(dims, int) else dims)]


def with_dim(state: State, dim: int) -> State:
    return replace(state, dim=dim) if state.kind in ("slice", "index") else state


# Arithmetic


def pointwise(call: Call) -> State:
    """Any elementwise operator."""
    require_exact(call, call.operands)
    return align(call, call.operands)


@rule("add.Tensor", "sub.Tensor", "add.Scalar", "sub.Scalar", "rsub.Scalar", "rsub.Tensor", free=("other",))
def _add(call: Call) -> State:
    return added(call, [_term(call, "self"), _term(call, "other")])


@rule("mul.Tensor", "mul.Scalar", free=("other",))
def _mul(call: Call) -> State:
    return multiplied(call, [_term(call, "self"), _term(call, "other")], (1, 1))


@rule("div.Tensor", "div.Scalar", free=("other",))
def _div(call: Call) -> State:
    other = _term(call, "other")
    if isinstance(other, Operand) and other.kind == "part" and not other.state.scale:
        unit = call.count_unit(other)
        if unit is not None:
            other = replace(other, state=State("same", scale=((unit, -1),)))
    return multiplied(call, [_term(call, "self"), other], (1, -1))


def _term(call: Call, name: str) -> Operand | State:
    return call.operand(name) if isinstance(call.micro[name], Operand) else call.number(name)


@rule("neg", "clone", "lift_fresh_copy", "detach", "alias", "positive")
def _unary_linear(call: Call) -> State:
    return call.operand("self").state


@rule("_to_copy", "to.dtype")
def _to_copy(call: Call) -> State:
    operand = call.operand("self")
    if call.first_result[1].dtype.startswith(("float", "bfloat", "complex")) or operand.kind == "index":
        return operand.state
    return pointwise(call)


@rule("where.self")
def _where(call: Call) -> State:
    condition, branches = call.operand("condition"), [call.operand("self"), call.operand("other")]
    state = added(call, branches)
    if state.kind != "part":
        require_exact(call, [condition])
        return replace(align(call, [condition, *branches]), scale=state.scale, zero=state.zero)
    if condition.kind != "same" or any(b.kind != "part" and not b.state.zero for b in branches):
        raise call.refuse("combines samples with a sum or mean over the batch")
    return state


@rule("masked_fill.Scalar")
def _masked_fill(call: Call) -> State:
    operand, mask = call.operand("self"), call.operand("mask")
    if call.micro["value"] != 0:
        return pointwise(call)
    return linear(call, operand, [mask], lambda: align(call, [operand, mask]))


@rule(
    *(
        [
            "gelu_backward",
            "silu_backward",
            "sigmoid_backward",
            "tanh_backward",
            "threshold_backward",
            "hardswish_backward",
        ]
    ),
    *(["elu_backward", "hardtanh_backward", "hardsigmoid_backward", "leaky_relu_backward", "softplus_backward"]),
    *(
        [
            "mish_backward",
            "log_sigmoid_backward",
            "native_dropout_backward",
            "softshrink_backward",
            "hardshrink_backward",
        ]
    ),
    *(["logit_backward", "infinitely_differentiable_gelu_backward", "rrelu_with_noise_backward"]),
)
def _pointwise_backward(call: Call) -> State:
    gradient, *others = call.operands
    return linear(call, gradient, others, lambda: align(call, [gradient, *others]))


@rule("log_sigmoid_forward")
def _pointwise_without_tag(call: Call) -> Result:
    state = pointwise(call)
    return [state, replace(state, kind="opaque")]


@rule("torch_odt::clamp_with_mask")
def _clamp_with_mask(call: Call) -> Result:
    state = pointwise(call)
    # Each micro-batch has the bits of its own samples.
    return [state, replace(state, kind="opaque")]


@rule("torch_odt::clamp_with_mask_backward")
def _clamp_with_mask_backward(call: Call) -> State:
    gradient, mask = call.operand("grad_output"), call.operand("mask")
    kind: Kind = "same" if mask.dim < 0 else "slice"
    clamped = replace(gradient, state=replace(mask.state, kind=kind))
    return linear(call, gradient, [clamped], lambda: align(call, [gradient, clamped]))


@rule("_prelu_kernel", "hardswish")
def _untagged(call: Call) -> State:
    return pointwise(call)


@rule("_prelu_kernel_backward")
def _prelu_backward(call: Call) -> State:
    operand, weight, gradient = (call.operand(n) for n in ("self", "weight", "grad_output"))
    return linear(call, gradient, [operand, weight], lambda: align(call, [gradient, operand, weight]))


# New tensors


@rule("full", "new_full", "full_like", "fill.Scalar", free=("size",))
def _full(call: Call) -> State:
    value = call.micro["fill_value"] if "fill_value" in call.micro else call.micro["value"]
    return state_by_shape(call, zero=value == 0)


@rule("zeros", "new_zeros", "zeros_like", free=("size",))
def _zeros(call: Call) -> State:
    return state_by_shape(call, zero=True)


@rule("ones", "new_ones", "ones_like", free=("size",))
@rule("empty.memory_format", "new_empty", "empty_like", free=("size",))
@rule("empty_strided", "new_empty_strided", free=("size", "stride"))
@rule("rand", "randn", "randint", "randint.low", "rand_like", "randn_like", "randint_like", free=("size",))
def _anything(call: Call) -> State:
    return state_by_shape(call)


@rule("scalar_tensor", free=("s",))
def _scalar_tensor(call: Call) -> State:
    return call.number("s")


@rule("arange", "arange.start", "arange.start_step", free=("end",))
def _arange(call: Call) -> State:
    state = state_by_shape(call)
    if state.kind == "same" and call.full["end"] == call.micro["end"]:
        return SAME
    if call.micro.get("start", 0) == 0 and call.micro.get("step", 1) == 1 and state.kind == "slice":
        return State("index", 0)
    raise call.refuse("numbers the samples of the batch")


@rule("bernoulli", "native_dropout", "bernoulli.p", "uniform", "normal_functional", "exponential")
def _random(call: Call) -> State:
    """One draw for each element: elementwise, and dropout scales its input."""
    operand = call.operand("self" if "self" in call.micro else "input")
    if operand.kind == "slice" and call.name == "native_dropout":
        return replace(operand.state, scale=_require_no_scale(call, operand))
    return pointwise(call)


def _require_no_scale(call: Call, operand: Operand) -> tuple[()]:
    require_exact(call, [operand])
    return ()


# Along some axes


@rule(
    "_softmax", "_log_softmax", "_safe_softmax", "cumprod", "sort", "sort.stable", "topk", "argsort", "cummax", "cummin"
)
@rule("amax", "amin", "max.dim", "min.dim", "argmax", "argmin", "prod", "prod.dim_int", "logsumexp", "var.correction")
@rule("std.correction", "var_mean.correction", "any", "all", "any.dim", "all.dim", "any.dims", "all.dims", "max", "min")
@rule("linalg_vector_norm", "norm.ScalarOpt_dim", "glu", "logcumsumexp", "kthvalue", "median.dim", "mode")
def _exact_along(call: Call) -> State:
    require_exact(call, [call.operand("self")])
    return _reduced(call, call.operand("self"))


@rule("cumsum", "flip", "roll")
def _linear_along(call: Call) -> State:
    operand = call.operand("self")
    return linear(call, operand, [], lambda: _reduced(call, operand))


@rule("_softmax_backward_data", "_log_softmax_backward_data", "glu_backward")
def _softmax_backward(call: Call) -> State:
    gradient, other = call.operands
    state = linear(call, gradient, [other], lambda: align(call, [gradient, other]))
    if state.kind == "slice" and state.dim in wrap_dims(call.micro["dim"], other.ndim):
        raise call.refuse("works along the batch axis")
    return state


def _reduced(call: Call, operand: Operand) -> State:
    if operand.kind != "slice":
        return operand.state
    dims = wrap_dims(call.micro.get("dim", call.micro.get("dims")), operand.ndim)
    if operand.dim in dims:
        raise call.refuse("works along the batch axis")
    return with_dim(operand.state, _dim_left(call, operand, dims))


def _dim_left(call: Call, operand: Operand, dims: Sequence[int]) -> int:
    kept = len(call.first_result[0].shape) == operand.ndim
    return operand.dim if kept else operand.dim - sum(d < operand.dim for d in dims)


@rule("sum", "sum.dim_IntList", "mean", "mean.dim")
def _sum(call: Call) -> State:
    operand = call.operand("self")
    dims = wrap_dims(call.micro.get("dim"), operand.ndim)
    if operand.kind != "slice":
        if operand.kind != "part":
            require_exact(call, [replace(operand, state=replace(operand.state, scale=()))])
        return operand.state
    if operand.dim not in dims:
        return with_dim(operand.state, _dim_left(call, operand, dims))
    scale = operand.state.scale
    return State("part", scale=scaled(scale, ((SAMPLES, 1),)) if call.name == "mean" else scale)


# Matrix products

_PRODUCTS = {"mm": "ij,jk->ik", "bmm": "bij,bjk->bik", "mv": "ij,j->i", "dot": "i,i->"}
_ADDED_PRODUCTS = {
    "addmm": ("ij,jk->ik", "mat1", "mat2"),
    "baddbmm": ("bij,bjk->bik", "batch1", "batch2"),
    "addmv": ("ij,j->i", "mat", "vec"),
    "addbmm": ("bij,bjk->ik", "batch1", "batch2"),
}


@rule(*_PRODUCTS)
def _product(call: Call) -> State:
    return contracted(call, _PRODUCTS[call.name], call.operands)


@rule(*_ADDED_PRODUCTS)
def _added_product(call: Call) -> State:
    subscripts, left, right = _ADDED_PRODUCTS[call.name]
    state = contracted(call, subscripts, [call.operand(left), call.operand(right)])
    full, micro = call.first_result
    return added(call, [call.operand("self"), Operand(state, full, micro)])


def unknown(target: str) -> NotSeparable:
    """The refusal of an operator without a rule."""
    return NotSeparable(f"it is not known how {target.removeprefix('aten.')} treats the batch")


def rule_for(target: str, function: Any) -> Rule | None:
    """The operator's own rule, or the one of elementwise operators when torch tags it as one."""
    import torch

    if target in RULES:
        return RULES[target]
    if isinstance(function, torch._ops.OpOverload) and torch.Tag.pointwise in function.tags:
        return _POINTWISE
    return None


_POINTWISE = Rule(pointwise, frozenset())

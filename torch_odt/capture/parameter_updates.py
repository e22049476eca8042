"""Optimizers' arithmetic for one parameter, as an operator of the graph: the numbers of `torch.optim`, bit for bit.

(A momentum that begins with -0 begins with 0 here.)

Each parameter is updated by torch's own function for its optimizer, a piece at a time: what stands in memory besides is
then a few MiB, where the whole parameter would take one or two more of its size, and a piece stays in the caches
between the passes that the function makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from torch_odt.capture.operators import register_operator
from torch_odt.ops import int8_descend_, int8_take_off_

_PIECE_ELEMENTS = 1 << 18
# In others, torch's vectors round where the scalars at their ends do not, so that a bit depends on where a piece ends.
_IN_PIECES = (torch.float32, torch.float64)
# The rule of int8 weights, which are no parameters: SGD without momentum, rounded stochastically.
INT8 = "int8"
# The rule of weights in NITI's arithmetic: integers are taken off integers.
NITI = "niti"
_INTEGERS = (INT8, NITI)
# Draws and a count that nobody reads, for its measurements: they must not allocate what updates themselves do not.
SPARE = (torch.tensor([0, 0], device="cpu"), torch.tensor(0, device="cpu"))
_MORE_THAN_DESCENT = ("momentum", "weight_decay", "maximize")


def update(
    rule: str, options: Mapping[str, Any], parameter: Tensor, gradient: Tensor, *state: Tensor, is_first: bool = False
) -> None:
    """Make one parameter's part of an optimizer's step, in place.

    Args:
        rule: the optimizer's name ("sgd", "adam") and what of it is in use ("momentum", "amsgrad"), in one text.
        options: the hyperparameters, as in the optimizer's `param_groups`.
        parameter, gradient: of the same shape and dtype. The gradient stays as it is.
        state: the tensors that the rule keeps, in its order, of the parameter's shape; "step" is a number.
        is_first: the state is 0, because the optimizer has none yet.
    """
    kind = rule.partition(" ")[0]
    if kind not in _INTEGERS and not lie_alike((parameter, gradient)):
        # As autograd lays it out: where an element lies may decide how it is rounded.
        gradient = torch.empty_like(parameter).copy_(gradient)
    _UPDATES[kind](options, parameter, gradient, state, is_first)


def _sgd(
    options: Mapping[str, Any], parameter: Tensor, gradient: Tensor, state: tuple[Tensor, ...], is_first: bool
) -> None:
    if parameter.numel() <= _PIECE_ELEMENTS and not any(options[name] for name in _MORE_THAN_DESCENT):
        # What torch's function comes to, in a third of its time.
        parameter.add_(gradient, alpha=-options["lr"])
        return
    used = {name: options[name] for name in ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")}
    if is_first:
        # The momentum is 0, and becomes the first gradient: all of it.
        used["dampening"] = 0.0
    for piece, its_gradient, *momentum in _pieces(parameter, gradient, *state):
        sgd([piece], [its_gradient], [*momentum] or [None], foreach=False, fused=False, **used)


def _adam(
    options: Mapping[str, Any], parameter: Tensor, gradient: Tensor, state: tuple[Tensor, ...], is_first: bool
) -> None:
    step, *moments = state
    beta1, beta2 = options["betas"]
    names = ("amsgrad", "lr", "weight_decay", "eps", "maximize", "decoupled_weight_decay")
    used = {name: options[name] for name in names}
    for number, (piece, its_gradient, mean, square, *largest) in enumerate(_pieces(parameter, gradient, *moments)):
        if number:
            # The function counts a step each time.
            step.sub_(1)
        moments_of_piece = ([mean], [square], largest, [step])
        adam([piece], [its_gradient], *moments_of_piece, foreach=False, fused=False, beta1=beta1, beta2=beta2, **used)


def _int8_descent(
    options: Mapping[str, Any], parameter: Tensor, gradient: Tensor, state: tuple[Tensor, ...], is_first: bool
) -> None:
    """What an int8 weight's update takes; whose it is keeps the draws, and counts what saturates."""
    (weight,) = state
    gradient = gradient.permute(0, 3, 1, 2) if gradient.dim() == 4 else gradient
    scale = gradient.new_ones(len(weight))
    int8_descend_(weight, gradient, scale, *SPARE, rate=options["lr"], weight_decay=options["weight_decay"])


def _take_off(
    options: Mapping[str, Any], parameter: Tensor, gradient: Tensor, state: tuple[Tensor, ...], is_first: bool
) -> None:
    int8_take_off_(parameter.view(torch.int8), gradient.view(torch.int8))


_UPDATES: dict[str, Callable[..., None]] = {"sgd": _sgd, "adam": _adam, INT8: _int8_descent, NITI: _take_off}


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same elements of all tensors, some at a time; all at once where they do not lie in the same order."""
    first = tensors[0]
    if first.numel() <= _PIECE_ELEMENTS or first.dtype not in _IN_PIECES or not lie_alike(tensors):
        yield tensors
        return
    flat = [tensor.as_strided((first.numel(),), (1,)) for tensor in tensors]
    for start in range(0, first.numel(), _PIECE_ELEMENTS):
        yield tuple(tensor[start : start + _PIECE_ELEMENTS] for tensor in flat)


def lie_alike(tensors: tuple[Tensor, ...]) -> bool:
    """Whether all have the same strides, and nothing lies between their elements."""
    first = tensors[0]
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    inner_first = sorted(zip(first.stride(), first.shape, strict=True))
    expected = 1
    for stride, size in inner_first:
        if size > 1 and stride != expected:
            return False
        expected *= size
    strides = [[st for st, size in zip(tensor.stride(), first.shape, strict=True) if size > 1] for tensor in tensors]
    return all(own == strides[0] for own in strides)


@register_operator("update")
def _harmless_update(rule: str, parameter: Tensor, gradient: Tensor, *state: Tensor) -> tuple[()]:
    """What a graph's update costs: its parameter and its state stay finite. Executors put the optimizer's own here."""
    used = rule.split()
    options = {
        "lr": 0.0,
        "momentum": 0.5 if "momentum" in used else 0.0,
        "dampening": 0.0,
        "nesterov": "nesterov" in used,
        "weight_decay": 0.5 if "weight_decay" in used else 0.0,
        "maximize": "maximize" in used,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "amsgrad": "amsgrad" in used,
        "decoupled_weight_decay": "decoupled" in used,
    }
    if used[0] not in _INTEGERS:
        for tensor in state:
            tensor.abs_()
    update(rule, options, parameter, gradient, *state)
    return ()

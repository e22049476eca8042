"""Operators by name, and what the graph must know about each of them.

A `TrainingGraph` names its operators as text. This file resolves the text, and holds the few facts that torch's schemas
do not tell: which results share storage with an argument although the schema is silent, which arguments are
used for their shape alone, which operators draw random numbers only with certain arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torch_odt import ops as odt_ops
from torch_odt.capture.strides import counts_as_channels_last, is_channels_last, is_contiguous

# Operators of this package that a rewrite may put into a graph.
_OWN: dict[str, Callable[..., Any]] = {}

# The schema promises a new tensor; the implementation returns a view.
_UNDECLARED_VIEWS = frozenset({"aten._unsafe_view.default", "aten._reshape_alias.default", "aten.lift_fresh.default"})

# Kernels that look at the grad mode to decide whether to fill the workspace that their backward needs.
_IN_GRAD_MODE = frozenset({"aten.mkldnn_rnn_layer.default"})

# target -> positions of tensor arguments that are used for their shape, strides and dtype alone.
_SHAPE_ONLY: dict[str, tuple[int, ...]] = {
    "aten.max_pool2d_with_indices_backward.default": (1,),
    "torch_odt.max_pool2d_with_offsets_backward.default": (1,),
    "aten.avg_pool2d_backward.default": (1,),
    "aten._adaptive_avg_pool2d_backward.default": (1,),
    "aten.nll_loss_backward.default": (1,),
    "aten.new_zeros.default": (0,),
    "aten.new_ones.default": (0,),
    "aten.new_full.default": (0,),
    "aten.new_empty.default": (0,),
    "aten.new_empty_strided.default": (0,),
    "aten.zeros_like.default": (0,),
    "aten.ones_like.default": (0,),
    "aten.full_like.default": (0,),
    "aten.empty_like.default": (0,),
}


def register_operator(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function callable from a graph as `odt.<name>`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _OWN[f"odt.{name}"] = function
        return function

    return register


def resolve(target: str) -> Callable[..., Any]:
    """The callable that a graph names: an operator of torch ("aten.add.Tensor") or one of ours ("odt.…").

    Raises:
        KeyError: no such operator is registered in this process.
    """
    if target in _OWN:
        return _OWN[target]
    return _in_grad_mode(target) if target in _IN_GRAD_MODE else of_torch(target)


def of_torch(target: str) -> torch._ops.OpOverload:
    """The operator of torch's dispatcher of that name.

    Raises:
        KeyError: no such operator is registered in this process.
    """
    found: Any = torch.ops
    try:
        for name in target.split(".", 2):
            found = getattr(found, name)
    except AttributeError:
        found = None
    # What a graph names must not reach anything else that torch.ops has.
    if not isinstance(found, torch._ops.OpOverload):
        raise KeyError(f"operator {target!r} is not registered here; import the package that has it")
    return found


def _in_grad_mode(target: str) -> Callable[..., Any]:
    function = of_torch(target)

    def call(*args: Any) -> Any:
        with torch.enable_grad():
            return function(*[a.detach() if isinstance(a, torch.Tensor) else a for a in args])

    return call


def is_view(op: torch._ops.OpOverload) -> bool:
    """Whether the results share the storage of the first argument."""
    if str(op) in _UNDECLARED_VIEWS:
        return True
    returns = op._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def is_random(op: torch._ops.OpOverload, arguments: dict[str, Any]) -> bool:
    """Whether a call with these arguments (by schema name) draws from the random number generator."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    # Attention kernels carry the tag for the sake of their dropout alone.
    has_dropout = any(argument.name == "dropout_p" for argument in op._schema.arguments)
    return not (has_dropout and arguments.get("dropout_p", 0.0) == 0.0)


@dataclass(frozen=True)
class Laid:
    """A tensor's shape and where its elements lie."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]


def shape_only_positions(
    target: str, args: tuple[Any, ...], dtype: str, images: Laid | None = None, window: Laid | None = None
) -> tuple[int, ...]:
    """Positions of the tensor arguments whose data the call never reads, for results of that type.

    Args:
        images, window: a convolution's input and weight.
    """
    if target == "aten.convolution_backward.default":
        if images is None or window is None:
            return ()
        wants_input, wants_weight, wants_bias = args[10]
        if args[9] > 1 and not (convolves_by_onednn(dtype) and _is_for_onednn(args, window.shape[2:])):
            # ATen's own kernels copy every group's part of the input and of the weight, whatever is wanted.
            return ()
        # The gradient of the bias alone makes the kernel read its input all the same.
        needless = (() if wants_weight or wants_bias else (1,)) + (() if wants_input else (2,))
        return tuple(i for i in needless if _is_taken_as_it_lies((images, window)[i - 1], images, window))
    if target == "aten.native_batch_norm_backward.default" and args[7]:
        return (3, 4)
    return _SHAPE_ONLY.get(target, ())


def _is_taken_as_it_lies(tensor: Laid, images: Laid, window: Laid) -> bool:
    """Whether a convolution does not copy it: one channels_last tensor makes ATen bring the others to that layout."""
    if is_channels_last(tensor.shape, tensor.stride):
        return is_contiguous(tensor.shape, tensor.stride) or counts_as_channels_last(tensor.shape, tensor.stride)
    if len(tensor.shape) != 4:
        return all(is_contiguous(laid.shape, laid.stride) for laid in (images, window))
    is_brought_over = any(counts_as_channels_last(laid.shape, laid.stride) for laid in (images, window))
    return is_contiguous(tensor.shape, tensor.stride) and not is_brought_over


def convolves_by_onednn(dtype: str) -> bool:
    """Whether convolutions in groups are oneDNN's here, with the settings of now."""
    onednn = torch.backends.mkldnn
    if not (onednn.is_available() and onednn.enabled):
        return False
    return dtype == "float32" or (dtype == "bfloat16" and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _is_for_onednn(args: tuple[Any, ...], kernel: tuple[int, ...]) -> bool:
    """Whether torch hands a convolution in groups to oneDNN wherever it may, whatever the number of samples."""
    stride, dilation, transposed, output_padding = args[4], args[6], args[7], args[8]
    if transposed and any(padding >= step for padding, step in zip(output_padding, stride, strict=True)):
        return False
    is_plain = all(number == 1 for number in (*stride, *dilation, *kernel[-2:]))
    return not is_plain or torch.get_num_threads() > 1


def output_mask_position(target: str) -> int | None:
    """Where a backward operator takes the mask of the gradients that it is to compute."""
    return {
        "aten.convolution_backward.default": 10,
        "aten.native_batch_norm_backward.default": 9,
        "aten.native_layer_norm_backward.default": 7,
        "aten.native_group_norm_backward.default": 9,
        "torch_odt.batch_norm_act_backward.default": 9,
    }.get(target)


@register_operator("batch_norm_normalize")
def _batch_norm_normalize(
    x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    return odt_ops.batch_norm_normalize(x, mean, invstd, weight, bias)


@register_operator("dropout_apply")
def _dropout_apply(x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout's output from its input and the mask that was drawn, with the arithmetic of aten's native_dropout."""
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    # ATen rounds the scale to the type of its input; a Python number would not be rounded.
    return x.mul(mask).mul_(torch.tensor(scale, dtype=x.dtype))

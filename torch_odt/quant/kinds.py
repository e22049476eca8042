"""What a node of a traced graph does, whichever way it is written: as a module, a function or a method."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from torch_odt.quant.pooling import Pool


@dataclass(frozen=True)
class Kind:
    """What a node does.

    Attributes:
        name: "layer", "batch_norm", "clamp", "add", "multiply", "concatenate", "max_pool", "average_pool",
            "adaptive_pool", "mean", "reshape", "dropout", "same", "function", "size" or "other".
        inputs: the nodes that it takes.
        options: the rest, by name.
    """

    name: str
    inputs: tuple[fx.Node, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


OTHER = Kind("other")

_FUNCTIONS: tuple[type[nn.Module], ...] = (
    nn.SiLU,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Sigmoid,
    nn.Tanh,
    nn.GELU,
    nn.Mish,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.LeakyReLU,
    nn.Softplus,
    nn.Softsign,
    nn.LogSigmoid,
)
_FUNCTIONS_BY_NAME: dict[Any, Callable[..., nn.Module]] = {
    F.silu: nn.SiLU,
    F.hardswish: nn.Hardswish,
    F.hardsigmoid: nn.Hardsigmoid,
    F.sigmoid: nn.Sigmoid,
    torch.sigmoid: nn.Sigmoid,
    "sigmoid": nn.Sigmoid,
    F.tanh: nn.Tanh,
    torch.tanh: nn.Tanh,
    "tanh": nn.Tanh,
    F.mish: nn.Mish,
}
_BOUNDS = {"min_val": "low", "max_val": "high", "min": "low", "max": "high"}
# Names of functions, operators and methods, which may end in an underscore.
_PROBABILITIES = frozenset({"softmax", "log_softmax", "softmin", "sigmoid", "log_sigmoid", "log", "argmax"})
_MULTIPLES = frozenset({"truediv", "true_divide", "div", "mul", "multiply", "neg"})
_MODULES_OF_SCORES = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Sigmoid, nn.LogSigmoid)
_SHAPES = ("flatten", "view", "reshape", "squeeze", "unsqueeze", "contiguous")


def kind_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> Kind:
    """What a node does; "other" where int8 has nothing for it."""
    if node.op == "call_module":
        return _of_module(node, modules[str(node.target)])
    if node.op == "call_function":
        return _of_function(node, node.target)
    if node.op == "call_method":
        return _of_method(node, str(node.target))
    return OTHER


def is_in_place(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a node writes to its first input, so that whoever reads that later sees the result."""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if str(name).endswith("_") or node.target in (operator.iadd, operator.imul):
        return True
    return bool(node.kwargs.get("inplace")) or any(argument is True for argument in node.args)


def is_of_scores(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a node makes probabilities of scores, their logarithms or order, or scores of another size or sign."""
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], _MODULES_OF_SCORES)
    name = str(getattr(node.target, "__name__", node.target)).rstrip("_")
    operands = [each for each in (*node.args, *node.kwargs.values()) if isinstance(each, fx.Node)]
    return name in _PROBABILITIES | _MULTIPLES and len([each for each in operands if not _is_constant(each)]) == 1


def _is_constant(node: fx.Node) -> bool:
    """Whether a node is made of parameters and numbers alone."""
    return node.op == "get_attr" or (node.op != "placeholder" and all(map(_is_constant, node.all_input_nodes)))


def _of_module(node: fx.Node, module: nn.Module) -> Kind:
    if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
        return OTHER
    inputs = (node.args[0],)
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        return Kind("layer", inputs)
    if isinstance(module, (nn.BatchNorm2d, nn.BatchNorm1d)):
        return Kind("batch_norm", inputs)
    if isinstance(module, nn.ReLU):
        return Kind("clamp", inputs, {"low": 0.0, "high": None})
    if isinstance(module, nn.Hardtanh):
        return Kind("clamp", inputs, {"low": float(module.min_val), "high": float(module.max_val)})
    if isinstance(module, nn.MaxPool2d) and not module.return_indices:
        m = module
        return _max_pool(inputs, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode)
    if isinstance(module, nn.AvgPool2d) and module.divisor_override is None:
        return _average_pool(
            inputs, module.kernel_size, module.stride, module.padding, module.ceil_mode, module.count_include_pad
        )
    if isinstance(module, nn.AdaptiveAvgPool2d):
        return Kind("adaptive_pool", inputs, {"output_size": _pair(module.output_size)})
    if isinstance(module, nn.Flatten):
        return _shape(inputs, "flatten", module.start_dim, module.end_dim)
    if type(module) in (nn.Dropout, nn.Dropout1d, nn.Dropout2d):
        return Kind("dropout", inputs, {"probability": module.p}) if type(module) is nn.Dropout else OTHER
    if isinstance(module, nn.Identity):
        return Kind("same", inputs)
    if type(module) in _FUNCTIONS:
        return Kind("function", inputs, {"function": module})
    return OTHER


def _of_function(node: fx.Node, target: Any) -> Kind:
    if target is getattr and node.args[1] == "shape":
        return Kind("size", (_node(node.args[0]),))
    if target in (operator.add, operator.iadd, torch.add) and _all_nodes(node.args, 2) and not node.kwargs:
        return Kind("add", _nodes(node))
    if target in (operator.mul, operator.imul, torch.mul) and _all_nodes(node.args, 2) and not node.kwargs:
        return Kind("multiply", _nodes(node))
    if target in (torch.cat, torch.concat):
        return _concatenation(node)
    if not node.args or not isinstance(node.args[0], fx.Node):
        return OTHER
    inputs, rest, options = (node.args[0],), node.args[1:], node.kwargs
    if target in (F.relu, torch.relu, F.relu_):
        return Kind("clamp", inputs, {"low": 0.0, "high": None})
    if target is F.relu6:
        return Kind("clamp", inputs, {"low": 0.0, "high": 6.0})
    if target in (F.hardtanh, torch.clamp) and _are_numbers((*rest, *options.values())):
        given = dict(zip(("low", "high"), rest, strict=False))
        given |= {_BOUNDS[name]: value for name, value in options.items() if name in _BOUNDS}
        default = {"low": -1.0, "high": 1.0} if target is F.hardtanh else {"low": None, "high": None}
        return Kind("clamp", inputs, default | given)
    if target in (F.max_pool2d, torch.max_pool2d, F.avg_pool2d) and not _any_nodes((*rest, *options.values())):
        return _functional_pool(target, inputs, rest, options)
    if target is F.adaptive_avg_pool2d and not _any_nodes((*rest, *options.values())):
        size = rest[0] if rest else options["output_size"]
        return Kind("adaptive_pool", inputs, {"output_size": _pair(size)})
    if target is torch.flatten:
        return _shape(inputs, "flatten", *rest, **options)
    if target in (torch.squeeze, torch.unsqueeze, torch.reshape):
        return _shape(inputs, target.__name__, *rest, **options)
    if target is torch.mean:
        return _mean(inputs, rest, options)
    if target is F.dropout:
        return _functional_dropout(inputs, rest, options)
    if target in _FUNCTIONS_BY_NAME:
        return Kind("function", inputs, {"function": _FUNCTIONS_BY_NAME[target]()})
    return OTHER


def _of_method(node: fx.Node, name: str) -> Kind:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return OTHER
    inputs, rest = (node.args[0],), node.args[1:]
    if name in ("size", "dim"):
        return Kind("size", inputs)
    if name in ("relu", "relu_"):
        return Kind("clamp", inputs, {"low": 0.0, "high": None})
    if name in ("add", "add_", "mul", "mul_") and _all_nodes(node.args, 2) and not node.kwargs:
        return Kind("add" if name.startswith("add") else "multiply", _nodes(node))
    if name in _SHAPES:
        return _shape(inputs, name, *rest, **node.kwargs)
    if name == "mean":
        return _mean(inputs, rest, node.kwargs)
    if name in _FUNCTIONS_BY_NAME:
        return Kind("function", inputs, {"function": _FUNCTIONS_BY_NAME[name]()})
    return OTHER


def _concatenation(node: fx.Node) -> Kind:
    given = dict(zip(("tensors", "dim"), node.args, strict=False)) | dict(node.kwargs)
    parts, dim = given.get("tensors"), given.get("dim", 0)
    if not isinstance(parts, (list, tuple)) or not _all_nodes(parts, len(parts)) or not isinstance(dim, int):
        return OTHER
    return Kind("concatenate", tuple(parts), {"dim": dim})


def _functional_dropout(inputs: Any, rest: Any, options: Any) -> Kind:
    given = dict(zip(("p", "training", "inplace"), rest, strict=False)) | dict(options)
    mode, probability = given.get("training", True), given.get("p", 0.5)
    if isinstance(mode, fx.Node):
        # What takes its place follows the model; the mode of another module may be another.
        is_the_models = mode.op == "get_attr" and mode.target == "training" and _are_numbers((probability,))
        return Kind("dropout", inputs, {"probability": probability}) if is_the_models else OTHER
    return OTHER if mode else Kind("same", inputs)


def _functional_pool(target: Any, inputs: tuple[fx.Node, ...], rest: Any, options: Any) -> Kind:
    is_max = target is not F.avg_pool2d
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    if not is_max:
        names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    given: dict[str, Any] = dict(zip(names, rest, strict=False)) | dict(options)
    if given.get("return_indices") or given.get("divisor_override"):
        return OTHER
    kernel, stride, padding = given["kernel_size"], given.get("stride"), given.get("padding", 0)
    if is_max:
        return _max_pool(inputs, kernel, stride, padding, given.get("dilation", 1), given.get("ceil_mode", False))
    return _average_pool(
        inputs, kernel, stride, padding, given.get("ceil_mode", False), given.get("count_include_pad", True)
    )


def _max_pool(
    inputs: tuple[fx.Node, ...], kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> Kind:
    window = Pool(_pair(kernel), _pair(stride or kernel), _pair(padding), _pair(dilation), ceil_mode)
    return Kind("max_pool", inputs, {"pool": window})


def _average_pool(
    inputs: tuple[fx.Node, ...], kernel: Any, stride: Any, padding: Any, ceil_mode: bool, counts_padding: bool
) -> Kind:
    window = Pool(_pair(kernel), _pair(stride or kernel), _pair(padding), (1, 1), ceil_mode)
    return Kind("average_pool", inputs, {"pool": window, "count_include_pad": counts_padding})


def _mean(inputs: tuple[fx.Node, ...], rest: Any, options: Any) -> Kind:
    given = dict(zip(("dim", "keepdim"), rest, strict=False)) | dict(options)
    dims = given.get("dim")
    is_global = isinstance(dims, (list, tuple)) and sorted(dims) in ([2, 3], [-2, -1])
    if not is_global or given.keys() - {"dim", "keepdim"}:
        return OTHER
    return Kind("mean", inputs, {"keepdim": bool(given.get("keepdim", False))})


def _shape(inputs: tuple[fx.Node, ...], method: str, *args: Any, **kwargs: Any) -> Kind:
    if kwargs.keys() - {"start_dim", "end_dim", "dim", "shape"}:
        return OTHER
    return Kind("reshape", inputs, {"method": method, "args": args, "kwargs": kwargs})


def _pair(value: Any) -> tuple[Any, Any]:
    return (value, value) if value is None or isinstance(value, int) else (value[0], value[-1])


def _node(argument: Any) -> fx.Node:
    assert isinstance(argument, fx.Node)
    return argument


def _nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    return tuple(_node(argument) for argument in node.args)


def _all_nodes(arguments: Any, count: int) -> bool:
    return len(arguments) == count and all(isinstance(argument, fx.Node) for argument in arguments)


def _any_nodes(arguments: Any) -> bool:
    return any(isinstance(argument, fx.Node) for argument in arguments)


def _are_numbers(arguments: Any) -> bool:
    return all(argument is None or isinstance(argument, (int, float)) for argument in arguments)


def folded(weight: Tensor, bias: Tensor | None, norm: nn.BatchNorm2d | nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    """A layer's weight and bias with the BatchNorm behind it, as that is in evaluation mode, inside them."""
    assert norm.running_mean is not None and norm.running_var is not None
    factor = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        factor = factor * norm.weight.detach().double()
    shift = -norm.running_mean.double() if bias is None else bias.detach().double() - norm.running_mean.double()
    offset = shift * factor if norm.bias is None else shift * factor + norm.bias.detach().double()
    shape = (-1, *[1] * (weight.dim() - 1))
    return (weight.detach().double() * factor.view(shape)).float(), offset.float()

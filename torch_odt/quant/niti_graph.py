"""A model's forward pass, rewritten so that mantissas travel between the layers that know them.

The pass is traced with `torch.fx`. Behind a converted layer, ReLU, pools, flattening and sums of two stay in integers;
before everything else the tensor becomes float32 again. A tensor of mantissas with two users is forked, because the
gradients that come back have scales of their own.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from torch_odt.ops.int8_arguments import Rounding, pair
from torch_odt.quant import niti_functions as niti
from torch_odt.quant.both_modes import trace_in_both_modes
from torch_odt.quant.niti_layers import NitiLayer

_ADDITIONS = (operator.add, operator.iadd, torch.add)
_IN_ROWS_AND_COLUMNS = ([2, 3], (2, 3), [-2, -1], (-2, -1))


@dataclass(frozen=True)
class _Call:
    """What takes the place of a node: a function of mantissas, and its arguments behind the tensors."""

    function: Callable[..., Any] | None  # None: the tensor itself
    tensors: tuple[fx.Node, ...]
    arguments: tuple[Any, ...] = ()


def traced(model: nn.Module) -> fx.Graph:
    """The forward pass as a graph.

    Raises:
        ValueError: it depends on values, or is otherwise beyond `torch.fx`.
    """
    try:
        return trace_in_both_modes(model)
    except Exception as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"torch.fx cannot trace {type(model).__name__}: {first_line}") from error


def calls_of(graph: fx.Graph) -> Counter[str]:
    """How often each submodule is called."""
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_module")


def rewrite(model: nn.Module, graph: fx.Graph, rounding: Rounding) -> list[str]:
    """Let mantissas travel as far as they can; returns what was left to float32 between converted layers.

    Args:
        model: its layers are converted already.
        graph: of its forward pass; changed in place.
        rounding: of gradients on the way back from float32.
    """
    scaled: set[fx.Node] = set()
    left: list[str] = []
    for node in list(graph.nodes):
        of_mantissas = [each for each in node.all_input_nodes if each in scaled]
        if _is_converted(model, node):
            scaled.add(node)
        elif of_mantissas:
            call = _call_on_mantissas(model, node, scaled)
            if call is None:
                if node.op != "output":
                    left.append(_described(model, node))
                for each in of_mantissas:
                    node.replace_input_with(each, _inserted(graph, each, niti.niti_dequantize, (each, rounding)))
                continue
            place = call.tensors[0]
            if call.function is not None:
                with graph.inserting_before(node):
                    place = graph.call_function(call.function, (*call.tensors, *call.arguments))
                scaled.add(place)
            node.replace_all_uses_with(place)
            graph.erase_node(node)
    for node in [each for each in graph.nodes if _is_converted(model, each)]:
        _end_in_float(model, graph, node)
        _end_in_relu(model, graph, node)
    for node in [each for each in graph.nodes if each in scaled]:
        _fork(graph, node, model)
    graph.lint()
    return left


def install(model: nn.Module, graph: fx.Graph) -> Callable[[], None]:
    """Let the model run the graph; returns what takes that back. The model stays an instance of its class."""
    old = type(model)
    forward = type(fx.GraphModule(model, graph)).forward
    # What torch.fx writes belongs to no module; those who read a model's code want to know one.
    forward.__module__ = old.__module__
    model.__class__ = type(old.__name__, (old,), {"forward": forward, "__module__": old.__module__})

    return partial(setattr, model, "__class__", old)


def _is_converted(model: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and isinstance(model.get_submodule(str(node.target)), NitiLayer)


def _described(model: nn.Module, node: fx.Node) -> str:
    if node.op == "call_module":
        return f"{node.target} ({type(model.get_submodule(str(node.target))).__name__})"
    return f"{node.name} ({getattr(node.target, '__name__', node.target)})"


def _inserted(graph: fx.Graph, after: fx.Node, function: Callable[..., Any], arguments: tuple[Any, ...]) -> fx.Node:
    with graph.inserting_after(after):
        return graph.call_function(function, arguments)


def _call_on_mantissas(model: nn.Module, node: fx.Node, scaled: Iterable[fx.Node]) -> _Call | None:
    """What a node is for mantissas; None where there is no such thing."""
    if node.op == "call_module":
        return _of_module(model.get_submodule(str(node.target)), node)
    if node.op == "call_function":
        return _of_function(node, set(scaled))
    return _of_method(node) if node.op == "call_method" else None


def _of_module(module: nn.Module, node: fx.Node) -> _Call | None:
    tensors = tuple(node.all_input_nodes)
    if len(tensors) != 1 or len(node.args) != 1:
        return None
    if isinstance(module, nn.ReLU6):
        return _Call(niti.niti_relu, tensors, (6.0,))
    if isinstance(module, nn.ReLU):
        return _Call(niti.niti_relu, tensors)
    if isinstance(module, nn.MaxPool2d):
        plain = pair(module.dilation) == (1, 1) and not (module.ceil_mode or module.return_indices)
        windows = (module.kernel_size, module.stride, module.padding)
        return _Call(niti.niti_max_pool2d, tensors, windows) if plain else None
    if isinstance(module, nn.AvgPool2d):
        plain = not module.ceil_mode and module.divisor_override is None
        plain &= module.count_include_pad or pair(module.padding) == (0, 0)
        windows = (module.kernel_size, module.stride, module.padding)
        return _Call(niti.niti_avg_pool2d, tensors, windows) if plain else None
    if isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1)):
        return _Call(niti.niti_global_avg_pool2d, tensors)
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
        return _Call(niti.niti_flatten, tensors)
    if isinstance(module, nn.Identity) or (isinstance(module, nn.Dropout) and not module.p):
        return _Call(None, tensors)
    return None


def _of_function(node: fx.Node, scaled: set[fx.Node]) -> _Call | None:
    tensors, rest = tuple(node.all_input_nodes), node.args[1:]
    if node.target in _ADDITIONS and not node.kwargs and len(node.args) == 2:
        both = len(tensors) == 2 and all(each in scaled for each in tensors)
        return _Call(niti.niti_add, tensors) if both else None
    if len(tensors) != 1:
        return None
    # An operator that overwrites its input does the same to a tensor that nobody else sees.
    options = {name: value for name, value in node.kwargs.items() if name != "inplace"}
    if node.target in (torch.relu, F.relu) and not options:
        return _Call(niti.niti_relu, tensors)
    if node.target is F.relu6 and not options:
        return _Call(niti.niti_relu, tensors, (6.0,))
    if node.target is torch.flatten and (rest, options) in (((1,), {}), ((), {"start_dim": 1})):
        return _Call(niti.niti_flatten, tensors)
    if node.target is F.adaptive_avg_pool2d and (*rest, *options.values()) in ((1,), ((1, 1),), ([1, 1],)):
        return _Call(niti.niti_global_avg_pool2d, tensors)
    if node.target is F.max_pool2d and rest and not options:
        return _Call(niti.niti_max_pool2d, tensors, rest[:3]) if len(rest) <= 3 else None
    if node.target is F.avg_pool2d and rest and not options:
        return _Call(niti.niti_avg_pool2d, tensors, rest[:3]) if len(rest) <= 3 else None
    return None


def _of_method(node: fx.Node) -> _Call | None:
    tensors, rest = tuple(node.all_input_nodes), node.args[1:]
    if len(tensors) != 1:
        return None
    if node.target in ("relu", "relu_") and not rest:
        return _Call(niti.niti_relu, tensors)
    if node.target == "flatten" and (rest, node.kwargs) in (((1,), {}), ((), {"start_dim": 1})):
        return _Call(niti.niti_flatten, tensors)
    if node.target == "mean" and len(rest) == 1 and rest[0] in _IN_ROWS_AND_COLUMNS and not node.kwargs:
        return _Call(_mean_in_rows, tensors)
    return None


def _mean_in_rows(tensor: niti.Scaled) -> niti.Scaled:
    return niti.niti_global_avg_pool2d(tensor, keeps_dimensions=False)


def _end_in_float(model: nn.Module, graph: fx.Graph, node: fx.Node) -> None:
    """Where float32 alone is wanted of a layer, its sums become that at once, without being rounded to mantissas."""
    users = list(node.users)
    if users and all(user.target is niti.niti_dequantize for user in users):
        model.get_submodule(str(node.target)).to_float = True  # type: ignore[assignment]
        for user in users:
            user.replace_all_uses_with(node)
            graph.erase_node(user)


def _end_in_relu(model: nn.Module, graph: fx.Graph, node: fx.Node) -> None:
    """A ReLU, and the ceiling that it may have, are bounds of the kernel that goes before it."""
    users = list(node.users)
    if len(users) == 1 and users[0].target is niti.niti_relu:
        layer = model.get_submodule(str(node.target))
        layer.relu, layer.ceiling = True, users[0].args[1] if len(users[0].args) > 1 else None  # type: ignore[assignment]
        users[0].replace_all_uses_with(node)
        graph.erase_node(users[0])


def _fork(graph: fx.Graph, node: fx.Node, model: nn.Module) -> None:
    """Give each user a tensor of its own."""
    if _is_converted(model, node) and model.get_submodule(str(node.target)).to_float:
        return
    users = list(node.users)
    rest = node
    for user in users[:-1]:
        both = _inserted(graph, rest, niti.niti_fork, (rest,))
        second = _inserted(graph, both, operator.getitem, (both, 1))
        first = _inserted(graph, both, operator.getitem, (both, 0))
        user.replace_input_with(node, first)
        rest = second
    users[-1].replace_input_with(node, rest)

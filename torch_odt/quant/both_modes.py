"""A module's forward pass as a graph that is right in training mode and in evaluation mode.

`torch.fx` follows the code in one mode, and what that has decided is then fixed: a dropout would go on in evaluation.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

from torch import fx, nn


def trace_in_both_modes(module: nn.Module) -> fx.Graph:
    """The forward pass, in which functions that are given `self.training` follow the mode of the module.

    Modules without tensors that decide by the mode, as timm's DropPath, are called as they are.

    Raises:
        ValueError: other code decides by the mode.
        Exception: whatever `torch.fx` raises where it cannot follow the code.
    """
    called = frozenset(id(each) for each in module.modules() if each is not module and _decides_by_the_mode(each))
    graph = _Tracer(called).trace(module)
    with _in_the_other_mode(module):
        other = _Tracer(called).trace(module)
    nodes, others = list(graph.nodes), list(other.nodes)
    if [(node.op, node.target) for node in nodes] != [(node.op, node.target) for node in others]:
        raise ValueError("it computes something else in evaluation mode than in training mode")
    for node, same in zip(nodes, others, strict=True):
        if not _is_alike(node, same):
            _follow_the_mode(graph, node, same)
    return graph


class _Tracer(fx.Tracer):
    def __init__(self, called: frozenset[int]) -> None:
        super().__init__()
        self._called = called

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self._called or super().is_leaf_module(m, module_qualified_name)


def _decides_by_the_mode(module: nn.Module) -> bool:
    if type(module).__module__.startswith("torch.nn.") or next(module.children(), None) is not None:
        return False
    if any(True for _ in (*module.parameters(), *module.buffers())):
        return False
    try:
        one = fx.Tracer().trace(module)
        with _in_the_other_mode(module):
            other = fx.Tracer().trace(module)
    except Exception:
        # What cannot be traced here cannot be traced with the rest, where the reason is told.
        return False
    return [(node.op, node.target) for node in one.nodes] != [(node.op, node.target) for node in other.nodes]


@contextlib.contextmanager
def _in_the_other_mode(module: nn.Module) -> Iterator[None]:
    """What else `train()` may do is not done."""

    def change() -> None:
        for each in module.modules():
            each.training = not each.training

    change()
    try:
        yield
    finally:
        change()


def _is_alike(node: fx.Node, same: fx.Node) -> bool:
    return str((node.args, node.kwargs)) == str((same.args, same.kwargs))


def _follow_the_mode(graph: fx.Graph, node: fx.Node, same: fx.Node) -> None:
    """Give a function the module's mode in the place of that in which it was traced."""
    bound, others = _arguments(node), _arguments(same)
    if bound is None or others is None or not isinstance(bound.arguments.get("training"), bool):
        raise ValueError(f"{node.name} takes something else in evaluation mode than in training mode")
    with graph.inserting_before(node):
        mode = graph.create_node("get_attr", "training")
    bound.arguments["training"] = others.arguments["training"] = mode
    node.args, node.kwargs = bound.args, bound.kwargs
    if str((node.args, node.kwargs)) != str((others.args, others.kwargs)):
        raise ValueError(f"{node.name} takes something else in evaluation mode than in training mode")


def _arguments(node: fx.Node) -> inspect.BoundArguments | None:
    """Those of a function that has a signature."""
    if node.op != "call_function":
        return None
    try:
        return inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None

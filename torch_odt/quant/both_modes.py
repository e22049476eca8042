"""A module's forward pass as a graph that is right in training mode and in evaluation mode.

`torch.fx` follows the code in one mode, and what that has decided is then fixed: a dropout would go on in evaluation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

_MODE = "training"


def trace_in_both_modes(module: nn.Module) -> fx.Graph:
    """The forward pass, in which arguments that depend on a module's mode follow it.

    Modules without tensors that decide by the mode, as timm's DropPath, are called as they are.

    Raises:
        ValueError: other code decides by the mode what to call.
        Exception: whatever `torch.fx` raises where it cannot follow the code.
    """
    called = frozenset(id(each) for each in module.modules() if each is not module and _decides_by_the_mode(each))
    before = set(vars(module))
    try:
        graph = _Tracer(called).trace(module)
        with _without_new_attributes(module), _in_the_other_mode(module):
            _follow_the_mode(module, graph, _Tracer(called).trace(module))
    except BaseException:
        _remove_new_attributes(module, before)
        raise
    return graph


def _follow_the_mode(module: nn.Module, graph: fx.Graph, other: fx.Graph) -> None:
    """Let the arguments in which two graphs differ follow the mode.

    Args:
        module: in the mode of the other one.
    """
    pairs = _pairs(module, graph, other)
    if pairs is None:
        raise ValueError(
            "it computes something else in evaluation mode than in training mode; give functions the mode, as "
            "F.dropout(x, p, self.training), or put the branch into a module of its own"
        )
    same = {there: node for node, there in pairs}
    for node, there in pairs:
        args, kwargs = fx.node.map_arg((there.args, there.kwargs), same.__getitem__)
        if (args, kwargs) != (node.args, node.kwargs):
            _Following(module, graph, node).follow(args, kwargs)


def by_mode(training: bool, in_training: Any, in_evaluation: Any) -> Any:
    """What an argument is in the mode of the moment."""
    return in_training if training else in_evaluation


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
        with _without_new_attributes(module):
            one = fx.Tracer().trace(module)
            with _in_the_other_mode(module):
                return _pairs(module, one, fx.Tracer().trace(module)) is None
    except Exception:
        # What cannot be traced here cannot be traced with the rest, where the reason is told.
        return False


@contextlib.contextmanager
def _without_new_attributes(module: nn.Module) -> Iterator[None]:
    """Tensors that code makes become attributes of the module that is traced; they are gone afterwards."""
    before = set(vars(module))
    try:
        yield
    finally:
        _remove_new_attributes(module, before)


def _remove_new_attributes(module: nn.Module, before: set[str]) -> None:
    for name in set(vars(module)) - before:
        delattr(module, name)


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


def _pairs(module: nn.Module, graph: fx.Graph, other: fx.Graph) -> list[tuple[fx.Node, fx.Node]] | None:
    """The nodes of two graphs that call the same in the same order; None where they do not."""
    nodes, others = list(graph.nodes), list(other.nodes)
    if len(nodes) != len(others):
        return None
    pairs = list(zip(nodes, others, strict=True))
    return pairs if all(_call_the_same(module, *pair) for pair in pairs) else None


def _call_the_same(module: nn.Module, node: fx.Node, other: fx.Node) -> bool:
    if node.op != other.op or node.target == other.target:
        return node.op == other.op
    if node.op != "get_attr":
        return False
    # The same number in the code has another name in each graph.
    one, another = (vars(module).get(str(each.target)) for each in (node, other))
    are_tensors = isinstance(one, torch.Tensor) and isinstance(another, torch.Tensor)
    return are_tensors and one.dtype == another.dtype and torch.equal(one, another)  # type: ignore[union-attr,arg-type]


class _Following:
    """Lets the arguments of a node follow the mode of the module in whose code it stands.

    Args:
        root: in the other mode than when the graph was traced.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph, node: fx.Node) -> None:
        scopes = list((node.meta.get("nn_module_stack") or {}).values())
        owner = str(scopes[-1][0]) if scopes else ""
        self._was_training = not root.get_submodule(owner).training
        self._mode = f"{owner}.{_MODE}" if owner else _MODE
        self._graph, self._node = graph, node

    def follow(self, args: Any, kwargs: Any) -> None:
        """Take over arguments as they are in the other mode."""
        with self._graph.inserting_before(self._node):
            self._node.args = tuple(self._merged(self._node.args, args))
            self._node.kwargs = self._merged(self._node.kwargs, kwargs)

    def _merged(self, one: Any, other: Any) -> Any:
        if type(one) is type(other) and one == other:
            return one
        if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
            return {key: self._merged(value, other[key]) for key, value in one.items()}
        if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
            return [self._merged(*each) for each in zip(one, other, strict=True)]
        if any(isinstance(each, (fx.Node, dict, list, tuple, slice)) for each in (one, other)):
            raise ValueError(f"{self._node.name} takes something else in evaluation mode than in training mode")
        mode = self._graph.create_node("get_attr", self._mode)
        if one is self._was_training and other is not one and isinstance(other, bool):
            return mode
        in_training, in_evaluation = (one, other) if self._was_training else (other, one)
        return self._graph.call_function(by_mode, (mode, in_training, in_evaluation))

"""A model as a chain: where one tensor is all that goes on, and what lies between two such places.

`torch.fx` traces the model, so that no family of networks needs a table of its own: a place to cut is one behind which
nothing but the value that was just computed is used. Residual blocks, branches and attention are never cut open.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.shape_prop import ShapeProp, TensorMetadata

from torch_odt.adapt.adaptation import StoresWeight
from torch_odt.adapt.frozen_batch_norm import FrozenBatchNorm
from torch_odt.adapt.layers import evaluating
from torch_odt.adapt.sparse_layers import SparseConv, SparseLinear
from torch_odt.adapt.stored_weights import StoredConv2d, StoredLinear
from torch_odt.adapt.tracing import LayerTracer
from torch_odt.errors import first_line

_CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.MultiheadAttention, StoredLinear, SparseLinear)
_CHANNELS_FIRST = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm),
    *(StoredConv2d, SparseConv, FrozenBatchNorm),
)


@dataclass(frozen=True)
class Cut:
    """A place between two operators where one tensor is all that goes on.

    Attributes:
        name: of the module that computes the tensor; where it is an operator inside of one, with that operator's.
        position: of that operator.
        shape, dtype: of the tensor, with the batch.
        channel_dim: which dimension of it holds the channels.
    """

    name: str
    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    channel_dim: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Chain:
    """A model unrolled: its cuts, and segments between them that share its layers.

    Cuts lie between layers with weights, at most one between two of them, where the tensor is smallest; norms,
    activations and pooling belong to the layer before. A layer that is used twice is never on both sides of one.

    Args:
        model: takes one tensor; further arguments keep their defaults. It is left as it is.
        example: a batch of inputs; only its shape and dtype are used.

    Attributes:
        cuts: in order.
        output_shape: what the model returns, where that is one tensor.

    Raises:
        ValueError: the model cannot be traced, takes several inputs, does not run the same operators in training and
            in evaluation, or has no place to be cut.

    Example:
        >>> from torchvision.models import resnet18
        >>> chain = Chain(resnet18(), torch.ones(2, 3, 64, 64))
        >>> [cut.name for cut in chain.cuts][:3], chain.cuts[0].shape
        (['maxpool', 'layer1.0.relu', 'layer1.1.relu'], (2, 64, 16, 16))
    """

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        self.model = model
        modes = [(module, module.training) for module in model.modules()]
        try:
            self._training = trace(model.train())
            self._evaluation = trace(model.eval())
        finally:
            for module, training in modes:
                module.training = training
        self._nodes = list(self._training.graph.nodes)
        if _operators(self._training) != _operators(self._evaluation):
            raise ValueError(f"{_named(model)} runs other operators in training than in evaluation; it cannot be cut")
        self.batch_size = example.shape[0]
        self._shapes = self._propagate(example)
        self.cuts = tuple(self._find_cuts())
        if not self.cuts:
            raise ValueError(
                f"{_named(model)} is no chain: of its {len(self._nodes)} operators none is followed by others with "
                "weights while its result is all that they use"
            )

    @property
    def output_shape(self) -> tuple[int, ...] | None:
        (result,) = self._nodes[-1].args
        meta = self._shapes[self._nodes.index(result)] if isinstance(result, fx.Node) else None
        return None if meta is None else tuple(meta.shape)

    def segment(self, start: Cut | None, end: Cut | None, *, training: bool = True) -> fx.GraphModule:
        """What lies between two cuts, as a module of the model's own layers.

        Args:
            start: None for the model's input.
            end: None for the model's output.
            training: the operators of training; otherwise those of evaluation.
        """
        traced = self._training if training else self._evaluation
        nodes = list(traced.graph.nodes)
        first = 0 if start is None else start.position
        last = len(nodes) - 1 if end is None else end.position
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {nodes[first]: graph.placeholder("x")}

        def copy_of(node: fx.Node) -> fx.Node:
            if node not in copies:
                # Parameters are fetched where they are first used, which may be in front of the segment.
                assert node.op == "get_attr"
                copies[node] = graph.node_copy(node, copy_of)
            return copies[node]

        for node in nodes[first + 1 : last + 1]:
            if node.op != "get_attr":
                copies[node] = graph.node_copy(node, copy_of)
        if end is not None:
            graph.output(copies[nodes[last]])
        return fx.GraphModule(traced, graph, type(self.model).__name__)

    def forward_bytes(self, end: Cut) -> int:
        """What the tensors of a forward pass to a cut take at most, each freed after its last use."""
        live, peak = 0, 0
        for position, dying in enumerate(self._dying()[: end.position + 1]):
            live += self._nbytes(position) if position else 0
            peak = max(peak, live)
            live -= sum(self._nbytes(each) for each in dying if each)
        return peak

    def bytes_between(self, start: Cut | None, end: Cut | None) -> int:
        """A first guess at what training a segment takes: all its results, and its parameters twice."""
        first = 0 if start is None else start.position
        last = len(self._nodes) - 1 if end is None else end.position
        results = sum(self._nbytes(position) for position in range(first, last + 1))
        parameters = {id(p): p.nbytes for node in self._nodes[first + 1 : last + 1] for p in self._parameters(node)}
        return results + 2 * sum(parameters.values())

    def _propagate(self, example: Tensor) -> list[TensorMetadata | None]:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with evaluating(self._evaluation), torch.no_grad():
                ShapeProp(self._evaluation, mode).propagate(mode.from_tensor(example))
        except Exception as error:
            shape = tuple(example.shape)
            raise ValueError(f"{_named(self.model)} does not take inputs of {shape}: {first_line(error)}") from error
        metas = [node.meta.get("tensor_meta") for node in self._evaluation.graph.nodes]
        return [meta if isinstance(meta, TensorMetadata) else None for meta in metas]

    def _find_cuts(self) -> Iterator[Cut]:
        weighted = [position for position, node in enumerate(self._nodes) if self._has_weights(node)]
        possible = self._single_tensor_positions() - self._inside_of_shared_layers()
        for before, after in pairwise(weighted):
            # Dropout belongs to the layer whose input it masks.
            between = [
                each
                for each in range(before, after)
                if each in possible and not _draws(self._nodes[each], self._training)
            ]
            if between:
                yield self._cut(min(between, key=lambda each: (self._nbytes(each), -each)))

    def _cut(self, position: int) -> Cut:
        meta, node = self._shapes[position], self._nodes[position]
        assert meta is not None
        modules = list(node.meta.get("nn_module_stack", ()))
        name = f"{modules[-1]} ({node.name})" if modules and modules[-1] else node.name
        name = str(node.target) if node.op == "call_module" else name
        return Cut(name, position, tuple(meta.shape), meta.dtype, self._channel_dim(position, len(meta.shape)))

    def _channel_dim(self, position: int, dims: int) -> int:
        """As the next layer reads a tensor of so many dimensions, or the last one wrote it."""
        readers = ((each, self._nodes[each].all_input_nodes) for each in range(position + 1, len(self._nodes)))
        writers = ((each, [self._nodes[each]]) for each in range(position, 0, -1))
        for each, tensors in (*readers, *writers):
            node = self._nodes[each]
            module = self._training.get_submodule(str(node.target)) if node.op == "call_module" else None
            if isinstance(module, _CHANNELS_LAST + _CHANNELS_FIRST):
                shape = self._shapes[self._nodes.index(tensors[0])]
                if shape is not None and len(shape.shape) == dims:
                    return dims - 1 if isinstance(module, _CHANNELS_LAST) else 1
        return min(1, dims - 1)

    def _dying(self) -> list[list[int]]:
        """For each operator, those whose results are used no more after it."""
        index = {node: position for position, node in enumerate(self._nodes)}
        dying: list[list[int]] = [[] for _ in self._nodes]
        for position, node in enumerate(self._nodes):
            if node.op != "get_attr":
                dying[max([position, *(index[user] for user in node.users)])].append(position)
        return dying

    def _single_tensor_positions(self) -> set[int]:
        live: set[int] = set()
        found = set()
        for position, dying in enumerate(self._dying()):
            if self._nodes[position].op != "get_attr":
                live.add(position)
            live.difference_update(dying)
            if live == {position} and self._shapes[position] is not None:
                found.add(position)
        return found

    def _inside_of_shared_layers(self) -> set[int]:
        """Between two uses of the same parameter, buffer or dropout, whose modes and values would be on both sides."""
        uses: dict[int, list[int]] = {}
        for position, node in enumerate(self._nodes):
            for tensor in self._state(node):
                uses.setdefault(id(tensor), []).append(position)
        return {each for positions in uses.values() for each in range(positions[0], positions[-1])}

    def _state(self, node: fx.Node) -> Iterator[object]:
        if node.op == "call_module":
            module = self._training.get_submodule(str(node.target))
            yield from (*module.parameters(), *module.buffers())
            if _draws(node, self._training):
                yield module
        # Counted where it is used: what is fetched once may be used often.
        for fetched in node.all_input_nodes:
            if fetched.op == "get_attr":
                yield _attribute(self._training, str(fetched.target))

    def _parameters(self, node: fx.Node) -> Iterator[Tensor]:
        return (tensor for tensor in self._state(node) if isinstance(tensor, nn.Parameter))

    def _has_weights(self, node: fx.Node) -> bool:
        stored = node.op == "call_module" and isinstance(self._training.get_submodule(str(node.target)), StoresWeight)
        return stored or any(parameter.dim() > 1 for parameter in self._parameters(node))

    def _nbytes(self, position: int) -> int:
        meta = self._shapes[position]
        if meta is None or self._nodes[position].op == "get_attr":
            return 0
        return math.prod(meta.shape) * meta.dtype.itemsize


def trace(model: nn.Module, *, whole: frozenset[str] = frozenset()) -> fx.GraphModule:
    """The operators of a model in the mode that it is in; submodules that cannot be traced are operators themselves.

    Args:
        whole: names of submodules that are operators, too.

    Raises:
        ValueError: the model's own code cannot be traced, or it takes several inputs.
    """
    required = [name for name, parameter in _arguments(model).items() if parameter.default is parameter.empty]
    if len(required) > 1:
        raise ValueError(f"{_named(model)} takes several inputs ({', '.join(required)}); a chain has one")
    # The model's own code runs with stand-ins for tensors, and may raise anything.
    try:
        return _trace(model, whole)
    except Exception:
        leaves = whole | frozenset(_untraceable(model))
    try:
        return _trace(model, leaves)
    except Exception as error:
        found = ", ".join(f"{name} ({type(child).__name__})" for name, child in model.named_children())
        raise ValueError(
            f"{_named(model)} cannot be traced, so that no place to cut it was found: {first_line(error)}. "
            f"It consists of {found or 'no submodules'}; give those that run one after the other as an nn.Sequential"
        ) from error


def _trace(model: nn.Module, leaves: frozenset[str]) -> fx.GraphModule:
    defaults = {name: p.default for name, p in list(_arguments(model).items())[1:] if p.default is not p.empty}
    graph = LayerTracer(leaves).trace(model, concrete_args=defaults or None)
    # What checks that arguments have their defaults.
    for placeholder in [node for node in graph.nodes if node.op == "placeholder"][1:]:
        _erase(graph, placeholder)
    traced = fx.GraphModule(model, graph, type(model).__name__)
    graph.eliminate_dead_code(lambda node: node.is_impure() or _writes(node, model))
    return traced


def _writes(node: fx.Node, root: nn.Module) -> bool:
    """Whether it changes a tensor in place, so that it counts though its result may be unused."""
    if node.op == "call_module":
        return any(getattr(module, "inplace", False) for module in root.get_submodule(str(node.target)).modules())
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return node.op.startswith("call_") and (is_in_place or bool(node.kwargs.get("inplace")) or "out" in node.kwargs)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


def _untraceable(model: nn.Module, prefix: str = "") -> Iterator[str]:
    """The names of the largest submodules that cannot be traced, but for containers that are never called."""
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield from _untraceable(child, f"{path}.")
            continue
        try:
            _trace(child, frozenset())
        except Exception:
            yield path


def _arguments(model: nn.Module) -> dict[str, inspect.Parameter]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind not in kinds}


def _draws(node: fx.Node, root: nn.Module) -> bool:
    """Whether it is dropout of some kind."""
    target: Callable[..., Any] | str = node.target
    if node.op == "call_module":
        name = type(root.get_submodule(str(target))).__name__
    else:
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return "drop" in name.lower() or name == "stochastic_depth"


def _operators(traced: fx.GraphModule) -> list[tuple[str, object]]:
    return [(node.op, node.target) for node in traced.graph.nodes]


def _attribute(root: nn.Module, name: str) -> object:
    owner, _, local = name.rpartition(".")
    return getattr(root.get_submodule(owner), local)


def _named(model: nn.Module) -> str:
    return f"the model ({type(model).__name__})"

"""A traced module rewritten to int8: what has no int8 form computes in float32, between conversions."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from torch_odt.ops.max_pool import MOST_WINDOW_ELEMENTS
from torch_odt.quant import pointwise, pooling
from torch_odt.quant.activation import Int8Activation, in_memory_order
from torch_odt.quant.kinds import Kind, folded, is_in_place, is_of_scores, kind_of
from torch_odt.quant.layer import Windows
from torch_odt.quant.layer_pool import can_be_of_a_layer
from torch_odt.quant.modules import (
    Int8Add,
    Int8Concatenate,
    Int8Conv2d,
    Int8Dropout,
    Int8Function,
    Int8Linear,
    Int8Multiply,
    Int8Windows,
    Masters,
    Quantize,
)
from torch_odt.quant.ranges import Range, grid_of
from torch_odt.quant.trace import TracedModule

Classifier = Literal["fp32", "int8"]
# Where modules live that the model does not have.
ROOM = "int8"


@dataclass(frozen=True)
class Options:
    """How layers are converted, see `convert_`."""

    classifier: Classifier
    masters: Masters
    headroom: float
    seed: int


@dataclass
class Rewritten:
    """What became of a traced module.

    Attributes:
        install: puts the new layers into the module, and returns what computes the new graph with it as `self`.
        layers: names of what is int8 now and has weights, in the model.
        kept: what stays float32, with the reason.
        operators: how many int8 operators there are besides.
    """

    install: Callable[[], Callable[..., Any]]
    layers: list[str]
    kept: dict[str, str]
    operators: int


_AVERAGES = frozenset({"adaptive_pool", "average_pool", "mean"})
_BEHIND_SCORES = _AVERAGES | {"clamp", "dropout", "reshape", "same"}


@dataclass
class _Value:
    """A tensor of the new graph, as float32, as int8, or as both."""

    real: fx.Node | None = None
    int8: fx.Node | None = None
    grid: Tensor | None = None


class _NotInInt8(Exception):
    """Why a node stays float32."""


@dataclass
class _Rewriter:
    part: TracedModule
    options: Options
    shared: Mapping[int, Sequence[str]]
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    replaced: dict[str, nn.Module] = field(default_factory=dict)
    added: dict[str, nn.Module] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules = dict(self.part.module.named_modules())
        self.kinds = {node: kind_of(node, self.modules) for node in self.part.graph.nodes}
        calls: dict[nn.Module, int] = {}
        for node in self.part.graph.nodes:
            if node.op == "call_module":
                module = self.modules[str(node.target)]
                calls[module] = calls.get(module, 0) + 1
        self.called_once = {module for module, count in calls.items() if count == 1}
        self.done: set[fx.Node] = set()
        # What is computed of scores, in float32.
        self.scores: set[fx.Node] = set()
        self.order = {node: position for position, node in enumerate(self.part.graph.nodes)}

    def run(self) -> Rewritten:
        for node in self.part.graph.nodes:
            if node in self.done:
                continue
            if node.op == "output":
                self.graph.output(self._real_arguments(node.args[0]))
                continue
            try:
                is_int8 = self._convert(node)
            except _NotInInt8 as reason:
                self.kept[self._name_of(node)] = str(reason)
                is_int8 = False
            if not is_int8:
                self._copy(node)
            if self._is_seen_by_others(node):
                self.values[self.kinds[node].inputs[0]] = self.values[node]
        if self.added and hasattr(self.part.module, ROOM):
            raise ValueError(f"the model has an attribute {ROOM!r}, where int8 operators are to live: rename it")
        return Rewritten(self._install, self.layers, self.kept, len(self.added))

    def _is_seen_by_others(self, node: fx.Node) -> bool:
        """Whether it writes to its input, which is read again later."""
        inputs = self.kinds[node].inputs
        if not inputs or not is_in_place(node, self.modules):
            return False
        return any(self.order[user] > self.order[node] for user in inputs[0].users)

    def _name_of(self, node: fx.Node) -> str:
        local = str(node.target) if node.op == "call_module" else node.name
        return f"{self.part.name}.{local}" if self.part.name else local

    def _copy(self, node: fx.Node) -> None:
        """The node as it was, on float32."""
        new = self.graph.node_copy(node, lambda argument: self._real(argument))
        self.values[node] = _Value(real=new) if node in self.part.ranges else new

    def _real_arguments(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, self._real)

    def _real(self, node: fx.Node) -> fx.Node:
        """A node's result as what it was in the old graph."""
        value = self.values[node]
        if not isinstance(value, _Value):
            assert isinstance(value, fx.Node)
            return value
        if value.real is None:
            value.real = self.graph.call_function(pointwise.dequantize, (value.int8,))
        return value.real

    def _in_int8(self, node: fx.Node) -> tuple[fx.Node, Tensor]:
        """A node's result in int8, and its grid."""
        value = self.values[node]
        if not isinstance(value, _Value):
            raise _NotInInt8("its input is no tensor of floats")
        if value.int8 is None:
            value.grid = self._grid(node)
            value.int8 = self._add(f"{node.name}_quantize", Quantize(value.grid), value.real)
        assert value.grid is not None
        return value.int8, value.grid

    def _grid(self, node: fx.Node) -> Tensor:
        """The grid of a node's result.

        Raises:
            ValueError: it was not finite over calibration.
        """
        seen = self.part.ranges.get(node, Range())
        if not seen.batches:
            raise _NotInInt8("no calibration batch has reached it")
        if not seen.is_finite:
            raise ValueError(
                f"the output of {self._name_of(node)} is not finite over the calibration batches "
                f"(from {seen.low} to {seen.high}): look at the model and at the batches"
            )
        if seen.is_zero:
            raise _NotInInt8("its output is 0 in all calibration batches, which gives no range")
        return grid_of(seen.low, seen.high)

    def _add(self, name: str, module: nn.Module, *inputs: Any) -> fx.Node:
        """A call of a module that the model did not have."""
        self.added[name] = module
        return self.graph.call_module(f"{ROOM}.{name}", inputs)

    def _only_user(self, node: fx.Node, kind: str) -> fx.Node | None:
        users = list(node.users)
        return users[0] if len(users) == 1 and self.kinds[users[0]].name == kind else None

    def _set(self, node: fx.Node, int8: fx.Node, grid: Tensor) -> bool:
        self.values[node] = _Value(int8=int8, grid=grid)
        return True

    def _convert(self, node: fx.Node) -> bool:
        """Put a node into the new graph in int8; False where it is to be copied."""
        kind = self.kinds[node]
        if node in self.scores:
            return False
        if kind.name == "size":
            return self._size(node, kind)
        if node not in self.part.ranges:
            if node.op == "call_module" and any(True for _ in self.modules[str(node.target)].parameters()):
                raise _NotInInt8("no calibration batch has reached it, or its output is no tensor of floats")
            return False
        if node.op in ("placeholder", "get_attr"):
            return False
        if kind.name == "other":
            raise _NotInInt8(f"there is no int8 form of {_described(node, self.modules)}")
        convert: Callable[[fx.Node, Kind], bool] = getattr(self, f"_int8_{kind.name}")
        return convert(node, kind)

    def _size(self, node: fx.Node, kind: Kind) -> bool:
        value = self.values[kind.inputs[0]]
        if not isinstance(value, _Value) or value.int8 is None:
            return False
        values = self.graph.call_function(getattr, (value.int8, "values"))
        self.values[node] = self.graph.node_copy(node, lambda argument: values)
        return True

    def _int8_layer(self, node: fx.Node, kind: Kind) -> bool:
        layer = self.modules[str(node.target)]
        assert isinstance(layer, (nn.Conv2d, nn.Linear))
        behind = self._behind_scores(node)
        is_last = behind is not None
        self.scores.update(behind or ())
        if is_last and self.options.classifier == "fp32":
            self.kept[self._name_of(node)] = 'it is the classifier (classifier="fp32")'
            return False
        windows = self._check_layer(layer)
        weight, bias = layer.weight, layer.bias
        norm = self._only_user(node, "batch_norm")
        if norm is None or not self._can_fold(self.modules[str(norm.target)]):
            self._replace(node, node, (layer,), weight, bias, windows, to_float=is_last)
            return True
        normalization = self.modules[str(norm.target)]
        weight, bias = folded(weight, bias, normalization)
        self._replace(node, norm, (layer, normalization), weight, bias, windows)
        self.replaced[str(norm.target)] = nn.Identity()
        return True

    def _behind_scores(self, node: fx.Node) -> list[fx.Node] | None:
        """The nodes between a layer that makes the model's scores and the output; None where it makes something else.

        Scores outgrow the range that they had at calibration. What is behind them tells that they are scores: averages
        of a convolution's, or probabilities.
        """
        behind: list[fx.Node] = []
        for each in chain([node], behind):
            for user in each.users:
                if user.op == "output" or self.kinds[user].name == "size":
                    continue
                if self.part.name or not (self.kinds[user].name in _BEHIND_SCORES or is_of_scores(user, self.modules)):
                    return None
                behind.append(user)
        tell = [each for each in behind if self.kinds[each].name in _AVERAGES or is_of_scores(each, self.modules)]
        return behind if tell or not behind else None

    def _replace(
        self,
        node: fx.Node,
        last: fx.Node,
        origins: Sequence[nn.Module],
        weight: Tensor,
        bias: Tensor | None,
        windows: Windows,
        *,
        to_float: bool = False,
    ) -> None:
        """Put an int8 layer in the place of the nodes from one to another, and of clamp and pool behind them.

        Args:
            origins: the modules that the weight and the bias are of; they say what trains.
        """
        low, high, ranged = self._clamp_behind(last)
        if to_float:
            low, high, ranged = None, None, last
        pool = None if to_float or weight.dim() != 4 else self._pool_behind(ranged)
        if pool is not None:
            windows = windows._replace(pool=self.kinds[pool].options["pool"])
        end = pool or ranged
        if not bool(weight.isfinite().all()):
            raise ValueError(f"the weight of {self._name_of(node)} is not finite, BatchNorm included")
        if not bool(weight.any()):
            raise _NotInInt8("its weight is 0")
        grid = None if to_float else self._grid(ranged)
        source, input_grid = self._in_int8(self.kinds[node].inputs[0])
        make = Int8Linear if weight.dim() == 2 else Int8Conv2d
        name = self._name_of(node)
        self.replaced[str(node.target)] = made = make(
            weight, bias, windows, input_grid[:1], grid, low=low, high=high, masters=self.options.masters,
            headroom=self.options.headroom, seed=zlib.crc32(name.encode()) ^ self.options.seed,
        )  # fmt: skip
        made.trained.requires_grad_(_trains(origins, "weight"))
        if made.bias is not None:
            made.bias.requires_grad_(_trains(origins, "bias"))
        self.layers.append(name)
        new = self.graph.call_module(str(node.target), (source,))
        self._mark(node, end)
        self.values[end] = _Value(real=new) if grid is None else _Value(int8=new, grid=grid)

    def _pool_behind(self, node: fx.Node) -> fx.Node | None:
        """A max-pool that a layer's operators can do."""
        pool = self._only_user(node, "max_pool")
        if pool is None or pool not in self.part.ranges:
            return None
        return pool if can_be_of_a_layer(self.kinds[pool].options["pool"]) else None

    def _mark(self, start: fx.Node, end: fx.Node) -> None:
        """The nodes from one to another in a row are done."""
        node = start
        while True:
            self.done.add(node)
            if node is end:
                return
            node = next(iter(node.users))

    def _clamp_behind(self, node: fx.Node) -> tuple[float | None, float | None, fx.Node]:
        clamp = self._only_user(node, "clamp")
        if clamp is None:
            return None, None, node
        options = self.kinds[clamp].options
        return options["low"], options["high"], clamp

    def _check_layer(self, layer: nn.Conv2d | nn.Linear) -> Windows:
        if type(layer) not in (nn.Conv2d, nn.Linear):
            raise _NotInInt8(f"{type(layer).__name__} may compute something of its own")
        if layer not in self.called_once:
            raise _NotInInt8("it is called more than once")
        if id(layer.weight) in self.shared:
            raise _NotInInt8(f"its weight is shared by {', '.join(self.shared[id(layer.weight)])}")
        if layer.weight.dtype != torch.float32 or layer.weight.device.type != "cpu":
            raise _NotInInt8(f"its weight is {layer.weight.dtype} on {layer.weight.device}, not float32 on the CPU")
        if isinstance(layer, nn.Linear):
            return Windows()
        if layer.padding_mode != "zeros":
            raise _NotInInt8(f"it is padded by {layer.padding_mode!r}")
        padding = layer.padding
        if isinstance(padding, str):
            reaches = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
            if padding == "same" and any(reach % 2 for reach in reaches):
                raise _NotInInt8("its padding differs from side to side")
            padding = (0, 0) if padding == "valid" else (reaches[0] // 2, reaches[1] // 2)
        return Windows(layer.stride, padding, layer.dilation, layer.groups)  # type: ignore[arg-type]

    def _can_fold(self, norm: nn.Module) -> bool:
        return norm in self.called_once and getattr(norm, "running_mean", None) is not None

    def _int8_batch_norm(self, node: fx.Node, kind: Kind) -> bool:
        """One that is behind no layer: a depthwise convolution of one pixel."""
        norm = self.modules[str(node.target)]
        if not isinstance(norm, nn.BatchNorm2d) or not self._can_fold(norm):
            raise _NotInInt8("it is a BatchNorm that cannot be folded")
        if self.kinds[kind.inputs[0]].name == "layer":
            raise _NotInInt8("the layer before it stays float32, or is used elsewhere, too")
        channels = norm.num_features
        weight, bias = folded(torch.ones(channels, 1, 1, 1), None, norm)
        self._replace(node, node, (norm,), weight, bias, Windows(groups=channels))
        return True

    def _int8_clamp(self, node: fx.Node, kind: Kind) -> bool:
        source, grid = self._in_int8(kind.inputs[0])
        return self._set(node, self._add(node.name, Int8Windows(pointwise.clamp, **kind.options), source), grid)

    def _int8_add(self, node: fx.Node, kind: Kind) -> bool:
        self._require_shapes(kind, same=True)
        # Where the sum itself is seen elsewhere, the clamp is another operator.
        low, high, end = (None, None, node) if self._is_seen_by_others(node) else self._clamp_behind(node)
        grid = self._grid(end)
        inputs = [self._in_int8(each)[0] for each in kind.inputs]
        new = self._add(node.name, Int8Add(grid, low, high), *inputs)
        self._mark(node, end)
        return self._set(end, new, grid)

    def _int8_multiply(self, node: fx.Node, kind: Kind) -> bool:
        self._require_shapes(kind, same=False)
        grid = self._grid(node)
        inputs = [self._in_int8(each)[0] for each in kind.inputs]
        return self._set(node, self._add(node.name, Int8Multiply(grid), *inputs), grid)

    def _int8_concatenate(self, node: fx.Node, kind: Kind) -> bool:
        grid = self._grid(node)
        inputs = [self._in_int8(each)[0] for each in kind.inputs]
        return self._set(node, self._add(node.name, Int8Concatenate(grid, kind.options["dim"]), *inputs), grid)

    def _require_shapes(self, kind: Kind, *, same: bool) -> None:
        shapes = [self.part.shapes.get(each) for each in kind.inputs]
        if None in shapes or kind.inputs[0].op == "get_attr" or kind.inputs[1].op == "get_attr":
            raise _NotInInt8("an operand is no activation")
        first, second = (tuple(shape or ()) for shape in shapes)
        large, small = (first, second) if math.prod(first) >= math.prod(second) else (second, first)
        fits = len(large) == len(small) and all(s in (1, n) for s, n in zip(small, large, strict=True))
        if first != second if same else not fits:
            raise _NotInInt8(f"its operands have the shapes {first} and {second}")

    def _int8_max_pool(self, node: fx.Node, kind: Kind) -> bool:
        pool = kind.options["pool"]
        if math.prod(pool.kernel_size) > MOST_WINDOW_ELEMENTS:
            raise _NotInInt8(f"its windows have more than {MOST_WINDOW_ELEMENTS} elements")
        return self._pooled(node, kind, pooling.max_pool)

    def _int8_average_pool(self, node: fx.Node, kind: Kind) -> bool:
        return self._pooled(node, kind, pooling.average_pool)

    def _int8_adaptive_pool(self, node: fx.Node, kind: Kind) -> bool:
        return self._pooled(node, kind, pooling.adaptive_average_pool)

    def _pooled(self, node: fx.Node, kind: Kind, function: Callable[..., Int8Activation]) -> bool:
        shape = self.part.shapes.get(kind.inputs[0])
        if shape is None or len(shape) != 4:
            raise _NotInInt8("its input is no batch of images")
        source, grid = self._in_int8(kind.inputs[0])
        return self._set(node, self._add(node.name, Int8Windows(function, **kind.options), source), grid)

    def _int8_mean(self, node: fx.Node, kind: Kind) -> bool:
        pooled = Kind("adaptive_pool", kind.inputs, {"output_size": (1, 1)})
        self._pooled(node, pooled, pooling.adaptive_average_pool)
        if not kind.options["keepdim"]:
            value = self.values[node]
            value.int8 = self.graph.call_function(reshaped, (value.int8, "flatten", 1))
        return True

    def _int8_reshape(self, node: fx.Node, kind: Kind) -> bool:
        value = self.values[kind.inputs[0]]
        if not isinstance(value, _Value) or value.int8 is None:
            return False
        args, kwargs = self._real_arguments((kind.options["args"], kind.options["kwargs"]))
        assert value.grid is not None
        new = self.graph.call_function(reshaped, (value.int8, kind.options["method"], *args), kwargs)
        return self._set(node, new, value.grid)

    def _int8_dropout(self, node: fx.Node, kind: Kind) -> bool:
        value = self.values[kind.inputs[0]]
        probability = kind.options["probability"]
        if not isinstance(value, _Value) or value.int8 is None:
            return False
        assert value.grid is not None
        return self._set(node, self._add(node.name, Int8Dropout(float(probability)), value.int8), value.grid)

    def _int8_same(self, node: fx.Node, kind: Kind) -> bool:
        self.values[node] = self.values[kind.inputs[0]]
        return True

    def _int8_function(self, node: fx.Node, kind: Kind) -> bool:
        grid = self._grid(node)
        source, input_grid = self._in_int8(kind.inputs[0])
        function = Int8Function(kind.options["function"], input_grid, grid)
        return self._set(node, self._add(node.name, function, source), grid)

    def _install(self) -> Callable[..., Any]:
        root = self.part.module
        for path, module in self.replaced.items():
            parent, _, name = path.rpartition(".")
            module.train(root.get_submodule(path).training)
            setattr(root.get_submodule(parent), name, module)
        if self.added:
            room = nn.Module()
            for name, module in self.added.items():
                room.add_module(name, module)
            setattr(root, ROOM, room.train(root.training))
        # Its modules are the root's own; what it adds is the code of its graph.
        return type(fx.GraphModule(root, self.graph)).forward


def reshaped(input: Int8Activation, method: str, *args: Any, **kwargs: Any) -> Int8Activation:
    """An activation in another shape, by a method of tensors."""
    values, slot = (getattr(tensor, method)(*args, **kwargs) for tensor in (input.values, input.slot))
    return Int8Activation(in_memory_order(values), slot, input.grid)


def rewrite(part: TracedModule, options: Options, shared: Mapping[int, Sequence[str]]) -> Rewritten:
    """Rewrite a traced and calibrated module to int8. The module itself is changed by what is returned.

    Args:
        shared: by the id of a parameter that several modules hold, their names.

    Raises:
        ValueError: a range or a weight is not finite.
    """
    return _Rewriter(part, options, shared).run()


def _trains(modules: Sequence[nn.Module], name: str) -> bool:
    """Whether one of the parameters of that name does."""
    return any(p.requires_grad for module in modules if (p := module._parameters.get(name)) is not None)


def _described(node: fx.Node, modules: dict[str, nn.Module]) -> str:
    if node.op == "call_module":
        return type(modules[str(node.target)]).__name__
    return str(getattr(node.target, "__name__", node.target))

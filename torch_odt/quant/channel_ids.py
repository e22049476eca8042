"""Which channels of a network belong together: a number for each channel, sent through its operators.

A filter can go only with everything that its output meets: rows of a norm, of a depthwise convolution, of the filters
whose output it is added to, and columns of the layers that read it. Where these lie is found by running the traced
network on numbers of channels in the place of activations: flattening, permuting and concatenating move them as they
move values, addition makes two of them one, and what is not known pins the channels that go through it, so that they
stay. No family of networks needs a table of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from torch_odt.adapt.chain import trace
from torch_odt.errors import first_line

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# By name, as modules and functions, without "_" and "2d": what treats all channels alike and each by itself, ...
_ELEMENTWISE = frozenset((
    "identity", "dropout", "alphadropout", "stochasticdepth", "relu", "relu6", "hardtanh", "hardswish", "silu", "gelu",
    "sigmoid", "hardsigmoid", "tanh", "leakyrelu", "elu", "selu", "mish", "clamp", "contiguous", "clone", "detach",
))  # fmt: skip
# ... what mixes places of an image, but not channels; and what is neither.
_SPATIAL = frozenset((
    "adaptiveavgpool", "adaptivemaxpool", "avgpool", "maxpool", "interpolate", "upsample", "upsamplingnearest",
    "upsamplingbilinear",
))  # fmt: skip
_PAIRWISE = frozenset(("add", "iadd", "sub", "isub", "mul", "imul", "truediv", "itruediv", "div", "maximum", "minimum"))
_MOVING = frozenset(("permute", "transpose", "flatten", "cat", "concat", "unsqueeze"))
_REDUCING = frozenset(("mean", "sum", "amax"))
_RESHAPING = frozenset(("view", "reshape"))
_LIBRARIES = ("torch", "_operator", "torchvision.ops")


@dataclass(frozen=True)
class ChannelIds:
    """What was found; channels with equal numbers can only go together.

    Attributes:
        outputs: of each convolution and linear layer, a number for each row of the weight, in the order of running.
        inputs: of those that are not depthwise, a number for each column.
        norms: of each BatchNorm, a number for each channel.
        pinned: for numbers that must stay, why.
    """

    outputs: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    norms: Mapping[str, Tensor]
    pinned: Mapping[int, str]


def find_channel_ids(model: nn.Module, example: Tensor) -> ChannelIds:
    """Send numbers of channels through a model, in training and in evaluation.

    Args:
        model: takes one tensor; left as it is.
        example: a batch of inputs; only its shape and dtype are used.

    Raises:
        ValueError: the model cannot be traced by torch.fx, or does not take such inputs.
    """
    found = _Channels(model)
    modes = [(module, module.training) for module in model.modules()]
    try:
        # Auxiliary classifiers read channels in training alone.
        traced = [trace(model.train(mode)) for mode in (True, False)]
        model.eval()
        for each in traced:
            _run(each, found, example)
    finally:
        for module, training in modes:
            module.training = training
    return found.result()


class _Channels:
    """Numbers of channels, those that were found to be one, and where they are."""

    def __init__(self, model: nn.Module) -> None:
        self._parents: list[int] = []
        self._reasons: dict[int, str] = {}
        self.shared = _sharing(model)
        self.outputs: dict[str, Tensor] = {}
        self.inputs: dict[str, Tensor] = {}
        self.norms: dict[str, Tensor] = {}

    def new(self, count: int) -> Tensor:
        start = len(self._parents)
        self._parents.extend(range(start, start + count))
        return torch.arange(start, start + count)

    def note(self, kept: dict[str, Tensor], name: str, ids: Tensor) -> Tensor:
        """Keep a layer's numbers; where it runs again, its channels are the same ones."""
        if name in kept:
            self.unite(kept[name], ids)
        return kept.setdefault(name, ids)

    def unite(self, left: Tensor, right: Tensor) -> None:
        """Of two tensors of one shape, what stands at the same place is one."""
        for a, b in torch.stack([left.flatten(), right.flatten()], 1).unique(dim=0).tolist():
            a, b = self._root(a), self._root(b)
            if a != b:
                self._parents[b] = a
                if b in self._reasons:
                    self._reasons.setdefault(a, self._reasons[b])

    def meet(self, left: Tensor, right: Tensor, reason: str) -> Tensor:
        """What two tensors make together; pinned where a channel meets several others."""
        left, right = torch.broadcast_tensors(left, right)
        shape = left.shape
        left, right = (self.roots(each) for each in torch.broadcast_tensors(_once(left), _once(right)))
        pairs = torch.stack([left.flatten(), right.flatten()], 1).unique(dim=0)
        if any(len(side.unique()) < len(side) for side in pairs.unbind(1)):
            self.pin(pairs, reason)
        else:
            self.unite(left, right)
        return left.expand(shape)

    def pin(self, ids: Tensor, reason: str) -> None:
        for each in _once(ids).unique().tolist():
            self._reasons.setdefault(self._root(each), reason)

    def roots(self, ids: Tensor) -> Tensor:
        return torch.tensor([self._root(each) for each in range(len(self._parents))], dtype=torch.int64)[ids]

    def result(self) -> ChannelIds:
        kept = (self.outputs, self.inputs, self.norms)
        outputs, inputs, norms = ({name: self.roots(ids) for name, ids in each.items()} for each in kept)
        return ChannelIds(outputs, inputs, norms, {self._root(each): why for each, why in self._reasons.items()})

    def _root(self, each: int) -> int:
        while self._parents[each] != each:
            self._parents[each] = self._parents[self._parents[each]]
            each = self._parents[each]
        return each


class _Propagation(fx.Interpreter):
    """Runs a traced model on tensors of its activations' shapes that hold numbers of channels."""

    def __init__(self, traced: fx.GraphModule, found: _Channels, dtype: torch.dtype) -> None:
        super().__init__(traced)
        self._found = found
        self._dtype = dtype
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._node = ""

    def run_node(self, n: fx.Node) -> Any:
        self._node = n.name
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._pinned(value, f"its channels meet {target}") if isinstance(value, Tensor) else value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        kind = type(module)
        name = _plain(kind.__name__)
        x = args[0] if args else None
        if target in self._found.shared and isinstance(x, Tensor):
            return self._unreadable(target, module, x, f"{target} has weights of {self._found.shared[target]} for them")
        if isinstance(x, Tensor) and kind.__module__.startswith("torch.nn"):
            if kind in CONVOLUTIONS:
                return self._convolution(target, module, x)
            if kind is nn.Linear:
                return self._linear(target, module, x)
            if kind in NORMS and (ids := _along(x, 1)) is not None:
                self._found.note(self._found.norms, target, ids)
                return x
            if name in _ELEMENTWISE:
                return x
            if name in _SPATIAL:
                return self._spatial(module, args, kwargs, target)
            if kind is nn.Flatten:
                return module(x)
        return self._unknown(module, args, kwargs, f"its channels go through {target} ({kind.__name__})")

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        is_known = (getattr(target, "__module__", "") or "torch").startswith(_LIBRARIES)
        return self._call(target, target.__name__ if is_known else "", args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._call(lambda x, *rest, **named: getattr(x, target)(*rest, **named), str(target), args, kwargs)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        for leaf in tree_leaves(args):
            if isinstance(leaf, Tensor):
                self._found.pin(leaf, "its channels are the model's output")
        return None

    def _call(self, call: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        name = _plain(name)
        reason = f"its channels go through {self._node}"
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        x = args[0] if args else None
        if name in _PAIRWISE and tensors:
            return self._pairwise(tensors, reason)
        if isinstance(x, Tensor) and len(tensors) == 1:
            if name in _ELEMENTWISE:
                return x
            if name in _SPATIAL:
                return self._spatial(call, args, kwargs, self._node)
            if name in _REDUCING:
                return self._reduced(call, args, kwargs, reason)
            if name in _RESHAPING and _flattens(x, *args[1:]):
                return x.reshape(x.shape[0], -1)
        if name in _MOVING and tensors:
            return _moved(call, name, args, kwargs)
        return self._unknown(call, args, kwargs, reason)

    def _convolution(self, name: str, module: Any, x: Tensor) -> Any:
        ids = _along(x, 1) if x.dim() == module.weight.dim() else None
        is_depthwise = 1 < module.groups == module.in_channels
        if module.groups > 1 and not is_depthwise:
            return self._unreadable(name, module, x, f"{name} reads them in {module.groups} groups")
        if ids is None:
            return self._unreadable(name, module, x, f"{name} does not read them by channel")
        if is_depthwise:
            ids = ids.repeat_interleave(module.out_channels // module.in_channels)
            rows = self._found.note(self._found.outputs, name, ids)
        else:
            self._found.note(self._found.inputs, name, ids)
            rows = self._rows(name, module.out_channels)
        (shape,) = self._shapes(module, (x,), {})
        return rows.view(1, -1, *[1] * (x.dim() - 2)).expand(shape)

    def _linear(self, name: str, module: nn.Linear, x: Tensor) -> Any:
        ids = _along(x, x.dim() - 1)
        if ids is None:
            return self._unreadable(name, module, x, f"{name} does not read them by channel")
        self._found.note(self._found.inputs, name, ids)
        return self._rows(name, module.out_features).expand(*x.shape[:-1], -1)

    def _unreadable(self, name: str, module: Any, x: Tensor, reason: str) -> Any:
        """A layer whose inputs cannot be told apart by channel: neither they nor its own filters may go."""
        self._found.pin(self._rows(name, module.weight.shape[0]), reason.replace("them", "its inputs"))
        return self._unknown(module, (x,), {}, reason)

    def _rows(self, name: str, count: int) -> Tensor:
        known = self._found.outputs.get(name)
        return self._found.note(self._found.outputs, name, self._found.new(count) if known is None else known)

    def _spatial(self, call: Callable[..., Any], args: Any, kwargs: Any, name: str) -> Any:
        """Pooling and resizing of all dimensions behind the channels."""
        x = args[0]
        shapes = self._shapes(call, args, kwargs)
        ids = _along(x, 1)
        if ids is None or len(shapes) != 1 or len(shapes[0]) != x.dim():
            return self._unknown(call, args, kwargs, f"its channels go through {name}, not by channel")
        return ids.view(1, -1, *[1] * (x.dim() - 2)).expand(shapes[0])

    def _reduced(self, call: Callable[..., Any], args: Any, kwargs: Any, reason: str) -> Any:
        """A mean, say: channels survive where all that is reduced are places of the same one."""
        small = args[0]
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        for dim in [dims] if isinstance(dims, int) else dims or range(small.dim()):
            first = small.narrow(dim, 0, 1)
            if not torch.equal(_once(small), _once(first).expand_as(_once(small))):
                return self._unknown(call, args, kwargs, reason)
            small = first
        (shape,) = self._shapes(call, args, kwargs)
        return small.reshape(shape)

    def _pairwise(self, tensors: list[Tensor], reason: str) -> Any:
        made = tensors[0]
        for other in tensors[1:]:
            if other.numel() == 1 or made.numel() == 1:
                made = made if other.numel() == 1 else other
            else:
                made = self._found.meet(made, other, reason)
        return made

    def _unknown(self, call: Callable[..., Any], args: Any, kwargs: Any, reason: str) -> Any:
        """Pin what goes in and what comes out; a call that makes no tensor (a size) pins nothing."""
        made = self._run_fake(call, args, kwargs)
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(made)):
            return made
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._found.pin(leaf, reason)
        return tree_map(lambda leaf: self._pinned(leaf, reason) if isinstance(leaf, Tensor) else leaf, made)

    def _shapes(self, call: Callable[..., Any], args: Any, kwargs: Any) -> list[torch.Size]:
        made = self._run_fake(call, args, kwargs)
        return [leaf.shape for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]

    def _run_fake(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def faked(leaf: Any) -> Any:
            return torch.empty(leaf.shape, dtype=self._dtype) if isinstance(leaf, Tensor) else leaf

        with self._mode:
            return call(*tree_map(faked, args), **tree_map(faked, kwargs))

    def _pinned(self, like: Tensor, reason: str) -> Tensor:
        ids = self._found.new(1)
        self._found.pin(ids, reason)
        return ids.expand(like.shape) if like.dim() else ids.reshape(())


def _run(traced: fx.GraphModule, found: _Channels, example: Tensor) -> None:
    # Layers are called with the example's shape, and may raise anything.
    try:
        _Propagation(traced, found, example.dtype).run(_pinned_like(example, found))
    except Exception as error:
        name = type(traced).__name__
        shape = tuple(example.shape)
        raise ValueError(f"the model ({name}) does not take inputs of {shape}: {first_line(error)}") from error


def _pinned_like(example: Tensor, found: _Channels) -> Tensor:
    ids = found.new(1)
    found.pin(ids, "its channels are the model's input")
    return ids.expand(1, *example.shape[1:])


def _sharing(model: nn.Module) -> dict[str, str]:
    """Layers that have a parameter in common with another, and that one's name."""
    owners: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                first = owners.setdefault(id(parameter), name)
                if first != name:
                    shared |= {name: first, first: name}
    return shared


def _plain(name: str) -> str:
    """A name without its dimensions: AvgPool2d, avg_pool2d and avg_pool3d are one."""
    return re.sub("[123]d$", "", name.lower().replace("_", ""))


def _once(ids: Tensor) -> Tensor:
    """The same numbers, without the repetitions of dimensions that were expanded."""
    for dim in range(ids.dim()):
        if ids.stride(dim) == 0 and ids.shape[dim] > 1:
            ids = ids.narrow(dim, 0, 1)
    return ids


def _along(ids: Tensor, dim: int) -> Tensor | None:
    """The numbers along a dimension, where they are the same at all places of the others; None where they are not."""
    if ids.dim() <= dim:
        return None
    small = _once(ids)
    first = small.transpose(0, dim).flatten(1)[:, 0]
    shape = [1] * ids.dim()
    shape[dim] = -1
    if not torch.equal(small, first.view(shape).expand_as(small)):
        return None
    return first.expand(ids.shape[dim])


def _flattens(x: Tensor, *sizes: Any) -> bool:
    """Whether a view makes rows of each sample, by sizes that stay right when there are fewer channels."""
    listed = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    return len(listed) == 2 and listed[1] == -1 and listed[0] in (-1, x.shape[0])


def _moved(call: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    if name not in ("cat", "concat"):
        return call(*args, **kwargs)
    tensors = args[0] if args else kwargs["tensors"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    # Images of a channel's number take as much as activations do: one place of each is enough.
    alike = [
        each
        for each in range(len(shape))
        if each != dim % len(shape) and all(tensor.stride(each) == 0 for tensor in tensors)
    ]
    for each in alike:
        tensors = [tensor.narrow(each, 0, 1) for tensor in tensors]
    return torch.cat(list(tensors), dim).expand(shape)

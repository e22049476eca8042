"""From a model to a `TrainingGraph`.

The step is traced with fake tensors (no memory for data, nothing is executed) by AOTAutograd, which yields the joint
graph of forward and backward in aten operators; `from_joint` turns that into plain data.
"""

from __future__ import annotations

import logging
import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import nn

from torch_odt.capture import operators
from torch_odt.capture.effects import effects_refused, plain_tensors_kept, refuse_hooks
from torch_odt.capture.graph import Op, Output, OutputKind, Ref, TrainingGraph, Value, ValueKind, refs
from torch_odt.capture.loss_modules import loss_module
from torch_odt.errors import CaptureError, LossError

Batch = tuple[tuple[Any, ...], dict[str, Any]]
Compute = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[torch.Tensor, Any]]


@dataclass
class TracedStep:
    """A traced step: the graph as it came out of the trace, and how to put the model's outputs together again.

    `result_spec` describes the nested structure of the model's outputs; `result_leaves` holds for each leaf the
    position among the graph's results, or the leaf itself when it is no tensor.
    """

    graph: TrainingGraph
    result_spec: Any
    result_leaves: list[tuple[int | None, Any]] = field(default_factory=list)

    def rebuild_results(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The model's outputs.

        Raises:
            TypeError: they hold an object whose tensors were not followed.
        """
        for _, constant in self.result_leaves:
            if isinstance(constant, Opaque):
                raise TypeError(
                    f"the model returns a {constant.type_name}, whose tensors cannot be returned; return a tensor, "
                    "tuple or dict, or register the type with torch.utils._pytree"
                )
        leaves = [constant if position is None else tensors[position] for position, constant in self.result_leaves]
        return pytree.tree_unflatten(leaves, self.result_spec)


@dataclass(frozen=True)
class Opaque:
    """Stands for an output that is neither a tensor nor a plain value: what is in it was not followed."""

    type_name: str


_PLAIN = (bool, int, float, str, type(None))


class _Step(nn.Module):
    """Model and loss as one module whose outputs are the loss and the model's flattened tensors."""

    def __init__(self, model: nn.Module, loss_fn: Any, compute: Compute) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_module(model, loss_fn)
        # In a list, so that it is no submodule.
        self._watched = [loss_fn]
        self._compute = compute
        self.result_spec: Any = None
        self.result_leaves: list[tuple[int | None, Any]] = []

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        with effects_refused(self, self._watched[0]):
            loss, results = self._compute(self.model, args, kwargs)
        leaves, self.result_spec = pytree.tree_flatten(results)
        self.result_leaves = []
        tensors: list[torch.Tensor] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self.result_leaves.append((len(tensors), None))
                tensors.append(leaf.detach().clone())
            else:
                self.result_leaves.append((None, leaf if isinstance(leaf, _PLAIN) else Opaque(type(leaf).__name__)))
        return (loss, *tensors)


def trace_step(model: nn.Module, loss_fn: Any, compute: Compute, batch: Batch) -> TracedStep:
    """Trace forward, loss and backward of one step without executing it.

    Args:
        model: the module to train, in the mode (training or evaluation) in which it is to run.
        loss_fn: the loss; parameters and buffers of its modules belong to the graph.
        compute: called as `compute(model, args, kwargs)`; returns the scalar loss and the model's outputs.
        batch: positional and keyword arguments of a step; their data is not read.

    Raises:
        CaptureError: the step depends on the data of its tensors or uses something that has no graph.
    """
    step = _Step(model, loss_fn, compute)
    refuse_hooks(step)
    try:
        with plain_tensors_kept(model, loss_fn), ExitStack() as stack, _tracing():
            from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

            joint = aot_export_joint_with_descriptors(stack, step, batch)
            module = joint.graph_module
    except (CaptureError, LossError):
        raise
    except Exception as error:
        raise CaptureError(_explain(error)) from error
    graph = from_joint(module, *_describe(module))
    return TracedStep(graph, step.result_spec, step.result_leaves)


@contextmanager
def _tracing() -> Iterator[None]:
    """Models that ask `torch.compiler.is_compiling()` leave out checks that depend on data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    # Tensors that are no parameters, buffers or inputs (a mask made once, the classes' weights) become constants.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # A batch that an operator refuses is told as the error that it raises, once, and not with torch's stacks as well.
    log, thread = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(is_of_others)
    try:
        with warnings.catch_warnings(), eager_operators(), fake:
            warnings.simplefilter("ignore")
            yield
    finally:
        log.removeFilter(is_of_others)
        torch.compiler._is_compiling_flag = before


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_UPSAMPLING = (
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)


@contextmanager
def eager_operators() -> Iterator[None]:
    """Trace recurrent layers and upsampling through the same C++ code as eager.

    The Python decompositions that torch takes in traces never apply the dropout between recurrent layers (they compare
    the layer's number the wrong way round), so a captured LSTM would not be the model. Bilinear upsampling becomes some
    fifty operators by them, and four tensors of its result's size instead of one.
    """
    from torch._C import DispatchKey

    removed: list[tuple[torch._ops.OpOverload, dict[Any, Any]]] = []
    for name in (*_RECURRENT, *_UPSAMPLING):
        packet = getattr(torch.ops.aten, name)
        for overload in (getattr(packet, each) for each in packet.overloads()):
            removed.append((overload, dict(overload.py_kernels)))
            # How a shape is found out stays as it is.
            for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd):
                overload.py_kernels.pop(key, None)
            overload._dispatch_cache.clear()
    try:
        yield
    finally:
        for overload, kernels in removed:
            overload.py_kernels.update(kernels)
            overload._dispatch_cache.clear()


def _explain(error: Exception) -> str:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    if isinstance(error, DataDependentOutputException):
        return f"the step branches on the data of a tensor ({error.func})"
    if isinstance(error, DynamicOutputShapeException):
        return f"the shape of a tensor depends on data ({error.func})"
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line}"


def _describe(
    module: torch.fx.GraphModule,
) -> tuple[list[tuple[ValueKind, str | int]], list[tuple[OutputKind, Any] | None]]:
    """What every input and output of an exported joint graph is, from AOTAutograd's descriptors."""
    from torch._functorch._aot_autograd import descriptors as d

    inputs: list[tuple[ValueKind, str | int]] = []
    for node in module.graph.find_nodes(op="placeholder"):
        desc = node.meta["desc"]
        if isinstance(desc, d.ParamAOTInput):
            inputs.append(("parameter", _qualified(desc.target)))
        elif isinstance(desc, d.BufferAOTInput):
            inputs.append(("buffer", _qualified(desc.target)))
        elif isinstance(desc, d.TangentAOTInput):
            inputs.append(("tangent", len([i for i in inputs if i[0] == "tangent"])))
        elif isinstance(desc, d.PlainAOTInput):
            inputs.append(("input", desc.idx))
        else:
            raise CaptureError(f"the step has an input of a kind that is not supported ({desc})")

    outputs: list[tuple[OutputKind, Any] | None] = []
    for desc in module.graph.output_node().meta["desc"]:
        if isinstance(desc, d.PlainAOTOutput):
            outputs.append(("loss", 0) if desc.idx == 0 else ("result", desc.idx - 1))
        elif isinstance(desc, d.InputMutationAOTOutput) and isinstance(desc.mutated_input, d.BufferAOTInput):
            outputs.append(("mutation", _qualified(desc.mutated_input.target)))
        elif isinstance(desc, d.GradAOTOutput) and isinstance(desc.grad_of, d.ParamAOTInput):
            outputs.append(("gradient", _qualified(desc.grad_of.target)))
        elif desc is None or isinstance(desc, d.GradAOTOutput):
            outputs.append(None)
        else:
            raise CaptureError(f"the step changes something that is neither a buffer nor a result ({desc})")
    return inputs, outputs


def _qualified(target: str) -> str:
    """The model's names as they are; those of a loss module behind `loss_fn:`, which no attribute can be called."""
    owner, _, name = target.partition(".")
    return name if owner == "model" else f"{owner}:{name}"


def from_joint(
    module: torch.fx.GraphModule,
    inputs: Sequence[tuple[ValueKind, str | int]],
    outputs: Sequence[tuple[OutputKind, Any] | None],
) -> TrainingGraph:
    """Turn a functional joint graph of aten operators into a `TrainingGraph`.

    Args:
        module: the joint graph; its nodes carry fake tensors in `meta["val"]`.
        inputs: kind and target of each placeholder, in order.
        outputs: kind and target of each output, in order; None for one that nobody wants.

    Raises:
        CaptureError: an operator changes its arguments, or is no operator of the dispatcher.
    """
    builder = _Builder(module)
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    for node, (kind, target) in zip(placeholders, inputs, strict=True):
        if node.meta.get("val") is not None and isinstance(node.meta["val"], torch.Tensor):
            builder.add_input(node, kind, target)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            builder.add_constant(node)
        elif node.op == "call_function":
            builder.add_call(node)
    returned = cast(Sequence[Any], module.graph.output_node().args[0])
    for node, description in zip(returned, outputs, strict=True):
        if node is not None and description is not None:
            builder.outputs.append(Output(builder.value_of(node), *description))
    return builder.finish()


class _Builder:
    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.module = module
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.inputs: list[int] = []
        self.outputs: list[Output] = []
        self.constants: dict[int, torch.Tensor] = {}
        self._value: dict[torch.fx.Node, int] = {}
        self._op: dict[torch.fx.Node, Op] = {}
        self._after_tangent: set[int] = set()
        self._backward = False

    def value_of(self, node: torch.fx.Node) -> int:
        return self._value[node]

    def add_input(self, node: torch.fx.Node, kind: ValueKind, target: str | int) -> None:
        index = self._new_value(node.name, node.meta["val"], kind, target=target)
        self._value[node] = index
        self.inputs.append(index)
        if kind == "tangent":
            self._after_tangent.add(index)

    def add_constant(self, node: torch.fx.Node) -> None:
        tensor = operator.attrgetter(cast(str, node.target))(self.module)
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(f"the step holds a constant that is no tensor ({node.target})")
        index = self._new_value(node.name, tensor, "constant")
        self._value[node] = index
        self.constants[index] = tensor.detach()

    def add_call(self, node: torch.fx.Node) -> None:
        if node.target is operator.getitem:
            self._add_item(node)
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            raise CaptureError(f"{node.target} is no operator of torch's dispatcher")
        if node.target._schema.is_mutable:
            raise CaptureError(f"{node.target} changes its arguments in place")
        args = self._arguments(node.args)
        kwargs = self._arguments(dict(node.kwargs))
        reads = tuple(dict.fromkeys(refs((args, kwargs))))
        named = {a.name: v for a, v in zip(node.target._schema.arguments, args, strict=False)} | kwargs
        self._backward = self._backward or not self._after_tangent.isdisjoint(reads)
        op = Op(
            index=len(self.ops),
            target=str(node.target),
            args=args,
            kwargs=kwargs,
            reads=reads,
            shape_reads=(),
            writes=(),
            is_view=operators.is_view(node.target),
            is_random=operators.is_random(node.target, named),
            phase="backward" if self._backward else "forward",
        )
        self.ops.append(op)
        self._op[node] = op
        result = node.meta["val"]
        if isinstance(result, torch.Tensor):
            self._value[node] = self._new_result(op, node.name, result)
            op.writes = (self._value[node],)
        else:
            op.writes = (None,) * len(result)

    def _add_item(self, node: torch.fx.Node) -> None:
        parent, position = cast(tuple[torch.fx.Node, int], node.args)
        op = self._op[parent]
        existing = op.writes[position]
        if existing is None:
            existing = self._new_result(op, node.name, node.meta["val"])
            op.writes = tuple(existing if i == position else w for i, w in enumerate(op.writes))
        self._value[node] = existing

    def _new_result(self, op: Op, name: str, tensor: torch.Tensor) -> int:
        base = self.values[op.reads[0]].base if op.is_view else None
        index = self._new_value(name, tensor, "computed", base=base, producer=op.index)
        if op.phase == "backward":
            self._after_tangent.add(index)
        return index

    def _new_value(
        self,
        name: str,
        tensor: torch.Tensor,
        kind: ValueKind,
        *,
        base: int | None = None,
        producer: int | None = None,
        target: str | int | None = None,
    ) -> int:
        index = len(self.values)
        value = Value(
            index=index,
            name=name,
            shape=tuple(int(n) for n in tensor.shape),
            stride=tuple(int(n) for n in tensor.stride()),
            dtype=str(tensor.dtype).removeprefix("torch."),
            nbytes=int(tensor.untyped_storage().nbytes()),
            kind=kind,
            base=index if base is None else base,
            producer=producer,
            target=target,
        )
        self.values.append(value)
        return index

    def _arguments(self, arguments: Any) -> Any:
        def convert(item: Any) -> Any:
            if isinstance(item, torch.fx.Node):
                return Ref(self._value[item])
            if isinstance(item, (list, tuple)):
                return (
                    type(item)(convert(i) for i in item) if type(item) in (list, tuple) else [convert(i) for i in item]
                )
            if isinstance(item, dict):
                return {k: convert(v) for k, v in item.items()}
            return item

        return convert(arguments)

    def finish(self) -> TrainingGraph:
        boundary = next((op.index for op in self.ops if op.phase == "backward"), len(self.ops))
        return TrainingGraph(
            ops=self.ops,
            values=self.values,
            inputs=self.inputs,
            outputs=self.outputs,
            boundary=boundary,
            program_length=len(self.ops),
            constants=self.constants,
        )

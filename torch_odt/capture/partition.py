"""AOTAutograd's partition step, with nothing but a token between forward and backward.

torch.compile hands AOTAutograd the joint graph of a piece of the model, which asks a partition function for a forward
and a backward module; every tensor that the forward module returns beyond its results is saved by autograd until the
backward pass. The modules made here have no bodies: they state inputs and outputs, and the one saved tensor is a token.
What runs is the `TrainingGraph`, whose values belong to the executor; so a plan may change without compiling again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx, nn

from torch_odt.capture.graph import OutputKind, TrainingGraph, ValueKind
from torch_odt.capture.rewrite import for_whole_batch, rewrite
from torch_odt.capture.trace import from_joint
from torch_odt.errors import CaptureError


@dataclass
class GraphPiece:
    """A piece of a model as a training graph, and how its inputs and outputs meet AOTAutograd's.

    Attributes:
        graph: the rewritten graph; without backward ops when the piece was captured for inference.
        forward_inputs: for each argument of the forward function the graph's value, None where the graph has none.
        tangents: the same for each tangent of the backward function.
        results: for each result of the forward function: its number among the graph's results, the target of a
            mutation, or `Constant`.
        gradient_count: how many gradients the backward function returns; None stands for those that do not exist.
    """

    graph: TrainingGraph
    forward_inputs: list[int | None]
    tangents: list[int | None] = field(default_factory=list)
    results: list[int | str | Constant] = field(default_factory=list)
    gradient_count: int = 0


@dataclass(frozen=True)
class Constant:
    """A result that is no tensor of the graph."""

    value: Any


def partition(
    joint: fx.GraphModule, num_fwd_outputs: int, disabled_rewrites: Collection[str] = ()
) -> tuple[GraphPiece, fx.GraphModule, fx.GraphModule]:
    """A joint graph as a `GraphPiece`, and the two modules that AOTAutograd wants.

    Args:
        joint: the graph of both; its inputs are primals, then tangents, its outputs are results, then gradients.
        num_fwd_outputs: how many of the outputs are results of the forward pass.
        disabled_rewrites: names of rewrites that are not to be made.

    Raises:
        CaptureError: the graph holds something that a `TrainingGraph` cannot express.
    """
    placeholders = list(joint.graph.find_nodes(op="placeholder"))
    primals = [node for node in placeholders if not _is_tangent(node)]
    tangents = [node for node in placeholders if _is_tangent(node)]
    returned = _returned(joint)
    results, gradients = returned[:num_fwd_outputs], returned[num_fwd_outputs:]
    inputs = [_input_description(node, i) for i, node in enumerate(primals)]
    inputs += [("tangent", i) for i in range(len(tangents))]
    outputs = _result_descriptions(joint, primals, results)
    outputs += [("gradient", i) for i in range(len(gradients))]
    piece = _make_piece(joint, inputs, outputs, len(primals), results, disabled_rewrites)
    piece.gradient_count = len(gradients)
    return piece, _forward_stub(primals, results), _backward_stub(primals, results, tangents, gradients)


def inference_piece(module: fx.GraphModule, disabled_rewrites: Collection[str] = ()) -> GraphPiece:
    """A graph without backward as a `GraphPiece`.

    Raises:
        CaptureError: the graph holds something that a `TrainingGraph` cannot express.
    """
    primals = list(module.graph.find_nodes(op="placeholder"))
    results = _returned(module)
    inputs = [_input_description(node, i) for i, node in enumerate(primals)]
    outputs = _result_descriptions(module, primals, results)
    return _make_piece(module, inputs, outputs, len(primals), results, disabled_rewrites)


def _returned(module: fx.GraphModule) -> list[Any]:
    return list(cast(Sequence[Any], module.graph.output_node().args[0]))


def _is_tangent(node: fx.Node) -> bool:
    return "tangents" in node.name


def _input_description(node: fx.Node, position: int) -> tuple[ValueKind, str | int]:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise CaptureError(f"an input of the model is on {value.device}; only the CPU is planned")
        if not fx_is_static(value):
            raise CaptureError("an input of the model has a shape that is not fixed")
    elif not isinstance(value, (int, float, bool, type(None))):
        raise CaptureError(f"the model has an input of a kind that is not supported ({type(value).__name__})")
    return ("parameter" if isinstance(value, nn.Parameter) else "input", position)


def fx_is_static(tensor: torch.Tensor) -> bool:
    """Whether every size of a traced tensor is a number."""
    return all(isinstance(size, int) for size in tensor.shape)


def _result_descriptions(
    module: fx.GraphModule, primals: Sequence[fx.Node], results: Sequence[Any]
) -> list[tuple[OutputKind, Any] | None]:
    """A result that is the new content of an input is a mutation: what reads the old content must be done by then."""
    position_of = {repr(node.meta["desc"]): i for i, node in enumerate(primals) if "desc" in node.meta}
    descriptions = module.graph.output_node().meta.get("desc") or [None] * len(results)
    found: list[tuple[OutputKind, Any] | None] = []
    for position, (node, description) in enumerate(zip(results, descriptions, strict=False)):
        mutated = getattr(description, "mutated_input", None)
        if not isinstance(node, fx.Node):
            found.append(None)
        elif mutated is not None and repr(mutated) in position_of:
            found.append(("mutation", position_of[repr(mutated)]))
        else:
            found.append(("result", position))
    return found


def _make_piece(
    module: fx.GraphModule,
    inputs: list[tuple[ValueKind, str | int]],
    outputs: list[tuple[OutputKind, Any] | None],
    primal_count: int,
    results: Sequence[Any],
    disabled_rewrites: Collection[str],
) -> GraphPiece:
    traced = from_joint(module, inputs, outputs)
    graph = for_whole_batch(rewrite(traced, disabled=disabled_rewrites), disabled_rewrites)
    given: dict[tuple[bool, int], int] = {}
    for index in graph.inputs:
        value = graph.values[index]
        given[value.kind == "tangent", int(value.target or 0)] = index
    tangent_count = len(inputs) - primal_count
    return GraphPiece(
        graph=graph,
        forward_inputs=[given.get((False, i)) for i in range(primal_count)],
        tangents=[given.get((True, i)) for i in range(tangent_count)],
        results=[_result(node, outputs[i], i) for i, node in enumerate(results)],
    )


def _result(node: Any, description: tuple[OutputKind, Any] | None, position: int) -> int | str | Constant:
    if description is None:
        return Constant(node)
    return position if description[0] == "result" else f"mutation of {description[1]}"


def _elsewhere() -> None:
    """Stands in the modules for whatever the executor computes."""
    raise RuntimeError("the module states inputs and outputs only")


def _forward_stub(primals: Sequence[fx.Node], results: Sequence[Any]) -> fx.GraphModule:
    graph = fx.Graph()
    copies = _placeholders(graph, primals)
    token = graph.call_function(_elsewhere)
    token.meta["val"] = _lasting_tensor(primals, results)
    graph.output((*(_stated(graph, node, copies) for node in results), token))
    return fx.GraphModule(nn.Module(), graph)


def _backward_stub(
    primals: Sequence[fx.Node], results: Sequence[Any], tangents: Sequence[fx.Node], gradients: Sequence[Any]
) -> fx.GraphModule:
    graph = fx.Graph()
    token = graph.placeholder("token")
    token.meta["val"] = _lasting_tensor(primals, results)
    copies = _placeholders(graph, tangents)
    graph.output(tuple(_stated(graph, node, copies) for node in gradients))
    return fx.GraphModule(nn.Module(), graph)


def _lasting_tensor(primals: Sequence[fx.Node], results: Sequence[Any]) -> Any:
    """What the token is said to be: a saved tensor that shares storage with an input is never taken for one that the
    backward pass may overwrite, so that `retain_graph=True` is allowed."""
    for node in (*primals, *results):
        if isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor):
            return node.meta["val"]
    raise CaptureError("the graph has neither tensor inputs nor results")


def _placeholders(graph: fx.Graph, nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    copies = {}
    for node in nodes:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    return copies


def _stated(graph: fx.Graph, node: Any, copies: dict[fx.Node, fx.Node]) -> Any:
    if not isinstance(node, fx.Node):
        return node
    if node in copies:
        return copies[node]
    stated = graph.call_function(_elsewhere)
    stated.meta = dict(node.meta)
    return stated

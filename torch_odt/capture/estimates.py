"""What an op costs when nobody measured it: a guess from the shapes of what it reads and writes."""

from __future__ import annotations

from math import prod

from torch_odt.capture.costs import OpCost
from torch_odt.capture.graph import Op, Ref, TrainingGraph

BYTES_PER_SECOND = 10e9
FLOPS_PER_SECOND = 150e9


def estimate(graph: TrainingGraph, op: Op) -> OpCost:
    """The cost of an op from its shapes: memory traffic, and multiplications for convolutions and matrix products.

    Good enough to rank ops by; take measured costs where there are any.
    """
    if op.is_view:
        return OpCost(0.0, (), (None,) * len(op.writes), "estimated")
    events: list[tuple[int, int]] = []
    ordinals: list[int | None] = []
    for result in op.writes:
        if result is None or graph.values[result].base != result:
            ordinals.append(None)
            continue
        ordinals.append(len(events))
        events.append((len(events), graph.values[result].nbytes))
    traffic = sum(graph.values[v].nbytes for v in op.reads) + sum(size for _, size in events)
    seconds = traffic / BYTES_PER_SECOND + 2 * multiplications(graph, op) / FLOPS_PER_SECOND
    return OpCost(seconds, tuple(events), tuple(ordinals), "estimated")


def multiplications(graph: TrainingGraph, op: Op) -> int:
    """Of convolutions, matrix products and attention; 0 for other ops."""
    name = op.target.split(".")[1] if "." in op.target else op.target
    shapes = [graph.values[a.value].shape if isinstance(a, Ref) else () for a in op.args]
    if name in ("convolution", "depthwise_conv2d", "pointwise_conv2d", "stored_pointwise_conv2d"):
        output = next((graph.values[v].shape for v in op.results), ())
        return prod(output) * prod(shapes[1][1:])
    if name == "convolution_backward":
        wanted = sum(map(bool, op.args[10][:2]))
        return wanted * prod(shapes[0]) * prod(shapes[2][1:])
    if name.startswith("depthwise_conv2d_grad"):
        window = op.args[2] if name.endswith("weight") else shapes[1][2:]
        return prod(shapes[0]) * prod(window)
    if name.removeprefix("stored_").startswith("pointwise_conv2d_grad"):
        return prod(shapes[0]) * shapes[1][1]
    if name in ("mm", "bmm"):
        return prod(shapes[0]) * shapes[1][-1]
    if name == "addmm":
        return prod(shapes[1]) * shapes[2][-1]
    if name.startswith("_scaled_dot_product") and not name.endswith("_backward"):
        return 2 * prod(shapes[0]) * shapes[1][-2]
    if name.startswith("_scaled_dot_product"):
        # The scores again, and the gradients of both products.
        return 5 * prod(shapes[1]) * shapes[2][-2]
    return 0

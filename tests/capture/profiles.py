"""What tests of measurements share."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from models import case_named
from torch import nn

from torch_odt import _extensions
from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import Op, Ref, TrainingGraph, Value
from torch_odt.capture.profile import profile
from torch_odt.capture.rewrite import inexact_rewrites, rewrite
from torch_odt.capture.trace import trace_step

needs_recorder = pytest.mark.skipif(_extensions.memory_module is None, reason="torch_odt._memory is not built")


def fast(graph: TrainingGraph, **options: Any) -> Costs:
    return profile(graph, repeats=1, min_seconds=0.0, **options)


@cache
def captured(name: str, autocast: bool = False, *, large: bool = False) -> TrainingGraph:
    case = case_named(name)
    case = case.enlarged() or case if large else case
    args, kwargs = case.batch(case.batch_size, torch.Generator().manual_seed(0))

    def compute(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return case.loss(model, (args, kwargs)), ()

    with torch.random.fork_rng():
        model = case.make()
    return rewrite(trace_step(model, case.loss_fn, compute, (args, kwargs)).graph, disabled=inexact_rewrites())


def graph_of(
    target: str, inputs: list[torch.Tensor], results: list[torch.Tensor | None], args: list[Any]
) -> TrainingGraph:
    """One op; an int among `args` inside a `Ref` names an input."""
    tensors = [*inputs, *(r for r in results if r is not None)]
    values = [
        Value(
            i,
            f"v{i}",
            tuple(t.shape),
            t.stride(),
            str(t.dtype).removeprefix("torch."),
            t.untyped_storage().nbytes(),
            "input" if i < len(inputs) else "computed",
            i,
            None if i < len(inputs) else 0,
        )
        for i, t in enumerate(tensors)
    ]
    numbers = iter(range(len(inputs), len(tensors)))
    writes = tuple(None if r is None else next(numbers) for r in results)
    op = Op(0, target, tuple(args), {}, tuple(range(len(inputs))), (), writes)
    return TrainingGraph([op], values, list(range(len(inputs))), [], 1, 1)


def wide(size: int) -> TrainingGraph:
    a, b = torch.ones(size, size), torch.ones(size, size)
    return graph_of("aten.mm.default", [a, b], [a @ b], [Ref(0), Ref(1)])

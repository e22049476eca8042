"""Which gradients are used up by the operators that compute them, and that no schedule may break it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_odt.capture import fused_updates
from torch_odt.capture.costs import Costs
from torch_odt.capture.fused_updates import FUSED_UPDATE, FusedUpdate, register_fused_update
from torch_odt.capture.graph import Op, TrainingGraph
from torch_odt.capture.graph_check import check_graph
from torch_odt.capture.profile import profile
from torch_odt.capture.rewrite import rewrite, with_updates
from torch_odt.capture.trace import trace_step
from torch_odt.capture.update_in_backward import UPDATE, UpdateRule
from torch_odt.errors import PlanError, ScheduleError
from torch_odt.execute.loss import make_compute
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.schedule import Run, Schedule
from torch_odt.planning.simulate import simulate

NO_COSTS = Costs({})
BACKWARD = "aten.convolution_backward.default"
RULE = UpdateRule("descent", ())


def descend(*arguments: Any) -> tuple[Tensor | None, ...]:
    of_input, of_weight, of_bias = torch.ops.aten.convolution_backward.default(*arguments)
    arguments[2].sub_(of_weight, alpha=0.0)
    return of_input, None, of_bias


@pytest.fixture(autouse=True)
def _convolutions_fuse(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fused_updates, "_FUSED", dict(fused_updates._FUSED))
    register_fused_update("descent", BACKWARD, FusedUpdate(gradient=1, weight=2, measured=descend))
    yield


def graph_of(model: nn.Module, *batch: Tensor, may_fuse: bool = True) -> TrainingGraph:
    traced = trace_step(model, F.cross_entropy, make_compute(F.cross_entropy), (batch, {}))
    graph = rewrite(traced.graph, drop=("result",), disabled={"sum_bias_gradients"})
    rules = {name: RULE for name, _ in model.named_parameters() if name.endswith("weight")}
    return with_updates(graph, rules, may_fuse=may_fuse)


def updated(graph: TrainingGraph, target: str) -> dict[str, Op]:
    return {str(graph.values[op.reads[0]].target): op for op in graph.program if op.target == target}


def network() -> nn.Module:
    head = [nn.Conv2d(4, 5, 8), nn.Flatten()]
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU(), *head)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 8, 8), torch.tensor([1, 2])


def test_operators_use_gradients_up_and_return_what_is_left() -> None:
    graph = graph_of(network(), *batch())
    fused = updated(graph, FUSED_UPDATE)
    assert set(fused) == {"0.weight", "2.weight", "4.weight"} and not updated(graph, UPDATE)
    assert BACKWARD not in {op.target for op in graph.program}
    # The gradients of inputs, but for the batch's, and of biases, which are delivered.
    assert {name: len(op.results) for name, op in fused.items()} == {"0.weight": 1, "2.weight": 2, "4.weight": 2}
    assert {output.target for output in graph.outputs_of("gradient")} == {"0.bias", "2.bias", "4.bias"}
    assert any("3 of them by the operators that compute these" in note for note in graph.notes)
    costs = profile(graph)
    assert all(costs.ops[op.index].source == "measured" for op in fused.values())
    held = simulate(graph, costs, keep_all(graph, costs)).peak_bytes
    plain = graph_of(network(), *batch(), may_fuse=False)
    assert set(updated(plain, UPDATE)) == set(fused)
    plain_costs = profile(plain)
    assert held <= simulate(plain, plain_costs, keep_all(plain, plain_costs)).peak_bytes


def test_gradients_that_others_need_are_stored() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.last = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 5, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.shared(self.shared(x).relu()).relu()).flatten(1)  # type: ignore[no-any-return]

    graph = graph_of(Twice(), *batch())
    assert set(updated(graph, FUSED_UPDATE)) == {"last.weight"}
    assert set(updated(graph, UPDATE)) == {"shared.weight"}


def test_a_weight_that_is_read_later_keeps_its_gradient() -> None:
    class ReadAgain(nn.Module):
        """The weight itself is multiplied with what is computed before it."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, 1, 1))
            self.layer = nn.Conv2d(4, 5, 8)

        def forward(self, x: Tensor) -> Tensor:
            scaled = F.pad(x, (0, 0, 0, 0, 0, 1)) * self.scale * self.layer.weight.detach().sum(0)
            return self.layer(scaled).flatten(1)  # type: ignore[no-any-return]

    graph = graph_of(ReadAgain(), *batch())
    assert set(updated(graph, UPDATE)) == {"layer.weight"} and not updated(graph, FUSED_UPDATE)


def test_a_weight_in_another_order_keeps_its_gradient() -> None:
    model = network()
    model[4].weight.data = model[4].weight.data.contiguous(memory_format=torch.channels_last)
    in_order = FusedUpdate(gradient=1, weight=2, measured=descend, in_memory_order=True)
    register_fused_update("descent", BACKWARD, in_order)
    graph = graph_of(model, *batch())
    assert "4.weight" in updated(graph, FUSED_UPDATE) and "0.weight" in updated(graph, UPDATE)


def test_a_schedule_that_reads_a_weight_after_its_update_is_refused() -> None:
    graph = graph_of(network(), *batch())
    schedule = keep_all(graph, NO_COSTS)
    again = next(op for op in graph.program if op.target == "aten.convolution.default")
    last = updated(graph, FUSED_UPDATE)["0.weight"]
    position = next(i for i, each in enumerate(schedule.instructions) if each == Run(last.index)) + 1
    instructions = [*schedule.instructions[:position], Run(again.index), *schedule.instructions[position:]]
    with pytest.raises(ScheduleError):
        simulate(graph, NO_COSTS, Schedule(tuple(instructions), schedule.boundary))


def test_a_graph_of_a_file_may_hold_them() -> None:
    graph = graph_of(network(), *batch())
    check_graph(graph)
    op = updated(graph, FUSED_UPDATE)["0.weight"]
    graph.ops[op.index] = replace(op, args=("descent", "aten.mm.default", *op.args[2:]))
    with pytest.raises(PlanError, match=rf"op {op.index} of the graph.* no update that an operator makes"):
        check_graph(graph)

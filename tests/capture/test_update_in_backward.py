"""Where a parameter's update stands in the graph, and that no schedule may break it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import Op, TrainingGraph
from torch_odt.capture.rewrite import rewrite, with_updates
from torch_odt.capture.trace import trace_step
from torch_odt.capture.update_in_backward import UPDATE, UpdateRule
from torch_odt.errors import ScheduleError
from torch_odt.execute.loss import make_compute
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.problem import make_problem
from torch_odt.planning.registry import get_planner
from torch_odt.planning.schedule import Run, Schedule
from torch_odt.planning.simulate import simulate

NO_COSTS = Costs({})
SGD = UpdateRule("sgd momentum", ("momentum_buffer",))


class Tied(nn.Module):
    """The same matrix at both ends, between them one that is used once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.middle(self.table(x))) @ self.table.weight.t()


def graph_of(model: nn.Module, *batch: Tensor, rules: dict[str, UpdateRule] | None = None) -> TrainingGraph:
    traced = trace_step(model, F.cross_entropy, make_compute(F.cross_entropy), (batch, {}))
    graph = rewrite(traced.graph, drop=("result",))
    return with_updates(graph, rules or {name: SGD for name, _ in model.named_parameters()})


def updates_of(graph: TrainingGraph) -> dict[str, Op]:
    return {str(graph.values[op.reads[0]].target): op for op in graph.program if op.target == UPDATE}


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (3, 4):
        layers += [nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 5))


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 8, 8), torch.tensor([1, 2])


def test_every_update_comes_right_after_the_last_read_of_its_parameter_or_its_gradient() -> None:
    graph = graph_of(convolutions(), *images())
    updates = updates_of(graph)
    assert len(updates) == 10 and not list(graph.outputs_of("gradient"))
    for op in updates.values():
        parameter, gradient = op.reads[:2]
        reads = [o.index for o in graph.program if o is not op and parameter in {graph.values[v].base for v in o.reads}]
        complete = graph.values[gradient].producer
        between = graph.ops[max(complete, *reads) + 1 : op.index]
        assert max(complete, *reads) < op.index
        assert all(other.target == UPDATE or other.is_view for other in between)


def test_a_parameter_that_is_used_twice_waits_for_the_last_part_of_its_gradient() -> None:
    graph = graph_of(Tied(), torch.tensor([1, 5, 3]), torch.tensor([2, 0, 7]))
    updates = updates_of(graph)
    assert updates["table.weight"].index == len(graph.program) - 1
    embedding = next(op.index for op in graph.program if op.target == "aten.embedding_dense_backward.default")
    assert max(updates["middle.weight"].index, updates["middle.bias"].index) < embedding


def test_what_has_no_rule_delivers_its_gradient() -> None:
    graph = graph_of(convolutions(), *images(), rules={"0.weight": SGD})
    assert set(updates_of(graph)) == {"0.weight"}
    assert len(list(graph.outputs_of("gradient"))) == 9


def test_the_state_is_an_input_of_the_parameters_form() -> None:
    graph = graph_of(
        convolutions(), *images(), rules={"0.weight": UpdateRule("adam", ("step", "exp_avg", "exp_avg_sq"))}
    )
    state = {v.target: (v.shape, v.stride) for v in graph.values if v.kind == "state"}
    form = ((4, 3, 3, 3), (27, 9, 3, 1))
    assert state == {"0.weight/step": ((), ()), "0.weight/exp_avg": form, "0.weight/exp_avg_sq": form}


def test_a_graph_is_not_changed_by_what_is_made_of_it() -> None:
    traced = trace_step(convolutions(), F.cross_entropy, make_compute(F.cross_entropy), (images(), {}))
    graph = rewrite(traced.graph, drop=("result",))
    before = graph.fingerprint
    assert with_updates(graph, {"0.weight": SGD}).fingerprint != before
    del graph.__dict__["fingerprint"]
    assert graph.fingerprint == before


def test_a_graph_and_what_is_made_of_it_hold_what_they_share_once() -> None:
    traced = trace_step(convolutions(), F.cross_entropy, make_compute(F.cross_entropy), (images(), {}))
    graph = rewrite(traced.graph, drop=("result",))
    updated = with_updates(graph, {"5.weight": SGD, "0.weight": SGD})
    pairs = [*zip(updated.ops, graph.ops, strict=False), *zip(updated.values, graph.values, strict=False)]
    assert all((new is old) == (new == old) for new, old in pairs)
    assert sum(new is old for new, old in pairs) > len(pairs) / 2


def test_gradients_are_not_held_at_once() -> None:
    model, batch = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))), (torch.randn(2, 64), torch.tensor([1, 2]))
    graphs = [graph_of(model, *batch, rules=rules) for rules in ({"none": SGD}, None)]
    kept, updated = (simulate(g, NO_COSTS, keep_all(g, NO_COSTS, 1)).peak_bytes for g in graphs)
    gradients = sum(p.nbytes for p in model.parameters())
    assert kept > gradients > 3 * updated


@pytest.mark.parametrize("planner", ["chen", "melon", "min-cut", "auto"])
def test_no_planner_reads_a_parameter_after_its_update(planner: str) -> None:
    """The simulator would say so; recomputation is asked for by a budget that keeps hardly anything."""
    x = torch.randn(2, 3, 40, 40)
    layers = [layer for _ in range(8) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU())]
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    )
    graph = graph_of(model, x, torch.tensor([1, 2]))
    budget = simulate(graph, NO_COSTS, keep_all(graph, NO_COSTS, 1)).peak_bytes // 2
    found = simulate(graph, NO_COSTS, get_planner(planner)(graph, NO_COSTS, budget))
    updated = {op.reads[0] for op in updates_of(graph).values()}
    assert any(not updated.isdisjoint(graph.ops[op].reads) for op in found.recomputed_ops)


def test_the_simulator_refuses_a_parameter_that_is_read_after_its_update() -> None:
    graph = graph_of(convolutions(), *images())
    schedule = keep_all(graph, NO_COSTS, 1)
    weight = updates_of(graph)["0.weight"].reads[0]
    # The first convolution needs nothing but the batch, and may run as often as somebody likes.
    convolution = next(op for op in graph.program if weight in op.reads)
    assert convolution.may_rerun and convolution.phase == "forward"
    instructions = [*schedule.instructions, Run(convolution.index)]
    with pytest.raises(ScheduleError, match="has been updated"):
        simulate(graph, NO_COSTS, Schedule(instructions, schedule.boundary))


def test_an_update_belongs_to_what_a_schedule_must_run() -> None:
    graph = graph_of(convolutions(), *images())
    steps = make_problem(graph, NO_COSTS).steps
    assert {op.index for op in updates_of(graph).values()} <= set(steps)

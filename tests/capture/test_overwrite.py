"""Gradients and activations that are overwritten: which, what a schedule may do with them, and that no bit changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_odt as odt
from tests.capture.test_rewrite import capture, check_against_plain, execute
from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import Op, Output, TrainingGraph
from torch_odt.capture.graph_check import check_graph
from torch_odt.errors import PlanError, ScheduleError
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.pool import check, pack
from torch_odt.planning.registry import get_planner
from torch_odt.planning.schedule import Run, Schedule
from torch_odt.planning.simulate import simulate

NO_COSTS = Costs({})


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Residual(nn.Module):
    """A gradient that two branches read, their sum, and activation functions that each read a gradient alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.third = nn.Conv2d(4, 4, 3, padding=1)

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return F.gelu(self.third(x + torch.relu(self.second(x)))).mean((2, 3))


def images(size: int = 8) -> Tensor:
    return torch.randn(2, 3, size, size)


def residual(size: int = 8, disabled: tuple[str, ...] = ()) -> TrainingGraph:
    return capture(Residual(), images(size), torch.randn(2, 4), disabled=[*disabled, "choose_layouts"])


def overwriting(graph: TrainingGraph) -> dict[str, Op]:
    return {op.target: op for op in graph.program if op.overwrites is not None}


def test_what_reads_a_gradient_last_writes_in_its_place() -> None:
    graph = check_against_plain(Residual(), images(), torch.randn(2, 4))
    # The gradient in front of ReLU goes around it as well, so that the sum is where the next one can be overwritten.
    expected = {"aten.gelu_backward.default", "aten.add.Tensor", "aten.tanh_backward.default"}
    assert set(overwriting(graph)) == expected
    for op in overwriting(graph).values():
        (result,) = op.writes
        assert result is not None and graph.values[result].base == graph.values[op.overwrites].base
        assert not op.may_rerun
    assert any(note.endswith("(overwrite_gradients)") for note in graph.notes)


class Tokens(nn.Module):
    """Linear layers over (samples, tokens, channels), which PyTorch multiplies as matrices: views stand between."""

    def __init__(self, *, trains: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)).requires_grad_(trains)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


def test_a_gradient_is_overwritten_behind_views_of_it() -> None:
    graph = check_against_plain(Tokens(), torch.randn(3, 5, 4), torch.randn(3, 2))
    op = overwriting(graph)["aten.gelu_backward.default"]
    view = graph.ops[graph.values[op.overwrites].producer]
    maker = graph.ops[graph.values[view.reads[0]].producer]
    assert view.is_view and not view.is_pinned
    assert maker.target == "aten.mm.default" and maker.is_pinned
    (result,) = op.writes
    assert graph.values[result].base == maker.writes[0]
    check_graph(graph)
    # Somebody else looks at the product behind the view.
    graph.outputs.append(Output(view.reads[0], "result", 1))
    with pytest.raises(PlanError, match="overwrites what leaves the step"):
        check_graph(graph)
    graph.outputs.pop()
    schedule = keep_all(graph, NO_COSTS, 1)
    check(graph, NO_COSTS, schedule, pack(graph, NO_COSTS, schedule))


def test_an_activation_is_overwritten_behind_views_of_it() -> None:
    graph = check_against_plain(Tokens(trains=False), torch.randn(3, 5, 4), torch.randn(3, 2))
    assert set(overwriting(graph)) == {"aten.gelu.default"}


def test_a_view_that_leaves_the_step_is_not_overwritten() -> None:
    class AlsoReturned(nn.Module):
        """The first layer's output is a result of the step, as the view that GELU reads."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)])
            self.layers[0].requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layers[0](x)
            return self.layers[1](F.gelu(hidden)) + hidden[..., :2]

    graph = check_against_plain(AlsoReturned(), torch.randn(3, 5, 4), torch.randn(3, 5, 2))
    assert "aten.gelu.default" not in overwriting(graph)


class FrozenStart(nn.Module):
    """Two layers of which nothing trains, one whose input two branches read, and layers that train."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(n, 4, 3, padding=1).requires_grad_(False) for n in (3, 4, 4))
        self.last = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardtanh(torch.addcmul(torch.ones(4, 1, 1), self.first(x), torch.ones(4, 1, 1)))
        x = x + F.relu(self.second(x))
        return F.silu(self.last(F.silu(self.third(x)))).mean((2, 3))


def test_activations_of_layers_before_all_that_trains_are_overwritten() -> None:
    graph = check_against_plain(FrozenStart(), images(), torch.randn(2, 4))
    forward = [op.target for op in graph.program if op.overwrites is not None and op.phase == "forward"]
    assert forward == ["aten.addcmul.default", "aten.hardtanh.default", "aten.relu.default", "aten.add.Tensor"]
    assert any(note.startswith("4 activations are overwritten") for note in graph.notes)


def test_it_can_be_switched_off() -> None:
    assert not overwriting(residual(disabled=("overwrite_gradients",)))


def test_the_parts_of_a_parameters_gradient_are_summed_as_before() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.tanh(self.layer(torch.tanh(self.layer(x)))))

    graph = check_against_plain(Twice(), torch.randn(3, 4), torch.randn(3, 4))
    assert set(overwriting(graph)) == {"aten.tanh_backward.default"}


def test_the_peak_is_smaller_and_every_address_has_one_owner() -> None:
    graphs = residual(32), residual(32, disabled=("overwrite_gradients",))
    peaks = []
    for graph in graphs:
        schedule = keep_all(graph, NO_COSTS, 1)
        layout = pack(graph, NO_COSTS, schedule)
        check(graph, NO_COSTS, schedule, layout)
        peaks.append(simulate(graph, NO_COSTS, schedule).peak_bytes)
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize("planner", ["chen", "melon", "min-cut", "auto"])
def test_planners_keep_what_has_been_overwritten(planner: str) -> None:
    model = nn.Sequential(*(Residual.block() for _ in range(6)), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    graph = capture(model, torch.randn(2, 4, 32, 32), torch.randn(2, 4), disabled=["choose_layouts"])
    assert overwriting(graph)
    keeping = simulate(graph, NO_COSTS, keep_all(graph, NO_COSTS, 1)).peak_bytes
    schedule = get_planner(planner)(graph, NO_COSTS, keeping // 2)
    assert simulate(graph, NO_COSTS, schedule).recomputed_ops
    check(graph, NO_COSTS, schedule, pack(graph, NO_COSTS, schedule))


def test_the_simulator_refuses_a_read_of_what_has_been_overwritten() -> None:
    graph = residual()
    schedule = keep_all(graph, NO_COSTS, 1)
    op = overwriting(graph)["aten.tanh_backward.default"]
    instructions = list(schedule.instructions)
    # Its reader runs twice, and the gradient is there still, but not what it was.
    instructions.insert(instructions.index(Run(op.index)), Run(op.index))
    with pytest.raises(ScheduleError, match="has been overwritten"):
        simulate(graph, NO_COSTS, Schedule(instructions, schedule.boundary))


class Frozen(nn.Module):
    """Convolutions whose biases alone train, with activation functions, a residual and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.third = nn.Conv2d(4, 4, 3, padding=1)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.first(x))
        x = torch.relu(self.second(x) + x)
        return self.third(x).mean((2, 3))


def test_activations_of_frozen_layers_are_overwritten() -> None:
    graph = capture(Frozen(), images(), torch.randn(2, 4))
    forward = [op.target for op in graph.program if op.overwrites is not None and op.phase == "forward"]
    assert forward == ["torch_odt.clamp_with_mask.default", "aten.add.Tensor", "torch_odt.clamp_with_mask.default"]
    assert any(note.endswith("(overwrite_activations)") for note in graph.notes)


def test_layers_without_a_backward_pass_need_one_tensor() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.Hardswish())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    for parameter in model[:-1].parameters():
        parameter.requires_grad_(False)
    graph = check_against_plain(model, torch.randn(2, 4, 8, 8), torch.randn(2, 4))
    assert [op.target for op in graph.program if op.overwrites is not None].count("aten.hardswish.default") == 4


def test_what_trains_overwrites_no_activation_that_could_be_computed_again() -> None:
    class Clamped(nn.Module):
        """What is added is read by the clamp alone, whose output is kept: it can come back from the two summands."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.third(torch.relu(self.first(x) + self.second(x))).mean((2, 3))

    graph = check_against_plain(Clamped(), torch.randn(2, 4, 8, 8), torch.randn(2, 4))
    assert not [op for op in graph.program if op.overwrites is not None and op.phase == "forward"]


def test_bits_stay_when_activations_are_overwritten_or_not() -> None:
    model, x, y = Frozen(), images(), torch.randn(2, 4)
    with_it, without = (capture(model, x, y, disabled=disabled) for disabled in ((), ("overwrite_activations",)))
    assert not [op for op in without.program if op.overwrites is not None and op.phase == "forward"]
    found, wanted = execute(with_it, model, (x, y)), execute(without, model, (x, y))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_a_norm_overwrites_what_it_has_taken_the_statistics_of() -> None:
    """In both passes the sum over what is overwritten comes first."""
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU6(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)]
    model = nn.Sequential(*layers, nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    odt.adapt.tinytl_(model, mode="bias", norm="detached", classes=None, head="3")
    model.train()
    graph = check_against_plain(model, images(), torch.randn(2, 4), disabled=["choose_layouts"])
    overwritten = [op for op in graph.program if op.overwrites is not None]
    norms = [op for op in overwritten if op.target == "aten.addcmul.default"]
    scaled = [op for op in overwritten if op.target == "aten.mul.Tensor" and op.phase == "backward"]
    assert norms and scaled
    for op in (*norms, *scaled):
        readers = [other for other in graph.program if op.overwrites in other.reads]
        assert len(readers) == 2 and readers[-1] is op and not readers[0].may_rerun
    check_graph(graph)

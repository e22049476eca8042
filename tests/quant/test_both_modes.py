"""What depends on the mode does so in a converted model, too, whichever mode it was converted in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import torch_odt as odt
from torch_odt.quant.both_modes import trace_in_both_modes

VERBS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "convert_": lambda model, x: odt.quant.convert_(model, [x]),
    "niti_": lambda model, _: odt.quant.niti_(model),
}


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.conv(x).relu().mean((2, 3)), 0.5, self.training)
        return F.dropout(self.fc(x), 0.5, training=self.training)


class Pathwise(nn.Module):
    """As networks of timm drop whole branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)
        self.drop = timm.layers.DropPath(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.fc((x + self.drop(self.conv(x))).mean((2, 3)))


class Varied(nn.Module):
    """Constants, and arguments that depend on the mode in other ways than by being it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu() * torch.tensor(0.5) + torch.tensor([2.0])
        x = F.dropout(x.mean((2, 3)), 0.5 if self.training else 0.0)
        return torch.dropout(torch.mul(self.fc(x), 2.0 if self.training else 1.0), 0.5, self.training)


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.fc, self.aux = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x).mean((2, 3))
        return self.fc(x) + self.aux(x) if self.training else self.fc(x)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("made_in_training", [True, False])
@pytest.mark.parametrize("kind", [Dropping, Pathwise, Varied])
def test_dropout_ends_in_evaluation(kind: type[nn.Module], made_in_training: bool, verb: str) -> None:
    torch.manual_seed(0)
    model, x = kind().train(made_in_training), torch.randn(16, 3, 12, 12)
    VERBS[verb](model, x)
    model.eval()
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("made_in_training", [True, False])
def test_code_that_branches_on_the_mode_still_does(made_in_training: bool, verb: str) -> None:
    torch.manual_seed(0)
    model, x = Auxiliary(), torch.randn(16, 3, 12, 12)
    wanted = {mode: model.train(mode)(x).detach() for mode in (True, False)}
    VERBS[verb](model.train(made_in_training), x)
    for mode in (True, False):
        found = model.train(mode)(x).detach()
        other = (found - wanted[not mode]).norm()
        assert (found - wanted[mode]).norm() < 0.3 * other


def test_what_cannot_be_one_graph_is_told() -> None:
    with pytest.raises(ValueError, match="computes something else in evaluation mode than in training mode"):
        trace_in_both_modes(Auxiliary())

    class Choosing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            one, other = x.relu(), x.tanh()
            return one.add(one if self.training else other)

    with pytest.raises(ValueError, match="add takes something else in evaluation mode than in training mode"):
        trace_in_both_modes(Choosing())


def test_modes_are_as_before_and_a_mode_of_ones_own_stays() -> None:
    model = nn.Sequential(Dropping(), nn.Dropout()).train()
    model[1].eval()
    graph = trace_in_both_modes(model)
    assert [module.training for module in model] == [True, False]
    assert [node.target for node in graph.nodes if node.op == "get_attr"] == ["0.training"] * 2

    def always(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=True)

    class Always(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return always(x)

    [call] = [node for node in trace_in_both_modes(Always()).nodes if node.op == "call_function"]
    assert isinstance(call, fx.Node) and call.kwargs["training"] is True


@pytest.mark.parametrize("verb", VERBS)
def test_a_function_follows_the_module_in_whose_code_it_stands(verb: str) -> None:
    torch.manual_seed(0)

    class Front(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.5, self.training)

    front = Front(nn.Conv2d(3, 8, 3), nn.ReLU())
    model, x = nn.Sequential(front, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)), torch.randn(8, 3, 12, 12)
    model.train()
    model[0].eval()
    VERBS[verb](model, x)
    assert torch.equal(model(x), model(x))
    model.eval()
    model[0].train()
    assert not torch.equal(model(x), model(x))


def test_nothing_is_left_of_a_model_that_cannot_be_one_graph() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * torch.tensor(2.0)
            return x.relu() if self.training else x

    model = Both()
    before = set(vars(model))
    with pytest.raises(ValueError, match="computes something else"):
        trace_in_both_modes(model)
    assert set(vars(model)) == before
    varied = Varied()
    constants = {node.target for node in trace_in_both_modes(varied).nodes if node.op == "get_attr"}
    assert set(vars(varied)) - set(vars(Varied())) == {name for name in constants if name.startswith("_tensor")}


@pytest.mark.parametrize("in_training", [True, False])
def test_an_inverted_mode_stays_inverted(in_training: bool) -> None:
    class Inverted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, training=not self.training)

    model, x = Inverted().train(in_training), torch.ones(64)
    traced = fx.GraphModule(model, trace_in_both_modes(model))
    for mode in (True, False):
        assert bool((traced.train(mode)(x) == 0).any()) is not mode

"""The search finds what brute force finds, inside the budget, and its memory model is near the simulator's count."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torch_odt as odt
from torch_odt.adapt import Contributions, Scheme, SchemeMemory, search_scheme
from torch_odt.adapt.step_bytes import step_bytes

LAYERS = ("a", "b", "c", "d")
RATIOS = (0.25, 1.0)


class Prices:
    """A price for each part; the simulator finds them a share higher than counting does."""

    def __init__(self, seed: int, more: float = 1.0) -> None:
        draw = random.Random(seed)
        self._layers = {name: draw.randint(5, 40) for name in LAYERS}
        self._more = more

    def counted(self, scheme: Scheme) -> int:
        return 10 + 3 * scheme.biases + round(sum(ratio * self._layers[name] for name, ratio in scheme.weights.items()))

    def simulated(self, scheme: Scheme) -> int:
        return round(self._more * self.counted(scheme))


def _contributions(seed: int) -> Contributions:
    draw = random.Random(seed)
    gains = {(name, ratio): draw.uniform(-0.01, 0.1) for name in LAYERS for ratio in RATIOS}
    return Contributions(0.5, 4, {0: 0.0} | {k: draw.uniform(0, 0.05) for k in (2, 4)}, gains)


def _brute_force(contributions: Contributions, memory: Prices, budget: int) -> float:
    """The largest gain of all schemes that fit by the simulator."""
    best = 0.0
    for biases, *ratios in itertools.product((0, 2, 4), *[(0.0, *RATIOS)] * len(LAYERS)):
        scheme = Scheme(int(biases), {name: r for name, r in zip(LAYERS, ratios, strict=True) if r})
        if memory.simulated(scheme) <= budget:
            best = max(best, contributions.gain(scheme))
    return best


@given(st.integers(0, 10_000), st.integers(10, 120))
@settings(max_examples=15, deadline=None)
def test_finds_what_brute_force_finds(seed: int, budget: int) -> None:
    contributions, memory = _contributions(seed), Prices(seed)
    found = search_scheme(contributions, memory, budget=budget, generations=30)
    assert found.nbytes <= budget
    assert found.gain == pytest.approx(_brute_force(contributions, memory, budget))


def test_what_the_simulator_says_counts() -> None:
    for seed, more in itertools.product(range(4), (0.5, 0.8, 1.3)):
        contributions, memory = _contributions(seed), Prices(seed, more=more)
        found = search_scheme(contributions, memory, budget=60, generations=30)
        assert found.nbytes == memory.simulated(found.scheme) <= 60
        assert found.gain == contributions.gain(found.scheme)
        assert found.gain == pytest.approx(_brute_force(contributions, memory, 60))


def test_a_budget_below_the_classifier_alone_is_refused() -> None:
    with pytest.raises(odt.InfeasibleBudget) as refused:
        search_scheme(_contributions(1), Prices(1), budget=9)
    assert refused.value.smallest_feasible_bytes == 10


def _network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 16), (16, 16), (16, 24)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4))


def test_counted_bytes_order_schemes_as_the_simulator_does() -> None:
    batch = (torch.randn(4, 3, 24, 24), torch.randint(4, (4,)))
    memory = SchemeMemory(_network(), nn.functional.cross_entropy, batch, classes=6)
    assert repr(memory) == f"SchemeMemory(Sequential, batch of {tuple(batch[0].shape)}, {tuple(batch[1].shape)})"
    schemes = [
        Scheme(),
        Scheme(1),
        Scheme(4),
        Scheme(0, {"3": 1}),
        Scheme(2, {"6": 1 / 4, "9": 1 / 4}),
        Scheme(4, {"3": 1, "6": 1, "9": 1}),
    ]
    counted, simulated = ([ask(scheme) for scheme in schemes] for ask in (memory.counted, memory.simulated))
    assert counted[:4] == simulated[:4], "corrected by what begins at the same layer"
    assert sorted(range(6), key=counted.__getitem__) == sorted(range(6), key=simulated.__getitem__)
    for mine, exact in zip(counted, simulated, strict=True):
        assert mine == pytest.approx(exact, rel=0.25)


def test_norms_are_what_the_scheme_is_applied_with() -> None:
    batch = (torch.randn(4, 3, 24, 24), torch.randint(4, (4,)))
    memory = SchemeMemory(_network(), nn.functional.cross_entropy, batch, norm="folded")
    model, scheme = _network(), Scheme(2, {"6": 1 / 4})
    adaptation = odt.adapt.sparse_update_(model, scheme, norm="folded")
    optimizer = torch.optim.SGD(adaptation.parameters(), lr=0.1)
    assert memory.simulated(scheme) == step_bytes(model, nn.functional.cross_entropy, batch, optimizer=optimizer)
    frozen = SchemeMemory(_network(), nn.functional.cross_entropy, batch)
    assert memory.simulated(scheme) != frozen.simulated(scheme)


def test_a_large_weight_behind_an_early_layer_is_counted_by_what_its_own_gradient_takes() -> None:
    network = torchvision.models.mobilenet_v2(width_mult=0.35, num_classes=4)
    batch = (torch.randn(1, 3, 64, 64), torch.zeros(1).long())
    memory = SchemeMemory(network, nn.functional.cross_entropy, batch)
    for weights in ({"features.18.0": 1}, {"features.17.conv.1.0": 1}):
        scheme = Scheme(12, {"features.13.conv.2": 1 / 4} | weights)
        assert memory.counted(scheme) == pytest.approx(memory.simulated(scheme), rel=0.05)


def test_the_optimizers_state_counts() -> None:
    batch = (torch.randn(2, 3, 8, 8), torch.randint(4, (2,)))
    with pytest.raises(ValueError, match="the model's inputs and the target"):
        SchemeMemory(_network(), nn.functional.cross_entropy, batch[0])  # type: ignore[arg-type]
    plain = SchemeMemory(_network(), nn.functional.cross_entropy, batch)
    adam = SchemeMemory(_network(), nn.functional.cross_entropy, batch, optimizer=torch.optim.Adam)
    scheme = Scheme(0, {"9": 1})
    weights = 24 * 16 * 9 * 4
    for ask in ("counted", "simulated"):
        more = getattr(adam, ask)(scheme) - getattr(plain, ask)(scheme)
        assert 2 * weights <= more < 3 * weights


def test_finds_what_brute_force_finds_by_the_simulator() -> None:
    draw = random.Random(3)
    layers, biases = ("3", "9"), (0, 2)
    memory = SchemeMemory(_network(), nn.functional.cross_entropy, (torch.randn(4, 3, 16, 16), torch.randint(4, (4,))))
    contributions = Contributions(0.5, 4, {0: 0.0, 2: 0.02}, {(name, 1.0): draw.uniform(0, 0.1) for name in layers})
    chosen = itertools.product(biases, *[(False, True)] * len(layers))
    schemes = [Scheme(int(count), dict.fromkeys(itertools.compress(layers, which), 1.0)) for count, *which in chosen]
    sizes = [memory.simulated(scheme) for scheme in schemes]
    assert any(memory.counted(scheme) != size for scheme, size in zip(schemes, sizes, strict=True))
    for budget in sorted(sizes)[::2]:
        best = max(contributions.gain(each) for each, size in zip(schemes, sizes, strict=True) if size <= budget)
        assert search_scheme(contributions, memory, budget=budget, generations=30).gain == pytest.approx(best)


def test_parts_that_gain_nothing_are_told() -> None:
    nothing = Contributions(0.5, 2, {0: 0.0, 2: -0.1}, {("a", 1.0): 0.0})
    with pytest.warns(odt.OdtWarning, match="no part of the model gained anything"):
        assert search_scheme(nothing, Prices(0), budget=60).scheme == Scheme()


def test_sizes_of_the_search_that_are_none_are_refused() -> None:
    for options in ({"population": 1}, {"generations": -1}):
        with pytest.raises(ValueError, match="at least 2 schemes"):
            search_scheme(_contributions(1), Prices(1), budget=60, **options)


def test_a_layer_that_the_model_does_not_have_is_named() -> None:
    batch = (torch.randn(4, 3, 24, 24), torch.randint(4, (4,)))
    memory = SchemeMemory(_network(), nn.functional.cross_entropy, batch, classes=6)
    with pytest.raises(ValueError, match=r"'no\.such' is no linear layer or convolution"):
        memory.counted(Scheme(0, {"no.such": 1.0}))

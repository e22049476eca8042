"""Where layers go, by what they take."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from niti_cases import bytes_of, small_net
from torch import nn

from torch_odt.quant import measure_placement, niti_
from torch_odt.quant.co_scheduling import FLOAT, INTEGERS, LayerCost, placed

seconds = st.floats(0, 10)


def cost(
    name: str, float32: float, inside: float, converted: float, *, takes: bool = True, gives: bool = True
) -> LayerCost:
    """A layer that is quicker between integers than between float32."""
    half = (inside + converted) / 2
    integers = {
        (INTEGERS, INTEGERS): inside, (INTEGERS, FLOAT): half, (FLOAT, INTEGERS): half, (FLOAT, FLOAT): converted,
    }  # fmt: skip
    return LayerCost(name, float32, integers, takes, gives)


def test_a_layer_alone_pays_for_its_conversions() -> None:
    slow, quick = cost("slow", 1, 9, 9), cost("quick", 2, 1, 3)
    assert placed([slow, quick, slow]).places == (FLOAT, FLOAT, FLOAT)
    together = placed([slow, quick, quick, quick, slow])
    assert together.places == (FLOAT, INTEGERS, INTEGERS, INTEGERS, FLOAT)
    assert together.seconds == 1 + 2 + 1 + 2 + 1
    assert together.float32 == ["slow", "slow"]


def test_a_norm_between_layers_keeps_them_apart() -> None:
    behind_norm = cost("quick", 2, 1, 3, takes=False, gives=False)
    assert placed([behind_norm] * 3).places == (FLOAT,) * 3


@given(st.lists(st.tuples(seconds, seconds, seconds, seconds, seconds, st.booleans(), st.booleans()), max_size=5))
def test_no_other_placement_is_cheaper(layers: list[tuple[float, float, float, float, float, bool, bool]]) -> None:
    forms = list(itertools.product((FLOAT, INTEGERS), repeat=2))
    costs = [
        LayerCost(str(index), float32, dict(zip(forms, integers, strict=True)), takes, gives)
        for index, (float32, *integers, takes, gives) in enumerate(layers)  # type: ignore[misc]
    ]
    best = min(_total(costs, choice) for choice in itertools.product(*[_choices()] * len(costs))) if costs else 0.0
    assert placed(costs).seconds == pytest.approx(best)


def _choices() -> list[tuple[str, str]]:
    """Where a layer runs, and in which form its output leaves it."""
    return [(FLOAT, FLOAT), (INTEGERS, FLOAT), (INTEGERS, INTEGERS)]


def _total(costs: list[LayerCost], choices: tuple[tuple[str, str], ...]) -> float:
    form, total = FLOAT, 0.0
    for index, (each, (place, leaving)) in enumerate(zip(costs, choices, strict=True)):
        following = costs[index + 1] if index + 1 < len(costs) else None
        if form == INTEGERS and place == FLOAT:
            return float("inf")
        if leaving == INTEGERS and not (each.gives_integers and following and following.takes_integers):
            return float("inf")
        total += each.float32_seconds if place == FLOAT else each.integer_seconds[form, leaving]
        form = leaving
    return total


def test_layers_are_measured_once_and_the_model_is_left_alone(tmp_path: Path) -> None:
    model = small_net()
    before, inputs = bytes_of(model), torch.randn(4, 1, 8, 8)
    placement = measure_placement(model, inputs, cache=tmp_path)
    assert bytes_of(model) == before and type(model[0]) is nn.Conv2d
    assert [each.name for each in placement.costs] == ["0", "3", "4", "8"]
    assert placement.seconds <= min(placement.integer_seconds, placement.float32_seconds) * (1 + 1e-9)
    assert all(each.float32_seconds > 0 and min(each.integer_seconds.values()) > 0 for each in placement.costs)
    assert measure_placement(model, inputs, cache=tmp_path) == placement, "the second time nothing is measured"
    text = str(placement)
    assert "goes to" in text and "all in integers" in text
    kept = niti_(copy.deepcopy(model), keep_float32=["3"])
    assert kept.converted == ("0", "4", "8")

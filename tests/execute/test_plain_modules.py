"""Values of modules are remembered as long as nothing has changed, and equal what a new look would find."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import nn

from torch_odt.execute.plain_modules import PlainModules, Values


def values_of(module: nn.Module) -> Values | None:
    return PlainModules().read([module]).get(id(module))


def test_an_unchanged_module_has_the_values_of_the_call_before() -> None:
    remembered, convolution = PlainModules(), nn.Conv2d(3, 4, 3)
    first = remembered.read([convolution])[id(convolution)]
    assert remembered.read([convolution])[id(convolution)] is first
    assert values_of(convolution) == first, "by content, too"
    assert values_of(nn.Conv2d(3, 4, 3)) == first
    assert values_of(nn.Conv2d(3, 4, 3, padding=1)) != first


@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), (1, True), (1, 1.0), (0.5, math.nan), ((1, 2), (1, 3)), ("a", "b"), (None, 0)]
)
def test_another_value_is_noticed(before: Any, after: Any) -> None:
    remembered, module = PlainModules(), nn.Identity()
    module.option = before
    first = remembered.read([module])[id(module)]
    module.option = after
    assert remembered.read([module])[id(module)] != first
    module.option = before
    assert remembered.read([module])[id(module)] == first


def test_another_name_and_another_mode_are_noticed() -> None:
    remembered, module = PlainModules(), nn.Identity()
    module.one, module.other = 1, 2
    seen = {remembered.read([module])[id(module)]}
    module.one, module.other = 2, 1
    seen.add(remembered.read([module])[id(module)])
    del module.one
    seen.add(remembered.read([module])[id(module)])
    module.eval()
    seen.add(remembered.read([module])[id(module)])
    assert len(seen) == 4


def test_not_a_number_equals_itself() -> None:
    one, other = nn.Dropout(), nn.Dropout()
    one.limit, other.limit = math.nan, float("nan")
    assert values_of(one) == values_of(other)


@pytest.mark.parametrize("held", [[1], {"a": 1}, ([1],), len, object(), nn.Parameter])
def test_what_may_change_in_place_is_not_remembered(held: Any) -> None:
    module = nn.Identity()
    module.held = held
    assert values_of(module) is None

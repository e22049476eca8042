"""Values of modules that hold nothing else than what cannot change in place."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
from torch import nn

from torch_odt.execute.plain_modules import Values, plain_values
from torch_odt.quant.layer import Windows


def values_of(module: nn.Module) -> Values | None:
    return plain_values([module]).get(id(module))


def test_values_are_equal_by_content() -> None:
    convolution = nn.Conv2d(3, 4, 3)
    assert values_of(convolution) == values_of(convolution) == values_of(nn.Conv2d(3, 4, 3))
    assert values_of(nn.Conv2d(3, 4, 3, padding=1)) != values_of(convolution)


@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), (1, True), (1, 1.0), (0.5, math.nan), ((1, 2), (1, 3)), ("a", "b"), (None, 0)]
)
def test_another_value_is_noticed(before: Any, after: Any) -> None:
    module = nn.Identity()
    module.option = before
    first = values_of(module)
    module.option = after
    assert values_of(module) != first
    module.option = before
    assert values_of(module) == first


def test_another_name_and_another_mode_are_noticed() -> None:
    module = nn.Identity()
    module.one, module.other = 1, 2
    seen = {values_of(module)}
    module.one, module.other = 2, 1
    seen.add(values_of(module))
    del module.one
    seen.add(values_of(module))
    module.eval()
    seen.add(values_of(module))
    assert len(seen) == 4


def test_not_a_number_equals_itself() -> None:
    one, other = nn.Dropout(), nn.Dropout()
    one.limit, other.limit = math.nan, float("nan")
    assert values_of(one) == values_of(other)


def test_named_tuples_of_packages_are_told_from_others() -> None:
    module = nn.Identity()
    module.held = Windows(padding=(1, 1))
    first = values_of(module)
    assert first is not None
    module.held = Windows(padding=(1, 1))
    assert values_of(module) == first
    for other in (Windows(padding=(1, 2)), tuple(Windows(padding=(1, 1)))):
        module.held = other
        assert values_of(module) not in (first, None)


class Own(NamedTuple):
    """Its methods, if it had some, would be code of the step."""

    number: int


class Open(Windows):
    """Of a package, but with a dict."""

    __module__ = Windows.__module__


class Angry(tuple):
    """Its code is not to be run."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


@pytest.mark.parametrize(
    "held",
    [
        *([1], {"a": 1}, ([1],), len, object(), nn.Parameter, Own(1), Open(), Windows([1])),
        pytest.param(Angry(), id="angry"),
    ],
)
def test_what_may_change_in_place_is_not_remembered(held: Any) -> None:
    module = nn.Identity()
    module.held = held
    assert values_of(module) is None

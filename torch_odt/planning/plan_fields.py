"""Fields of plain data from elsewhere, each of the type that it must have."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch_odt.errors import PlanError

_T = TypeVar("_T")
_LIMIT = 1 << 63


@dataclass(frozen=True)
class Fields:
    """The fields of one record.

    Every method raises PlanError, with the field's place in the plan, where a field is missing or of another type.

    Attributes:
        place: where in the plan the record stands; empty for the plan itself.
    """

    data: Mapping[str, Any]
    place: str = ""

    @classmethod
    def of_value(cls, value: Any, place: str = "") -> Fields:
        if not isinstance(value, Mapping):
            raise _wrong(place or "the plan", value, "a record of named fields")
        return cls(value, place)

    def raw(self, name: str) -> Any:
        if name not in self.data:
            raise PlanError(f"this is no plan: {self._at(name)} is missing")
        return self.data[name]

    def text(self, name: str) -> str:
        return self._checked(name, lambda value: isinstance(value, str), "a text")

    def flag(self, name: str) -> bool:
        return self._checked(name, lambda value: isinstance(value, bool), "true or false")

    def whole(self, name: str, least: int = 0) -> int:
        return self._checked(name, lambda value: is_whole(value, least), f"a whole number of at least {least}")

    def number(self, name: str) -> float:
        return float(self._checked(name, is_number, "a number"))

    def one_of(self, name: str, values: Collection[Any]) -> Any:
        what = f"one of {', '.join(map(repr, values))}"
        return self._checked(name, lambda value: isinstance(value, str) and value in values, what)

    def items(self, name: str, is_right: Callable[[Any], bool], what: str) -> list[Any]:
        """A list, all of whose items are right."""
        found = self._checked(name, lambda value: isinstance(value, (list, tuple)), "a list")
        for number, item in enumerate(found):
            if not is_right(item):
                raise _wrong(f"{self._at(name)}[{number}]", item, what)
        return list(found)

    def records(self, name: str) -> Iterator[Fields]:
        for number, item in enumerate(self.items(name, lambda _: True, "")):
            yield Fields.of_value(item, f"{self._at(name)}[{number}]")

    def record(self, name: str) -> Fields:
        return Fields.of_value(self.raw(name), self._at(name))

    def optional(self, read: Callable[[str], _T], name: str) -> _T | None:
        """What `read`, a method of these fields, finds under a name; None where the plan says nothing."""
        return None if self.raw(name) is None else read(name)

    def made(self, make: Callable[[Any], _T], name: str) -> _T:
        """What a function that reads plain data makes of a field."""
        try:
            return make(self.raw(name))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise PlanError(f"this is no plan: {self._at(name)} is damaged: {error!r}") from error

    def _checked(self, name: str, is_right: Callable[[Any], bool], what: str) -> Any:
        value = self.raw(name)
        if not is_right(value):
            raise _wrong(self._at(name), value, what)
        return value

    def _at(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name


def is_whole(value: Any, least: int = 0) -> bool:
    """Whether it is a whole number that fits into 64 bits."""
    return type(value) is int and least <= value < _LIMIT


def is_number(value: Any) -> bool:
    """Whether it is a number, of any size that a float has."""
    return (type(value) is int and -_LIMIT <= value < _LIMIT) or (type(value) is float and not math.isnan(value))


def _wrong(place: str, value: Any, what: str) -> PlanError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return PlanError(f"this is no plan: {place} is {shown}, not {what}; make the plan again")

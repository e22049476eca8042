"""What modules hold besides tensors, looked at anew where something has changed and remembered where nothing has.

Most modules are torch's own layers, whose attributes are numbers, texts and tuples of them. Those cannot change in
place: as long as a module holds the very same objects under the same names, it holds the same values.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_odt.capture.reads import MODULE_OWN

_UNCHANGING = frozenset({bool, int, float, str, bytes, type(None)})
# Its tensors, children and hooks, which a step's outline is of.
_STRUCTURE = MODULE_OWN - {"training"}


class Values:
    """Values that compare by content and hash but once."""

    __slots__ = ("_content", "_hash")

    def __init__(self, content: Hashable) -> None:
        self._content = content
        self._hash = hash(content)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Values) and self._hash == other._hash and self._content == other._content
        )

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class _Seen:
    """A module's attributes as they were, and their values."""

    names: tuple[str, ...]
    held: tuple[Any, ...]
    values: Values

    def is_unchanged(self, attributes: Mapping[str, Any]) -> bool:
        return (
            len(attributes) == len(self.held)
            and all(map(operator.is_, attributes.values(), self.held))
            and self.names == tuple(attributes)
        )


class PlainModules:
    """The values of modules that hold nothing else than what cannot change in place; remembered from call to call."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def read(self, modules: Iterable[nn.Module]) -> dict[int, Values]:
        """The values of those modules that hold plain ones alone, by the modules' identities."""
        before, self._seen = self._seen, {}
        for module in modules:
            attributes = vars(module)
            seen = before.get(id(module))
            # Where a new module has an old one's identity, equal attributes have equal values all the same.
            if seen is None or not seen.is_unchanged(attributes):
                seen = _look_at(attributes)
            if seen is not None:
                self._seen[id(module)] = seen
        return {identity: seen.values for identity, seen in self._seen.items()}


def _look_at(attributes: Mapping[str, Any]) -> _Seen | None:
    own = [(name, value) for name, value in attributes.items() if name not in _STRUCTURE]
    if not all(_is_plain(value) for _, value in own):
        return None
    values = Values(tuple((name, _typed(value)) for name, value in own))
    return _Seen(tuple(attributes), tuple(attributes.values()), values)


def _is_plain(value: Any) -> bool:
    return type(value) in _UNCHANGING or (type(value) is tuple and all(map(_is_plain, value)))


def _typed(value: Any) -> Hashable:
    """A value that equals those of its type alone; NaN equals itself."""
    if type(value) is tuple:
        return tuple(map(_typed, value))
    return (type(value), "nan" if value != value else value)

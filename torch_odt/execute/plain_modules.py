"""What modules hold besides tensors, where that cannot change in place.

Most modules are torch's own layers, whose attributes are numbers, texts and tuples of them, named ones of installed
packages too: as long as a module holds the very same objects under the same names, it holds the same values.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from torch import nn

from torch_odt.capture.reads import MODULE_OWN, is_own_class

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


def plain_values(modules: Iterable[nn.Module]) -> dict[int, Values]:
    """The values of those modules that hold plain ones alone, by the modules' identities."""
    # Layers are alike, and what is equal is kept once.
    shared: dict[Hashable, Any] = {}
    found = ((id(module), _look_at(vars(module), shared)) for module in modules)
    return {identity: values for identity, values in found if values is not None}


def _look_at(attributes: Mapping[str, Any], shared: dict[Hashable, Any]) -> Values | None:
    own = [(name, value) for name, value in attributes.items() if name not in _STRUCTURE]
    if not all(_is_plain(value) for _, value in own):
        return None
    pairs = [(name, _typed(value)) for name, value in own]
    values = Values(tuple(shared.setdefault(pair, pair) for pair in pairs))
    found: Values = shared.setdefault(values, values)
    return found


def _is_plain(value: Any) -> bool:
    return type(value) in _UNCHANGING or (_is_tuple(value) and all(map(_is_plain, value)))


def _is_tuple(value: Any) -> bool:
    """Whether it is one that holds its items alone, and has no methods of the user's."""
    kind = type(value)
    if kind is tuple or not issubclass(kind, tuple) or is_own_class(kind):
        return kind is tuple
    return kind.__dictoffset__ == 0 and hasattr(kind, "_fields")


def _typed(value: Any) -> Hashable:
    """A value that equals those of its type alone; NaN equals itself."""
    if isinstance(value, tuple):
        return (type(value), *map(_typed, value))
    return (type(value), "nan" if value != value else value)

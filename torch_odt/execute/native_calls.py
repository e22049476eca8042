"""Ops of a graph as compiled calls, where `torch_odt._memory` is built.

What an operator takes and where its results go is found out once, when a schedule is made ready. A call copies pointers
then, where Python takes longer to call a small operator than the operator takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from torch_odt import _extensions
from torch_odt.capture.graph import Op, Ref, refs
from torch_odt.capture.overwrite import Overwriting
from torch_odt.execute.one_operator import Number, OneOperator
from torch_odt.memory._tracking import is_tracking, number_of


def native_call(op: Op, function: Callable[..., Any], shape_only: Mapping[int, torch.Tensor]) -> Any | None:
    """What calls an op's operator on the values of a table; None where that is for Python.

    Args:
        function: what the op calls. Anything but an operator of torch's dispatcher, by itself, `Overwriting` an
            argument or as `OneOperator`, is for Python.
        shape_only: what stands in the place of values that are not in memory.
    """
    module = _extensions.memory_module
    if module is None:
        return None
    args, kwargs = list(op.args), op.kwargs
    writes = [-1 if value is None else value for value in op.writes]
    takes, alike, mark = (-1, -1), (-1, -1), ""
    if isinstance(function, OneOperator):
        use = function.use
        args, kwargs, alike, mark = list(use.arguments), {}, use.alike or alike, use.mark
        writes = [-1 if value is None else value for value in use.results]
        function = use.operator
    elif isinstance(function, Overwriting):
        takes = (writes.pop(function.way.result), args[function.position].value)
        args, into = function.given(args)
        kwargs = kwargs | into
        function = function.operator
    if not isinstance(function, torch._ops.OpOverload):
        return None
    schema = function._schema
    if not all(str(result.type) == "Tensor" for result in schema.returns):
        return None
    if takes != (-1, -1) and not writes:
        # What the operator returns is what it wrote to.
        writes = [-1] * len(schema.returns)
    names = [argument.name for argument in schema.arguments]
    if len(args) > len(names) or not kwargs.keys().isdisjoint(names[: len(args)]):
        return None
    named = dict(zip(names, args, strict=False)) | kwargs
    placed = _Placed(shape_only)
    try:
        arguments = {name: placed.argument(name, value) for name, value in named.items()}
        category = number_of("activation") if is_tracking() and not op.is_view else -1
        return module.OperatorCall(
            schema.name, schema.overload_name, arguments, placed.places, placed.numbers, writes, takes, alike, mark,
            category,
        )  # fmt: skip
    except (_ForPython, RuntimeError, ValueError, TypeError):
        return None


@cache
def _anything() -> torch.Tensor:
    """What stands where a table's tensor will: one for all calls, which hold it for as long as they are."""
    with torch.inference_mode(False):
        return torch.empty(0)


class _ForPython(Exception):
    """An argument has values where a compiled call has no place for them."""


class _Placed:
    """Arguments without the values that are in a table, and the places of those: argument, element and value.

    Attributes:
        places: the element is -1 where a value is the argument itself.
        numbers: arguments that are read when the operator is called, and from where.
    """

    def __init__(self, shape_only: Mapping[int, torch.Tensor]) -> None:
        self._shape_only = shape_only
        self.places: list[tuple[str, int, int]] = []
        self.numbers: list[tuple[str, torch.Tensor]] = []

    def argument(self, name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._member(name, element, member) for element, member in enumerate(value)]
        if isinstance(value, Number):
            self.numbers.append((name, value.cell))
            return 0.0
        return self._member(name, -1, value)

    def _member(self, name: str, element: int, value: Any) -> Any:
        if not isinstance(value, Ref):
            if any(True for _ in refs(value)):
                raise _ForPython
            return value
        if value.value in self._shape_only:
            return self._shape_only[value.value]
        self.places.append((name, element, value.value))
        return _anything()

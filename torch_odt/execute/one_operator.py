"""What an op calls where that comes to one operator of torch's dispatcher: compiled code can call it by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True, eq=False)
class Number:
    """A number among arguments that may be another one in each call, as a learning rate.

    Attributes:
        cell: float64 of one number, which is read when the operator is called.
    """

    cell: torch.Tensor


class OperatorUse(NamedTuple):
    """A call of an operator.

    Attributes:
        operator: of torch's dispatcher.
        arguments: in its order, with `Ref` where a value of a graph stands, and `Number`.
        results: for each of its results, the value that it is, or None where it is dropped.
        alike: positions of two arguments: the second one is brought to the layout of the first.
        mark: its name in torch's profiles; none where that is empty.
    """

    operator: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    results: tuple[int | None, ...]
    alike: tuple[int, int] | None = None
    mark: str = ""


@dataclass(frozen=True)
class OneOperator:
    """A function for an op.

    Attributes:
        use: the call that it comes to.
        python: does the same with the op's own arguments, and notes at tensors that they have changed, which a call by
            compiled code leaves to the caller.
    """

    use: OperatorUse
    python: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.python(*arguments)

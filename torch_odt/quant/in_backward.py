"""When the gradient of an operator may change a weight itself, in place, instead of handing the weight's gradient on.

A large layer's gradient takes longer to be written to memory and read again than to be computed. Where nobody else is
to see it, the operator of the backward pass takes it off the weight as it computes it.

An operator knows such a weight by what `InBackward` puts at the parameter. Captures see other tensors in its place, and
so operators that change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Update = TypeVar("Update")
ATTRIBUTE = "_torch_odt_in_backward"


class InBackward(Generic[Update]):
    """Lets the operators that use a parameter change it in the backward pass, until `stop`.

    Args:
        parameter: a leaf, or what takes its gradient.
        update: what is to be done, as of now; None leaves it to whoever takes the gradient.
    """

    def __init__(self, parameter: Tensor, update: Callable[[], Update | None]) -> None:
        self.parameter = parameter
        self.update = update
        # Uses whose graphs live and have not been passed back; and whether there were several at a time since there
        # was none. Their gradients are added up before anything is updated.
        self.open_uses, self.is_shared = 0, False
        setattr(parameter, ATTRIBUTE, self)

    def stop(self) -> None:
        """The parameter gets its gradient again."""
        if getattr(self.parameter, ATTRIBUTE, None) is self:
            delattr(self.parameter, ATTRIBUTE)

    def __reduce__(self) -> tuple[Any, ...]:
        # A parameter is saved with what has been put at it, but not with an optimizer.
        return type(None), ()


class Use(Generic[Update]):
    """One use of a parameter by an operator, kept with what its backward pass needs."""

    __slots__ = ("_is_open", "_of")

    def __init__(self, of: InBackward[Update]) -> None:
        self._of = of
        self._is_open = True
        of.is_shared |= of.open_uses > 0
        of.open_uses += 1

    def update(self) -> Update | None:
        """What the backward pass that has come to the operator is to do; None to return the gradient."""
        of = self._of
        is_shared = of.is_shared
        self._end()
        if is_shared or torch.is_grad_enabled() or of.parameter.grad is not None:
            return None
        try:
            accumulates = torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(of.parameter).node)
        except RuntimeError:  # torch.autograd.grad wants this very gradient
            return None
        return of.update() if accumulates else None

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._of.open_uses -= 1
            self._of.is_shared &= self._of.open_uses > 0


def use_of(tensor: Tensor) -> Use[Any] | None:
    """A use of a parameter, or of a view of one, that may be changed in the backward pass; None of any other tensor."""
    base = tensor._base
    found = getattr(tensor if base is None else base, ATTRIBUTE, None)
    return None if found is None else Use(found)

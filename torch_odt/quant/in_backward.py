"""When the gradient of an operator may change a weight itself, in place, instead of handing the weight's gradient on.

A large layer's gradient takes longer to be written to memory and read again than to be computed. Where nobody else is
to see it, the operator of the backward pass takes it off the weight as it computes it.

An operator knows such a weight by what `InBackward` puts at the parameter. Captures see other tensors in its place, and
so operators that change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

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
        self._parameter = parameter
        self._update = update
        self._uses: WeakSet[Use[Update]] = WeakSet()
        setattr(parameter, ATTRIBUTE, self)

    def stop(self) -> None:
        """The parameter gets its gradient again."""
        if getattr(self._parameter, ATTRIBUTE, None) is self:
            delattr(self._parameter, ATTRIBUTE)

    def __reduce__(self) -> tuple[Any, ...]:
        # A parameter is saved with what has been put at it, but not with an optimizer.
        return type(None), ()


class Use(Generic[Update]):
    """One use of a parameter by an operator, kept with what its backward pass needs."""

    def __init__(self, of: InBackward[Update]) -> None:
        self._of = of
        self._accumulator = torch.autograd.graph.get_gradient_edge(of._parameter).node
        # Gradients of several uses are added up before anything is updated.
        self._is_alone = not of._uses
        for other in of._uses:
            other._is_alone = False
        of._uses.add(self)

    def update(self) -> Update | None:
        """What the backward pass that has come to the operator is to do; None to return the gradient."""
        self._of._uses.discard(self)
        if not self._is_alone or torch.is_grad_enabled() or self._of._parameter.grad is not None:
            return None
        try:
            accumulates = torch._C._will_engine_execute_node(self._accumulator)
        except RuntimeError:  # torch.autograd.grad wants this very gradient
            return None
        return self._of._update() if accumulates else None


def use_of(tensor: Tensor) -> Use[Any] | None:
    """A use of a parameter, or of a view of one, that may be changed in the backward pass; None of any other tensor."""
    found = getattr(tensor if tensor._base is None else tensor._base, ATTRIBUTE, None)
    return None if found is None else Use(found)

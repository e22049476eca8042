"""When the gradient of an operator may change a weight itself, in place, instead of handing the weight's gradient on.

A large layer's gradient takes longer to be written to memory and read again than to be computed. Where nobody else is
to see it, the operator of the backward pass takes it off the weight as it computes it. Others are those that ask for it
(`torch.autograd.grad`), hooks, and further uses of the weight, whose gradients are added up first.

An operator knows such a weight by what `InBackward` puts at the parameter. Captures see other tensors in its place, and
so operators that change nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from torch_odt.execute.gradients import USED_UP

Update = TypeVar("Update")


class InBackward(Generic[Update]):
    """Lets the operators that use a parameter change its weight in the backward pass, until `stop`.

    Args:
        parameter: a leaf that takes a weight's gradient; it has one hook behind accumulation, which does the same with
            gradients that are stored.
        update: what is to be done, as of now; None leaves it to that hook.
        release: ends this, and all that was set up with it.
    """

    def __init__(
        self, parameter: Tensor, update: Callable[[], Update | None], release: Callable[[], None] | None = None
    ) -> None:
        self.parameter = parameter
        self.update = update
        self.release = release or self.stop
        # Uses whose graphs live and whose gradients have not been accumulated; and whether there were several at a
        # time since there was none.
        self.open_uses, self.is_shared = 0, False
        setattr(parameter, USED_UP, self)

    def stop(self) -> None:
        """The parameter gets its gradient again."""
        if self.is_in_force():
            delattr(self.parameter, USED_UP)

    def is_in_force(self) -> bool:
        return getattr(self.parameter, USED_UP, None) is self

    def is_seen_by_hooks(self) -> bool:
        behind: Any = self.parameter._post_accumulate_grad_hooks
        return bool(self.parameter._backward_hooks) or (behind is not None and len(behind) > 1)

    def __reduce__(self) -> tuple[Any, ...]:
        # A parameter is saved with what has been put at it, but not with an optimizer; nothing but what
        # `torch.load(weights_only=True)` knows may stand in its place.
        return OrderedDict, ()


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
        if not accumulates(of.parameter):
            return None
        is_alone = not of.is_shared
        self._end()
        has_gradient = of.parameter.grad is not None or torch.is_grad_enabled()
        may_change = is_alone and of.is_in_force() and not has_gradient and not of.is_seen_by_hooks()
        return of.update() if may_change else None

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._of.open_uses -= 1
            self._of.is_shared &= self._of.open_uses > 0


def accumulates(parameter: Tensor) -> bool:
    """Whether the backward pass that runs ends in the parameter's `.grad`."""
    try:
        accumulator = torch.autograd.graph.get_gradient_edge(parameter).node
        return bool(torch._C._will_engine_execute_node(accumulator))
    except RuntimeError:  # torch.autograd.grad wants this very gradient
        return False


def use_of(tensor: Tensor) -> Use[Any] | None:
    """A use of a parameter, or of a view of one, that may be changed in the backward pass; None of any other tensor."""
    base = tensor._base
    found = getattr(tensor if base is None else base, USED_UP, None)
    return Use(found) if isinstance(found, InBackward) else None


def is_same_memory(kept: Tensor, weight: Tensor) -> bool:
    """Whether what was kept for the backward pass is the weight, and no copy that a hook for saved tensors made."""
    return kept.device == weight.device and kept.data_ptr() == weight.data_ptr()

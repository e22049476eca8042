"""Budget policies: how many bytes this process may hold, by what the system says at a moment.

Open `Policy` first: each is one small dataclass. A controller asks again and again, so what a policy says may change
while training runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch_odt.errors import require_number
from torch_odt.memory._units import parse_bytes
from torch_odt.runtime.budget import AUTO_SHARE, Budget
from torch_odt.runtime.monitor import Reading

__all__ = ["ControlGroupHeadroom", "Fixed", "Policy", "ShareOfAvailable", "Smallest", "policy_of"]


@runtime_checkable
class Policy(Protocol):
    """Says what this process may hold. A class of your own needs this one method."""

    def allowed_bytes(self, reading: Reading, level_bytes: int) -> int | None:
        """What the process may hold in all, by this reading; None where the policy has nothing to say.

        Args:
            reading: what the system says now.
            level_bytes: what the process held before training. What it holds above that is training's own, and counts
                as available to it.
        """


AnyPolicy = Policy | Callable[[Reading], int | None]


@dataclass(frozen=True)
class Fixed:
    """Always the same. Choose it together with others, as the most that they may say.

    Args:
        budget: bytes as `Budget` takes them, but no share.

    Raises:
        ValueError: `budget` is a share, or no number of bytes.

    Example:
        >>> from torch_odt.runtime import read_system
        >>> reading = read_system()
        >>> Fixed("512MiB").allowed_bytes(reading, 0) == 512 << 20
        True
    """

    budget: int | str | Budget

    def __post_init__(self) -> None:
        if Budget.of_value(self.budget).share is not None:
            raise ValueError(f"{self.budget!r} changes with what is available: use ShareOfAvailable for that")

    def allowed_bytes(self, reading: Reading, level_bytes: int) -> int:
        budget = Budget.of_value(self.budget)
        return parse_bytes(budget.amount) + (level_bytes if budget.of == "training" else 0)


@dataclass(frozen=True)
class ShareOfAvailable:
    """A share of what there would be if nothing were trained. Choose it on a machine that runs other programs too.

    Args:
        share: of what the system, control groups and limits of the process leave, above 0 and at most 1.
        reserve: bytes that stay free for other programs in any case.
        floor: bytes of training that are never given up, whatever others want.

    Raises:
        ValueError: `share` is out of range, or `reserve` or `floor` is no number of bytes.

    Example:
        >>> from torch_odt.runtime import read_system
        >>> reading = read_system()
        >>> half = ShareOfAvailable(0.5).allowed_bytes(reading, reading.process_bytes)
        >>> half - reading.process_bytes == reading.available_bytes // 2
        True
    """

    share: float = AUTO_SHARE
    reserve: int | str = 0
    floor: int | str = 0

    def __post_init__(self) -> None:
        require_number("share", self.share)
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, not {self.share}")
        _bytes(self.reserve)
        _bytes(self.floor)

    def allowed_bytes(self, reading: Reading, level_bytes: int) -> int:
        own_bytes = max(0, reading.process_bytes - level_bytes)
        growth_bytes = int(self.share * (reading.available_bytes + own_bytes)) - _bytes(self.reserve)
        return level_bytes + max(growth_bytes, _bytes(self.floor), 0)


@dataclass(frozen=True)
class ControlGroupHeadroom:
    """What the tightest control group leaves. Choose it in a container whose other processes come and go.

    It says nothing where no control group limits this process: combine it with another one by `Smallest`.

    Args:
        reserve: bytes of the group that stay free.
        floor: bytes of training that are never given up.

    Raises:
        ValueError: `reserve` or `floor` is no number of bytes.

    Example:
        >>> policy = Smallest(ControlGroupHeadroom(reserve="32MiB"), ShareOfAvailable(0.9))
        >>> from torch_odt.runtime import read_system
        >>> reading = read_system()
        >>> policy.allowed_bytes(reading, reading.process_bytes) >= reading.process_bytes
        True
    """

    reserve: int | str = "16MiB"
    floor: int | str = 0

    def __post_init__(self) -> None:
        _bytes(self.reserve)
        _bytes(self.floor)

    def allowed_bytes(self, reading: Reading, level_bytes: int) -> int | None:
        group = reading.control_group
        if group is None:
            return None
        left_bytes = group.limit_bytes - group.used_bytes - _bytes(self.reserve)
        return max(reading.process_bytes + left_bytes, level_bytes + _bytes(self.floor))


@dataclass(frozen=True, init=False)
class Smallest:
    """The least that any of several policies allows; those that say nothing are passed over.

    Raises:
        ValueError: there is none.
        TypeError: one is neither a policy nor what can be made into one.

    Example:
        >>> from torch_odt.runtime import read_system
        >>> reading = read_system()
        >>> Smallest("1GiB", Fixed("512MiB")).allowed_bytes(reading, 0) <= 512 << 20
        True
    """

    policies: tuple[Policy, ...]

    def __init__(self, *policies: object) -> None:
        if not policies:
            raise ValueError("the smallest of no policies: name at least one")
        object.__setattr__(self, "policies", tuple(policy_of(policy) for policy in policies))

    def allowed_bytes(self, reading: Reading, level_bytes: int) -> int | None:
        said = [policy.allowed_bytes(reading, level_bytes) for policy in self.policies]
        return min((nbytes for nbytes in said if nbytes is not None), default=None)


@dataclass(frozen=True)
class Callback:
    """What a function of the user's says."""

    function: Callable[[Reading], int | None]

    def allowed_bytes(self, reading: Reading, level_bytes: int) -> int | None:
        return self.function(reading)


def policy_of(value: object) -> Policy:
    """A policy from one, from anything that `Budget` takes, or from a function of a reading.

    Raises:
        TypeError: it is none of these.
        ValueError: it is a text or number that is no budget.

    Example:
        >>> from torch_odt.runtime import read_system
        >>> policy_of("80%")
        ShareOfAvailable(share=0.8, reserve=0, floor=0)
        >>> policy_of(lambda reading: reading.total_bytes // 2).allowed_bytes(read_system(), 0) > 0
        True
    """
    if isinstance(value, type):
        raise TypeError(f"give an object, not the class {value.__name__}: {value.__name__}(...)")
    if isinstance(value, Policy):
        return value
    if isinstance(value, int | str | Budget):
        budget = Budget.of_value(value)
        return Fixed(budget) if budget.share is None else ShareOfAvailable(budget.share)
    if callable(value):
        return Callback(value)
    hint = f": bytes are a whole number, {int(value)}" if isinstance(value, float) and math.isfinite(value) else ""
    raise TypeError(f"a policy, a budget or a function of a reading is needed, not {value!r}{hint}")


def _bytes(amount: int | str) -> int:
    return 0 if amount == 0 else parse_bytes(amount)

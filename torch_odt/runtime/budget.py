"""Budgets: how many bytes, of what, and from where."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from torch_odt.memory import available, available_detail, children_bytes
from torch_odt.memory._units import format_bytes, parse_bytes

__all__ = ["AUTO_SHARE", "Allotment", "Budget", "BudgetOf", "ResolvedBudget", "format_bytes", "parse_bytes"]

BudgetOf = Literal["process", "training"]

# What "auto" leaves to everybody else: memory that is available now may be wanted by others in a moment.
AUTO_SHARE = 0.9


def _parse_share(text: str) -> float | None:
    """The share that "80%" stands for; None if the text is no percentage."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", text)
    if match is None:
        return None
    percent = float(match[1])
    if not 0 < percent <= 100 or not math.isfinite(percent):
        raise ValueError(f'{text!r} is not a share: give more than 0% and at most 100%, such as "80%"')
    return percent / 100


@dataclass(frozen=True)
class ResolvedBudget:
    """A budget in numbers, at one moment.

    Attributes:
        total_bytes: what the process may hold.
        level_bytes: what it held when the budget was resolved.
        growth_bytes: what may be added to that; negative if the level is above the budget already.
        of: what the budget was stated for.
        text: the budget in words.
        children_bytes: what child processes take of a fixed number of bytes, because a control group limits all
            together: the workers of a DataLoader.
    """

    total_bytes: int
    level_bytes: int
    growth_bytes: int
    of: BudgetOf
    text: str
    children_bytes: int = 0

    def in_terms_of(self, growth_bytes: int) -> int:
        """The budget that would leave so much growth, stated as this one is."""
        level_bytes = self.level_bytes if self.of == "process" else 0
        return level_bytes + growth_bytes + self.children_bytes


@dataclass(frozen=True)
class Budget:
    """So many bytes of something.

    When to choose it: wherever a `budget=` is taken a plain "512MiB" does too. Choose the object to budget the training
    alone, independent of what the interpreter and its libraries weigh.

    Attributes:
        amount: bytes as an int or as text ("512MiB"); "80%" of what is available; or "auto", nine tenths of it.
            What is available is the smallest of what the machine, the control group and the process limits leave. The
            two relative forms are on top of what the process holds.
        of: "process" counts everything that the process holds and the kernel cannot take back; "training" counts what
            is added above the level at construction.

    Raises:
        ValueError: `amount` is not a number of bytes, a share or "auto", or `of` is unknown.

    Example:
        >>> Budget("370MiB", of="training").resolve(level_bytes=1000).growth_bytes
        387973120
    """

    amount: int | str
    of: BudgetOf = "process"

    def __post_init__(self) -> None:
        if self.of not in ("process", "training"):
            raise ValueError(f'a budget is of "process" or of "training", not of {self.of!r}')
        if self.share is None:
            try:
                parse_bytes(self.amount)
            except ValueError as error:
                link = " Or" if str(error).endswith("?") else "; or"
                raise ValueError(f'{error}{link} "80%" of what is available, or "auto"') from None

    @classmethod
    def of_value(cls, value: int | str | Budget) -> Budget:
        """A budget from anything that a `budget=` may be given."""
        return value if isinstance(value, Budget) else cls(value)

    @property
    def share(self) -> float | None:
        """The share of the available memory that it asks for; None if its amount is fixed."""
        if not isinstance(self.amount, str):
            return None
        return AUTO_SHARE if self.amount.strip().lower() == "auto" else _parse_share(self.amount)

    def resolve(self, level_bytes: int) -> ResolvedBudget:
        """The budget in numbers, for a process that holds so much now.

        Args:
            level_bytes: what the process holds, from `torch_odt.memory.process_bytes()`.

        Returns:
            Total and growth. A relative budget asks the system again at every call.

        Raises:
            ValueError: `level_bytes` is negative.
        """
        if level_bytes < 0:
            raise ValueError(f"a process cannot hold {level_bytes} bytes")
        share, taken_bytes = self.share, 0
        if share is not None:
            growth_bytes = int(share * available())
        else:
            taken_bytes = children_bytes() if _is_group_limited() else 0
            amount_bytes = parse_bytes(self.amount)
            growth_bytes = (amount_bytes if self.of == "training" else amount_bytes - level_bytes) - taken_bytes
        return ResolvedBudget(
            total_bytes=level_bytes + growth_bytes,
            level_bytes=level_bytes,
            growth_bytes=growth_bytes,
            of=self.of,
            text=str(self),
            children_bytes=taken_bytes,
        )

    def __str__(self) -> str:
        if self.share is not None:
            what = "auto" if "%" not in str(self.amount) else f"{self.amount} of the available memory"
            return f"{what} ({self.of})"
        return f"{format_bytes(parse_bytes(self.amount))} ({self.of})"


@dataclass(frozen=True)
class Allotment:
    """What this process may hold until a controller decides again; other processes have been taken off already.

    Example:
        >>> Allotment(3 << 20).resolve(level_bytes=1 << 20).growth_bytes
        2097152
    """

    total_bytes: int

    def resolve(self, level_bytes: int) -> ResolvedBudget:
        """The same in numbers, for a process that holds so much now."""
        growth_bytes = self.total_bytes - level_bytes
        return ResolvedBudget(self.total_bytes, level_bytes, growth_bytes, of="process", text=str(self))

    def __str__(self) -> str:
        return f"{format_bytes(self.total_bytes)} (process)"


def _is_group_limited() -> bool:
    """Whether a control group limits this process and its children together."""
    return any(source.startswith("cgroup") for source in available_detail())

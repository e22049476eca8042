"""What the package raises and warns with."""

from __future__ import annotations


class OdtWarning(UserWarning):
    """Something works, but not as well as it could; the text says what to do."""


class NonFiniteLossWarning(OdtWarning):
    """The loss of a step is NaN or infinite."""


class LossError(ValueError):
    """What the loss function returned cannot be trained on; the text says why."""


class CaptureError(RuntimeError):
    """A step cannot be captured as a graph; the text says why."""


class PlanError(RuntimeError):
    """A plan cannot be made or does not fit the graph that it is used with."""


class ScheduleError(PlanError):
    """A schedule breaks a rule of the graph that it is to execute."""


class PagingError(RuntimeError):
    """Memory could not be moved to the file of pages or back.

    Nothing that was trained is lost: parameters, buffers and random generators are as before the step, which can be
    made again. An accumulation over several calls begins anew with it, unless the step is transactional.

    Attributes:
        fault: "full" (the device or the limit), "failed" (input or output), "torn" (the file does not hold what was
            written), "slow", or "forked" (another process than the one that pages).
    """

    def __init__(self, text: str, fault: str = "failed") -> None:
        super().__init__(text)
        self.fault = fault


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read back; the text says what is wrong with it."""


class StoredOutputsError(RuntimeError):
    """Outputs of a mentor on disk are damaged, or those of another mentor or of other data; the text says which."""


class InfeasibleBudget(RuntimeError):
    """No plan stays inside the budget.

    Attributes:
        budget: the refused budget, as given.
        smallest_feasible_bytes: the smallest budget that would be accepted, in the refused budget's own terms.
        hints: what would lower it.
    """

    def __init__(
        self, budget: object, smallest_feasible_bytes: int, hints: tuple[str, ...] = (), detail: str = ""
    ) -> None:
        # The package of memory takes its errors from here.
        from torch_odt.memory._units import format_bytes

        self.budget = budget
        self.smallest_feasible_bytes = smallest_feasible_bytes
        self.hints = tuple(hints)
        self._detail = detail
        refused = f"of {format_bytes(budget)}" if isinstance(budget, int) else str(budget)
        smallest = f"{format_bytes(smallest_feasible_bytes)} ({smallest_feasible_bytes} bytes)"
        text = f"the budget {refused} is too small; the smallest feasible one is {smallest}"
        if detail:
            text += f": {detail}"
        if hints:
            text += ". To lower it: " + "; ".join(hints)
        super().__init__(text)

    def __reduce__(self) -> tuple[type[InfeasibleBudget], tuple[object, int, tuple[str, ...], str]]:
        # An exception is pickled by its message alone, but planning runs in other processes.
        return type(self), (self.budget, self.smallest_feasible_bytes, self.hints, self._detail)


def first_line(error: BaseException) -> str:
    """What an error says, without what follows in further lines; its class where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def require_number(name: str, value: object, *, whole: bool = False) -> None:
    """
    Raises:
        TypeError: an argument of that name is no number, or no whole one where `whole` asks for that.
    """
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise TypeError(f"{name} is a {'whole ' if whole else ''}number, not {value!r}")

"""Why a budget is refused, and what would lower the smallest one that is accepted."""

from __future__ import annotations

from torch_odt.errors import InfeasibleBudget
from torch_odt.execute.accounting import Allowance
from torch_odt.execute.candidate import Candidate
from torch_odt.execute.candidates import Candidates
from torch_odt.execute.request import StepRequest
from torch_odt.execute.summary import could_page


def infeasible(
    request: StepRequest, candidates: Candidates, allowance: Allowance, smallest: Candidate
) -> InfeasibleBudget:
    """The refusal of a budget, with the smallest one that would be accepted."""
    return InfeasibleBudget(
        allowance.budget.text,
        allowance.smallest_budget(allowance.total_with(smallest)),
        hints=_hints(candidates, request),
        detail=allowance.describe(),
    )


def _hints(candidates: Candidates, request: StepRequest) -> tuple[str, ...]:
    hints = ["a smaller batch"] if candidates.batch > 1 else []
    if any("BatchNorm" in note for note in candidates.notes):
        hints.append("BatchNorm in evaluation mode, so that the batch can be cut into micro-batches")
    if could_page(request):
        hints.append("page_to=, for the device has storage")
    if request.planner != "auto":
        hints.append('planner="auto"')
    if request.optimizer_cost is not None and request.optimizer_cost.state_bytes:
        hints.append("an optimizer with less state")
    return tuple(hints)

"""Steps whose budget changes while training runs: what a controller decides, and what is prepared for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from torch_odt import memory
from torch_odt.errors import InfeasibleBudget, OdtWarning
from torch_odt.execute.prepared import Prepared
from torch_odt.execute.request import StepRequest
from torch_odt.runtime.budget import Allotment, Budget

if TYPE_CHECKING:
    from torch_odt.execute.retries import Lowered
    from torch_odt.runtime.controller import BudgetValue, Controller
    from torch_odt.runtime.growth import Need

Found = TypeVar("Found")
PLAN_FOR_ONE_BUDGET = "a plan was made for one budget, which cannot change while training runs: give bytes"


def controller_of(value: BudgetValue | None) -> Controller | None:
    """What decides while training runs, if that is what was given; None for a plain budget."""
    if value is None or isinstance(value, int | str | Budget):
        return None
    # A start from a plan does without.
    from torch_odt.runtime.controller import Controller

    return Controller.of_value(value)


def first_budget(value: BudgetValue, controller: Controller | None, level_bytes: int) -> Budget | Allotment:
    """The budget of the first step."""
    if controller is not None:
        return controller.begin(level_bytes)
    if not isinstance(value, int | str | Budget):
        raise TypeError(f"a budget is bytes, a text such as '512MiB', a Budget or a policy, not {value!r}")
    return Budget.of_value(value)


def prepare_now(
    controller: Controller | None,
    request: StepRequest,
    current: Prepared | None,
    find: Callable[..., Prepared],
    forget_plans: Callable[[], None],
    *,
    lowered: Lowered | None,
) -> Prepared:
    """What runs in as many bytes as there are now.

    Args:
        controller: decides how many; None where the budget is fixed.
        current, forget_plans: as for `prepare_allotted`.
        find: makes or finds what runs within the request's budget, or `lowered=` what an attempt is to do with.
        lowered: that; None for the ordinary budget.
    """
    if controller is None:
        return find(lowered=lowered)
    if lowered is None:
        return prepare_allotted(controller, request, current, find, forget_plans)
    prepared = find(lowered=lowered)
    # As much of its arena as can be had: what is lacking, others have, and the attempt may fail once more.
    request.hold(prepared.plan.arena_bytes, lambda: controller.room_bytes(request.level_bytes))
    return prepared


def prepare_allotted(
    controller: Controller,
    request: StepRequest,
    current: Prepared | None,
    prepare: Callable[[], Prepared],
    forget_plans: Callable[[], None],
) -> Prepared:
    """What runs in as many bytes as a controller allows now; the smallest plan where that is too little.

    The arena of what is returned is held, so that nobody else can take what the step counts on while it runs. What
    cannot be held, because others have been faster, makes the plan smaller.

    Args:
        current: what ran last.
        prepare: makes or finds what runs within the request's budget.
        forget_plans: gives back what plans for other amounts hold.
    """

    def prepare_within(allotment: Allotment) -> Prepared:
        request.allot(allotment)
        try:
            return prepare()
        except InfeasibleBudget as error:
            smallest_bytes = error.smallest_feasible_bytes
        held_bytes = memory.process_bytes()
        forget_plans()
        memory.trim()
        freed_bytes = held_bytes - memory.process_bytes()
        if smallest_bytes - freed_bytes > allotment.total_bytes:
            return _in_the_fewest(controller, smallest_bytes, request.allot, prepare)
        # What other plans held was what was missing.
        return or_in_the_fewest(controller, request.allot, prepare)

    level_bytes = request.level_bytes
    prepared = prepare_within(controller.before_step(level_bytes, _need_of(request, current)))
    while lacking := request.hold(prepared.plan.arena_bytes, lambda: controller.room_bytes(level_bytes)):
        if controller.is_scarce:
            break
        prepared = prepare_within(controller.overtaken(level_bytes, prepared.plan.peak_bytes - lacking))
    if prepared.program is not None and prepared.pressure is None:
        from torch_odt.execute.pressure import Pressure

        prepared.pressure = Pressure(controller, request, prepared.plan)
    return prepared


def or_in_the_fewest(controller: Controller, allot: Callable[[Allotment], None], prepare: Callable[[], Found]) -> Found:
    """What is prepared within what a controller allows; where that is too little, in the fewest bytes, with a warning.

    Args:
        allot: takes what there is from now on.
    """
    try:
        return prepare()
    except InfeasibleBudget as error:
        smallest_bytes = error.smallest_feasible_bytes
    return _in_the_fewest(controller, smallest_bytes, allot, prepare, stacklevel=9)


def _in_the_fewest(
    controller: Controller,
    smallest_bytes: int,
    allot: Callable[[Allotment], None],
    prepare: Callable[[], Found],
    *,
    stacklevel: int = 8,
) -> Found:
    allot(controller.refused(smallest_bytes))
    if controller.is_scarce:
        allowed = Allotment(controller.decisions[-1].allowed_bytes)
        warnings.warn(
            f"{allowed} are allowed, and the smallest plan takes {controller.current}: that one is followed until more "
            "is allowed. A smaller batch takes less",
            OdtWarning,
            stacklevel=stacklevel,
        )
    return prepare()


def heed(lowered: Lowered | None, controller: Controller, request: StepRequest) -> None:
    """What a call could only be made with is what the next ones are allotted for a while."""
    if lowered is not None and lowered.growth_bytes is not None:
        request.allot(controller.out_of_memory(request.level_bytes + lowered.growth_bytes))


def _need_of(request: StepRequest, current: Prepared | None) -> Need | None:
    """What the plan that ran last takes."""
    if current is None:
        return None
    from torch_odt.runtime.growth import Need

    plan = current.plan
    # What a whole batch, or one that nothing is paged of, would take is not known.
    is_known = plan.captured and not (plan.micro_batch or current.pages)
    step_seconds = current.measured_seconds
    return Need(
        request.level_bytes + plan.peak_bytes,
        plan.slowdown if is_known else None,
        plan.planning_seconds or 0.0,
        request.holding.seconds_per_byte,
        step_seconds,
        step_seconds / plan.eager_seconds if is_known and step_seconds and plan.eager_seconds else None,
    )

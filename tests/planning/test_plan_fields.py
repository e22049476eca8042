"""Every field of a plan has its type: whatever a file says, it is a plan or a clear error."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan import make_plan

from torch_odt.errors import PlanError
from torch_odt.planning.plan import Plan

VALUES = st.sampled_from(
    [None, True, -1, 0, 3, 10**30, 1.5, math.inf, -math.inf, math.nan, "", "x", [], [1], [None], {}, {"nbytes": 1}]
)


def state() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(make_plan(micro_batch=3, notes=["a note"]).to_state()))
    return found


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in nested data: what holds it, and its key there."""
    for key in data if isinstance(data, dict) else range(len(data)):
        yield data, key
        if isinstance(data[key], (dict, list)):
            yield from places(data[key])


STATE = state()


@given(data=st.data())
def test_whatever_is_changed_it_is_a_plan_or_an_error(data: st.DataObject) -> None:
    changed = copy.deepcopy(STATE)
    for _ in range(data.draw(st.integers(1, 2))):
        found = list(places(changed))
        holder, key = found[data.draw(st.integers(0, len(found) - 1))]
        if data.draw(st.booleans()):
            holder[key] = data.draw(VALUES)
        else:
            del holder[key]
    try:
        plan = Plan.from_state(changed)
    except PlanError:
        return
    assert Plan.from_state(plan.to_state()) == plan
    assert str(plan)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("planner", 3, "planner is 3, not a text"),
        ("step_seconds", "fast", "step_seconds is 'fast', not a number"),
        ("eager_seconds", math.nan, "eager_seconds is nan, not a number"),
        ("step_joules", [], "step_joules"),
        ("objective", "bytes", "objective is 'bytes', not one of 'seconds', 'joules'"),
        ("batch", 2.5, "batch is 2.5, not a whole number of at least 1"),
        ("micro_batch", 0, "micro_batch is 0"),
        ("captured", 1, "captured is 1, not true or false"),
        ("notes", ["a", 2], r"notes\[1\] is 2, not a text"),
        ("lines", [{"label": "all", "nbytes": 1.5, "note": ""}], r"lines\[0\].nbytes is 1.5"),
        ("lines", [{"label": "all", "note": ""}], r"lines\[0\].nbytes is missing"),
        ("recomputed", {}, "recomputed is {}, not a list"),
        ("budget", {**STATE["budget"], "of": "nobody"}, "budget.of is 'nobody'"),
        ("schedule", {**STATE["schedule"], "instructions": [["fly", 1]]}, "schedule is damaged"),
        ("layout", {}, "layout is damaged"),
        ("timeline", {**STATE["timeline"], "kept_bytes": []}, "lists of timeline differ in length"),
        ("timeline", {**STATE["timeline"], "transfers": [["up", "x", 1, 0.0, 1.0]]}, r"timeline.transfers\[0\]"),
    ],
)
def test_a_field_of_another_type_is_named(name: str, value: Any, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Plan.from_state({**STATE, name: value})


@pytest.mark.parametrize("value", [None, [], "plan", {}])
def test_what_has_no_fields_is_no_plan(value: Any) -> None:
    with pytest.raises(PlanError, match="this is no plan"):
        Plan.from_state(value)

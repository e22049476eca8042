"""Plan files that were changed with care, their digest included: an error, or a run; never the end of the process."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_steps import Case, saved_plan
from small_steps import Net, make_batches

import torch_odt as odt
from torch_odt.planning.plan_file import read_plan_file, write_plan_file

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch_odt.OdtWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

CASES = {
    "whole": Case(functools.partial(Net, norm=True), functools.partial(torch.optim.SGD, momentum=0.9)),
    "cut": Case(functools.partial(Net, dropout=0.3), options={"micro_batch": 4}),
}
numbers = st.sampled_from([-1, 0, 1, 2, 7, 10**6, 2**40])
others = st.sampled_from([None, True, 1.5, "", "x", "%0", "%7", "aten.relu.default", "float64", [], [1, 2]])


@functools.cache
def content_of(name: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        return read_plan_file(saved_plan(Path(folder) / "plan.json", CASES[name]))


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in nested data: what holds it, and its key there."""
    for key in data if isinstance(data, dict) else range(len(data)):
        yield data, key
        if isinstance(data[key], (dict, list)):
            yield from places(data[key])


def follow(content: dict[str, Any], case: Case) -> None:
    with TemporaryDirectory() as folder:
        write_plan_file(Path(folder) / "plan.json", content)
        case.train(make_batches(1, case.size), plan=Path(folder) / "plan.json")


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=60)
@given(data=st.data())
def test_whatever_is_changed(name: str, data: st.DataObject) -> None:
    content = copy.deepcopy(content_of(name))
    found = list(places(content["program"]))
    holder, key = found[data.draw(st.integers(0, len(found) - 1))]
    holder[key] = data.draw(numbers | others)
    # What remains is for operators of torch's to refuse: they look at their arguments by themselves.
    with contextlib.suppress(odt.PlanError, odt.InfeasibleBudget, RuntimeError, IndexError):
        follow(content, CASES[name])


def part(content: dict[str, Any]) -> dict[str, Any]:
    return content["program"]["parts"][0]


def blocks(content: dict[str, Any]) -> list[list[int]]:
    table = part(content)["first"]["layout"]["table"]
    return [place for row in table for place in row if place[0] >= 0]


def overlaps(content: dict[str, Any]) -> None:
    for place in blocks(content):
        place[0] = 0


def lies_outside(content: dict[str, Any]) -> None:
    blocks(content)[0][0] = 1 << 40


def is_misaligned(content: dict[str, Any]) -> None:
    part(content)["first"]["layout"]["address_peak_bytes"] += 64
    max(blocks(content))[0] += 1


def runs_what_is_not_there(content: dict[str, Any]) -> None:
    part(content)["schedule"]["instructions"][0] = ["run", 10_000]


def frees_too_early(content: dict[str, Any]) -> None:
    instructions = part(content)["schedule"]["instructions"]
    first = next(i for i, (kind, _) in enumerate(instructions) if kind == "free")
    instructions.insert(1, instructions.pop(first))


def updates_something_else(content: dict[str, Any]) -> None:
    op = next(op for op in part(content)["first"]["graph"]["ops"] if op["target"] == "odt.update")
    op["args"][0] = "adam"


def has_other_micro_batches(content: dict[str, Any]) -> None:
    content["program"]["micro-batches"] = [3, 3]


@pytest.mark.parametrize(
    "change",
    [
        overlaps,
        lies_outside,
        is_misaligned,
        runs_what_is_not_there,
        frees_too_early,
        updates_something_else,
        has_other_micro_batches,
    ],
)
def test_what_contradicts_itself_is_refused(change: Any) -> None:
    content = copy.deepcopy(content_of("whole"))
    change(content)
    with pytest.raises(odt.PlanError):
        follow(content, CASES["whole"])

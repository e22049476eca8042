"""The page of a plan: well-formed, on its own, with the plan's numbers and whatever texts it is given."""

from __future__ import annotations

import builtins
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from drawn_plans import MB, make_frontiers, make_plan
from html_page import Page
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_odt.pages import svg
from torch_odt.planning.page.document import NOT_COMPUTED, page, write_page
from torch_odt.planning.page.timeline_chart import bands_of
from torch_odt.planning.plan import Plan, PlanLine
from torch_odt.planning.plan_text import format_seconds
from torch_odt.runtime.budget import format_bytes

TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=40).filter(
    lambda text: text == text.strip()
)


def test_it_is_well_formed_and_asks_for_nothing() -> None:
    text = page(make_plan(), frontiers=make_frontiers(), title="a model")
    found = Page(text)
    assert found.texts_in("h1") == found.texts_in("title") == ["a model"]
    assert not [a for _, a in found.elements if {"src", "href", "action", "data", "srcset"} & a.keys()]
    assert not re.search(r"://|url\(|@import|fetch\(|XMLHttpRequest", text)
    assert any("default-src 'none'" in (a.get("content") or "") for tag, a in found.elements if tag == "meta")


def test_its_numbers_are_the_plans() -> None:
    plan = make_plan()
    found = Page(page(plan))
    assert plan.timeline is not None and plan.timeline.transfers and plan.recomputed
    facts = dict(zip(found.texts_in("dt"), found.texts_in("dd"), strict=True))
    moved = [format_bytes(plan.timeline.moved_bytes(direction)) for direction in ("out", "in")]
    assert facts == {
        "predicted peak": format_bytes(plan.peak_bytes),
        "of the budget": f"{plan.peak_bytes / (100 * MB):.0%}",
        "a step": format_seconds(plan.step_seconds),
        "against keeping everything": f"{plan.slowdown:.2f} times",
        "recomputed": f"{plan.timeline.recompute_seconds / plan.step_seconds:.1%} of the time, "
        f"{plan.recomputed_ops} calls",
        "paged": f"{moved[0]} out, {moved[1]} in",
        "waits for the file": format_seconds(plan.timeline.wait_seconds),
        "batch": "whole",
        "smallest feasible budget": "7.0 MiB",
        "planning took": "250 ms",
    }
    cells = found.texts_in("td")
    for line in plan.lines:
        assert cells[cells.index(line.label) + 1] == format_bytes(line.nbytes)


def test_its_data_are_the_timelines() -> None:
    plan = make_plan()
    data, timeline = Page(page(plan)).data, plan.timeline
    assert timeline is not None
    assert data["start"] == timeline.start_seconds and data["seconds"] == timeline.seconds
    assert [data["names"][name] for name in data["name"]] == timeline.names
    assert data["transfers"] == [list(transfer) for transfer in timeline.transfers]
    assert data["file"] == timeline.file_bytes
    fixed = plan.peak_bytes - plan.arena_bytes
    totals = [sum(sizes) for sizes in zip(*data["bands"], strict=True)]
    assert totals == [fixed + total for total in timeline.total_bytes]
    assert [band.name for band in bands_of(plan, timeline)] == [
        "gradients",
        "optimizer state",
        "others",
        "kept",
        "recomputed",
        "back from the file",
        "on its way to or from the file",
        "workspace of the operator",
    ]


def test_the_legend_begins_at_the_peak() -> None:
    plan = make_plan()
    assert plan.timeline is not None
    totals = plan.timeline.total_bytes
    moment = totals.index(max(totals))
    found = Page(page(plan))
    assert format_bytes(plan.peak_bytes - plan.arena_bytes + totals[moment]) == found.texts_in("b")[0]
    assert found.texts_in("strong") == [plan.timeline.names[moment]]
    (stack,) = [a for a in found.classes("stack") if a.get("role") == "slider"]
    assert stack["aria-valuenow"] == str(moment)


@settings(max_examples=40, deadline=None)
@given(TEXTS, TEXTS, TEXTS, TEXTS, TEXTS)
def test_no_text_is_taken_for_the_page(title: str, note: str, label: str, op: str, planner: str) -> None:
    plain = Page(page(make_plan(), frontiers=make_frontiers()))
    plan = make_plan(notes=(note, "another one"))
    assert plan.timeline is not None
    names = [f"</script><b>{op}" for _ in plan.timeline.names]
    plan.timeline = replace(plan.timeline, names=names)
    plan.lines = (plan.lines[0], PlanLine(label, 9 * MB, "<i>"), *plan.lines[2:])
    melon, dtr = make_frontiers().values()
    found = Page(page(plan, frontiers={f"{planner}<u>": melon, "dtr": dtr}, title=title))
    assert {tag for tag, _ in found.elements} <= {tag for tag, _ in plain.elements}
    assert found.texts_in("h1") == [title]
    assert note in found.texts_in("li")
    assert label in found.texts_in("td") and "<i>" in found.texts_in("small")
    assert f"{planner}<u>" in found.texts_in("td")
    assert found.data["names"] == names[:1]


def test_every_plan_of_a_frontier_is_a_dot() -> None:
    plan, frontiers = make_plan(), make_frontiers()
    found = Page(page(plan, frontiers=frontiers))
    dots = found.classes("dot")
    assert len(dots) == sum(len({(p.peak_bytes, p.step_seconds) for p in plans}) for plans in frontiers.values())
    for dot in [*dots, *found.classes("ring")[:1]]:
        shares = [float(number) for number in re.findall(r"([\d.]+)%", dot["style"] or "")]
        assert len(shares) == 2 and all(0 < share < 100 for share in shares)
    texts = [dot["data-text"] or "" for dot in dots]
    for name, plans in frontiers.items():
        for each in plans:
            wanted = f"{name}: {format_bytes(each.peak_bytes)}, {format_seconds(each.step_seconds)} a step"
            assert any(text.startswith(wanted) for text in texts)


def test_joules_are_drawn_where_they_are_known() -> None:
    plan = make_plan(step_joules=1.5)
    without, with_ = (
        Page(page(plan, frontiers=frontiers)) for frontiers in (make_frontiers(), make_frontiers(step_joules=2.5))
    )
    assert not [a for _, a in without.elements if a.get("type") == "radio"]
    assert [a["value"] for _, a in with_.elements if a.get("type") == "radio"] == ["seconds", "joules"]
    assert len(with_.classes("plot")) == len(without.classes("plot")) + 1
    assert "2.50 J" in with_.texts_in("td") and "1.50 J" in with_.texts_in("dd")


@pytest.mark.parametrize("frontiers", [None, {}])
def test_it_says_when_frontiers_were_not_computed(frontiers: dict[str, list[Plan]] | None) -> None:
    assert NOT_COMPUTED in page(make_plan(), frontiers=frontiers)
    assert NOT_COMPUTED not in page(make_plan(), frontiers=make_frontiers())


def test_a_plan_without_a_graph_has_a_page() -> None:
    plan = Plan(
        planner="checkpointing", lines=(PlanLine("all", 7),), step_seconds=0.0, eager_seconds=0.0, captured=False
    )
    found = Page(page(plan))
    assert found.data is None
    assert "The step was not captured: nothing to draw." in found.texts_in("p")
    assert found.texts_in("dt") == ["predicted peak", "batch"]


def test_without_an_arena_nothing_is_stacked_twice() -> None:
    plan = make_plan()
    assert plan.timeline is not None
    most = max(plan.timeline.total_bytes)
    plan = replace(plan, layout=None, lines=(PlanLine("activations, temporaries and gradients", most + 5),))
    totals = [sum(sizes) for sizes in zip(*Page(page(plan)).data["bands"], strict=True)]
    assert max(totals) == plan.peak_bytes


def test_a_step_without_memory_of_its_own_has_a_page() -> None:
    plan = make_plan(lines=(), layout=None, recomputed=())
    assert plan.timeline is not None
    nothing = [0] * len(plan.timeline.start_seconds)
    columns = ("kept", "recomputed", "returned", "moving", "workspace", "file")
    plan.timeline = replace(plan.timeline, **{f"{name}_bytes": nothing for name in columns})
    assert set(map(sum, Page(page(plan, frontiers={"melon": [plan]})).data["bands"])) == {0}


def test_many_planners_can_be_told_apart() -> None:
    plans = make_frontiers()["melon"]
    found = Page(page(make_plan(), frontiers={f"planner {i}": plans for i in range(12)}))
    assert len({swatch["class"] for swatch in found.classes("swatch") if "line" in (swatch["class"] or "")}) == 12


def test_plot_writes_a_page_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    make_plan().plot(tmp_path / "plan.html")
    write_page(tmp_path / "other.html", make_plan())
    assert (tmp_path / "plan.html").read_text("utf-8") == (tmp_path / "other.html").read_text("utf-8")


def test_an_image_shows_what_is_recomputed_and_paged(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    make_plan().plot(tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text("utf-8")
    for name in ("recomputed", "page-outs", "page-ins", "back from the file", "on its way to or from the file"):
        assert f"<!-- {name} -->" in text


@settings(max_examples=200, deadline=None)
@given(st.floats(0, 1e12), st.floats(1e-3, 1e12), st.integers(1, 8))
def test_ticks_are_few_round_and_inside(low: float, extent: float, most: int) -> None:
    axis = svg.Axis(low, low + extent)
    ticks = axis.ticks(most)
    assert len(ticks) <= most + 1
    slack = 1e-6 * extent + 1e-6 * low
    assert all(axis.low - slack <= tick <= axis.high + slack for tick in ticks)
    for one, next_ in pairwise(ticks):
        mantissa = f"{next_ - one:.3e}"
        assert extent < 1e-3 * low or mantissa[0] in "1259"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=30))
def test_steps_hold_each_value_to_the_next_edge(values: list[int]) -> None:
    edges = [float(edge) for edge in range(len(values) + 1)]
    path = svg.steps(svg.Axis(0, len(values)), svg.Axis(0, 100), edges, values)
    height, right, levels = 0.0, 0.0, {}
    for letter, numbers in re.findall(r"([MHV])([\d. ]+)", path):
        number = float(numbers.split()[-1])
        if letter == "H":
            levels |= {i: height for i in range(len(values)) if right <= (i + 0.5) * 1000 / len(values) < number}
            right = number
        else:
            height = number
    assert [levels[i] for i in range(len(values))] == pytest.approx([4 * (100 - value) for value in values])

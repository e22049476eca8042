"""The page of a plan in a real browser that reaches no network: charts, hover, switches, narrow screens."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from pathlib import Path

import pytest
from browser import framed, visit
from drawn_plans import make_frontiers, make_plan

from torch_odt.planning.page.document import page
from torch_odt.planning.timeline import Timeline
from torch_odt.runtime.budget import format_bytes

pytestmark = pytest.mark.slow

HOVER = """
const stack = document.querySelector("#timeline .stack");
function pointAt(share) {
  const box = stack.getBoundingClientRect();
  const place = {clientX: box.left + share * box.width, clientY: box.top + 9, bubbles: true};
  stack.dispatchEvent(new PointerEvent("pointermove", place));
  const text = (name) => document.querySelector(`#timeline [data-of=${name}]`).textContent;
  const sizes = [...document.querySelectorAll("#timeline .legend li")].map((e) => e.textContent.trim());
  return {name: text("name"), total: text("total"), file: text("file"), transfers: text("transfers"), sizes};
}
const report = SHARES.map(pointAt);
"""
KEYS = """
const stack = document.querySelector("#timeline .stack");
const press = (key) => stack.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
const report = ["Home", "ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight"].map((key) => {
  press(key);
  return [Number(stack.getAttribute("aria-valuenow")), stack.getAttribute("aria-valuetext")];
});
"""
SWITCHES = """
const seen = () => [...document.querySelectorAll("#frontier .dot")].filter((dot) => dot.getClientRects().length);
const before = seen().map((dot) => dot.dataset.text);
document.querySelector("#frontier input[data-planner='0']").click();
const without = seen().map((dot) => dot.dataset.text);
document.querySelector("#frontier input[value=joules]").click();
const joules = seen().map((dot) => dot.closest("[data-measure]").dataset.measure);
const dot = seen()[0], box = dot.getBoundingClientRect();
const place = {clientX: box.left + 4, clientY: box.top + 4, bubbles: true};
dot.closest(".plot").dispatchEvent(new PointerEvent("pointermove", place));
const readout = document.querySelector("[data-of=point]").textContent;
const report = {before, without, joules, readout, wanted: dot.dataset.text};
"""
WIDTHS = """
const view = document.querySelector("iframe").contentWindow, inside = view.document;
const report = {
  page: inside.documentElement.scrollWidth,
  window: view.innerWidth,
  charts: [...inside.querySelectorAll(".plot svg")].map((e) => [e.clientWidth, e.clientHeight]),
  background: view.getComputedStyle(inside.body).backgroundColor,
};
"""


@pytest.fixture(scope="module")
def text() -> str:
    return page(make_plan(step_joules=2.0), frontiers=make_frontiers(step_joules=3.0), title="<i>a model</i> & more")


def test_the_charts_are_there_without_an_error(tmp_path: Path, text: str) -> None:
    found = visit(tmp_path, text)
    assert found.console == []
    for element in ('id="timeline"', 'id="frontier"', 'class="lane high"', 'class="area recomputed"', 'class="cursor"'):
        assert element in found.dom
    assert "<h1>&lt;i&gt;a model&lt;/i&gt; &amp; more</h1>" in found.dom


def test_an_error_and_a_request_would_be_seen(tmp_path: Path, text: str) -> None:
    broken = text.replace("</main>", '<img src="https://example.org/a.png"><script>nobody.knows()</script></main>')
    console = "\n".join(visit(tmp_path, broken).console)
    assert "nobody is not defined" in console
    assert "Content Security Policy" in console


def test_a_pointer_finds_the_operator_and_its_bytes(tmp_path: Path, text: str) -> None:
    timeline = make_plan().timeline
    assert timeline is not None
    # Also in the middle of a transfer.
    out = timeline.transfers[0]
    shares = [0.01, 0.3, 0.5, 0.77, 0.99, (out.start_seconds + out.end_seconds) / 2 / timeline.seconds]
    found = visit(tmp_path, text, HOVER.replace("SHARES", json.dumps(shares)))
    assert found.console == []
    fixed_bytes = make_plan().peak_bytes - make_plan().arena_bytes
    for share, shown in zip(shares, found.report, strict=True):
        moment = bisect_right(timeline.start_seconds, share * timeline.seconds) - 1
        assert shown["name"] == timeline.names[moment]
        assert shown["total"] == format_bytes(fixed_bytes + timeline.total_bytes[moment])
        assert shown["file"] == format_bytes(timeline.file_bytes[moment])
        assert f"kept {format_bytes(timeline.kept_bytes[moment])}" in shown["sizes"]
        assert f"recomputed {format_bytes(timeline.recomputed_bytes[moment])}" in shown["sizes"]
    assert f"paged out: {out.name}, {format_bytes(out.nbytes)}" in found.report[-1]["transfers"]


def test_arrow_keys_go_from_moment_to_moment(tmp_path: Path, text: str) -> None:
    timeline = make_plan().timeline
    assert isinstance(timeline, Timeline)
    last = len(timeline.names) - 1
    wanted = [[moment, timeline.names[moment]] for moment in (0, 1, 2, 1, last, last)]
    assert visit(tmp_path, text, KEYS).report == wanted


def test_planners_and_joules_are_switched(tmp_path: Path, text: str) -> None:
    found = visit(tmp_path, text, SWITCHES)
    assert found.console == []
    report = found.report
    assert {name.split(":")[0] for name in report["before"]} == {"melon", "dtr"}
    assert {name.split(":")[0] for name in report["without"]} == {"dtr"}
    assert set(report["joules"]) == {"joules"}
    assert report["wanted"] in report["readout"]


@pytest.mark.parametrize("width", [320, 390, 1100])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_narrow_screens_in_light_and_dark(tmp_path: Path, text: str, width: int, dark: bool) -> None:
    report = visit(tmp_path, framed(text, width), WIDTHS, dark=dark).report
    assert report["page"] == report["window"] == width
    assert all(width / 2 < chart[0] < width and chart[1] > 150 for chart in report["charts"][:1])
    levels = [int(level) for level in re.findall(r"\d+", report["background"])]
    assert max(levels) < 60 if dark else min(levels) > 200

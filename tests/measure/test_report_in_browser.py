"""Pages of records in a real browser that reaches no network: wide and narrow, light and dark, every table open."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from browser import framed, visit
from sample_records import sample_record

from torch_odt.measure.report import compare, page

pytestmark = pytest.mark.slow

PAGE_FIGURE = Path(__file__).parents[2] / "benchmarks" / "page_figure.py"

LOOK = """
const view = document.querySelector("iframe").contentWindow, inside = view.document;
const all = (names) => [...inside.querySelectorAll(names)];
const size = (each) => parseFloat(view.getComputedStyle(each).fontSize);
const charts = all("figure .plot");
all("details").forEach((each) => (each.open = true));
const outside = all(".value, .tick, .title, h2, h3, .legend li, .absent li").filter((each) => {
  const box = each.getBoundingClientRect();
  return box.right > view.innerWidth + 0.5 || box.left < -0.5;
});
const meets = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2;
const overlapping = charts.flatMap((chart) => {
  const names = ".value, .group, .tick, .mark";
  const texts = [...chart.querySelectorAll(names), ...(chart.nextElementSibling?.querySelectorAll(names) ?? [])];
  const boxes = texts.map((each) => [each.textContent, each.getBoundingClientRect()]);
  const isHigher = (a, b) => boxes.indexOf(a) < boxes.indexOf(b);
  return boxes.flatMap((a) => boxes.filter((b) => isHigher(a, b) && meets(a[1], b[1])).map((b) => [a[0], b[0]]));
});
const painted = all(".block, path.line").map((each) => view.getComputedStyle(each));
const report = {
  page: inside.documentElement.scrollWidth,
  window: view.innerWidth,
  charts: charts.map((each) => [each.clientWidth, each.clientHeight]),
  outside: outside.map((each) => each.textContent),
  overlapping,
  smallest: Math.min(...all(".value, .tick, .title, .group, .mark, td, li").map((each) => size(each))),
  unpainted: painted.filter((each) => each.fill === "none" && each.stroke === "none").length,
  narrowest: Math.min(...all("td:first-child").map((each) => each.clientWidth)),
  cut: all("table").filter((each) => each.parentElement.scrollWidth < each.offsetWidth).length,
  background: view.getComputedStyle(inside.body).backgroundColor,
};
"""


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    first, second = sample_record("<i>a board</i> & more"), sample_record("another", faster=1.3)
    return {"page": page(first), "comparison": compare(first, second).page()}


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [("page", 390, False), ("page", 390, True), ("page", 1100, False), ("page", 1100, True), ("comparison", 390, True)],
)
def test_it_fits_in_light_and_dark(tmp_path: Path, texts: dict[str, str], name: str, width: int, dark: bool) -> None:
    found = visit(tmp_path, framed(texts[name], width), LOOK, dark=dark)
    report = found.report
    assert found.console == []
    assert report["page"] == report["window"] == width
    assert report["outside"] == [] and report["overlapping"] == []
    assert report["smallest"] >= 11 and report["unpainted"] == 0
    assert report["narrowest"] > 120 and report["cut"] == 0
    assert len(report["charts"]) > 20
    assert all(150 < chart[0] < width and chart[1] > 30 for chart in report["charts"])
    levels = [int(level) for level in re.findall(r"\d+", report["background"])]
    assert max(levels) < 60 if dark else min(levels) > 200


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the quick suite, of one network."""
    path = tmp_path_factory.mktemp("measured") / "page.html"
    words = ["--quick", "--model", "lenet", "--batch-sizes", "2,8", "--threads", "1,2", "--budget", "8MiB,12MiB"]
    words += ["--repetitions", "2", "--run-seconds", "2", "--fit", "16MiB", "--watts", "4,1", "--html", str(path)]
    command = [sys.executable, "-P", "-m", "torch_odt", "measure", *words]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1100, False)])
def test_a_measured_page_shows_its_figures(tmp_path: Path, measured: str, width: int, dark: bool) -> None:
    report = visit(tmp_path, framed(measured, width), LOOK, dark=dark).report
    assert report["page"] == width and report["outside"] == [] and report["overlapping"] == []
    figures = dict(re.findall(r'<figure id="([^"]+)" class="chart">(.*?)</figure>', measured, re.DOTALL))
    assert figures.keys() >= {
        "step-times", "sample-times", "threads", "busy-processors", "peak-memory", "memory-categories",
        "memory-over-time", "largest-batch", "frontier", "phases", "operators", "step-energy", "sample-energy",
        "long-run",
    }  # fmt: skip
    for figure in figures.values():
        assert figure.count('data-axis="x"') == figure.count('data-axis="y"') == figure.count("<svg ") > 0
        assert figure.count('<i class="swatch') > 0 and figure.count('class="tick"') > 1


def test_what_does_not_fit_would_be_seen(tmp_path: Path, texts: dict[str, str]) -> None:
    wide = texts["page"].replace('<span class="value"', '<span class="value" data-x="', 1)
    wide = wide.replace('data-x=" style="', 'style="width:900px;', 1)
    report = visit(tmp_path, framed(wide, 390), LOOK).report
    assert report["outside"] != [] and report["page"] > 390


def test_a_figure_becomes_a_picture(tmp_path: Path, texts: dict[str, str]) -> None:
    """As README shows one: nothing but the figure, as high as it is, and only the charts that were asked for."""
    path, out = tmp_path / "page.html", tmp_path / "figure.png"
    path.write_text(texts["page"], encoding="utf-8")

    def drawn(*words: str) -> tuple[int, int]:
        ended = subprocess.run([sys.executable, "-P", str(PAGE_FIGURE), str(path), "--out", str(out), *words])
        assert ended.returncode == 0
        return struct.unpack(">II", out.read_bytes()[16:24])

    width, height = drawn("memory-over-time", "--width", "800")
    assert width == 800 and height > 300
    models = re.findall(r"<h3>(.*?), batch", texts["page"].split('id="memory-over-time"')[1].split("</figure>")[0])
    assert len(set(models)) > 1
    assert drawn("memory-over-time", "--width", "800", "--panel", models[0])[1] < height
    wrong = subprocess.run(
        [sys.executable, "-P", str(PAGE_FIGURE), str(path), "memory", "--out", str(out)], capture_output=True, text=True
    )
    assert wrong.returncode == 2 and "no figure 'memory'" in wrong.stderr and "memory-over-time" in wrong.stderr

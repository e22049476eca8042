"""The recipe's table, on a step that is traced and planned in seconds."""

from __future__ import annotations

import csv
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "poet_energy.py"
SMALL = ["--batch-size", "4", "--image-size", "64", "--time-limit", "1"]


@pytest.fixture(name="recipe", scope="module")
def _recipe() -> dict[str, Any]:
    return runpy.run_path(str(RECIPE))


def test_it_prints_and_writes_every_cell(
    recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--shares", "0.5", "0.2", "--deadlines", "1.2", "--planners", "poet", "capuchin", "--out", str(tmp_path)]
    status = recipe["main"]([*SMALL, *options])
    printed = capsys.readouterr().out
    with (tmp_path / "poet_energy.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    cells = json.loads((tmp_path / "poet_energy.json").read_text(encoding="utf-8"))
    places = {(row["planner"], row["budget_share"], row["deadline_share"]) for row in rows}
    assert len(rows) == len(cells) == len(places) == 8
    for cell in cells:
        if cell["fits"]:
            assert cell["peak_bytes"] <= cell["budget_bytes"]
            assert cell["extra_joules_share"] >= -1e-9
            assert f"{cell['extra_joules_share']:.2%}" in printed
    by_place = {(c["planner"], c["budget_share"], c["deadline_share"]): c for c in cells}
    for (planner, *place), cell in by_place.items():
        if planner == "capuchin" and cell["fits"]:
            assert by_place["poet", *place]["joules"] <= cell["joules"] + 1e-9
    free = [cell for cell in cells if cell["planner"] == "poet" and cell["fits"] and cell["deadline_share"] is None]
    worst = max(cell["extra_joules_share"] for cell in free)
    assert status == int(worst >= 0.01)
    assert f"without a deadline are at most {worst:.2%}" in printed


def test_checkmate_never_pages(recipe: dict[str, Any]) -> None:
    options = recipe["parse_options"]([*SMALL, "--shares", "0.5", "--deadlines", "--planners", "checkmate"])
    (cell,) = recipe["compare"](recipe["trace"]("resnet18", 4, 64), "resnet18", "cortex-a72", options)
    assert cell.fits
    assert cell.written_bytes == cell.read_bytes == 0
    assert cell.extra_joules_share == pytest.approx(cell.extra_seconds_share)

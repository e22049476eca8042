"""`torch-odt plan` and `torch-odt profile`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from terminals import Terminal

import torch_odt as odt
from torch_odt.planning import registry
from torch_odt.planning.schedule import Schedule
from torch_odt.runtime.budget import format_bytes

SMALL = ("--input", "4x3x16x16")


@pytest.fixture
def model(net: Path) -> tuple[str, ...]:
    return ("--model", f"{net}:make", *SMALL)


def test_plan_is_printed(terminal: Terminal, model: tuple[str, ...]) -> None:
    outcome = terminal("plan", *model, "--budget", "64MiB", "--budget-of", "training", "--optimizer", "adam")
    assert outcome.code == 0, outcome.err
    assert "64.0 MiB" in outcome.out


def test_plan_as_json(terminal: Terminal, model: tuple[str, ...]) -> None:
    outcome = terminal("plan", *model, "--budget", "64MiB", "--budget-of", "training", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["peak_bytes"] <= 64 << 20


def test_a_rewrite_can_be_switched_off(terminal: Terminal) -> None:
    words = ("plan", "--model", "resnet18", "--input", "2x3x32x32", "--budget", "4GiB", "--json")
    for more, is_fused in ((), True), (("--disable-rewrite", "fuse_batch_norm"), False):
        outcome = terminal(*words, *more)
        assert outcome.code == 0
        assert any("(fuse_batch_norm)" in note for note in json.loads(outcome.out)["notes"]) is is_fused


def test_infeasible_budget_is_code_2_and_names_the_smallest(terminal: Terminal, model: tuple[str, ...]) -> None:
    outcome = terminal("plan", *model, "--budget", "1kB", "--budget-of", "training")
    assert outcome.code == 2
    assert "smallest feasible" in outcome.err
    assert outcome.out == ""


def test_without_a_budget_the_range_is_shown(terminal: Terminal, model: tuple[str, ...]) -> None:
    outcome = terminal("plan", *model)
    assert outcome.code == 0, outcome.err
    assert "The smallest feasible budget is" in outcome.out


def test_range_as_json(terminal: Terminal, model: tuple[str, ...]) -> None:
    document = terminal("plan", *model, "--json").document
    # The budget that is named allows for what capture leaves behind, which for a tiny model is more than the model.
    assert document["smallest_feasible_bytes"] <= document["keep_all_bytes"] + (8 << 20)
    assert len(document["plans"]) >= 2


def test_plot(terminal: Terminal, model: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    outcome = terminal("plan", *model, "--budget", "64MiB", "--budget-of", "training", "--plot", path)
    assert outcome.code == 0, outcome.err
    assert path.read_bytes().startswith(b"\x89PNG")


def test_model_that_trains_nothing(terminal: Terminal, net: Path) -> None:
    outcome = terminal("plan", "--model", f"{net}:frozen", *SMALL, "--budget", "64MiB")
    assert outcome.code == 2
    assert "no trainable parameter" in outcome.err


def test_own_loss_and_batch_can_be_planned(terminal: Terminal, net: Path) -> None:
    outcome = terminal("plan", "--model", f"{net}:autoencoder", "--budget", "64MiB", "--budget-of", "training")
    assert outcome.code == 0, outcome.err


def test_profile_shows_the_operators(terminal: Terminal, model: tuple[str, ...]) -> None:
    outcome = terminal("profile", *model)
    assert outcome.code == 0, outcome.err
    assert "aten.convolution_backward" in outcome.out


def test_profile_as_json(terminal: Terminal, model: tuple[str, ...]) -> None:
    document = terminal("profile", *model, "--json").document
    seconds = [operator["seconds"] for operator in document["operators"]]
    assert seconds == sorted(seconds, reverse=True)
    assert sum(seconds) == pytest.approx(document["seconds"])


def test_costs_travel_from_profile_to_plan(terminal: Terminal, model: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    assert terminal("profile", *model, "--out", path).code == 0
    assert json.loads(path.read_text())["machine"]
    outcome = terminal("plan", *model, "--budget", "64MiB", "--budget-of", "training", "--costs", path, "--json")
    assert outcome.code == 0, outcome.err
    assert "measured elsewhere" in str(outcome.document["notes"])


def test_file_that_holds_no_costs(terminal: Terminal, model: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text("{}")
    outcome = terminal("plan", *model, "--costs", path)
    assert outcome.code == 2
    assert "no table of costs" in outcome.err


def test_costs_that_cannot_be_written(terminal: Terminal, model: tuple[str, ...], tmp_path: Path) -> None:
    outcome = terminal("profile", *model, "--out", tmp_path / "no" / "costs.json")
    assert outcome.code == 2
    assert "--out" in outcome.err


def test_a_refusal_as_json(terminal: Terminal, model: tuple[str, ...]) -> None:
    outcome = terminal("plan", *model, "--budget", "1kB", "--budget-of", "training", "--json")
    assert outcome.code == 2
    assert outcome.document["smallest_feasible_bytes"] > 1000


def test_a_plot_that_cannot_be_written_is_refused_before_the_work(
    terminal: Terminal, model: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_odt.commands.plan.task_of", lambda _: pytest.fail("the model was made"))
    for name in ("absent/plan.png", "plan.nonsense"):
        outcome = terminal("plan", *model, "--budget", "64MiB", "--plot", tmp_path / name)
        assert outcome.code == 2
        assert "--plot" in outcome.err


def test_the_plan_is_written(terminal: Terminal, model: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    words = ("plan", *model, "--budget", "64MiB", "--budget-of", "training", "--optimizer", "adam", "--json")
    outcome = terminal(*words, "--out", str(out))
    assert outcome.code == 0, outcome.err
    plan = odt.load_plan(out)
    assert plan.program is not None and plan.to_dict() == outcome.document


def test_a_plan_is_not_written_without_a_budget(terminal: Terminal, model: tuple[str, ...], tmp_path: Path) -> None:
    outcome = terminal("plan", *model, "--out", str(tmp_path / "plan.json"))
    assert outcome.code == 2
    assert "--budget" in outcome.err


def test_a_plan_is_not_written_where_there_is_no_folder(
    terminal: Terminal, model: tuple[str, ...], tmp_path: Path
) -> None:
    outcome = terminal("plan", *model, "--budget", "64MiB", "--out", str(tmp_path / "nowhere" / "plan.json"))
    assert outcome.code == 2
    assert "nowhere" in outcome.err


def test_a_plan_for_another_device(terminal: Terminal, model: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    words = ("plan", *model, "--budget", "64MiB", "--budget-of", "training", "--planner", "melon", "--json")
    more = ("--device", "cortex-a72", "--objective", "joules", "--deadline", "1000", "--page-to", "/no/folder/of/ours")
    outcome = terminal(*words, *more, "--out", str(out))
    assert outcome.code == 0, outcome.err
    document = outcome.document
    assert document["device"] == "Raspberry Pi 4B+ (Cortex-A72)" and document["step_joules"] > 0
    assert (document["objective"], document["deadline_seconds"]) == ("joules", 1000.0)
    assert odt.load_plan(out).to_dict() == document


def test_a_deadline_that_cannot_be_met(terminal: Terminal, model: tuple[str, ...]) -> None:
    words = ("plan", *model, "--budget", "64MiB", "--budget-of", "training", "--device", "cortex-m0")
    outcome = terminal(*words, "--deadline", "1e-6")
    assert outcome.code == 2
    assert "deadline" in outcome.err


def test_devices_that_cannot_be_read(terminal: Terminal, model: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "board.toml").write_text("watts = 3")
    for name, text in (
        ("abacus", "cortex-a72"),
        (str(tmp_path / "board.toml"), "description is missing"),
        (str(tmp_path / "none.toml"), "none.toml"),
    ):
        outcome = terminal("plan", *model, "--budget", "64MiB", "--device", name)
        assert outcome.code == 2
        assert text in outcome.err


@pytest.mark.parametrize("budget", [("--budget", "64MiB", "--budget-of", "training"), ()])
def test_page(terminal: Terminal, model: tuple[str, ...], tmp_path: Path, budget: tuple[str, ...]) -> None:
    path = tmp_path / "plan.html"
    outcome = terminal("plan", *model, *budget, "--html", path, "--planners", "melon, chen", "--json")
    assert outcome.code == 0, outcome.err
    plan = outcome.document if budget else outcome.document["plans"][0]
    text = path.read_text(encoding="utf-8")
    assert f"<dd>{format_bytes(plan['peak_bytes'])}</dd>" in text
    for name in ("melon", "chen"):
        assert f'data-text="{name}: ' in text
    assert 'data-text="dtr: ' not in text


@pytest.mark.parametrize("names", ["absent,melon", "absent"])
def test_a_page_survives_a_planner_that_fails(
    terminal: Terminal, model: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    def without_solver(*_: Any) -> Schedule:
        raise odt.PlanError("this planner needs pulp")

    monkeypatch.setitem(registry._PLANNERS, "absent", without_solver)
    path = tmp_path / "plan.html"
    words = ("--budget", "64MiB", "--budget-of", "training", "--html", path, "--planners", names)
    outcome = terminal("plan", *model, *words)
    assert outcome.code == 0, outcome.err
    text = path.read_text(encoding="utf-8")
    assert "this planner needs pulp" in text
    assert ('data-text="melon: ' in text) == ("melon" in names)


def test_page_without_frontiers_says_so(terminal: Terminal, model: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    words = ("--budget", "64MiB", "--budget-of", "training", "--html", path, "--planners", "none")
    assert terminal("plan", *model, *words).code == 0
    assert "were not computed" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "words", [("--html", "absent/plan.html"), ("--html", "plan.html", "--planners", "nobody"), ("--planners", "melon")]
)
def test_a_page_that_cannot_be_made_is_refused_before_the_work(
    terminal: Terminal, model: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("torch_odt.commands.plan.task_of", lambda _: pytest.fail("the model was made"))
    monkeypatch.chdir(tmp_path)
    outcome = terminal("plan", *model, *words)
    assert outcome.code == 2
    assert words[-2] in outcome.err or "nobody" in outcome.err


def test_more_time_for_planning(terminal: Terminal, model: tuple[str, ...]) -> None:
    words = ("plan", *model, "--budget", "64MiB", "--budget-of", "training", "--json")
    outcome = terminal(*words, "--planning-seconds", "0.5")
    assert outcome.code == 0, outcome.err
    assert outcome.document["peak_bytes"] <= 64 << 20
    outcome = terminal(*words, "--planning-seconds", "no")
    assert outcome.code == 2 and "--planning-seconds" in outcome.err

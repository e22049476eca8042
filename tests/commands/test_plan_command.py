"""`torch-odt plan` and `torch-odt profile`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from terminals import Terminal

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

"""`torch-odt bench`."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from terminals import Terminal

from torch_odt import memory
from torch_odt.commands.bench import budgets_of
from torch_odt.commands.errors import UserError
from torch_odt.commands.options import planners_of
from torch_odt.planning.registry import planner_names

DEEP = """
from torch import nn


def make(num_classes=10):
    layers = [each for i in range(6) for each in (nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.Tanh())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))
"""


@pytest.fixture
def bench(net: Path) -> tuple[str, ...]:
    return ("bench", "--model", f"{net}:make", "--input", "8x3x32x32", "--planners", "keep-all,sage")


def test_every_planner_at_every_budget(terminal: Terminal, bench: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    outcome = terminal(*bench, "--budgets", "1%,100%", "--out", path)
    assert outcome.code == 0, outcome.err
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["planner"], row["feasible"]) for row in rows] == [
        ("keep-all", "False"),
        ("sage", "False"),
        ("keep-all", "True"),
        ("sage", "True"),
    ]
    assert all(row["peak_bytes"] == row["step_seconds"] == row["measured_peak_bytes"] == "" for row in rows[:2])
    assert all(int(row["peak_bytes"]) <= int(row["budget_bytes"]) for row in rows[2:])
    assert [float(row["slowdown"]) for row in rows[2:]] == [1.0, 1.0]
    assert all(name in outcome.out for name in ("sage", "slowdown", "100%", str(path)))


def test_more_time_for_planning(terminal: Terminal, bench: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(
        "torch_odt.execute.compare.compare", lambda *_, planning_seconds, **__: given.append(planning_seconds) or []
    )
    for more in ((), ("--planning-seconds", "2.5")):
        assert terminal(*bench, "--budgets", "80%", "--json", *more).code == 0
    assert given == [0.0, 2.5]


def test_joules_and_paging_on_a_device(terminal: Terminal, tmp_path: Path) -> None:
    path, net = tmp_path / "r.csv", tmp_path / "deep.py"
    net.write_text(DEEP)
    words = ("bench", "--model", f"{net}:make", "--input", "8x3x32x32", "--planners", "melon,capuchin")
    words = (*words, "--budgets", "70%", "--micro-batch", "8", "--device", "cortex-a72", "--objective", "joules")
    words = (*words, "--optimizer", "adam", "--out", path)
    alone = terminal(*words)
    assert alone.code == 0, alone.err
    assert alone.out.count("capuchin is made for paging and is compared without it") == 1
    assert "with the state of adam" in alone.out and "Raspberry Pi" in alone.out
    with path.open(newline="") as file:
        melon, capuchin = csv.DictReader(file)
    assert float(melon["energy_joules"]) == pytest.approx(3.0 * float(melon["step_seconds"]), rel=1e-6)
    assert melon["paged_bytes"] == "0"
    assert "nothing to page to" in capuchin["notes"] and "nothing to page to" not in melon["notes"]
    # The folder is the device's.
    paging = terminal(*words, "--page-to", "/no/folder/of/ours")
    assert paging.code == 0, paging.err
    assert "compared without it" not in paging.out and "paged" in paging.out
    with path.open(newline="") as file:
        melon, capuchin = csv.DictReader(file)
    assert int(melon["paged_bytes"]) > 0 and int(melon["peak_bytes"]) <= int(melon["budget_bytes"])
    late = terminal(*words, "--deadline", "1e-6", "--json")
    assert [each["feasible"] for each in late.document["comparisons"]] == [False, False]
    assert "too late" in str(late.document["comparisons"][0]["notes"])


def test_shares_are_of_what_keeping_everything_takes(terminal: Terminal, bench: tuple[str, ...]) -> None:
    document = terminal(*bench, "--budgets", "50%,100%", "--json").document
    half, whole = document["comparisons"][0], document["comparisons"][2]
    assert whole["peak_bytes"] == whole["budget_bytes"]
    assert whole["measured_peak_bytes"] is None
    assert half["budget_bytes"] == pytest.approx(whole["peak_bytes"] / 2, abs=1)
    assert half["budget_share"] == pytest.approx(0.5, rel=1e-4)


@pytest.mark.skipif(not memory.install(), reason="torch_odt._memory is not built")
def test_what_is_predicted_can_be_measured(terminal: Terminal, bench: tuple[str, ...]) -> None:
    outcome = terminal(*bench, "--budgets", "100%", "--run", "--json")
    assert outcome.code == 0, outcome.err
    for each in outcome.document["comparisons"]:
        assert each["measured_step_seconds"] > 0
        assert 0.5 * each["peak_bytes"] < each["measured_peak_bytes"] <= each["peak_bytes"]


def test_a_range_has_both_ends_and_steps_between() -> None:
    assert [budget_of(1000) for budget_of in budgets_of("20%..100%")] == [200, 400, 600, 800, 1000]
    assert [budget_of(1000) for budget_of in budgets_of("100%..20%")] == [200, 400, 600, 800, 1000]


def test_budgets_may_be_bytes() -> None:
    assert [budget_of(1000) for budget_of in budgets_of("3kB, 70%")] == [3000, 700]


def test_planners_are_named_or_all() -> None:
    assert planners_of(" sage,, melon") == ["sage", "melon"]
    assert planners_of("all") == list(planner_names())
    with pytest.raises(UserError, match="everyone"):
        planners_of("sage,everyone")


@pytest.mark.parametrize("text", ["", "20%..", "1MiB..2MiB", "1%..2%..3%", "nonsense", "0%"])
def test_what_is_no_list_of_budgets_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--budgets"):
        budgets_of(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--planners", "sage,nonsense"), "nonsense"),
        (("--planners", ","), "--planners"),
        (("--out", "no/r.csv"), "--out"),
        (("--page-to", "/no/folder/of/ours"), "--page-to"),
        (("--device", "abacus"), "cortex-a72"),
        (("--run", "--device", "cortex-a72"), "leave out --device"),
        (("--run", "--optimizer", "adam"), "leave out --optimizer"),
    ],
)
def test_what_cannot_work_is_refused_before_the_work(
    terminal: Terminal, bench: tuple[str, ...], words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_odt.commands.bench.task_of", lambda _: pytest.fail("the model was made"))
    outcome = terminal(*bench, *words)
    assert outcome.code == 2
    assert said in outcome.err


def test_a_batch_that_cannot_be_cut_is_refused(terminal: Terminal, bench: tuple[str, ...]) -> None:
    outcome = terminal(*bench, "--micro-batch", 2)
    assert outcome.code == 2
    assert "BatchNorm" in outcome.err

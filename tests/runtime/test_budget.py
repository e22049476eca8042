"""Budgets mean what they say, and refuse what they cannot read."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_odt.errors import InfeasibleBudget
from torch_odt.runtime import Budget, budget, format_bytes, parse_bytes

MIB = 2**20
GIB = 2**30


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("512MiB", 512 * MIB),
        ("1.5 GB", 1_500_000_000),
        ("1.5gib", 3 * GIB // 2),
        (" 10 kB ", 10_000),
        ("10KiB", 10_240),
        ("2TB", 2_000_000_000_000),
        ("7 B", 7),
        ("7000000", 7_000_000),
        (".5 KiB", 512),
        ("0.1 GB", 100_000_000),
        (123, 123),
    ],
)
def test_bytes_are_read(text: int | str, count: int) -> None:
    assert parse_bytes(text) == count


def test_a_small_number_without_a_unit_is_asked_about() -> None:
    with pytest.raises(ValueError, match=r"has no unit and would be 512 bytes: did you mean \"512MiB\""):
        parse_bytes("512")


@pytest.mark.parametrize(
    "text",
    ["", "0", "0.2 B", "-1MiB", "nan", "inf", "5XB", "5M", "1e9", "MiB", "1 2MB", "1,5GB", 0, -3, True, 1.5, None],
)
def test_what_is_no_number_of_bytes_is_refused_with_examples(text: object) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes: give a positive number such as") as caught:
        parse_bytes(text)  # type: ignore[arg-type]
    assert repr(text) in str(caught.value)


@given(st.integers(1, 2**50))
def test_every_unit_is_its_power(count: int) -> None:
    for power, (decimal, binary) in enumerate([("kB", "KiB"), ("MB", "MiB"), ("GB", "GiB")], start=1):
        assert parse_bytes(f"{count}{decimal}") == count * 1000**power
        assert parse_bytes(f"{count} {binary}") == count * 1024**power


def test_bytes_are_written_in_the_unit_that_suits() -> None:
    assert [format_bytes(n) for n in (5, 1536, 3 * MIB // 2, 3 * GIB)] == ["5 B", "1.5 KiB", "1.5 MiB", "3.00 GiB"]


def test_a_process_budget_counts_what_is_held_already() -> None:
    resolved = Budget("512MiB").resolve(300 * MIB)
    assert (resolved.total_bytes, resolved.level_bytes, resolved.growth_bytes) == (512 * MIB, 300 * MIB, 212 * MIB)
    assert (resolved.of, resolved.text) == ("process", "512.0 MiB (process)")
    assert Budget("100MiB").resolve(300 * MIB).growth_bytes == -200 * MIB


def test_a_training_budget_is_above_the_level() -> None:
    resolved = Budget("370MiB", of="training").resolve(300 * MIB)
    assert (resolved.total_bytes, resolved.growth_bytes) == (670 * MIB, 370 * MIB)


@pytest.mark.parametrize("of", ["process", "training"])
@pytest.mark.parametrize(("amount", "share"), [("auto", 0.9), ("80%", 0.8), ("12.5 %", 0.125), ("100%", 1.0)])
def test_relative_budgets_add_a_share_of_what_is_available(
    amount: str, share: float, of: budget.BudgetOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "available", lambda: 1000 * MIB)
    resolved = Budget(amount, of=of).resolve(300 * MIB)
    assert resolved.growth_bytes == int(share * 1000 * MIB)
    assert resolved.total_bytes == 300 * MIB + resolved.growth_bytes
    assert amount in resolved.text


@pytest.mark.parametrize("amount", ["0%", "101%", "-5%", "nan%", "automatic", 0, 1.5])
def test_impossible_amounts_are_refused_at_once(amount: object) -> None:
    with pytest.raises(ValueError, match=r"is not a (share|number of bytes)"):
        Budget(amount)  # type: ignore[arg-type]


def test_unknown_kinds_and_levels_are_refused() -> None:
    with pytest.raises(ValueError, match='"process" or of "training"'):
        Budget("1GiB", of="gpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot hold -1"):
        Budget("1GiB").resolve(-1)


def test_anything_a_budget_option_takes_becomes_a_budget() -> None:
    made = Budget("1GiB", of="training")
    assert Budget.of_value(made) is made
    assert Budget.of_value("80%") == Budget("80%")
    assert Budget.of_value(123).resolve(0).total_bytes == 123


def test_an_infeasible_budget_says_what_would_do() -> None:
    error = InfeasibleBudget(Budget("100MiB"), 212 * MIB, ("a smaller batch", "paging"))
    assert (error.budget, error.smallest_feasible_bytes) == (Budget("100MiB"), 212 * MIB)
    assert error.hints == ("a smaller batch", "paging")
    for part in ("100.0 MiB", "212.0 MiB", "a smaller batch", "paging"):
        assert part in str(error)
    assert "100.0 MiB" in str(InfeasibleBudget(100 * MIB, 1))
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.budget, copied.hints) == (str(error), error.budget, error.hints)


def test_child_processes_are_taken_off_where_a_control_group_limits_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "children_bytes", lambda: 50 * MIB)
    monkeypatch.setattr(budget, "available_detail", lambda: {"system": 9 * GIB})
    assert Budget("512MiB").resolve(300 * MIB).growth_bytes == 212 * MIB
    monkeypatch.setattr(budget, "available_detail", lambda: {"system": 9 * GIB, "cgroup_v2": GIB})
    resolved = Budget("512MiB").resolve(300 * MIB)
    assert (resolved.growth_bytes, resolved.total_bytes, resolved.children_bytes) == (162 * MIB, 462 * MIB, 50 * MIB)
    assert resolved.in_terms_of(resolved.growth_bytes) == 512 * MIB
    monkeypatch.setattr(budget, "available", lambda: GIB)
    assert Budget("50%").resolve(300 * MIB).growth_bytes == GIB // 2, "what is available is without them already"

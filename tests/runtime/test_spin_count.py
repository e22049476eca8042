"""The choice of a spin count: by whom it is fast, once for each machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from torch_odt import OdtWarning
from torch_odt.runtime import spin_count
from torch_odt.runtime.spin_count import COUNTS, explored_spin_count, fewest_that_are_fast
from torch_odt.runtime.wait_policy import GUARD, SPIN_COUNT, reexecute_with_wait_policy


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({0: 0.100, 1_000: 0.100, 30_000: 0.100}, 0),
        ({0: 0.150, 1_000: 0.110, 30_000: 0.101, 100_000: 0.100}, 30_000),
        ({0: 0.200, 1_000: 0.150, 30_000: 0.130, 100_000: 0.100}, 100_000),
    ],
)
def test_the_fewest_spins_that_cost_nothing_when_quiet(seconds: dict[int, float], chosen: int) -> None:
    assert fewest_that_are_fast(seconds) == chosen


def test_counts_take_turns_and_the_choice_is_remembered(tmp_path: Path) -> None:
    asked: list[int] = []

    def measure(count: int) -> float:
        asked.append(count)
        # Something else ran during the whole second turn.
        return (0.2 if count < 10_000 else 0.1) * (4 if 6 <= len(asked) <= 10 else 1)

    assert explored_spin_count(measure=measure, cache=tmp_path) == 10_000
    assert asked == [*COUNTS] * 3
    assert explored_spin_count(measure=measure, cache=tmp_path) == 10_000 and len(asked) == 15
    assert explored_spin_count(measure=lambda _: 1.0, counts=(5, 7), cache=tmp_path) == 5, "another question"


def test_the_count_is_what_the_process_is_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spin_count, "explored_spin_count", lambda: 1_000)
    calls: list[Any] = []
    reexecute_with_wait_policy(
        spin_count=None, environment={}, words=["python", "x.py"], execute=lambda *parts: calls.append(parts)
    )
    assert calls == [(sys.executable, [sys.executable, "x.py"], {"GOMP_SPINCOUNT": "1000", GUARD: "1"})]


def test_real_steps(tmp_path: Path) -> None:
    assert 0 < spin_count._step_seconds(1_000) < 60


def test_steps_that_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(spin_count, "_STEPS", "raise SystemExit('no torch here')")
    with pytest.raises(RuntimeError, match="GOMP_SPINCOUNT=0 failed: no torch here"):
        explored_spin_count(cache=tmp_path)


def test_a_machine_that_is_too_slow_takes_the_usual_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spin_count, "_TIMEOUT_SECONDS", 0.01)
    monkeypatch.setattr(spin_count, "_STEPS", "import time; time.sleep(5)")
    monkeypatch.setattr(spin_count, "machine_name", lambda: "a slow one")
    calls: list[Any] = []
    with pytest.warns(OdtWarning, match="took more than 0 s"):
        reexecute_with_wait_policy(
            spin_count=None, environment={}, words=["python"], execute=lambda *parts: calls.append(parts)
        )
    assert calls[0][2]["GOMP_SPINCOUNT"] == str(SPIN_COUNT)


def test_where_a_round_takes_long_one_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(spin_count, "_LONG_SECONDS", -1.0)
    asked: list[int] = []
    assert explored_spin_count(measure=lambda count: asked.append(count) or 1.0, cache=tmp_path) == 0  # type: ignore[func-returns-value]
    assert asked == [*COUNTS]

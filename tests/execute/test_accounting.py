"""What is given back before a step, so that it fits in its budget."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from torch_odt import memory
from torch_odt.execute import accounting
from torch_odt.execute.accounting import make_room

MIB = 2**20


@dataclass
class Arena:
    resident_bytes: int


# A budget of 100 MiB, of which a step takes 10 that are not there yet.
@pytest.mark.parametrize("arena", [None, Arena(40 * MIB)])
@pytest.mark.parametrize(
    ("ever", "now", "is_asked", "is_trimmed"),
    [
        (60, 50, False, False),
        (120, 80, True, False),
        (120, 90, True, False),
        (120, 91, True, True),
        # It has ever held as much but for what processors have not counted yet.
        (90, 90, True, False),
        # Nobody counts the most that there was.
        (0, 80, True, False),
        (0, 95, True, True),
    ],
)
def test_room_is_made_where_a_step_would_not_fit(
    monkeypatch: pytest.MonkeyPatch, arena: Arena | None, ever: int, now: int, is_asked: bool, is_trimmed: bool
) -> None:
    called = []
    monkeypatch.setattr(accounting, "_UNCOUNTED_BYTES", 2 * MIB)
    monkeypatch.setattr(memory, "most_resident_bytes", lambda: ever * MIB)
    monkeypatch.setattr(memory, "process_bytes", lambda: called.append("asked") or now * MIB)
    monkeypatch.setattr(memory, "trim", lambda: called.append("trimmed"))
    make_room(arena, 10 * MIB if arena is None else 50 * MIB, 100 * MIB)
    assert called == ["asked"] * is_asked + ["trimmed"] * is_trimmed


def test_first_steps_of_a_plan_always_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = []
    monkeypatch.setattr(memory, "trim", lambda: trimmed.append(True))
    make_room(None, 0, 1 << 60, 0)
    make_room(None, 0, 1 << 60, 100)
    assert trimmed == [True]

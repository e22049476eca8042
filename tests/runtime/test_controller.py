"""When a controller decides for more, for less, and for nothing new."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from readings import MIB, reading

from torch_odt.errors import OdtWarning
from torch_odt.runtime.controller import Controller, Decision, _on_ladder
from torch_odt.runtime.growth import Need
from torch_odt.runtime.monitor import Reading
from torch_odt.runtime.policies import Callback, ControlGroupHeadroom

LEVEL = 100 * MIB


class World:
    """What a policy says, and what the clock shows."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.seconds = 0.0

    def controller(self, **options: Any) -> Controller:
        self.following = Controller(
            lambda _: self.allowed * MIB, read=reading, clock=lambda: self.seconds, grow_after_seconds=5.0, **options
        )
        return self.following

    def step(self, allowed: int, need: int = 0, *, slowdown: float | None = None, seconds: float = 1.0) -> int:
        """A step later; what is allotted, in MiB."""
        self.allowed = allowed
        self.seconds += seconds
        needed = Need(need * MIB, slowdown) if need else None
        return self.following.before_step(LEVEL, needed).total_bytes // MIB

    @property
    def actions(self) -> list[str]:
        return [decision.action for decision in self.following.decisions]


@given(growth=st.integers(1, 1 << 45))
def test_a_rung_is_a_little_below_what_is_allowed(growth: int) -> None:
    rung = _on_ladder(LEVEL + growth, LEVEL) - LEVEL
    assert growth / 2 ** (1 / 6) - 1 <= rung <= growth
    assert _on_ladder(LEVEL + rung, LEVEL) <= LEVEL + rung


def test_less_is_followed_at_once_and_more_after_a_while() -> None:
    world = World(612)
    assert world.controller().begin(LEVEL).total_bytes == 612 * MIB
    assert world.step(612, need=600) == 612
    assert world.step(356, need=600) == 356
    assert [world.step(612, need=340) for _ in range(5)] == [356] * 5
    assert world.step(612, need=340) == 612
    assert world.actions == ["begin", "shrink", "grow"]


def test_memory_that_comes_and_goes_moves_nothing() -> None:
    world = World(356)
    world.controller().begin(LEVEL)
    assert {world.step(612 if step % 4 else 356, need=340) for step in range(40)} == {356}
    assert world.actions == ["begin"]


def test_only_what_was_there_all_the_time_is_taken() -> None:
    world = World(356)
    world.controller().begin(LEVEL)
    for allowed in (1124, 612, 1124, 1124, 1124):
        world.step(allowed, need=340)
    assert world.step(1124, need=340) == 612


def test_a_plan_that_takes_less_than_it_may_stays() -> None:
    world = World(612)
    world.controller().begin(LEVEL)
    assert world.step(450, need=400) == 612
    assert world.step(399, need=400) < 399


def test_a_plan_that_gains_nothing_does_not_grow() -> None:
    world = World(356)
    world.controller().begin(LEVEL)
    assert {world.step(2000, need=300, slowdown=1.0) for _ in range(20)} == {356}


def test_after_a_retreat_it_waits() -> None:
    world = World(612)
    controller = world.controller()
    controller.begin(LEVEL)
    assert controller.out_of_memory(400 * MIB).total_bytes == 400 * MIB
    assert {world.step(612, need=390) for _ in range(29)} == {400}
    assert [world.step(612, need=390) for _ in range(8)][-1] == 612
    assert world.actions == ["begin", "retreat", "grow"]


def test_the_smallest_plan_is_followed_until_there_is_more() -> None:
    world = World(150)
    controller = world.controller()
    controller.begin(LEVEL)
    assert controller.refused(200 * MIB).total_bytes == 200 * MIB
    assert {world.step(150, need=195) for _ in range(10)} == {200}
    assert [world.step(612, need=195) for _ in range(7)][-1] == 612
    assert world.actions == ["begin", "scarce", "grow"]


def test_what_others_took_first_is_given_up() -> None:
    world = World(612)
    controller = world.controller()
    controller.begin(LEVEL)
    world.step(612)
    world.allowed = 400
    assert controller.overtaken(LEVEL, 500 * MIB).total_bytes // MIB == 387
    assert controller.overtaken(LEVEL, 100 * MIB).total_bytes < 190 * MIB
    assert world.actions == ["begin", "overtaken", "overtaken"]
    assert controller.decisions[-1].allowed_bytes == 400 * MIB


def test_who_presses_again_and_again_is_given_more_at_once() -> None:
    world = World(612)
    world.controller().begin(LEVEL)
    found = [world.step(left, need=left + 1) for left in (611, 540, 420)]
    assert found == [556, 422, 281]
    for _ in range(4):
        world.step(612, need=280, slowdown=1.0)
    assert world.step(270, need=280) == 261, "that was long ago"


def test_less_for_which_there_is_a_plan_is_enough() -> None:
    world = World(612)
    world.controller().begin(LEVEL)
    assert world.step(500, need=600) == 462
    assert [world.step(612, need=460) for _ in range(6)][-1] == 612
    assert world.step(540, need=600) == 462, "and not 506"


def test_the_smallest_plan_is_remembered_for_a_while() -> None:
    world = World(612)
    controller = world.controller()
    controller.begin(LEVEL)
    world.step(400, need=600)
    assert controller.refused(390 * MIB).total_bytes == 390 * MIB
    assert not controller.is_scarce and world.actions[-1] == "shrink"
    assert world.step(391, need=392) == 390
    assert world.step(380, need=390) == 390 and controller.is_scarce
    assert [world.step(612, need=390) for _ in range(6)][-1] == 612
    assert world.step(300, need=600, seconds=301) == 281 and not controller.is_scarce


def test_room_is_what_is_allowed_beyond_what_is_held() -> None:
    world = World(150)
    controller = world.controller()
    controller.begin(LEVEL)
    assert controller.room_bytes(LEVEL) == 50 * MIB
    controller.refused(200 * MIB)
    assert controller.room_bytes(LEVEL) == 500 * MIB, "all that is available"


def test_decisions_are_logged_with_their_reasons(tmp_path: Path) -> None:
    world, seen = World(612), list[Decision]()
    log = tmp_path / "decisions.jsonl"
    controller = world.controller(log=log, on_decision=seen.append)
    controller.begin(LEVEL)
    world.step(612)
    world.step(356, need=600)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["action"] for line in lines] == ["begin", "shrink"]
    assert lines[1]["step"] == 1 and lines[1]["allowed_bytes"] == lines[1]["budget_bytes"] == 356 * MIB
    assert "less is allowed" in lines[1]["reason"]
    assert lines == [decision.to_dict() for decision in seen]


def test_a_policy_that_says_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="says nothing of this process"):
        Controller(ControlGroupHeadroom(), read=reading).begin(LEVEL)
    with pytest.raises(ValueError, match=r"a whole number of bytes, 0 or more, not 2\.5"):
        Controller(lambda _: 2.5, read=reading).begin(LEVEL)


def test_it_must_begin() -> None:
    with pytest.raises(RuntimeError, match="nothing has been decided"):
        Controller("80%", read=reading).before_step(LEVEL, None)
    with pytest.raises(ValueError, match="must not be negative"):
        Controller("80%", grow_after_seconds=-1)
    with pytest.raises(TypeError, match="grow_after_seconds is a number, not '5'"):
        Controller("80%", grow_after_seconds="5")  # type: ignore[arg-type]


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Controller("80%", log=tmp_path / "missing" / "decisions.jsonl")


def test_less_than_nothing_is_no_number_of_bytes() -> None:
    with pytest.raises(ValueError, match="0 or more, not -5"):
        Controller(lambda _: -5, read=reading).begin(LEVEL)


def test_below_what_failed_it_grows() -> None:
    world = World(612)
    controller = world.controller()
    controller.begin(LEVEL)
    controller.out_of_memory(LEVEL + 256 * MIB)
    assert world.step(228, need=300) == 228
    grown = [world.step(612, need=220) for _ in range(6)]
    assert grown[0] == 228 and grown[-1] == 356, "up to what failed, while more than that is not tried"
    assert world.actions == ["begin", "retreat", "shrink", "grow"]


def test_scarcity_ends() -> None:
    world = World(612)
    controller = world.controller()
    controller.begin(LEVEL)
    world.step(150, need=600)
    controller.refused(300 * MIB)
    assert controller.is_scarce and world.actions[-1] == "scarce"
    world.step(320, need=300)
    assert not controller.is_scarce
    assert controller.room_bytes(LEVEL) == 320 * MIB - reading().process_bytes
    world.step(150, need=300)
    assert controller.is_scarce and world.actions[-2:] == ["scarce", "scarce"]


def test_a_limit_that_is_lifted_ends_nothing() -> None:
    said: list[int | None] = [612 * MIB, None, None]
    controller = Controller(lambda _: said.pop(0), read=lambda: reading(available=2000))
    assert controller.begin(LEVEL).total_bytes == 612 * MIB
    assert controller.before_step(LEVEL, Need(600 * MIB)).total_bytes == 612 * MIB
    controller = Controller(lambda _: None, read=reading)
    with pytest.raises(ValueError, match="says nothing of this process"):
        controller.begin(LEVEL)


def test_a_log_that_fails_ends_nothing(tmp_path: Path) -> None:
    world = World(612)
    log = tmp_path / "gone" / "decisions.jsonl"
    log.parent.mkdir()
    controller = world.controller(log=log)
    log.unlink()
    log.parent.rmdir()
    with pytest.warns(OdtWarning, match="could not be written down"):
        controller.begin(LEVEL)
    assert world.step(356, need=600) == 356
    assert world.actions == ["begin", "shrink"]


def test_a_step_that_runs_is_told_what_it_lacks() -> None:
    world = World(612)
    controller = world.controller()
    controller.begin(LEVEL)
    assert world.step(612, need=600) == 612
    need = 600 * MIB
    # What a process holds varies: as little as this is not worth a new plan.
    for allowed in (700, 600, 590, 570):
        world.allowed = allowed
        assert controller.lacking_bytes(LEVEL, need) == 0
    world.allowed = 356
    lacking = controller.lacking_bytes(LEVEL, need)
    assert lacking == (600 - 356) * MIB
    controller.evicted(LEVEL, lacking, lacking)
    decision = controller.decisions[-1]
    assert (decision.action, decision.freed_bytes, decision.budget_bytes) == ("evict", lacking, 356 * MIB)
    # The next step is planned for that, and a plan for more that cost nothing does not stand in the way of more.
    assert world.step(356, need=600, slowdown=1.0) == 356
    assert [world.step(612, need=600, slowdown=1.0) for _ in range(6)] == [356] * 5 + [612]
    assert world.actions == ["begin", "evict", "grow"]


def test_a_step_that_cannot_give_back_leaves_the_budget() -> None:
    world = World(612)
    controller = world.controller()
    controller.begin(LEVEL)
    world.step(612, need=600)
    world.allowed = 50
    lacking = controller.lacking_bytes(LEVEL, 600 * MIB)
    assert lacking == 500 * MIB
    controller.evicted(LEVEL, lacking, 0)
    assert world.actions == ["begin", "keep"] and controller.current.total_bytes == 612 * MIB
    assert world.step(356, need=600) == 356


def test_where_the_smallest_plan_is_followed_a_step_is_left_alone() -> None:
    world = World(612)
    controller = world.controller()
    controller.begin(LEVEL)
    world.step(356, need=600)
    controller.refused(500 * MIB)
    assert controller.is_scarce and controller.lacking_bytes(LEVEL, 500 * MIB) == 0


def test_a_dip_while_a_step_runs_is_over_before_the_next() -> None:
    world = World(612)
    controller = world.controller()
    controller.begin(LEVEL)
    world.step(150, need=600)
    controller.refused(300 * MIB)
    world.step(612, need=300)
    world.step(612, need=300, seconds=6.0)
    assert controller.current.total_bytes == 612 * MIB
    world.allowed = 120
    controller.evicted(LEVEL, controller.lacking_bytes(LEVEL, 600 * MIB), 300 * MIB)
    assert controller.current.total_bytes == 300 * MIB, "what the smallest plan takes"
    world.step(612, need=600)
    controller.refused(320 * MIB)
    assert world.actions[-1] == "shrink" and not controller.is_scarce, "by what is allowed now"


def test_who_took_what_there_was_is_given_half_at_once() -> None:
    left = [512]

    def exhausted() -> Reading:
        return reading(available=left[0])

    controller = Controller(lambda found: found.available_bytes + LEVEL, read=exhausted)
    controller.begin(LEVEL)
    controller.before_step(LEVEL, None)
    controller.policy = Callback(lambda _: LEVEL + 256 * MIB)
    left[0] = 10
    assert controller.before_step(LEVEL, Need(LEVEL + 500 * MIB)).total_bytes == LEVEL + 128 * MIB
    assert [decision.action for decision in controller.decisions] == ["begin", "shrink"]


def test_no_guess_goes_below_the_smallest_plan() -> None:
    world = World(612)
    controller = world.controller()
    controller.begin(LEVEL)
    world.step(400, need=600)
    controller.refused(390 * MIB)
    assert [world.step(612, need=390) for _ in range(6)][-1] == 612
    left = [500, 480, 450, 400]
    assert min(world.step(allowed, need=allowed + 1) for allowed in left) == 390
    assert "scarce" not in world.actions


def test_a_plan_that_takes_less_than_it_was_made_for_comes_back_where_it_fits() -> None:
    world = World(612)
    world.controller().begin(LEVEL)
    world.step(612)
    assert world.step(250, need=400, slowdown=1.0) < 250
    grown = [world.step(450, need=240, slowdown=1.2) for _ in range(6)]
    assert grown[-1] == 612, "what takes 400 fits"
    assert world.step(450, need=400, slowdown=1.0) == 612
    assert world.actions == ["begin", "shrink", "grow"]

"""Rests beside others, on a clock that is made up."""

from __future__ import annotations

import pytest

from torch_odt.runtime import Background
from torch_odt.runtime.duty import Duty
from torch_odt.runtime.neighbours import Load


class World:
    """A machine on which a step computes for so long, and others keep so many cores busy."""

    def __init__(self, share: float, others_cores: float | None) -> None:
        self.seconds = self.own = 0.0
        self.looks = 0
        self.others_cores = others_cores
        self.duty = Duty(share, self.look, lambda: self.seconds, self.sleep, lambda: self.own)

    def look(self) -> Load:
        self.looks += 1
        return Load(self.others_cores)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def step(self, *, computed: float = 0.2, waited: float = 0.0, threads: int = 1) -> float:
        """How long it has rested behind a step."""
        self.duty.step_begins()
        self.seconds += computed + waited
        self.own += computed * threads
        before = self.seconds
        assert self.duty.step_done(threads) == self.duty.is_shared
        return self.seconds - before


@pytest.mark.parametrize("threads", [1, 2])
def test_beside_others_it_computes_for_its_share_of_the_time(threads: int) -> None:
    world = World(0.25, others_cores=1.0)
    rests = [world.step(threads=threads) for _ in range(20)]
    assert rests == pytest.approx([0.6] * 20)
    assert world.duty.rested_seconds == pytest.approx(0.75 * world.seconds)


@pytest.mark.parametrize("others_cores", [0.0, 0.2, None])
def test_alone_it_never_rests(others_cores: float | None) -> None:
    world = World(0.25, others_cores)
    assert [world.step() for _ in range(10)] == [0.0] * 10
    assert world.looks <= 5, "it looks twice a second"


def test_others_come_and_go() -> None:
    world = World(0.5, others_cores=0.0)
    assert world.step() == 0
    world.others_cores = 1.0
    assert [world.step() > 0 for _ in range(6)][-1]
    world.others_cores = 0.0
    assert [world.step() > 0 for _ in range(6)][-1] is False


def test_what_a_step_waited_for_a_core_is_rest_enough() -> None:
    world = World(0.5, others_cores=2.0)
    assert world.step(computed=0.2, waited=3.0) == pytest.approx(0.2)


def test_a_rest_is_short_and_can_be_left_out() -> None:
    assert World(0.01, others_cores=1.0).step(computed=5.0) == 2.0
    world = World(1, others_cores=1.0)
    assert world.step() == 0 == world.looks


@pytest.mark.parametrize("duty", [0, -1, 1.5])
def test_shares_that_are_none(duty: float) -> None:
    with pytest.raises(ValueError, match="duty is above 0 and at most 1"):
        Background(duty=duty)

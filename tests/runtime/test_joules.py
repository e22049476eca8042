"""The joules of steps, by sensors that are made up."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch

from torch_odt.runtime import Background
from torch_odt.runtime.choice import Setting
from torch_odt.runtime.joules import StepJoules


class Sensor:
    """Shows what it is told, since the last question."""

    name = "a sensor"

    def __init__(self) -> None:
        self.drawn = 0.0
        self.error: Exception | None = None

    def joules(self, seconds: float) -> float:
        if self.error is not None:
            raise self.error
        drawn, self.drawn = self.drawn, 0.0
        return drawn


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


@pytest.fixture
def sensor(monkeypatch: pytest.MonkeyPatch) -> Sensor:
    found = Sensor()
    monkeypatch.setattr("torch_odt.runtime.background.find_sensors", lambda: [found])
    return found


def test_what_is_drawn_between_two_steps_counts_and_what_is_skipped_does_not() -> None:
    sensor, notes = Sensor(), list[str]()
    sensor.drawn = 100.0
    joules = StepJoules(sensor, notes.append, clock=Clock())
    sensor.drawn = 3.0
    assert joules(1.0) == 3.0
    sensor.drawn = 50.0
    joules.skip()
    sensor.drawn = 4.0
    assert joules(1.0) == 4.0 and notes == []


@pytest.mark.parametrize(
    ("drawn", "error", "text"),
    [
        (0.0, None, "it shows 0 J"),
        (1e9, None, "it shows 1e\\+09 J"),
        (1.0, OSError("the device is gone"), "the device is gone"),
        (1.0, ValueError("no number"), "no number"),
    ],
)
def test_a_sensor_of_no_use_is_told_of_once(drawn: float, error: Exception | None, text: str) -> None:
    sensor, notes = Sensor(), list[str]()
    joules = StepJoules(sensor, notes.append, clock=Clock())
    sensor.drawn, sensor.error = drawn, error
    assert joules(1.0) is None
    sensor.drawn, sensor.error = 1.0, None
    joules.skip()
    assert joules(1.0) is None
    assert len(notes) == 1
    assert re.search(rf"a sensor is of no use \({text}.*\): settings are chosen by seconds", notes[0])


def chosen(sensor: Sensor, step: Callable[[Setting | None], float], pauses: list[bool]) -> tuple[Setting, list[str]]:
    """What `Background` chooses by joules; two threads take a third of the seconds of one."""

    def waits() -> bool:
        sensor.drawn += 0.1 if pauses else 0.0
        return bool(pauses) and pauses.pop(0)

    options = Background(
        nice=0,
        scheduling="normal",
        idle_storage=False,
        least="joules",
        pause_when=waits,
    )
    with options.applied() as background:
        for _ in range(12):
            background.before_step()
            sensor.drawn += step(background.setting)
            two = background.setting is not None and background.setting.threads == 2
            background.after_step(0.01 if two else 0.03)
        assert background.setting is not None
        return background.setting, list(background.notes)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _one_set_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr("torch_odt.runtime.background.read_cores", lambda: ())


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("one", "two", "threads"), [(1e-3, 2e-3, 1), (2e-3, 1e-3, 2)])
def test_the_fewest_joules_are_chosen(sensor: Sensor, one: float, two: float, threads: int) -> None:
    setting, notes = chosen(sensor, lambda now: two if now is not None and now.threads == 2 else one, [])
    assert setting.threads == threads and notes == []


@pytest.mark.usefixtures("two_threads")
def test_a_pause_is_not_paid_for_by_a_setting(sensor: Sensor) -> None:
    """One thread takes the fewest joules; the machine draws much while training waits before each of its steps."""
    pauses = [True, False] * 5
    setting, _ = chosen(sensor, lambda now: 2e-3 if now is not None and now.threads == 2 else 1e-3, pauses)
    assert setting.threads == 1 and not pauses


@pytest.mark.usefixtures("two_threads")
def test_a_sensor_that_shows_nothing_leaves_the_choice_to_seconds(sensor: Sensor) -> None:
    setting, notes = chosen(sensor, lambda now: 0.0, [])
    assert setting.threads == 2
    assert len(notes) == 1 and "settings are chosen by seconds" in notes[0]


@pytest.mark.usefixtures("two_threads")
def test_a_sensor_that_fails_ends_no_step(sensor: Sensor) -> None:
    steps = []

    def step(now: Setting | None) -> float:
        steps.append(now)
        if len(steps) == 5:
            sensor.error = OSError("the device is gone")
        return 1e-3

    setting, notes = chosen(sensor, step, [])
    assert setting.threads == 2 and len(steps) == 12
    assert notes == ["a sensor is of no use (the device is gone): settings are chosen by seconds"]

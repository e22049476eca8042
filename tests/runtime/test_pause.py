"""Pauses, with sensors and clocks that are made up."""

from __future__ import annotations

import os
import signal
import threading
from typing import NamedTuple

import pytest

from torch_odt.runtime.pause import Battery, Pauses, read_celsius


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def test_a_condition_of_the_caller() -> None:
    clock, answers, told = Clock(), [True, True, True, False], list[str]()
    pauses = Pauses(when=lambda: answers.pop(0), clock=clock, sleep=clock.sleep)
    pauses.wait(told.append)
    assert answers == [] and told == ["the caller's condition"]
    assert pauses.paused_seconds == clock.seconds > 0


def test_a_hot_processor_must_cool_down() -> None:
    clock, heat = Clock(), [70.0, 81.0, 78.0, 75.0]
    pauses = Pauses(above_celsius=80.0, celsius=lambda: heat[0], clock=clock, sleep=clock.sleep)
    reasons = []
    while heat:
        reasons.append(pauses.reason())
        heat.pop(0)
        clock.seconds += 10
    hot = "a temperature above 80.0 degrees Celsius"
    assert reasons == [None, hot, hot, None]


def test_sensors_are_not_asked_at_every_step() -> None:
    asked = []
    clock = Clock()
    pauses = Pauses(above_celsius=80.0, celsius=lambda: asked.append(1) or 20.0, clock=clock)
    asked.clear()
    for _ in range(100):
        assert pauses.reason() is None
        clock.seconds += 0.1
    assert len(asked) == 2


def test_a_battery_must_be_charged_a_little_before_training_goes_on() -> None:
    clock = Clock()
    state = [Battery(20.5, False)]
    pauses = Pauses(below_battery_percent=20.0, battery=lambda: state[0], clock=clock, sleep=clock.sleep)
    waits = []
    for percent in (20.5, 19.9, 20.1, 24.9, 25.0, 20.1, 19.9):
        state[0] = Battery(percent, False)
        waits.append(pauses.reason() is not None)
        clock.seconds += 10
    assert waits == [False, True, True, True, False, False, True]


def test_a_limit_near_full_can_be_reached() -> None:
    clock = Clock()
    state = [Battery(90.0, False)]
    pauses = Pauses(below_battery_percent=98.0, battery=lambda: state[0], clock=clock)
    assert pauses.reason() is not None
    state[0] = Battery(100.0, False)
    clock.seconds += 10
    assert pauses.reason() is None


class Sensor(NamedTuple):
    current: float | None


@pytest.mark.parametrize(
    ("sensors", "celsius"),
    [
        ({"coretemp": (50.0, 61.0), "nvme": (84.0,), "acpitz": (70.0,)}, 61.0),
        ({"k10temp": (55.0,), "amdgpu": (90.0,)}, 55.0),
        ({"cpu_thermal": (47.0,), "nvme": (60.0,)}, 47.0),
        ({"soc_thermal": (None, 48.0), "iwlwifi_1": (80.0,)}, 48.0),
        ({"acpitz": (40.0,), "nvme": (70.0,)}, 40.0),
        ({"coretemp": (None,), "acpitz": (41.0,)}, 41.0),
        ({"nvme": (52.0,), "pch": (58.0,)}, 58.0),
        ({}, None),
    ],
)
def test_the_processors_sensors_come_before_others(
    monkeypatch: pytest.MonkeyPatch, sensors: dict[str, tuple[float | None, ...]], celsius: float | None
) -> None:
    found = {name: [Sensor(value) for value in values] for name, values in sensors.items()}
    monkeypatch.setattr("psutil.sensors_temperatures", lambda: found, raising=False)
    assert read_celsius() == celsius


def test_a_battery_that_is_not_charged() -> None:
    clock = Clock()
    state = [Battery(19.0, True)]
    pauses = Pauses(below_battery_percent=20.0, battery=lambda: state[0], clock=clock, sleep=clock.sleep)
    reasons = []
    for battery in (Battery(19.0, True), Battery(19.0, False), Battery(19.0, None), Battery(30.0, False)):
        state[0] = battery
        reasons.append(pauses.reason())
        clock.seconds += 10
    low = "a battery below 20.0 percent"
    assert reasons == [None, low, low, None]


def test_absent_sensors_are_named() -> None:
    pauses = Pauses(above_celsius=80.0, below_battery_percent=20.0, celsius=lambda: None, battery=lambda: None)
    assert [note.split(" can")[0] for note in pauses.notes] == ["no temperature", "no battery"]
    assert pauses.reason() is None


def test_signals_and_the_handlers_before_them() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        pauses = Pauses()
        pauses.listen(signal.SIGUSR1, signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert pauses.reason() == "a signal"
        os.kill(os.getpid(), signal.SIGUSR2)
        assert pauses.reason() is None and seen == []
        pauses.ignore()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1] and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signals_belong_to_the_main_thread() -> None:
    pauses = Pauses()
    thread = threading.Thread(target=pauses.listen, args=(signal.SIGUSR1, signal.SIGUSR2))
    thread.start()
    thread.join()
    assert pauses.notes == ["signals reach the main thread alone: pausing by signal is off"]


def test_a_wait_ends_when_the_process_is_to_end() -> None:
    """Whoever handles the signal has only taken note of it, as a `Checkpointer` does."""
    noted: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    clock = Clock()

    def ask_to_end(seconds: float) -> None:
        clock.sleep(seconds)
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        pauses = Pauses(when=lambda: True, clock=clock, sleep=ask_to_end)
        watched = signal.getsignal(signal.SIGTERM)
        assert pauses.wait(lambda reason: None)
        assert noted == [signal.SIGTERM] and pauses.paused_seconds > 0
        assert signal.getsignal(signal.SIGTERM) == watched
        with pauses.watching():
            os.kill(os.getpid(), signal.SIGTERM)
            assert not pauses.wait(lambda reason: None), "one that came before the wait"
            assert pauses.wait(lambda reason: None), "one step has been made since, and the process goes on"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_raises_ends_a_wait() -> None:
    def interrupt(seconds: float) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Pauses(when=lambda: True, sleep=interrupt).wait(lambda reason: None)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler

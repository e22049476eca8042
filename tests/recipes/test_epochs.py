"""Time and energy until an accuracy is reached."""

from __future__ import annotations

import time

from recipes.common.epochs import Epoch, measured_epoch, reached


def test_epochs_are_added_up_until_the_accuracy_is_there() -> None:
    epochs = [Epoch(2.0, {"a": 1.0, "b": 5.0}, 0.5), Epoch(3.0, {"a": 4.0}, 0.8), Epoch(1.0, {"a": 1.0}, 0.7)]
    found = reached(epochs, 0.75)
    assert found is not None and (found.epochs, found.seconds) == (2, 5.0)
    assert found.energy_joules == {"a": 5.0}  # the other source was not there all the time
    assert reached(epochs, 0.5) is not None and reached(epochs, 0.81) is None and reached([], 0.1) is None


def test_steps_are_measured_and_what_is_looked_at_is_not() -> None:
    def looked_at() -> float:
        time.sleep(0.3)
        return 0.25

    began = time.perf_counter()
    epoch = measured_epoch(lambda: time.sleep(0.02), looked_at, watts=1000.0)
    assert epoch.accuracy == 0.25 and 0.02 <= epoch.seconds <= time.perf_counter() - began - 0.3
    assert epoch.energy_joules["model, modelled"] > 0
    assert "model, modelled" not in measured_epoch(lambda: None, lambda: 0.0, watts=None).energy_joules

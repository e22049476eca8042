"""The choice of threads and cores, with steps whose seconds are made up."""

from __future__ import annotations

from itertools import pairwise

from torch_odt.runtime.choice import Chooser, Setting, settings_to_try
from torch_odt.runtime.cores import Core
from torch_odt.runtime.neighbours import Load

ONE, TWO = Setting(1), Setting(2)


class Machine:
    """One thread always takes 3 seconds; two take 2, or 20 beside a neighbour."""

    def __init__(self) -> None:
        self.now_seconds = 0.0
        self.others_cores = 0.0
        self.slow_seconds = 20.0
        self.applied: list[Setting] = []
        self.chooser = Chooser(
            (ONE, TWO), self.applied.append, lambda: Load(self.others_cores), clock=lambda: self.now_seconds
        )

    def step(self, factor: float = 1.0) -> None:
        assert self.chooser.current is not None
        many = self.slow_seconds if self.others_cores else 2.0
        seconds = factor * (many if self.chooser.current == TWO else 3.0)
        self.now_seconds += seconds
        self.chooser.step_done(seconds)


def test_the_fastest_stays_and_the_first_step_of_each_is_not_counted() -> None:
    machine = Machine()
    machine.chooser.begin()
    for factor in (9.0, 1.0, 1.0, 1.4, 1.0, 1.0, 1.0, 1.0):
        machine.step(factor)
    assert machine.applied == [ONE, TWO] and machine.chooser.choices == [TWO]


def test_a_neighbour_that_comes_and_goes() -> None:
    machine = Machine()
    machine.chooser.begin()
    for _ in range(10):
        machine.step()
    machine.others_cores = 2.0
    for _ in range(8):
        machine.step()
    assert machine.chooser.choices == [TWO, ONE] and machine.chooser.current == ONE
    machine.others_cores = 0.0
    for _ in range(12):
        machine.step()
    assert machine.chooser.choices == [TWO, ONE, TWO] and machine.chooser.current == TWO


def test_what_only_confirms_the_choice_is_tried_less_and_less() -> None:
    """A neighbour that flutters, and beside which the same setting is the best."""
    machine = Machine()
    machine.slow_seconds = 2.0
    machine.chooser.begin()
    tried, began = [], 0.0
    for number in range(3000):
        machine.others_cores = 2.0 * (number // 4 % 2)
        was = machine.chooser.current
        machine.step()
        if was == TWO and machine.chooser.current == ONE:
            tried.append(machine.now_seconds - began)
            began = machine.now_seconds
    assert machine.chooser.choices == [TWO] * len(machine.chooser.choices) and len(tried) >= 5
    # The first one waits for nothing, the others for twice as long each time.
    assert all(later > 1.5 * earlier for earlier, later in pairwise(tried[1:6]))
    assert len(tried) < 30


def test_a_choice_that_changed_is_not_put_off() -> None:
    machine = Machine()
    machine.chooser.begin()
    for _ in range(12):
        machine.step()
    for others_cores in (2.0, 0.0) * 3:
        machine.others_cores = others_cores
        for _ in range(14):
            machine.step()
    assert machine.chooser.choices == [TWO, ONE, TWO, ONE, TWO, ONE, TWO]


def test_steps_that_became_slow_are_tried_anew_at_once() -> None:
    """However often that has only confirmed the choice before."""
    machine = Machine()
    machine.slow_seconds = 2.0
    machine.chooser.begin()
    for step in range(400):
        machine.others_cores = 2.0 * (step // 10 % 2)
        machine.step()
    assert len(machine.chooser.choices) > 3 and set(machine.chooser.choices) == {TWO}
    machine.others_cores, machine.slow_seconds = 2.0, 20.0
    for _ in range(8):
        machine.step()
    assert machine.chooser.current == ONE


def test_one_window_unlike_the_others_changes_nothing() -> None:
    machine = Machine()
    machine.chooser.begin()
    for _ in range(12):
        machine.step()
    for _ in range(5):
        machine.others_cores = 2.0
        machine.step()
        machine.others_cores = 0.0
        machine.step()
    assert machine.chooser.choices == [TWO]


def test_a_cost_that_nobody_knows_any_more_is_seconds() -> None:
    machine = Machine()
    costs = iter([5.0] * 4)
    machine.chooser.cost = lambda seconds: next(costs, None)
    machine.chooser.begin()
    for _ in range(12):
        machine.step()
    assert machine.chooser.cost is None and machine.chooser.choices == [TWO]


def test_what_is_hopeless_costs_one_step() -> None:
    machine = Machine()
    machine.others_cores = 2.0
    machine.chooser.begin()
    for _ in range(4):
        machine.step()
    assert machine.applied == [ONE, TWO, ONE] and machine.chooser.choices == [ONE]


def test_energy_may_decide() -> None:
    machine = Machine()
    machine.chooser.cost = lambda seconds: 10.0 if seconds == 2.0 else 1.0
    machine.chooser.begin()
    for _ in range(6):
        machine.step()
    assert machine.chooser.choices == [ONE]


def test_what_is_tried() -> None:
    cores = [Core(number, "big" if number > 1 else "little", frozenset({number}), True) for number in range(4)]
    tried = settings_to_try(cores, 4)
    everywhere, big, little = frozenset(range(4)), frozenset({2, 3}), frozenset({0, 1})
    assert tried[-1] == Setting(4, everywhere) and tried[0].threads == 1
    expected = {(count, everywhere) for count in (1, 2, 4)} | {
        (count, part) for count in (1, 2) for part in (big, little)
    }
    assert {(setting.threads, setting.cores) for setting in tried} == expected
    assert {setting.threads for setting in settings_to_try(cores, 4, fixed_threads=3)} == {3}

"""Signs of other programs, from faked counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_odt.runtime.neighbours import Load, Neighbours


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class Machine:
    """Two cores, of which core 0 is this process's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now_seconds = self.own_seconds = 0.0

    def set(self, *, busy_ticks: int, waited_ns: int, ran_ns: int, stalled_us: int) -> None:
        lines = "cpu 9 9 9 9 9 9 9 9 0 0", f"cpu0 {busy_ticks} 0 0 5 5 0 0 0 0 0", "cpu1 700 0 0 0 0 0 0 0 0 0"
        write(self.root / "proc/stat", "\n".join(lines))
        write(self.root / "proc/self/task/7/schedstat", f"{ran_ns} {waited_ns} 3\n")
        write(self.root / "proc/pressure/cpu", f"some avg10=0.00 avg60=0.00 avg300=0.00 total={stalled_us}\n")

    def neighbours(self) -> Neighbours:
        return Neighbours(
            root=self.root,
            clock=lambda: self.now_seconds,
            own_seconds=lambda: self.own_seconds,
            numbers=frozenset({0}),
        )


def test_what_lies_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    machine = Machine(tmp_path)
    machine.set(busy_ticks=100, waited_ns=0, ran_ns=0, stalled_us=0)
    neighbours = machine.neighbours()
    assert neighbours.look() == Load()
    machine.now_seconds, machine.own_seconds = 2.0, 0.5
    machine.set(busy_ticks=300, waited_ns=1_500_000_000, ran_ns=500_000_000, stalled_us=1_000_000)
    assert neighbours.look() == Load(others_cores=0.75, delay_share=0.75, pressure_share=0.5)


def test_what_is_absent_is_absent(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    neighbours = machine.neighbours()
    neighbours.look()
    machine.now_seconds = 1.0
    assert neighbours.look() == Load()
    assert not Load().differs_from(Load(1.0, 1.0, 1.0))


def test_what_counts_as_a_change() -> None:
    quiet = Load(others_cores=0.1, delay_share=0.0, pressure_share=0.0)
    assert Load(1.1, 0.0, 0.0).differs_from(quiet)
    assert quiet.differs_from(Load(1.1, 0.0, 0.0))
    assert Load(0.1, 0.5, 0.0).differs_from(quiet)
    assert not Load(0.3, 0.1, 0.9).differs_from(quiet), "pressure counts only where cores are not known"
    assert Load(None, None, 0.9).differs_from(Load(None, None, 0.1))


def test_this_system() -> None:
    neighbours = Neighbours()
    neighbours.look()
    sum(range(2_000_000))
    load = neighbours.look()
    assert load.delay_share is None or 0 <= load.delay_share <= 1
    assert load.others_cores is None or load.others_cores >= 0

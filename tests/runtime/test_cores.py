"""Cores by kind, from faked trees."""

from __future__ import annotations

from pathlib import Path

from torch_odt.runtime.cores import Core, core_sets, read_cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_big_and_little_by_capacity(tmp_path: Path) -> None:
    cpus = tmp_path / "sys/devices/system/cpu"
    write(cpus / "online", "0-3\n")
    for number, capacity in enumerate((446, 446, 1024, 1000)):
        write(cpus / f"cpu{number}/cpu_capacity", f"{capacity}\n")
        write(cpus / f"cpu{number}/cpufreq/cpuinfo_max_freq", "2000000\n")
    cores = read_cores(root=tmp_path, allowed={0, 2, 3})
    assert [core.kind for core in cores] == ["little", "little", "big", "big"]
    assert [core.allowed for core in cores] == [True, False, True, True]
    assert (cores[0].max_hertz, cores[0].capacity) == (2_000_000_000, 446)
    assert core_sets(cores) == (frozenset({0, 2, 3}), frozenset({2, 3}), frozenset({0}))


def test_big_and_little_by_clock_where_capacities_are_absent(tmp_path: Path) -> None:
    cpus = tmp_path / "sys/devices/system/cpu"
    write(cpus / "online", "0,2\n")
    write(cpus / "cpu0/cpufreq/cpuinfo_max_freq", "1400000\n")
    write(cpus / "cpu2/cpufreq/cpuinfo_max_freq", "2400000\n")
    assert [(core.number, core.kind) for core in read_cores(root=tmp_path, allowed={0, 2})] == [
        (0, "little"),
        (2, "big"),
    ]


def test_siblings_give_a_set_with_one_of_each(tmp_path: Path) -> None:
    cpus = tmp_path / "sys/devices/system/cpu"
    write(cpus / "online", "0-3\n")
    for number in range(4):
        write(cpus / f"cpu{number}/topology/thread_siblings_list", f"{number % 2},{number % 2 + 2}\n")
    cores = read_cores(root=tmp_path, allowed=range(4))
    assert cores[3].siblings == {1, 3}
    assert core_sets(cores) == (frozenset(range(4)), frozenset({0, 1}))


def test_of_siblings_the_first_allowed_one_is_taken() -> None:
    pair = frozenset({0, 1})
    cores = [Core(0, "big", pair, allowed=False), Core(1, "big", pair, allowed=True)]
    assert core_sets(cores) == (frozenset({1}),)


def test_what_is_absent_is_absent(tmp_path: Path) -> None:
    assert read_cores(root=tmp_path) == () and core_sets(()) == ()
    write(tmp_path / "sys/devices/system/cpu/online", "0\n")
    assert read_cores(root=tmp_path, allowed={0}) == (Core(0, "big", frozenset({0}), allowed=True),)

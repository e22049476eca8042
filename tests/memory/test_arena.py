"""The arena serves a plan's addresses, and everything that does not match its plan in the ordinary way."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_odt import _extensions

KIB = 1024
Table = list[list[tuple[int, int]]]


def bytes_tensor(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8)


@contextmanager
def planned(arena: Any, table: Table) -> Iterator[None]:
    number = arena.load(table)
    arena.select(number)
    arena.begin(0)
    try:
        yield
    finally:
        arena.end()
        arena.unload(number)


def convolution() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(4, 8, 16, 16).to(memory_format=torch.channels_last)
    w = torch.randn(16, 8, 3, 3)
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    y = torch.ops.aten.convolution(x, w, None, *settings)
    return y, *torch.ops.aten.convolution_backward(y, x, w, [16], *settings, [True, True, True])


def test_a_recorded_operator_replays_at_its_planned_addresses(tracker: ModuleType) -> None:
    expected = convolution()
    tracker.record_begin()
    first = convolution()
    addresses = tracker.record_addresses()
    events = tracker.record_end()
    # A temporary may have lain where a result lies now, so an address may stand there twice: the last one counts.
    ordinals = {address: ordinal for ordinal, address in enumerate(addresses)}
    assert ordinals[first[0].data_ptr()] < ordinals[first[1].data_ptr()]

    places, end = [], 0
    for kind, ordinal, nbytes in events:
        if kind == "alloc":
            assert ordinal == len(places)
            places.append((end, nbytes))
            end += -(-nbytes // 64) * 64
    arena = tracker.Arena(end)
    with planned(arena, [places]):
        again = convolution()
    assert arena.stats()["hits"] == len(places)
    assert arena.misses() == []
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_the_recorder_tells_old_blocks_from_new_ones(tracker: ModuleType) -> None:
    old = bytes_tensor(100)
    tracker.record_begin()
    a = bytes_tensor(200)
    empty = bytes_tensor(0)
    b = bytes_tensor(300)
    del old
    del a, empty
    assert tracker.record_addresses()[1] == b.data_ptr()
    assert tracker.record_end() == [("alloc", 0, 200), ("alloc", 1, 300), ("free", -1, 100), ("free", 0, 200)]
    with pytest.raises(RuntimeError, match="not recording"):
        tracker.record_end()


def test_recordings_do_not_nest_and_belong_to_threads(tracker: ModuleType) -> None:
    tracker.record_begin()
    with pytest.raises(RuntimeError, match="already recording"):
        tracker.record_begin()
    thread = threading.Thread(target=lambda: bytes_tensor(100))
    thread.start()
    thread.join()
    assert tracker.record_end() == []


def test_addresses_and_counts_follow_the_plan(tracker: ModuleType) -> None:
    level = tracker.stats()
    arena = tracker.Arena(64 * KIB)
    with planned(arena, [[(0, 1000), (2048, 500), (-1, 700)], [(1024, 100)]]):
        a, b, outside = bytes_tensor(1000), bytes_tensor(500), bytes_tensor(700)
        arena.begin(1)
        c = bytes_tensor(100)
    assert [b.data_ptr() - a.data_ptr(), c.data_ptr() - a.data_ptr()] == [2048, 1024]
    assert a.data_ptr() % os.sysconf("SC_PAGESIZE") == 0
    after = tracker.stats()
    assert after["allocated_bytes"] - level["allocated_bytes"] == 2300
    assert after["outside_bytes"] - level["outside_bytes"] == 700
    assert after["arena"]["live_bytes"] == arena.live_bytes == 1600
    assert after["arena"]["live_blocks"] == arena.live_blocks == 3
    assert sum(arena.stats()["misses"].values()) == 0
    del a, b, c, outside
    assert arena.live_blocks == 0
    assert tracker.allocated_bytes() == level["allocated_bytes"]


def test_every_reason_for_a_miss_is_counted_and_harmless(tracker: ModuleType) -> None:
    arena = tracker.Arena(64 * KIB)
    with planned(arena, [[(0, 1000), (512, 1000), (4096, 100)]]):
        first = bytes_tensor(1000).fill_(1)
        overlapping = bytes_tensor(1000).fill_(2)
        wrong_size = bytes_tensor(101).fill_(3)
        unplanned = bytes_tensor(50).fill_(4)
    assert arena.stats()["hits"] == 1
    assert arena.stats()["misses"] == {"occupied": 1, "size_mismatch": 1, "past_record": 1}
    assert arena.misses() == [
        (0, 1, 1000, 1000, "occupied"),
        (0, 2, 100, 101, "size_mismatch"),
        (0, 3, -1, 50, "past_record"),
    ]
    for value, block in enumerate((first, overlapping, wrong_size, unplanned), start=1):
        assert bool((block == value).all())
    arena.reset_misses()
    assert arena.misses() == []
    assert arena.stats()["misses"] == {"occupied": 0, "size_mismatch": 0, "past_record": 0}


def test_less_than_planned_lies_in_its_place(tracker: ModuleType) -> None:
    arena = tracker.Arena(64 * KIB)
    with planned(arena, [[(0, 1000), (1024, 1000)]]):
        smaller, whole = bytes_tensor(300), bytes_tensor(1000)
    assert whole.data_ptr() - smaller.data_ptr() == 1024
    assert arena.live_bytes == 1300
    assert (arena.stats()["hits"], arena.stats()["smaller"]) == (2, 1)
    assert arena.misses() == []


def test_the_sample_of_misses_is_bounded(tracker: ModuleType) -> None:
    arena = tracker.Arena(KIB)
    with planned(arena, [[]]):
        for _ in range(50):
            bytes_tensor(10)
    assert len(arena.misses()) == 32
    assert arena.stats()["misses"]["past_record"] == 50


@settings(deadline=None)
@given(
    places=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 600)), min_size=1, max_size=25),
    keep=st.lists(st.booleans(), min_size=25, max_size=25),
)
def test_live_blocks_never_share_a_byte(places: list[tuple[int, int]], keep: list[bool]) -> None:
    module = _extensions.memory_module
    if module is None:
        pytest.skip("torch_odt._memory is not built")
    module.install()
    arena = module.Arena(4 * KIB)
    live = []
    with planned(arena, [[(64 * slot, size) for slot, size in places]]):
        for number, (_, size) in enumerate(places):
            block = bytes_tensor(size).fill_(number)
            if keep[number]:
                live.append((number, block))
            del block
    assert all(bool((kept == number).all()) for number, kept in live)
    live.clear()
    assert arena.live_blocks == 0
    module.uninstall()


def test_other_threads_allocate_in_the_ordinary_way(tracker: ModuleType) -> None:
    arena = tracker.Arena(64 * KIB)
    blocks = []
    with planned(arena, [[(0, 1000)]]):
        thread = threading.Thread(target=lambda: blocks.append(bytes_tensor(1000)))
        thread.start()
        thread.join()
        assert arena.live_blocks == 0
        blocks.append(bytes_tensor(1000))
        assert arena.live_blocks == 1


def test_arena_blocks_may_be_freed_by_another_thread(tracker: ModuleType) -> None:
    arena = tracker.Arena(64 * KIB)
    with planned(arena, [[(0, 1000)]]):
        blocks = [bytes_tensor(1000)]
    thread = threading.Thread(target=blocks.clear)
    thread.start()
    thread.join()
    assert arena.live_blocks == 0


def test_tensors_outlive_the_arena(tracker: ModuleType) -> None:
    gc.collect()
    others = tracker.stats()["arena"]["reserved_bytes"]
    arena = tracker.Arena(64 * KIB)
    with planned(arena, [[(0, 1000)]]):
        block = bytes_tensor(1000).fill_(7)
    del arena
    gc.collect()
    assert tracker.stats()["arena"]["live_blocks"] >= 1
    assert bool((block == 7).all())
    block.add_(1)
    del block
    assert tracker.stats()["arena"]["reserved_bytes"] == others


def test_an_arena_can_be_dropped_while_it_is_active(tracker: ModuleType) -> None:
    gc.collect()
    others = tracker.stats()["arena"]["reserved_bytes"]
    arena = tracker.Arena(64 * KIB)
    arena.select(arena.load([[(0, 1000)]]))
    arena.begin(0)
    block = bytes_tensor(1000)
    arena.dynamic(True)
    del arena
    gc.collect()
    assert bytes_tensor(5000).numel() == 5000
    del block
    assert tracker.stats()["arena"]["reserved_bytes"] == others


def test_uninstalling_waits_for_the_last_arena_block(tracker: ModuleType) -> None:
    arena = tracker.Arena(64 * KIB)
    with planned(arena, [[(0, 1000)]]):
        block = bytes_tensor(1000)
    with pytest.raises(RuntimeError, match="while 1 blocks live in an arena"):
        tracker.uninstall()
    assert tracker.is_installed()
    del block
    assert tracker.uninstall()


def test_arena_blocks_count_towards_the_cap(tracker: ModuleType) -> None:
    arena = tracker.Arena(64 * KIB)
    tracker.set_cap(tracker.allocated_bytes() + 500)
    with planned(arena, [[(0, 1000), (0, 400)]]):
        with pytest.raises(torch.OutOfMemoryError):
            bytes_tensor(1000)
        assert arena.live_blocks == 0


def test_dynamic_mode_serves_large_blocks_anywhere_below_its_limit(tracker: ModuleType) -> None:
    arena = tracker.Arena(256 * KIB)
    arena.dynamic(True, limit_bytes=64 * KIB)
    small = bytes_tensor(4095)
    assert arena.live_blocks == 0
    a, b, c = bytes_tensor(16 * KIB), bytes_tensor(8 * KIB), bytes_tensor(16 * KIB)
    base = a.data_ptr()
    del b
    fits_the_hole = bytes_tensor(8 * KIB)
    too_large = bytes_tensor(40 * KIB)
    arena.dynamic(False)
    outside = bytes_tensor(8 * KIB)
    assert fits_the_hole.data_ptr() == base + 16 * KIB
    assert c.data_ptr() == base + 24 * KIB
    assert not base <= too_large.data_ptr() < base + 256 * KIB
    assert not base <= outside.data_ptr() < base + 256 * KIB
    assert (arena.stats()["dynamic_hits"], arena.stats()["dynamic_misses"]) == (4, 1)
    assert arena.resident_bytes <= 64 * KIB
    del a, c, fits_the_hole, small


def test_dynamic_mode_may_refuse_what_is_beyond_its_limit(tracker: ModuleType) -> None:
    arena = tracker.Arena(256 * KIB)
    arena.dynamic(True, limit_bytes=64 * KIB, refuses=True)
    within = bytes_tensor(40 * KIB)
    allocated = tracker.stats()["allocated_bytes"]
    with pytest.raises(torch.OutOfMemoryError, match=r"does not fit into the .* of the arena"):
        bytes_tensor(40 * KIB)
    assert tracker.stats()["allocated_bytes"] == allocated
    arena.dynamic(True, limit_bytes=64 * KIB)
    outside = bytes_tensor(40 * KIB)
    arena.dynamic(False)
    assert arena.live_blocks == 1
    del within, outside


def test_dynamic_mode_respects_planned_blocks_and_their_ordinals(tracker: ModuleType) -> None:
    arena = tracker.Arena(256 * KIB)
    with planned(arena, [[(8 * KIB, 8 * KIB), (0, 4 * KIB)]]):
        middle = bytes_tensor(8 * KIB)
        arena.dynamic(True)
        temporary = bytes_tensor(12 * KIB)
        arena.dynamic(False)
        first = bytes_tensor(4 * KIB)
    assert temporary.data_ptr() == middle.data_ptr() + 8 * KIB
    assert first.data_ptr() == middle.data_ptr() - 8 * KIB
    assert sum(arena.stats()["misses"].values()) == 0


def test_release_gives_the_pages_back(tracker: ModuleType) -> None:
    arena = tracker.Arena(64 * KIB)
    page = os.sysconf("SC_PAGESIZE")
    with planned(arena, [[(0, 1000), (0, 1000)]]):
        block = bytes_tensor(1000).fill_(9)
        assert arena.resident_bytes == page
        assert not arena.release()
        del block
        assert arena.resident_bytes == page
        assert arena.release()
        assert arena.resident_bytes == 0
        assert bool((bytes_tensor(1000) == 0).all())


def test_an_idle_arena_gives_way(tracker: ModuleType) -> None:
    held = tracker.stats()["outside_bytes"] + tracker.stats()["arena"]["resident_bytes"]
    arena = tracker.Arena(256 * KIB)
    arena.set_yield_limit(held + 300 * KIB)
    table = [[(0, 200 * KIB)]]
    with planned(arena, table):
        block = bytes_tensor(200 * KIB)
        beside_an_active_one = bytes_tensor(150 * KIB)
        assert arena.resident_bytes == 200 * KIB
        del block
        while_active = bytes_tensor(1 * KIB)
        assert arena.resident_bytes == 200 * KIB
    del beside_an_active_one, while_active
    fits = bytes_tensor(90 * KIB)
    assert arena.resident_bytes == 200 * KIB
    displaces = bytes_tensor(20 * KIB)
    assert arena.resident_bytes == 0
    assert arena.stats()["yields"] == 1
    arena.set_yield_limit(-1)
    with planned(arena, table):
        bytes_tensor(200 * KIB)
    del displaces
    displaces = bytes_tensor(150 * KIB)
    assert arena.stats()["yields"] == 1
    assert arena.resident_bytes == 200 * KIB
    del fits, displaces


def test_tables_are_selected_and_unloaded(tracker: ModuleType) -> None:
    arena = tracker.Arena(64 * KIB)
    one, two = arena.load([[(0, 100)]]), arena.load([[(64, 100)]])
    with pytest.raises(RuntimeError, match="no table is selected"):
        arena.begin(0)
    arena.select(one)
    arena.begin(0)
    a = bytes_tensor(100)
    for forbidden in (lambda: arena.select(two), lambda: arena.unload(one), lambda: arena.resize(128 * KIB)):
        with pytest.raises(RuntimeError, match="active"):
            forbidden()
    arena.end()
    arena.select(two)
    arena.unload(one)
    del a
    arena.begin(0)
    assert bytes_tensor(100).data_ptr() % 4096 == 64
    arena.end()
    for forbidden in (lambda: arena.select(one), lambda: arena.unload(one)):
        with pytest.raises(IndexError, match="no table 0"):
            forbidden()
    with pytest.raises(IndexError, match="instruction 1 is outside"):
        arena.begin(1)
    arena.unload(two)
    with pytest.raises(RuntimeError, match="no table is selected"):
        arena.begin(0)


@pytest.mark.parametrize("place", [(1, 64), (0, 0), (0, 64 * KIB + 1), (64 * KIB, 1)])
def test_impossible_places_are_refused(tracker: ModuleType, place: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"not a multiple|does not fit"):
        tracker.Arena(64 * KIB).load([[place]])


def test_resizing_needs_an_empty_arena(tracker: ModuleType) -> None:
    arena = tracker.Arena(64 * KIB)
    arena.select(arena.load([[(0, 8 * KIB)]]))
    arena.begin(0)
    block = bytes_tensor(8 * KIB)
    arena.end()
    with pytest.raises(RuntimeError, match="blocks live in it"):
        arena.resize(128 * KIB)
    del block
    with pytest.raises(RuntimeError, match="unload it first"):
        arena.resize(4 * KIB)
    arena.resize(128 * KIB)
    assert (arena.reserve_bytes, arena.resident_bytes) == (128 * KIB, 0)


def test_only_one_arena_serves_a_thread(tracker: ModuleType) -> None:
    first, second = tracker.Arena(KIB), tracker.Arena(KIB)
    second.select(second.load([[]]))
    with planned(first, [[]]), pytest.raises(RuntimeError, match="another arena is active"):
        second.begin(0)
    first.dynamic(True)
    with pytest.raises(RuntimeError, match="another arena serves"):
        second.dynamic(True)
    first.dynamic(False)


def test_reserving_costs_nothing_and_the_impossible_fails(tracker: ModuleType) -> None:
    assert tracker.Arena(2**40).resident_bytes == 0
    with pytest.raises(RuntimeError, match="cannot reserve"):
        tracker.Arena(2**62)
    with pytest.raises(ValueError, match="cannot reserve -1"):
        tracker.Arena(-1)


def test_a_forked_child_keeps_its_own_arena(run_python: Callable, tracker: ModuleType) -> None:
    script = """
import os, torch
from torch_odt._extensions import memory_module as m
m.install()
arena = m.Arena(1 << 20)
arena.select(arena.load([[(0, 4000), (4096, 4000)]]))
arena.begin(0)
block = torch.ones(1000)
child = os.fork()
if child == 0:
    block.fill_(2)
    second = torch.ones(1000)
    fine = arena.live_blocks == 2 and second.data_ptr() - block.data_ptr() == 4096
    del block, second
    os._exit(0 if fine and arena.live_blocks == 0 else 3)
assert os.waitpid(child, 0)[1] == 0
assert bool((block == 1).all()) and arena.live_blocks == 1
"""
    result = run_python(script)
    assert result.returncode == 0, result.stderr

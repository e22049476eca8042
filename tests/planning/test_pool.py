from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_builder import StepBuilder

from torch_odt.errors import PlanError
from torch_odt.planning import packing
from torch_odt.planning.pool import OUTSIDE, Layout, allocations, check, pack
from torch_odt.planning.schedule import Deliver, Free, Instruction, Run, Schedule
from torch_odt.planning.timeline import timeline_of


def assert_apart(blocks: packing.Blocks, offsets: packing.Ints) -> None:
    tops = offsets + blocks.nbytes
    for i in range(len(blocks)):
        together = (blocks.start[:i] < blocks.end[i]) & (blocks.end[:i] > blocks.start[i])
        overlap = (offsets[:i] < tops[i]) & (tops[:i] > offsets[i])
        assert not (together & overlap).any()


rectangles = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(1, 1000)).map(lambda b: (b[0], b[0] + b[1], b[2])),
    max_size=40,
)


@given(rectangles)
def test_packed_blocks_never_overlap(rows: list[tuple[int, int, int]]) -> None:
    blocks = packing.as_blocks(rows)
    offsets, height = packing.place_all(blocks, effort=200)
    assert_apart(blocks, offsets)
    assert height == max(offsets + blocks.nbytes, default=0)
    assert height >= packing.live_peak(blocks)


@given(rectangles)
def test_stacking_in_order_never_overlaps(rows: list[tuple[int, int, int]]) -> None:
    blocks = packing.as_blocks(rows)
    offsets, height = packing.stack_in_order(blocks)
    assert_apart(blocks, offsets)
    assert height == max(offsets + blocks.nbytes, default=0)


@given(rectangles)
def test_live_bytes_are_those_of_a_replay(rows: list[tuple[int, int, int]]) -> None:
    moments, live = packing.live_bytes(packing.as_blocks(rows))
    for moment, count in zip(moments, live, strict=True):
        assert count == sum(size for start, end, size in rows if start <= moment < end)


def test_the_smallest_gap_that_fits_is_taken() -> None:
    # Two gaps of 40 and 30 bytes between long-lived blocks; 30 bytes go into the second one.
    fixed = [(0, 9, 10), (0, 2, 40), (0, 9, 10), (0, 2, 30), (0, 9, 10)]
    blocks = packing.as_blocks([*fixed, (3, 5, 30)])
    found = packing.best_fit(blocks, np.arange(6))
    assert found is not None
    assert found[0].tolist() == [0, 10, 50, 60, 90, 60]


def test_activations_of_a_deep_chain_stack_without_a_gap() -> None:
    # Activation i lives until its turn in the backward pass; a temporary lives beside each of them.
    depth = 200
    rows = []
    for i in range(depth):
        rows.append((2 * i, 4 * depth - 2 * i, 64 * (1 + i * 7919 % 50)))
        rows.append((2 * i + 1, 2 * i + 3, 64 * (1 + i * 104729 % 30)))
    blocks = packing.as_blocks(rows)
    _, height = packing.place_all(blocks)
    assert height <= 1.03 * packing.live_peak(blocks)


def tiling(seed: int, count: int, units: int = 33) -> packing.Blocks:
    """A rectangle that was cut into blocks at random: they can be put together again without a gap."""
    generator = np.random.default_rng(seed)
    tiles = [(0, 1000, 0, units)]
    while len(tiles) < count:
        areas = [(end - start) * (top - bottom) for start, end, bottom, top in tiles]
        chosen = int(np.argmax(areas)) if generator.random() < 0.5 else int(generator.integers(len(tiles)))
        start, end, bottom, top = tiles[chosen]
        if generator.random() < 0.5 and end - start > 4:
            cut = int(generator.integers(start + 1, end))
            tiles[chosen : chosen + 1] = [(start, cut, bottom, top), (cut, end, bottom, top)]
        elif top - bottom > 1:
            cut = int(generator.integers(bottom + 1, top))
            tiles[chosen : chosen + 1] = [(start, end, bottom, cut), (start, end, cut, top)]
    return packing.as_blocks([(start, end, 6400 * (top - bottom)) for start, end, bottom, top in tiles])


@pytest.mark.parametrize(("seed", "count"), [(5, 40), (6, 40), (0, 120)])
def test_blocks_that_no_fixed_order_stacks_well(seed: int, count: int) -> None:
    blocks = tiling(seed, count)
    without_search = packing.place_all(blocks, effort=0)[1]
    offsets, height = packing.place_all(blocks)
    assert_apart(blocks, offsets)
    assert height <= 1.03 * packing.live_peak(blocks) < without_search


def test_the_search_sees_only_so_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_MOST_SEARCHED", 20)
    blocks = tiling(4, 40)
    offsets, height = packing.place_all(blocks, effort=2000)
    assert_apart(blocks, offsets)
    assert height == max(offsets + blocks.nbytes)


def test_packing_is_deterministic() -> None:
    blocks = tiling(1, 100)
    first, second = packing.place_all(blocks, effort=5000), packing.place_all(blocks, effort=5000)
    assert first[1] == second[1] and (first[0] == second[0]).all()


def test_nothing_to_pack() -> None:
    offsets, height = packing.place_all(packing.as_blocks([]))
    assert len(offsets) == 0 and height == 0


def chain_step() -> tuple[StepBuilder, Schedule]:
    """x -> a -> loss; backward reads a and makes a gradient."""
    step = StepBuilder()
    x = step.given(640)
    (a,) = step.op([x], [640])
    (loss,) = step.op([a], [64], events=[(0, 1280), (1, 64), (0, -1280)], ordinals=[1])
    delivered_loss = step.output(loss, "loss")
    step.start_backward()
    (gradient,) = step.op([a], [320], events=[(0, 320), (1, 128), (1, -128)], ordinals=[0])
    delivered_gradient = step.output(gradient, "gradient", "weight")
    instructions: list[Instruction] = [
        *(Run(0), Run(1), Deliver(delivered_loss), Free(loss)),
        *(Run(2), Free(a), Deliver(delivered_gradient), Free(gradient)),
    ]
    return step, Schedule(instructions, 4, "test")


def test_what_leaves_the_step_lies_outside() -> None:
    step, schedule = chain_step()
    graph, costs = step.graph(), step.costs()
    layout = pack(graph, costs, schedule)
    check(graph, costs, schedule, layout)
    assert [len(row) for row in layout.table] == [1, 2, 0, 0, 2, 0, 0, 0]
    assert layout.table[1][1] == (OUTSIDE, 64)
    assert layout.table[4][0] == (OUTSIDE, 320)
    assert layout.outside_peak_bytes == 64 + 320
    assert layout.live_peak_bytes == layout.address_peak_bytes == 640 + 1280
    assert layout.total_bytes == layout.address_peak_bytes + layout.outside_peak_bytes


def test_accumulated_gradients_stay_inside() -> None:
    step, schedule = chain_step()
    graph, costs = step.graph(), step.costs()
    layout = pack(graph, costs, schedule, gradients="accumulate")
    check(graph, costs, schedule, layout, gradients="accumulate")
    assert layout.outside_peak_bytes == 64
    assert layout.table[4][0][0] != OUTSIDE


def test_temporaries_of_one_op_share_bytes_when_they_do_not_meet() -> None:
    step = StepBuilder()
    x = step.given(8)
    events = [(0, 4096), (0, -4096), (1, 4096), (1, -4096), (2, 64)]
    (y,) = step.op([x], [64], events=events, ordinals=[2])
    layout = pack(step.graph(), step.costs(), Schedule([Run(0), Free(y)], 2))
    assert layout.address_peak_bytes == 4096


def test_a_view_keeps_its_storage() -> None:
    step = StepBuilder()
    x = step.given(8)
    (base,) = step.op([x], [4096])
    view = step.view(base)
    (late,) = step.op([view], [4096])
    instructions = [Run(0), Run(1), Free(base), Run(2), Free(view), Free(late)]
    graph, costs = step.graph(), step.costs()
    layout = pack(graph, costs, Schedule(instructions, len(instructions)))
    assert layout.address_peak_bytes == 2 * 4096
    ends = [block.end for block in allocations(graph, costs, Schedule(instructions, 6)).blocks]
    assert ends[0] > allocations(graph, costs, Schedule(instructions, 6)).clock_after[2]


def test_a_recomputed_value_is_a_block_of_its_own() -> None:
    step = StepBuilder()
    x = step.given(8)
    (a,) = step.op([x], [4096])
    (b,) = step.op([x], [4096])
    instructions = [Run(0), Free(a), Run(1), Free(b), Run(0), Free(a)]
    layout = pack(step.graph(), step.costs(), Schedule(instructions, 6))
    assert layout.address_peak_bytes == 4096
    assert layout.table[0] == layout.table[4] == ((0, 4096),)


def test_an_unused_result_ends_with_its_op() -> None:
    step = StepBuilder()
    x = step.given(8)
    (a,) = step.op([x], [64, None], events=[(0, 64), (1, 4096)], ordinals=[0, 1])
    (b,) = step.op([a], [4096])
    layout = pack(step.graph(), step.costs(), Schedule([Run(0), Run(1), Free(a), Free(b)], 4))
    assert layout.address_peak_bytes == 4096 + 64


def test_a_block_that_nobody_owns_is_never_reused() -> None:
    step = StepBuilder()
    x = step.given(8)
    (a,) = step.op([x], [64], events=[(0, 4096), (1, 64)], ordinals=[1])
    layout = pack(step.graph(), step.costs(), Schedule([Run(0), Free(a)], 2))
    assert layout.table[0] == ((OUTSIDE, 4096), (0, 64))


def test_a_result_that_allocates_nothing_keeps_what_it_may_share() -> None:
    step = StepBuilder()
    x = step.given(8)
    (a,) = step.op([x], [4096])
    (alias,) = step.op([a], [4096], events=[], ordinals=[None])
    (b,) = step.op([x], [4096])
    instructions = [Run(0), Run(1), Free(a), Run(2), Free(alias), Free(b)]
    layout = pack(step.graph(), step.costs(), Schedule(instructions, 6))
    assert layout.table[0][0][0] != layout.table[3][0][0]


def test_freeing_what_is_absent_is_refused() -> None:
    step, _ = chain_step()
    with pytest.raises(PlanError, match="instruction 0 frees value 1"):
        pack(step.graph(), step.costs(), Schedule([Free(1)], 1))
    with pytest.raises(PlanError, match="instruction 0 delivers value 2"):
        pack(step.graph(), step.costs(), Schedule([Deliver(0)], 1))
    with pytest.raises(ValueError, match="alignment"):
        pack(step.graph(), step.costs(), Schedule([], 0), alignment=0)


def test_the_check_finds_an_overlap() -> None:
    step, schedule = chain_step()
    graph, costs = step.graph(), step.costs()
    layout = pack(graph, costs, schedule)
    table = [list(row) for row in layout.table]
    table[1][0] = (table[0][0][0], 1280)
    with pytest.raises(PlanError, match="overlap"):
        check(graph, costs, schedule, Layout(1920, 0, 1920, table))
    table[1][0] = (1920, 1280)
    with pytest.raises(PlanError, match="outside of the arena"):
        check(graph, costs, schedule, Layout(1920, 0, 1920, table))
    with pytest.raises(PlanError, match="not those of the schedule"):
        check(graph, costs, schedule, Layout(1920, 0, 1920, [[] for _ in table]))


@st.composite
def random_steps(draw: st.DrawFn) -> tuple[StepBuilder, Schedule]:
    """Any graph of ops, views and temporaries, and a schedule that frees and recomputes at random."""
    step = StepBuilder()
    present = [step.given(64)]
    instructions: list[Instruction] = []
    in_memory: list[int] = []
    producers: dict[int, int] = {}
    for _ in range(draw(st.integers(1, 15))):
        read = draw(st.sampled_from(present + in_memory))
        if read in in_memory and draw(st.booleans()):
            made = [step.view(read)]
        else:
            size, temporary = draw(st.integers(1, 5000)), draw(st.integers(0, 5000))
            events = [(0, temporary), (1, size), (0, -temporary)] if temporary else [(1, size)]
            made = step.op([read], [size], events=events, ordinals=[1])
            producers[made[0]] = len(step.ops) - 1
        instructions.append(Run(len(step.ops) - 1))
        in_memory += made
        while in_memory and draw(st.integers(0, 2)) == 0:
            gone = in_memory.pop(draw(st.integers(0, len(in_memory) - 1)))
            instructions.append(Free(gone))
            is_from_input = gone in producers and step.ops[producers[gone]].reads[0] in present
            if is_from_input and draw(st.booleans()):
                instructions.append(Run(producers[gone]))
                in_memory.append(gone)
                break
    for value in in_memory:
        if draw(st.booleans()):
            kind = draw(st.sampled_from(["loss", "gradient"]))
            instructions.append(Deliver(step.output(value, kind, "w")))
        instructions.append(Free(value))
    return step, Schedule(instructions, len(instructions))


@settings(max_examples=60, deadline=None)
@given(random_steps(), st.sampled_from(["keep", "accumulate"]))
def test_any_layout_passes_the_check(made: tuple[StepBuilder, Schedule], gradients: str) -> None:
    step, schedule = made
    graph, costs = step.graph(), step.costs()
    layout = pack(graph, costs, schedule, gradients=gradients, effort=200)  # type: ignore[arg-type]
    check(graph, costs, schedule, layout, gradients=gradients)  # type: ignore[arg-type]
    assert all(offset % 64 == 0 for row in layout.table for offset, _ in row if offset != OUTSIDE)
    assert layout.address_peak_bytes >= layout.live_peak_bytes
    expected = [
        len([e for e in costs.ops[i.op].events if e[1] > 0]) if isinstance(i, Run) else 0 for i in schedule.instructions
    ]
    assert [len(row) for row in layout.table] == expected


@settings(max_examples=40, deadline=None)
@given(random_steps())
def test_the_timeline_peaks_where_the_arena_does(made: tuple[StepBuilder, Schedule]) -> None:
    step, schedule = made
    graph, costs = step.graph(), step.costs()
    timeline = timeline_of(graph, costs, schedule)
    inside = [b for b in allocations(graph, costs, schedule).blocks if not b.outside]
    peak = packing.live_peak(packing.as_blocks([(b.start, b.end, b.nbytes) for b in inside]))
    assert max(timeline.total_bytes, default=0) == peak
    assert min(timeline.workspace_bytes, default=0) >= 0

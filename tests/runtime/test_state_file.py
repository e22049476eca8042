"""Files of state: what is read is what was written, and what was damaged is found out."""

from __future__ import annotations

import gc
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_odt import CheckpointError
from torch_odt.runtime.state_file import read_state, write_state

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    return tensor.permute(draw(st.permutations(range(len(shape)))))


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary()
trees = st.recursive(
    plain | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=8,
)


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(tree=st.dictionaries(st.text(max_size=3), trees, max_size=4))
def test_what_is_read_is_what_was_written(tmp_path: Path, tree: dict[str, Any]) -> None:
    write_state(tmp_path / "state", tree)
    assert_same(read_state(tmp_path / "state"), tree)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_numbers_that_are_not_finite_and_arrays(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    write_state(tmp_path / "state", {"inf": -math.inf, "nan": math.nan, "array": array})
    found = read_state(tmp_path / "state")
    assert found["inf"] == -math.inf and math.isnan(found["nan"])
    assert found["array"].dtype == np.uint32 and (found["array"] == array).all()


def test_layouts_stay_and_tied_tensors_are_written_once(tmp_path: Path) -> None:
    images = torch.randn(8, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    columns = torch.randn(100, 100).t()
    write_state(tmp_path / "state", {"images": images, "tied": columns, "again": columns, "part": columns[:, :2]})
    found = read_state(tmp_path / "state")
    assert found["images"].stride() == images.stride() and torch.equal(found["images"], images)
    assert found["tied"].stride() == columns.stride() and torch.equal(found["again"], columns)
    assert torch.equal(found["part"], columns[:, :2])
    assert (tmp_path / "state").stat().st_size < images.nbytes + 1.5 * columns.nbytes


def test_any_tool_for_safetensors_shows_the_tensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = torch.nn.Linear(3, 2)
    write_state(tmp_path / "state", {"model": model.state_dict()})
    found = load_file(tmp_path / "state")
    assert torch.equal(found["model.weight"], model.weight) and torch.equal(found["model.bias"], model.bias)


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.ones(2).to_sparse(), 1j])
def test_what_a_file_cannot_hold_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(TypeError, match=r"optimizer\.state\.0"):
        write_state(tmp_path / "state", {"optimizer": {"state": [value]}})
    assert not list(tmp_path.iterdir())


def test_every_flipped_bit_and_every_truncation_is_found(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = {"weights": torch.arange(5.0), "step": 3, "names": ["a", "b"]}
    write_state(path, state)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        try:
            found = read_state(path)
        except CheckpointError as error:
            assert str(path) in str(error)
        else:
            # The file's own padding means nothing.
            assert_same(found, state)
            assert whole[place : place + 1] == b" "
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="damaged"):
            read_state(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weights": torch.ones(2)}, tmp_path / "weights")
    with pytest.raises(CheckpointError, match="not written as a checkpoint"):
        read_state(tmp_path / "weights")
    with pytest.raises(FileNotFoundError):
        read_state(tmp_path / "absent")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks /proc what a descriptor is")
def test_what_is_written_is_on_the_disk_before_it_takes_its_name_and_so_is_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power may go at any moment: a name of what has not been written yet, or a lost name, would be a lost file."""
    calls: list[tuple[str, ...]] = []
    sync, replace = os.fsync, os.replace

    def synced(number: int) -> None:
        calls.append(("sync", Path(f"/proc/self/fd/{number}").readlink().name))
        sync(number)

    def replaced(source: Path, target: Path) -> None:
        calls.append(("replace", Path(source).name, Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_state(tmp_path / "state", {"weights": torch.ones(3)})
    assert calls == [("sync", "state.partial"), ("replace", "state.partial", "state"), ("sync", tmp_path.name)]


def test_a_failed_write_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    write_state(path, {"step": 1})

    def fail(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(Path, "replace", fail)
        write_state(path, {"step": 2})
    assert read_state(path) == {"step": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


def test_what_was_written_is_not_held_until_garbage_is_collected(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        write_state(tmp_path / "state", {"a": torch.ones(3), "b": [(1, np.ones(2))], "c": b"d"})
        held = [each for each in gc.get_objects() if type(each).__name__ == "_Flattener"]
    finally:
        gc.enable()
    assert not held

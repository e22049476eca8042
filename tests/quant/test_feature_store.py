"""Features as int8: within half a step of what the front computes, in memory and in files, and bad data named."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torch_odt as odt
from torch_odt.quant import FeatureStore, Int8Range, feature_range, store_features

Samples = list[tuple[Tensor, int]]


@given(low=st.floats(-1e4, 1e4), width=st.floats(0, 1e4), seed=st.integers(0, 99), per_channel=st.booleans())
def test_codes_are_within_half_a_step(low: float, width: float, seed: int, per_channel: bool) -> None:
    values = low + width * torch.rand(5, 3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values[:, 1] *= 0.01
    by_channel = values.transpose(0, 1).flatten(1) if per_channel else values.flatten()
    found = Int8Range.over(by_channel.amin(-1), by_channel.amax(-1))
    half = found.scale.double().view(-1, 1) / 2 if per_channel else found.scale.double() / 2
    error = (found.dequantize(found.quantize(values)) - values).abs()
    # The scale is rounded to float32, and is multiplied by up to 255.
    assert bool((error <= half * (1 + 1e-3)).all())
    assert int(found.is_outside(values).sum()) == 0
    assert torch.equal(found.dequantize(found.quantize(torch.zeros_like(values))), torch.zeros(5, 3, 4))


def test_a_range_holds_zero_and_cuts_what_lies_outside() -> None:
    found = Int8Range.over(torch.tensor(2.0), torch.tensor(5.1))
    assert float(found.scale) == pytest.approx(5.1 / 255)
    values = torch.tensor([[-1.0, 0.0, 5.1, 5.1 + 0.4 * 5.1 / 255, 7.0]])
    assert found.quantize(values).tolist() == [[-128, -128, 127, 127, 127]]
    assert found.is_outside(values).tolist() == [[True, False, False, False, True]]
    assert float(Int8Range.over(torch.tensor(0.0), torch.tensor(0.0)).scale) == 1.0
    with pytest.raises(ValueError, match=r"not finite"):
        Int8Range.over(torch.tensor(0.0), torch.tensor(float("inf")))
    with pytest.raises(ValueError, match=r"above its highest"):
        Int8Range.over(torch.tensor(1.0), torch.tensor(0.0))


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("on_disk", [False, True])
def test_features_are_what_the_front_computes(tmp_path: Path, per_channel: bool, on_disk: bool) -> None:
    front, data = _front(), _data(7)
    expected = front.eval()(torch.stack([x for x, _ in data])).detach()
    front.train()
    store = store_features(
        front, data, tmp_path / "features" if on_disk else None, per_channel=per_channel, batch_size=3
    )
    assert front.training and front[1].training and int(front[1].num_batches_tracked) == 0
    assert store.sample_shape == (4, 3, 3) and len(store) == 7 and store.saturated == 0
    assert store.nbytes == 7 * 36 + 7 * 8 + (32 if per_channel else 8)
    features, labels = store.read(range(7))
    step = store.range.scale.view(-1, 1, 1) if per_channel else store.range.scale
    assert bool(((features - expected).abs() <= step / 2 * (1 + 1e-5)).all())
    assert labels.tolist() == [label for _, label in data]
    if on_disk:
        assert (tmp_path / "features" / "features.bin").stat().st_size == 7 * 36
        assert not (tmp_path / "features.partial").exists()


def test_by_channel_steps_are_finer() -> None:
    data = [(torch.stack([torch.rand(4), 100 * torch.rand(4)]), 0) for _ in range(9)]
    fine, coarse = (store_features(nn.Identity(), data, per_channel=each) for each in (True, False))
    x = torch.stack([sample for sample, _ in data])
    errors = [(store.read(range(9))[0] - x)[:, 0].abs().max() for store in (fine, coarse)]
    assert errors[0] < errors[1] / 20


def test_a_store_is_a_data_set() -> None:
    store = store_features(_front(), _data(5))
    x, y = store[3]
    loaded = list(DataLoader(store, batch_size=2))
    assert [len(labels) for _, labels in loaded] == [2, 2, 1]
    assert torch.equal(loaded[1][0][1], x) and int(loaded[1][1][1]) == y
    assert torch.equal(store[-1][0], store[4][0])
    with pytest.raises(IndexError, match=r"no sample 5: the store holds 5"):
        store[5]


def test_batches_are_each_sample_once_in_the_order_that_is_drawn() -> None:
    data = TensorDataset(torch.arange(7.0)[:, None] * 10, torch.arange(7))
    store = store_features(nn.Identity(), data)
    draws = (torch.Generator().manual_seed(seed) for seed in (0, 1))
    first, second = (torch.cat([y for _, y in store.batches(3, generator=draw)]).tolist() for draw in draws)
    assert sorted(first) == list(range(7)) and first != second
    assert [len(y) for _, y in store.batches(3, drop_last=True)] == [3, 3]
    for x, y in store.batches(3):
        torch.testing.assert_close(x[:, 0], 10.0 * y, atol=0.501 * float(store.range.scale), rtol=0)
    with pytest.raises(ValueError, match=r"size=0"):
        next(store.batches(0))
    with pytest.raises(ValueError, match=r"size=8: a batch has 1 to 7"):
        next(store.batches(8, drop_last=True))


def test_a_folder_is_read_back_and_not_made_twice(tmp_path: Path) -> None:
    front, data = _front(), _data(6)
    folder = tmp_path / "features"
    store = store_features(front, data, folder, per_channel=True)
    opened = FeatureStore.open(folder)
    for other in (opened, pickle.loads(pickle.dumps(opened))):
        assert all(map(torch.equal, other.read(range(6)), store.read(range(6))))
    front[0].register_forward_hook(_must_not_run)
    assert len(store_features(front, data, folder, per_channel=True)) == 6


def test_what_a_folder_does_not_hold_is_refused(tmp_path: Path) -> None:
    front, data, folder = _front(), _data(6), tmp_path / "features"
    store_features(front, data, folder)
    for other_front, other_data, options, named in (
        (nn.Sequential(nn.Conv2d(1, 4, 3)), data, {}, "front"),
        (front, _data(6, seed=5), {}, "inputs"),
        (front, _data(5), {}, "inputs, samples"),
        (front, data, {"per_channel": True}, "per_channel"),
        (front, data, {"fixed_range": Int8Range.over(torch.tensor(0.0), torch.tensor(9.0))}, "range"),
    ):
        with pytest.raises(odt.StoredOutputsError, match=rf"something else \(other {named}\)"):
            store_features(other_front, other_data, folder, **options)
    (folder / "labels.bin").write_bytes(b"12345678")
    with pytest.raises(odt.StoredOutputsError, match=r"labels.bin has 8 bytes and should have 48"):
        FeatureStore.open(folder)
    (folder / "features.json").write_text("{")
    with pytest.raises(odt.StoredOutputsError, match=r"features.json is damaged"):
        FeatureStore.open(folder)
    with pytest.raises(odt.StoredOutputsError, match=r"holds no features"):
        FeatureStore.open(tmp_path)
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "mine.txt").touch()
    with pytest.raises(odt.StoredOutputsError, match=r"not ours"):
        store_features(front, data, tmp_path / "other")


def test_an_interrupted_folder_is_made_anew(tmp_path: Path) -> None:
    front, data = _front(), _data(6)
    with pytest.raises(FloatingPointError, match=r"sample 5 are not finite"):
        fixed = feature_range(front, data)
        store_features(
            front, [*data[:5], (torch.full((1, 8, 8), torch.nan), 1)], tmp_path / "features", fixed_range=fixed
        )
    assert not (tmp_path / "features").exists()
    assert len(store_features(front, data, tmp_path / "features")) == 6


def test_a_fixed_range_is_kept_and_what_lies_outside_is_counted() -> None:
    front, data = _front(), _data(8)
    fixed = feature_range(front, data[:4])
    louder = [(5 * x, y) for x, y in data]
    store = store_features(front, louder, fixed_range=fixed)
    assert store.range is fixed
    features = front.eval()(torch.stack([x for x, _ in louder])).detach()
    assert store.saturated == int((features > (127 - fixed.zero_point + 0.5) * fixed.scale).sum()) > 0


def test_bad_data_and_fronts_are_named() -> None:
    data = _data(3)
    with pytest.raises(ValueError, match=r"the data have no samples"):
        store_features(_front(), [])
    with pytest.raises(ValueError, match=r"batch_size=0"):
        store_features(_front(), data, batch_size=0)
    with pytest.raises(TypeError, match=r"sample 1 is a Tensor"):
        store_features(_front(), [data[0], data[1][0]])
    with pytest.raises(TypeError, match=r"the label of sample 0 is 0.5"):
        store_features(_front(), [(data[0][0], 0.5)])
    with pytest.raises(TypeError, match=r"returns tuple"):
        store_features(_Pair(), data)
    with pytest.raises(ValueError, match=r"makes \(9, 8\) of 3 samples"):
        store_features(nn.Flatten(0, 2), [(x[:, :3], y) for x, y in data])
    with pytest.raises(ValueError, match=r"sample 1 are \(1, 4, 4\), those before .*8, 8"):
        store_features(nn.Identity(), [data[0], (torch.ones(1, 4, 4), 0)], batch_size=1)
    with pytest.raises(ValueError, match=r"the range has 2 channels, and features 4"):
        store_features(_front(), data, fixed_range=Int8Range.over(torch.zeros(2), torch.ones(2)))


class _Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def _must_not_run(*_: object) -> None:
    raise AssertionError("it was computed again")


def _front() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))


def _data(count: int, *, seed: int = 0) -> Samples:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(1, 8, 8, generator=draw), number % 3) for number in range(count)]

"""The recipe from end to end on a small network, and the spoken digits as it reads them."""

from __future__ import annotations

import copy
import json
import tarfile
import wave
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from recipes import fedepth_blocks
from recipes.common.spoken_digits import load_speakers
from torch_odt._extensions import memory_module
from torch_odt.adapt.blocks import PooledHead


@pytest.mark.slow
@pytest.mark.skipif(memory_module is None, reason="torch_odt._memory, which counts bytes, is not built")
def test_clients_of_different_memory_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(fedepth_blocks, "CHANNELS", (8, 8, 16))
    monkeypatch.setattr(fedepth_blocks, "STRIDES", (2, 1, 2))
    arguments = ["--data", "digits", "--rounds", "1", "--seeds", "1", "--cache", str(tmp_path / "cache")]
    with torch.random.fork_rng(devices=[]):
        ended = fedepth_blocks.main([*arguments, "--out", str(tmp_path)])
    report = json.loads((tmp_path / "fedepth_blocks.json").read_text())
    everyone, left_out, *others = report["rows"]
    assert (everyone["clients"], left_out["clients"]) == (6, 2)
    assert [row["method"] for row in others] == ["HeteroFL", "Split-Mix", "FeDepth"]
    for row in others:
        assert row["clients"] == 6
        assert 0 < row["measured_bytes"] <= row["planned_bytes"] <= min(report["memory_bytes"])
        assert 0 <= row["worst"][0] <= row["accuracies"][0] <= 1
    heterofl, split_mix, fedepth = others
    assert heterofl["weight_bytes"] == split_mix["weight_bytes"] < fedepth["weight_bytes"] == everyone["weight_bytes"]
    learnt = [row["accuracies"][0] >= left_out["accuracies"][0] for row in (heterofl, fedepth)]
    inside = max(report["blocks_over_largest"].values()) <= fedepth_blocks.BLOCKS_OVER_LARGEST
    assert ended == (0 if all(learnt) and inside else 1)


def test_the_spoken_digits_have_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fedepth_blocks.main([])
    assert "name their folder by --data-dir" in capsys.readouterr().err


def test_each_speaker_is_a_client(tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    folder.mkdir()
    for name, frames in {"3_ann_7": 900, "9_ann_4": 9000, "0_bob_5": 400, "0_bob_0": 400}.items():
        _write_tone(folder / f"{name}.wav", frames)
    (tmp_path / "fsdd").mkdir()
    with tarfile.open(tmp_path / "fsdd" / "recordings.tar.xz", "w:xz") as tar:
        tar.add(folder, "recordings")
    found = load_speakers(tmp_path, tmp_path)
    packed = load_speakers(tmp_path / "fsdd", tmp_path / "cache")
    assert sorted(found) == sorted(packed) == ["ann", "bob"]
    assert found["ann"].train[1].tolist() == [3] and found["ann"].test[1].tolist() == [9]
    for speaker, samples in found.items():
        assert samples.train[0].shape == (1, 1, 32, 40)
        assert torch.equal(samples.train[0], packed[speaker].train[0])
        assert samples.test[0].mean().abs() < 1e-5 and samples.test[0].isfinite().all()
    # The tone lies in one band, over all of a long recording.
    assert found["ann"].test[0][0, 0].argmax(0)[2:-2].unique().numel() == 1
    with pytest.raises(FileNotFoundError, match=r"recordings\.tar\.xz"):
        load_speakers(tmp_path / "cache" / "none", tmp_path)


def test_digits_are_shared_out_unevenly_and_none_twice() -> None:
    pytest.importorskip("sklearn")
    clients = fedepth_blocks._uneven_digits(0.5)
    sizes = [len(part[1]) for samples in clients.values() for part in (samples.train, samples.test)]
    assert len(clients) == 6 and sum(sizes) == 1797 and min(sizes) > 0
    counts = torch.stack([samples.train[1].bincount(minlength=10) for samples in clients.values()])
    assert (counts.max(0).values > 2 * counts.float().mean(0)).any()


def test_bases_are_dealt_evenly_and_never_twice_to_a_client() -> None:
    for _ in range(20):
        hands = fedepth_blocks._deal([4, 4, 2, 2, 1, 1], 4)
        assert [len(set(hand)) for hand in hands] == [len(hand) for hand in hands] == [4, 4, 2, 2, 1, 1]
        dealt = Counter(base for hand in hands for base in hand)
        assert max(dealt.values()) - min(dealt.values()) <= 1


def test_each_seed_begins_with_fresh_heads() -> None:
    device: Any = SimpleNamespace(heads=[nn.Sequential(PooledHead(8, 10)), PooledHead(4, 10)])
    trained = copy.deepcopy([head.state_dict() for head in device.heads])
    with torch.random.fork_rng(devices=[]):
        found = []
        for seed in (0, 1, 0):
            torch.manual_seed(seed)
            found.append(fedepth_blocks.fresh_heads(device))
    for head, state, first, second, again in zip(device.heads, trained, *found, strict=True):
        for name, value in head.state_dict().items():
            assert torch.equal(value, state[name]) and torch.equal(first[name], again[name])
            assert not torch.equal(first[name], state[name]) and not torch.equal(first[name], second[name])


def _write_tone(path: Path, frames: int) -> None:
    tone = (torch.sin(torch.arange(frames) * 2 * torch.pi * 1000 / 8000) * 20000).to(torch.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(tone.numpy().tobytes())

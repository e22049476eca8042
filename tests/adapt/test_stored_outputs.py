"""A mentor's outputs on disk: what it computes, found by number, refused where they are another's."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torch_odt as odt
from torch_odt.adapt import StoredOutputs, store_outputs
from torch_odt.adapt.samples_digest import SAMPLES_READ, samples_digest


class Mentor(nn.Sequential):
    """With BatchNorm and dropout, which behave otherwise in training."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(96, 5)
        )
        self.calls = 0
        self.fails_at: int | None = None

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise KeyboardInterrupt
        return super().forward(input)


def test_what_is_read_is_what_the_mentor_computes_in_evaluation_mode(tmp_path: Path) -> None:
    mentor, images = _mentor(), torch.randn(23, 3, 4, 4)
    before = {name: tensor.clone() for name, tensor in mentor.state_dict().items()}
    modes = [module.training for module in mentor.modules()]
    stored = store_outputs(mentor, images, tmp_path / "s", layers=["2"], dtype="float32", batch_size=4)
    assert [module.training for module in mentor.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in mentor.state_dict().items())
    with torch.no_grad():
        hints = nn.Sequential(*list(mentor.eval())[:3])(images)
        logits = mentor(images)
    found = stored.read([22, 0, 7])
    torch.testing.assert_close(found, (logits[[22, 0, 7]], hints[[22, 0, 7]]))
    assert stored.hint_shapes == {"2": (6, 4, 4)}
    assert repr(stored).endswith(f"/s'): 23 samples, logits {tuple(logits.shape[1:])}")
    assert stored.disk_bytes == sum(path.stat().st_size for path in stored.folder.glob("*.bin")) == 23 * 4 * 101


@given(samples=st.integers(1, 9), batch_size=st.integers(1, 10), labelled=st.booleans(), half=st.booleans())
def test_batches_leave_no_trace(
    tmp_path_factory: pytest.TempPathFactory, samples: int, batch_size: int, labelled: bool, half: bool
) -> None:
    mentor, images = _mentor(), torch.randn(samples, 3, 4, 4)
    data = TensorDataset(images, torch.arange(samples)) if labelled else images
    folder = tmp_path_factory.mktemp("stored")
    stored = store_outputs(mentor, data, folder, dtype="float16" if half else "float32", batch_size=batch_size)
    assert not folder.with_name(f"{folder.name}.partial").exists()
    with torch.no_grad():
        expected = mentor.eval()(images)
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if half else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(stored.read(range(samples))[0].float(), expected, **tolerance)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    mentor, images = _mentor(), torch.randn(20, 3, 4, 4)
    mentor.fails_at = 4
    with pytest.raises(KeyboardInterrupt):
        store_outputs(mentor, images, tmp_path / "s", batch_size=4)
    assert not (tmp_path / "s").exists()
    assert "forward" not in vars(mentor[2])
    mentor.fails_at = None
    stored = store_outputs(mentor, images, tmp_path / "s", batch_size=4)
    assert mentor.calls == 4 + 2
    store_outputs(mentor, images, tmp_path / "s", batch_size=4)
    assert mentor.calls == 4 + 2
    fresh = store_outputs(mentor, images, tmp_path / "t", batch_size=4)
    assert torch.equal(stored.read(range(20))[0], fresh.read(range(20))[0])


def test_what_was_not_known_to_be_whole_is_computed_again(tmp_path: Path) -> None:
    mentor, images = _mentor(), torch.randn(12, 3, 4, 4)
    mentor.fails_at = 3
    with pytest.raises(KeyboardInterrupt):
        store_outputs(mentor, images, tmp_path / "s", batch_size=4)
    # Power was lost before the second batch was noted, and left rubbish behind it.
    description = tmp_path / "s.partial" / "outputs.json"
    description.write_text(json.dumps(json.loads(description.read_text()) | {"done": 4}))
    with (tmp_path / "s.partial" / "logits.bin").open("ab") as file:
        file.write(b"rubbish")
    mentor.fails_at = None
    stored = store_outputs(mentor, images, tmp_path / "s", batch_size=4)
    assert torch.equal(
        stored.read(range(12))[0], store_outputs(mentor, images, tmp_path / "t", batch_size=4).read(range(12))[0]
    )


def test_outputs_of_something_else_are_refused_and_left(tmp_path: Path) -> None:
    mentor, images = _mentor(), torch.randn(6, 3, 4, 4)
    stored = store_outputs(mentor, images, tmp_path / "s")
    stored.check_mentor(mentor)
    other = _mentor(seed=1)
    with pytest.raises(odt.StoredOutputsError, match=r"mentor is \w+ and not \w+"):
        store_outputs(other, images, tmp_path / "s")
    with pytest.raises(odt.StoredOutputsError, match="other weights"):
        stored.check_mentor(other)
    with pytest.raises(odt.StoredOutputsError, match="samples is 6 and not 5"):
        store_outputs(mentor, images[:5], tmp_path / "s")
    with pytest.raises(odt.StoredOutputsError, match=r"layers is \(\) and not \('2',\)"):
        store_outputs(mentor, images, tmp_path / "s", layers=["2"])
    with pytest.raises(odt.StoredOutputsError, match="of 6 samples, and these data have 5"):
        stored.beside(TensorDataset(images[:5], torch.arange(5)))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo.jpg").touch()
    with pytest.raises(odt.StoredOutputsError, match="no stored outputs"):
        store_outputs(mentor, images, tmp_path / "mine")
    assert (tmp_path / "mine" / "photo.jpg").exists()
    assert len(StoredOutputs(tmp_path / "s")) == 6


def test_other_data_of_the_same_length_are_refused(tmp_path: Path) -> None:
    mentor, images, labels = _mentor(), torch.randn(6, 3, 4, 4), torch.arange(6)
    stored = store_outputs(mentor, images, tmp_path / "s")
    turned = images.flip(0)
    for other in (images + 1, turned, images.double(), TensorDataset(turned, labels)):
        with pytest.raises(odt.StoredOutputsError, match=r"inputs is \w+ and not \w+.*at random are never the same"):
            store_outputs(mentor, other, tmp_path / "s")
    with pytest.raises(odt.StoredOutputsError, match=r"other inputs \(digest \w+\) than these data have"):
        stored.beside(TensorDataset(turned, labels))
    assert len(stored.beside(TensorDataset(images, labels + 1))) == 6
    assert len(store_outputs(mentor, TensorDataset(images, labels), tmp_path / "s")) == 6


def test_of_many_samples_the_first_the_last_and_some_between_are_compared() -> None:
    class Counted(list[Tensor]):
        def __init__(self, samples: list[Tensor]) -> None:
            super().__init__(samples)
            self.read: list[int] = []

        def __getitem__(self, index: Any) -> Any:
            self.read.append(index)
            return super().__getitem__(index)

    data = Counted([torch.full((1,), float(number)) for number in range(2000)])
    digest = samples_digest(data)
    assert len(set(data.read)) == len(data.read) == SAMPLES_READ
    assert (data.read[0], data.read[-1]) == (0, 1999)
    assert max(b - a for a, b in pairwise(data.read)) == 4
    for place in (0, 1999):
        changed = [*data]
        changed[place] = torch.zeros(1) - 1
        assert samples_digest(changed) != digest


def test_a_partial_folder_of_other_data_is_refused(tmp_path: Path) -> None:
    mentor, images = _mentor(), torch.randn(6, 3, 4, 4)
    mentor.fails_at = 2
    with pytest.raises(KeyboardInterrupt):
        store_outputs(mentor, images, tmp_path / "s", batch_size=2)
    with pytest.raises(odt.StoredOutputsError, match=r"s\.partial holds outputs of something else \(inputs is"):
        store_outputs(mentor, images + 1, tmp_path / "s", batch_size=2)


def test_a_partial_folder_of_another_mentor_is_refused(tmp_path: Path) -> None:
    mentor, images = _mentor(), torch.randn(6, 3, 4, 4)
    mentor.fails_at = 2
    with pytest.raises(KeyboardInterrupt):
        store_outputs(mentor, images, tmp_path / "s", batch_size=2)
    with pytest.raises(odt.StoredOutputsError, match=r"s\.partial holds outputs of something else"):
        store_outputs(_mentor(seed=1), images, tmp_path / "s", batch_size=2)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "logits.bin").write_bytes(b"short"), "5 bytes long; it should have 60"),
        (lambda folder: (folder / "logits.bin").unlink(), "not there"),
        (lambda folder: (folder / "outputs.json").write_text("{"), "damaged"),
        (lambda folder: (folder / "outputs.json").write_text("[]"), "damaged"),
        (lambda folder: _change(folder, version=99), "99"),
        (lambda folder: _change(folder, done=4), "4 of 6 samples"),
        (lambda folder: _change(folder, done=7), "does not fit together"),
        (lambda folder: _change(folder, shapes=[[5], [5]]), "does not fit together"),
    ],
)
def test_what_is_damaged_is_refused(tmp_path: Path, damage: Any, said: str) -> None:
    store_outputs(_mentor(), torch.randn(6, 3, 4, 4), tmp_path / "s")
    damage(tmp_path / "s")
    with pytest.raises(odt.StoredOutputsError, match=said):
        StoredOutputs(tmp_path / "s")


def test_samples_come_with_label_and_outputs_also_from_workers(tmp_path: Path) -> None:
    images, labels = torch.randn(10, 3, 4, 4), torch.arange(10)
    stored = store_outputs(_mentor(), TensorDataset(images, labels), tmp_path / "s", layers=["2"])
    samples = stored.beside(TensorDataset(images, labels))
    again = pickle.loads(pickle.dumps(samples))
    assert len(pickle.dumps(stored)) < 500
    x, (label, logits, hint) = again[3]
    assert torch.equal(x, images[3]) and int(label) == 3
    assert torch.equal(logits, stored[3][0]) and hint.shape == (6, 4, 4)
    batches = list(DataLoader(samples, batch_size=5))
    assert len(batches) == 2
    x, (label, logits, hint) = batches[1]
    assert torch.equal(label, labels[5:]) and torch.equal(logits, stored.read(range(5, 10))[0])
    assert sum(1 for _ in samples) == 10
    for index in (10, -1):
        with pytest.raises(IndexError, match=f"no sample {index}: .*0 to 9"):
            stored.read([index])
    with pytest.raises(TypeError, match="inputs and a label"):
        _ = stored.beside(images)[0]


def test_reading_takes_a_batch_of_memory(tmp_path: Path) -> None:
    stored = store_outputs(nn.Linear(1, 2**17), torch.randn(256, 1), tmp_path / "s", batch_size=32)
    assert stored.disk_bytes == 64 * 2**20
    level = odt.memory.process_bytes()
    most = 0
    for start in range(0, 256, 4):
        assert stored.read(range(start, start + 4))[0].isfinite().all()
        most = max(most, odt.memory.process_bytes() - level)
    assert most < 16 * 2**20


def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    mentor, images = _mentor(), torch.randn(4, 3, 4, 4)
    with pytest.raises(ValueError, match=r"no layer 'layer9'; it has 0, 1"):
        store_outputs(mentor, images, tmp_path / "s", layers=["layer9"])
    with pytest.raises(ValueError, match="no samples"):
        store_outputs(mentor, images[:0], tmp_path / "s")
    with pytest.raises(TypeError, match="data is a DataLoader: give a Dataset"):
        store_outputs(mentor, DataLoader(images), tmp_path / "s")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype='int8'"):
        store_outputs(mentor, images, tmp_path / "s", dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sample 0 is a dict"):
        store_outputs(mentor, [{"x": images[0]}], tmp_path / "s")
    with torch.no_grad():
        mentor[5].bias[0] = 1e6
    with pytest.raises(FloatingPointError, match=r"not finite as torch\.float16.*65504"):
        store_outputs(mentor, images, tmp_path / "s")
    assert store_outputs(mentor, images, tmp_path / "t", dtype="float32").read([0])[0].max() > 9e5


def test_a_layer_that_runs_twice_or_returns_no_tensor_is_named(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.idle, self.lstm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LSTM(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(self.layer(self.layer(x)))[0]

    for name, kind, said in (
        ("layer", ValueError, "runs more than once"),
        ("idle", ValueError, "did not run"),
        ("lstm", TypeError, "returns a tuple"),
    ):
        with pytest.raises(kind, match=said):
            store_outputs(Twice(), torch.ones(3, 4), tmp_path / name, layers=[name])


def _mentor(seed: int = 0) -> Mentor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Mentor().train()


def _change(folder: Path, **values: Any) -> None:
    path = folder / "outputs.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "outputs").touch()
    with pytest.raises(odt.StoredOutputsError, match="outputs is a file: give a folder"):
        store_outputs(_mentor(), torch.randn(4, 3, 4, 4), tmp_path / "outputs")

"""Data sets that the command line can name."""

from __future__ import annotations

import gzip
import pickle
import shutil
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch

from torch_odt.commands.data import ImageData, load_data
from torch_odt.commands.errors import UserError


def check(data: ImageData, train: int, validation: int, classes: int, size: int) -> None:
    assert (len(data.train), len(data.validation), len(data.classes)) == (train, validation, classes)  # type: ignore[arg-type]
    for part in (data.train, data.validation):
        image, label = part[0]
        assert image.shape == (3, size, size)
        assert image.dtype == torch.float32
        assert 0 <= label < classes


def test_digits_need_nothing() -> None:
    check(load_data("digits", data_dir=None, image_size=32), 1500, 297, 10, 32)


def test_digits_are_split_the_same_way_every_time() -> None:
    first, second = (load_data("digits", data_dir=None, image_size=16).train[0] for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1]


def test_packed_fashion_mnist_is_unpacked_elsewhere(packed_fashion_mnist: Path, tmp_path: Path) -> None:
    cache = tmp_path / "elsewhere"
    data = load_data("fashion-mnist", data_dir=packed_fashion_mnist, image_size=32, cache_dir=cache)
    check(data, 40, 8, 10, 32)
    assert "Ankle boot" in data.classes
    assert {path.suffix for path in (packed_fashion_mnist / "FashionMNIST" / "raw").iterdir()} == {".gz"}
    assert sorted(path.name for path in cache.rglob("*ubyte*"))[0] == "t10k-images-idx3-ubyte"


def test_packed_fashion_mnist_is_unpacked_into_the_cache_by_default(
    packed_fashion_mnist: Path, own_cache: Path
) -> None:
    load_data("fashion-mnist", data_dir=packed_fashion_mnist)
    assert len(list(own_cache.rglob("*-ubyte"))) == 4


def test_another_process_may_unpack_at_the_same_time(
    packed_fashion_mnist: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copyfileobj

    def while_another_unpacks(*files: IO[bytes]) -> None:
        monkeypatch.setattr(shutil, "copyfileobj", copy)
        check(load_data("fashion-mnist", data_dir=packed_fashion_mnist, image_size=32), 40, 8, 10, 32)
        copy(*files)

    monkeypatch.setattr(shutil, "copyfileobj", while_another_unpacks)
    check(load_data("fashion-mnist", data_dir=packed_fashion_mnist, image_size=32), 40, 8, 10, 32)
    assert not list(own_cache.rglob("*.partial"))


def test_unpacked_fashion_mnist_is_read_where_it_lies(packed_fashion_mnist: Path, own_cache: Path) -> None:
    for path in (packed_fashion_mnist / "FashionMNIST" / "raw").glob("*.gz"):
        with gzip.open(path) as packed, path.with_suffix("").open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    check(load_data("fashion-mnist", data_dir=packed_fashion_mnist, image_size=32), 40, 8, 10, 32)
    assert not list(own_cache.rglob("*-ubyte"))


def test_incomplete_fashion_mnist_names_what_is_missing(packed_fashion_mnist: Path) -> None:
    (packed_fashion_mnist / "FashionMNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError, match=r"lacks t10k-labels-idx1-ubyte \(or"):
        load_data("fashion-mnist", data_dir=packed_fashion_mnist)


def test_damaged_archive(packed_fashion_mnist: Path) -> None:
    (packed_fashion_mnist / "FashionMNIST" / "raw" / "train-images-idx3-ubyte.gz").write_bytes(b"no archive")
    with pytest.raises(UserError, match="cannot be unpacked"):
        load_data("fashion-mnist", data_dir=packed_fashion_mnist)


@pytest.mark.parametrize("name", ["cifar10", "fashion-mnist"])
def test_a_folder_that_is_not_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"absent: there is no such folder; --download makes it and fetches {name}"):
        load_data(name, data_dir=tmp_path / "absent")


def test_absent_cifar10(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--download fetches it"):
        load_data("cifar10", data_dir=tmp_path)


def test_folder_keeps_a_tenth_for_validation(image_folder: Path) -> None:
    data = load_data(str(image_folder), data_dir=None, image_size=16)
    check(data, 11, 1, 2, 16)
    assert data.classes == ["cat", "dog"]


def test_folder_with_its_own_validation(image_folder: Path) -> None:
    parts = image_folder.parent / "parts"
    shutil.copytree(image_folder, parts / "train")
    shutil.copytree(image_folder, parts / "val")
    check(load_data(str(parts), data_dir=None, image_size=16), 12, 12, 2, 16)
    (parts / "val" / "cow").mkdir()
    shutil.copy(parts / "val" / "cat" / "0.png", parts / "val" / "cow")
    with pytest.raises(UserError, match="do not hold the same classes"):
        load_data(str(parts), data_dir=None, image_size=16)


def test_folder_without_classes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one subfolder of images a class"):
        load_data(str(tmp_path), data_dir=None)


def test_cifar10_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        part = {"data": np.zeros((2, 3072), dtype=np.uint8), "labels": [3, 9]}
        (folder / name).write_bytes(pickle.dumps(part))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {i}" for i in range(10)]}))
    # The real files have known digests.
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    check(load_data("cifar10", data_dir=tmp_path, image_size=16), 10, 2, 10, 16)


def test_a_download_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", unreachable)
    with pytest.raises(UserError, match="no route to host"):
        load_data("cifar10", data_dir=tmp_path, image_size=16, download=True)

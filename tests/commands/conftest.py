"""What the tests of the commands share: a terminal to type into, a tiny model, tiny data sets."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from terminals import Outcome, Terminal

from torch_odt import cli

NET = """
from torch import nn


def make(num_classes=10):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes),
    )


def autoencoder():
    import torch
    model = nn.Sequential(nn.Linear(12, 3), nn.ReLU(), nn.Linear(3, 12))
    batch = torch.ones(4, 12)
    return model, nn.functional.mse_loss, (batch, batch)


def frozen():
    return make().requires_grad_(False)


def no_scores():
    return nn.Conv2d(3, 3, 1)


def not_a_model():
    return 7


def broken():
    raise KeyError("weights")
"""


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("TORCH_ODT_CACHE", str(folder))
    return folder


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str]) -> Terminal:
    def type_in(*words: object) -> Outcome:
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        printed = capsys.readouterr()
        return Outcome(code, printed.out, printed.err)

    return type_in


@pytest.fixture
def net(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Two classes of six images of 20 x 24 pixels."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for name in ("cat", "dog"):
        folder = tmp_path / "images" / name
        folder.mkdir(parents=True)
        for number in range(6):
            pixels = generator.integers(0, 255, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "images"


@pytest.fixture
def packed_fashion_mnist(tmp_path: Path, own_cache: Path) -> Path:
    """The files of Fashion-MNIST as they are downloaded, with a few images in them; unpacked into `own_cache`."""
    raw = tmp_path / "data" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for part, count in (("train", 40), ("t10k", 8)):
        images = generator.integers(0, 255, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        with gzip.open(raw / f"{part}-images-idx3-ubyte.gz", "wb") as file:
            file.write(struct.pack(">4i", 2051, count, 28, 28) + images.tobytes())
        with gzip.open(raw / f"{part}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(struct.pack(">2i", 2049, count) + labels.tobytes())
    return tmp_path / "data"

"""Real images for tests: Fashion-MNIST from a folder, scikit-learn's digits where there is none."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

SIZE = 224


def load_images(data_dir: Path | None, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` grey images with values from 0 to 1 and their labels.

    Args:
        data_dir: the folder that holds FashionMNIST/raw (torchvision's layout, gzipped or not); None for the digits.
        count: how many; the digits repeat when there are fewer.
    """
    if data_dir is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        chosen = order[torch.arange(count) % len(order)]
        return torch.tensor(digits.images / 16, dtype=torch.float32)[chosen], torch.tensor(digits.target)[chosen]
    raw = data_dir / "FashionMNIST" / "raw"
    images = _read(raw / "train-images-idx3-ubyte", 16, count * 28 * 28).reshape(count, 28, 28)
    labels = _read(raw / "train-labels-idx1-ubyte", 8, count)
    return torch.from_numpy(images).float() / 255, torch.from_numpy(labels).long()


def upscale(images: torch.Tensor) -> torch.Tensor:
    """Grey images as colour images of 224 x 224."""
    return F.interpolate(images.unsqueeze(1), size=SIZE, mode="bilinear").repeat(1, 3, 1, 1)


def _read(path: Path, header: int, count: int) -> np.ndarray:
    """The first bytes behind an IDX file's header."""
    packed = path.with_name(path.name + ".gz")
    with path.open("rb") if path.exists() else gzip.open(packed) as file:
        return np.frombuffer(file.read(header + count)[header:], dtype=np.uint8).copy()

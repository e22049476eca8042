"""Images to train on: a folder of the user's, two well-known data sets, and the digits that come with scikit-learn."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset

from torch_odt._whole_file import whole_file
from torch_odt.cache import default_folder
from torch_odt.commands.errors import UserError
from torch_odt.commands.models import INSTALL_TORCHVISION
from torch_odt.errors import first_line

if TYPE_CHECKING:
    from torchvision.datasets import ImageFolder

Transform = Callable[[Any], torch.Tensor]

NAMES = ("digits", "fashion-mnist", "cifar10")
DEFAULT_IMAGE_SIZE = {"digits": 96, "fashion-mnist": 96, "cifar10": 96}
FOLDER_IMAGE_SIZE = 224

_VALIDATION_FOLDERS = ("val", "valid", "validation", "test")
_VALIDATION_SHARE = 0.1
_DIGITS_FOR_VALIDATION = 297
_MEAN, _SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass
class ImageData:
    """Two data sets of (image, label): images are float tensors of 3 x size x size.

    Attributes:
        name: what it is called.
        train, validation: samples to learn from, and others.
        classes: their names.
        image_size: height and width.
    """

    name: str
    train: Dataset[tuple[torch.Tensor, int]]
    validation: Dataset[tuple[torch.Tensor, int]]
    classes: list[str]
    image_size: int


def load_data(
    name: str,
    *,
    data_dir: Path | None,
    image_size: int | None = None,
    download: bool = False,
    cache_dir: Path | None = None,
) -> ImageData:
    """The data set of that name, or the images in that folder.

    Args:
        name: one of `NAMES`, or a folder with one subfolder a class.
        data_dir: where the named data sets lie, or are downloaded to.
        image_size: images are brought to this height and width.
        download: fetch a named data set that is not there.
        cache_dir: where archives are unpacked if `data_dir` is read-only.
    """
    size = image_size or DEFAULT_IMAGE_SIZE.get(name, FOLDER_IMAGE_SIZE)
    if name == "digits":
        return load_digits(size)
    if name == "fashion-mnist":
        return _fashion_mnist(_needs_dir(name, data_dir, download), size, download, cache_dir)
    if name == "cifar10":
        return _cifar10(_needs_dir(name, data_dir, download), size, download)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise UserError(f"--data {name}: neither a folder nor one of {', '.join(NAMES)}")
    return _image_folder(folder, size)


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Handwritten digits of 8 x 8 pixels, scaled up when they are asked for."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, image_size: int) -> None:
        self._images = (images - images.mean()) / images.std()
        self._labels = labels
        self._image_size = image_size

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self._images[index][None, None]
        large = F.interpolate(image, size=(self._image_size, self._image_size), mode="bilinear")
        return large[0].expand(3, -1, -1), int(self._labels[index])


def load_digits(image_size: int) -> ImageData:
    """scikit-learn's 1,797 digits; it needs no files."""
    try:
        from sklearn import datasets
    except ImportError:
        raise UserError('scikit-learn is not installed: pip install "torch_odt[demo]"') from None
    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order]
    labels = torch.tensor(digits.target)[order]
    split = len(labels) - _DIGITS_FOR_VALIDATION
    return ImageData(
        "digits",
        Digits(images[:split], labels[:split], image_size),
        Digits(images[split:], labels[split:], image_size),
        [str(digit) for digit in range(10)],
        image_size,
    )


def _fashion_mnist(data_dir: Path, size: int, download: bool, cache_dir: Path | None) -> ImageData:
    datasets = _torchvision_datasets()
    root = data_dir if download else _unpacked_fashion_mnist(data_dir, cache_dir)
    transform = _image_transform(size, grey=True)
    train, validation = _open_both(datasets.FashionMNIST, root, download, transform)
    return ImageData("fashion-mnist", train, validation, list(train.classes), size)


def _unpacked_fashion_mnist(data_dir: Path, cache_dir: Path | None) -> Path:
    """A folder with the files as torchvision reads them; archives are unpacked into the cache."""
    raw = data_dir / "FashionMNIST" / "raw"
    stems = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    if all((raw / stem).is_file() for stem in stems):
        return data_dir
    missing = [stem for stem in stems if not (raw / stem).is_file() and not (raw / f"{stem}.gz").is_file()]
    if missing:
        names = ", ".join(missing)
        raise UserError(f"{raw} lacks {names} (or the same with .gz): give another --data-dir, or --download")
    origin = hashlib.sha256(os.fsencode(raw.resolve())).hexdigest()[:16]
    root = (cache_dir or default_folder()) / "datasets" / origin
    target = root / "FashionMNIST" / "raw"
    try:
        target.mkdir(parents=True, exist_ok=True)
        for stem in stems:
            _unpack(raw, stem, target)
    except OSError as error:
        raise UserError(f"{raw} cannot be unpacked to {target}: {error}") from error
    return root


def _unpack(raw: Path, stem: str, target: Path) -> None:
    """Put one file there, whole or not at all; nothing to do if it is as new as its source.

    Several processes may unpack at once.
    """
    source = raw / stem if (raw / stem).is_file() else raw / f"{stem}.gz"
    final = target / stem
    origin = source.stat()
    if final.is_file() and final.stat().st_mtime_ns == origin.st_mtime_ns:
        return
    open_packed = gzip.open if source.suffix == ".gz" else open
    with whole_file(final) as partial, open_packed(source, "rb") as packed, partial.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
        unpacked.close()
        os.utime(partial, ns=(origin.st_atime_ns, origin.st_mtime_ns))


def _cifar10(data_dir: Path, size: int, download: bool) -> ImageData:
    datasets = _torchvision_datasets()
    transform = _image_transform(size)
    train, validation = _open_both(datasets.CIFAR10, data_dir, download, transform)
    return ImageData("cifar10", train, validation, list(train.classes), size)


def _image_folder(folder: Path, size: int) -> ImageData:
    """`train/` and `val/` below it if there are such; otherwise every tenth image is kept for validation."""
    validation = next((folder / name for name in _VALIDATION_FOLDERS if (folder / name).is_dir()), None)
    if (folder / "train").is_dir() and validation is not None:
        train_set, validation_set = _open_folder(folder / "train", size), _open_folder(validation, size)
        if train_set.classes != validation_set.classes:
            raise UserError(f"{folder / 'train'} and {validation} do not hold the same classes")
        return ImageData(folder.name, train_set, validation_set, list(train_set.classes), size)
    whole = _open_folder(folder, size)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = max(1, round(len(whole) * _VALIDATION_SHARE))
    if len(whole) <= held_out:
        raise UserError(f"{folder} holds {len(whole)} image(s); that is too few to train and validate with")
    return ImageData(
        folder.name, Subset(whole, order[held_out:]), Subset(whole, order[:held_out]), list(whole.classes), size
    )


def _open_folder(folder: Path, size: int) -> ImageFolder:
    datasets = _torchvision_datasets()
    try:
        return datasets.ImageFolder(folder, transform=_image_transform(size))
    except FileNotFoundError as error:
        raise UserError(f"--data {folder}: it needs one subfolder of images a class: {first_line(error)}") from error


def _image_transform(size: int, *, grey: bool = False) -> Transform:
    from torchvision import transforms

    steps: list[Any] = [transforms.Grayscale(3)] if grey else []
    steps += [transforms.Resize(size), transforms.CenterCrop(size), transforms.ToTensor()]
    return transforms.Compose([*steps, transforms.Normalize(_MEAN, _SPREAD)])


def _torchvision_datasets() -> Any:
    try:
        from torchvision import datasets
    except ImportError:
        raise UserError(INSTALL_TORCHVISION) from None
    return datasets


def _open_both(dataset: Callable[..., Any], root: Path, download: bool, transform: Transform) -> tuple[Any, Any]:
    """The samples to learn from, and the others."""
    try:
        train, validation = (dataset(root, train=t, download=download, transform=transform) for t in (True, False))
    except (RuntimeError, OSError, EOFError) as error:
        raise UserError(f"no data set in {root}: {first_line(error)} (--download fetches it)") from error
    return train, validation


def _needs_dir(name: str, data_dir: Path | None, download: bool) -> Path:
    if data_dir is None:
        raise UserError(f"--data {name} needs --data-dir, the folder where the data set lies (or goes with --download)")
    folder = data_dir.expanduser()
    if not (download or folder.is_dir()):
        raise UserError(f"--data-dir {data_dir}: there is no such folder; --download makes it and fetches {name}")
    return folder

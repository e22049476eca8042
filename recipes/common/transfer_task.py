"""Transfer within a data set: a network that knows some classes, or speakers, learns the others from a few samples."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, interpolate
from torch.utils.data import Dataset

from recipes.common.spoken_digits import load_speakers
from torch_odt._whole_file import whole_file
from torch_odt.commands.data import ImageData, load_data


@dataclass(frozen=True)
class Augmentation:
    """How images are changed each time that they are seen: each by amounts drawn for it, up to these either way.

    Attributes:
        turn: in radians.
        zoom: of the size.
        shift: of half the size, for rows and for columns.
        contrast, brightness: what normalised values are multiplied by, beside 1, and what is added to them.
    """

    turn: float
    zoom: float
    shift: float
    contrast: float
    brightness: float

    def __call__(self, images: Tensor, draw: torch.Generator) -> Tensor:
        """Other images; what lies outside of one is what a mirror at its edge shows."""

        def drawn(most: float) -> Tensor:
            return (2 * torch.rand(len(images), generator=draw) - 1) * most

        turn, zoom = drawn(self.turn), 1 + drawn(self.zoom)
        rows, columns = drawn(self.shift), drawn(self.shift)
        cosine, sine = zoom * turn.cos(), zoom * turn.sin()
        places = torch.stack([torch.stack([cosine, -sine, columns], 1), torch.stack([sine, cosine, rows], 1)], 1)
        grid = affine_grid(places, list(images.shape), align_corners=False)
        moved = grid_sample(images, grid, padding_mode="reflection", align_corners=False)
        return moved * (1 + drawn(self.contrast)).view(-1, 1, 1, 1) + drawn(self.brightness).view(-1, 1, 1, 1)


@dataclass(frozen=True)
class Samples:
    """Images of some classes.

    Attributes:
        images: `(n, 3, size, size)`, float32.
        labels: `(n,)`, counted from 0.
        mirrors: whether an image in a mirror is one, too; that of a sound is not.
        augmentation: of what `batches` yields; None for none.
    """

    images: Tensor
    labels: Tensor
    mirrors: bool = True
    augmentation: Augmentation | None = None

    def batches(self, size: int, draw: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch in random order, each image mirrored or not; what does not fill a batch is left out."""
        for rows in torch.randperm(len(self.labels), generator=draw).split(size):
            if len(rows) == size:
                images = self.images[rows]
                if self.mirrors:
                    mirrored = torch.rand(size, 1, 1, 1, generator=draw) < 0.5
                    images = torch.where(mirrored, images.flip(3), images)
                if self.augmentation is not None:
                    images = self.augmentation(images, draw)
                yield images.contiguous(memory_format=torch.channels_last), self.labels[rows]

    def part(self, start: int, stop: int) -> Samples:
        """Those of some rows."""
        return replace(self, images=self.images[start:stop], labels=self.labels[start:stop])


@dataclass(frozen=True)
class TransferTask:
    """What a network is pretrained on, and what it is adapted to.

    Attributes:
        source: of the classes, or speakers, that it is pretrained on.
        train: of the others, to adapt to.
        held_out: more of these, from the training set: learning rates are chosen by them.
        test: of these, by which nothing was chosen.
    """

    source: Samples
    train: Samples
    held_out: Samples
    test: Samples

    def augmented(self, augmentation: Augmentation) -> TransferTask:
        """The same, whose samples to pretrain on and to adapt to are changed each time."""
        source, train = (replace(samples, augmentation=augmentation) for samples in (self.source, self.train))
        return replace(self, source=source, train=train)

    @property
    def classes(self) -> int:
        """How many there are to adapt to."""
        return int(self.test.labels.max()) + 1


def make_task(
    data: ImageData, source_classes: Sequence[int], *, source: int, train: int, held_out: int, test: int
) -> TransferTask:
    """A task from a data set: at most so many samples of each part.

    Args:
        source_classes: those to pretrain on; all others are adapted to.
        test: of the data set's samples for validation, and, where these are too few, of those for training that are
            left over.
    """
    others = [each for each in range(len(data.classes)) if each not in source_classes]
    tested = _samples(data.validation, others, test)
    adapted = _samples(data.train, others, train + held_out + test - len(tested.labels))
    return _divided(_samples(data.train, source_classes, source), adapted, tested, train, held_out)


def first_half(options: argparse.Namespace, *, held_out: int | None = None) -> TransferTask:
    """The first half of the classes, after pretraining on the second, as a recipe's options say.

    Args:
        options: `data`, `data_dir`, `image_size`, `cache`, and how many samples: `source_samples` to pretrain with,
            `samples` to adapt to, `test_samples`.
        held_out: so many are; as many as are adapted to by default.
    """
    data = load_data(
        options.data, data_dir=options.data_dir, image_size=options.image_size, cache_dir=options.cache / "data"
    )
    return make_task(
        data,
        range(len(data.classes) // 2, len(data.classes)),
        source=options.source_samples,
        train=options.samples,
        held_out=options.samples if held_out is None else held_out,
        test=options.test_samples,
    )


def other_speakers(options: argparse.Namespace, *, held_out: int | None = None) -> TransferTask:
    """Spoken digits of the first half of the speakers, after pretraining on the second half, as a recipe's options say.

    Args:
        options, held_out: as for `first_half`; images are spectrograms of that size.

    Raises:
        FileNotFoundError: `data_dir` holds no recordings.
    """
    speakers = load_speakers(options.data_dir, options.cache)
    names = sorted(speakers)
    half = len(names) // 2

    def together(parts: list[tuple[Tensor, Tensor]]) -> Samples:
        images, labels = (torch.cat(each) for each in zip(*parts, strict=True))
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        large = interpolate(images[order], size=(options.image_size, options.image_size), mode="bilinear")
        return Samples(large.expand(-1, 3, -1, -1), labels[order], mirrors=False)

    source = together([speakers[name].train for name in names[half:]])
    adapted = together([speakers[name].train for name in names[:half]])
    tested = together([speakers[name].test for name in names[:half]])
    held_out = options.samples if held_out is None else held_out
    most = options.samples + held_out + max(0, options.test_samples - len(tested.labels))
    return _divided(
        source.part(0, options.source_samples),
        adapted.part(0, most),
        tested.part(0, options.test_samples),
        options.samples,
        held_out,
    )


def _divided(source: Samples, adapted: Samples, tested: Samples, train: int, held_out: int) -> TransferTask:
    """What is adapted to in three parts; what is left of it is tested with as well."""
    # Where there are fewer than both, a fifth at least is held out.
    count = len(adapted.labels)
    cut = train if count >= train + held_out else min(train, count * 4 // 5)
    end = min(train + held_out, count)
    rest = adapted.part(end, len(adapted.labels))
    test = Samples(torch.cat([tested.images, rest.images]), torch.cat([tested.labels, rest.labels]), tested.mirrors)
    return TransferTask(source, adapted.part(0, cut), adapted.part(cut, end), test)


def pretrained(
    make_model: Callable[[], nn.Module],
    samples: Samples,
    epochs: int,
    cache: Path,
    *,
    rate: float = 0.1,
    optimizer: Literal["sgd", "adamw"] = "sgd",
    label_smoothing: float = 0.1,
) -> nn.Module:
    """A network after training on the source classes, whose weights are remembered in a file.

    Args:
        make_model: makes it; its weights are drawn with seed 0.
        cache: the file. Its name must tell all that the weights depend on.
        rate: the highest learning rate.
        optimizer: SGD with Nesterov's momentum and a weight decay of 1e-4, or AdamW with one of 1e-2.
        label_smoothing: of the loss.

    Raises:
        FloatingPointError: training diverged.
    """
    with torch.random.fork_rng(devices=[]):
        # Of the weights, and of what dropout leaves out.
        torch.manual_seed(0)
        model = make_model().to(memory_format=torch.channels_last)
        if cache.exists():
            model.load_state_dict(torch.load(cache, weights_only=True))
            return model
        began = time.perf_counter()
        draw = torch.Generator().manual_seed(0)
        trainer: torch.optim.Optimizer
        if optimizer == "sgd":
            trainer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4, nesterov=True)
        else:
            trainer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=1e-2)
        size = min(64, len(samples.labels))
        steps = epochs * (len(samples.labels) // size)
        schedule = torch.optim.lr_scheduler.OneCycleLR(trainer, rate, steps, pct_start=0.1, cycle_momentum=False)
        for _ in range(epochs):
            for x, y in samples.batches(size, draw):
                trainer.zero_grad()
                cross_entropy(model(x), y, label_smoothing=label_smoothing).backward()
                trainer.step()
                schedule.step()
    if not all(each.isfinite().all() for each in model.state_dict().values()):
        raise FloatingPointError(f"pretraining diverged at a learning rate of {rate:g}: take a lower one")
    with whole_file(cache) as partial:
        torch.save(model.state_dict(), partial)
    print(f"pretrained in {time.perf_counter() - began:.0f} s, {cache}", file=sys.stderr, flush=True)
    return model


def accuracy(model: nn.Module, samples: Samples) -> float:
    """The share that is recognised, in evaluation mode; the mode is then as before."""
    was_training = model.training
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in zip(samples.images.split(256), samples.labels.split(256), strict=True):
            scores = model(images.contiguous(memory_format=torch.channels_last))
            right += int((scores.argmax(1) == labels).sum())
    model.train(was_training)
    return right / len(samples.labels)


def _samples(data: Dataset[tuple[Tensor, int]], classes: Sequence[int], most: int) -> Samples:
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()  # type: ignore[arg-type]
    images: list[Tensor] = []
    labels: list[int] = []
    for index in order:
        if len(images) == most:
            break
        image, label = data[index]
        if label in classes:
            images.append(image)
            labels.append(classes.index(label))
    return Samples(torch.stack(images), torch.tensor(labels))

"""A small network on the device learns from a large one that never runs there: its stored logits and hints.

    python recipes/mentee_distill.py                                                 # scikit-learn's digits
    python recipes/mentee_distill.py --data fashion-mnist --data-dir DIR --out results
    python recipes/mentee_distill.py --quick                                         # a look, in half a minute

The mentor, a residual network, is trained on many samples, as in a data centre. The device has others: a few with
labels, more without. The mentor runs over these once; its logits, and the output of its last stage as a hint, are
kept on disk. A small convolutional network, the mentee, is then trained from the same starts, for as many steps

- on the labels that there are,
- on logits of the same samples as well,
- on logits of all samples, so that those without a label teach, too,
- on these and hints,
- and, as a measure of what could be reached, on labels of all samples, which the device does not have.

All see the same shifted copies of their samples. Each way's learning rate, temperature and weights are the best of as
many random draws, on samples that serve nothing else; the test set is looked at after that, by mentees of other seeds.
Bytes of training are those of the plan, and those that a process of its own holds above its level before there was a
model, for a step of `TrainStep` at the same batch. The recipe ends with code 1 where logits of all samples are not 2
points better than labels, or the mentor's training takes less than four times the mentee's bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_odt as odt
from recipes.common.process_bytes import ROOMY, Training, TrainingBytes, training_bytes
from recipes.common.quick import set_quick
from recipes.common.small_resnet import SmallConvNet, SmallResNet
from torch_odt._whole_file import whole_file
from torch_odt.adapt import DistillationLoss, StoredOutputs, WithHints
from torch_odt.cache import default_folder
from torch_odt.commands.data import load_data

# The mentor's layer that hints come from, and the mentee's that follows it.
HINT = {"pool": "pool"}
POINTS_ABOVE_LABELS = 0.02
TIMES_LESS = 4.0
UNLABELLED = -100
# How far copies are shifted, in pixels.
SHIFT = 2
# What is drawn from when settings are looked for; rates between the two, evenly in their logarithm.
RATES = (1e-3, 3e-2)
TEMPERATURES = (1.0, 2.0, 4.0, 8.0)
SOFT_WEIGHTS = (0.5, 0.9, 1.0)
HINT_WEIGHTS = (0.03, 0.1, 0.3, 1.0)
# Of the mentees that settings are chosen by; those that are tested have 0, 1, 2 ...
TUNING_SEED = 1000


@dataclass(frozen=True)
class Samples:
    """Images `(n, 3, h, w)` and labels `(n,)`, of which some may be unknown."""

    images: Tensor
    labels: Tensor

    def __getitem__(self, rows: slice | Tensor) -> Samples:
        return Samples(self.images[rows], self.labels[rows])

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Parts:
    """What is there to learn from.

    Attributes:
        mentor: what the device does not have.
        device: what it has, copies included: those with a label first. All labels are the true ones.
        labelled: so many of `device` have a label, copies included.
        held_out: to choose settings by.
        test: for nothing else.
    """

    mentor: Samples
    device: Samples
    labelled: int
    held_out: Samples
    test: Samples

    @property
    def known(self) -> Samples:
        """The device's samples with those labels that it has."""
        labels = self.device.labels.clone()
        labels[self.labelled :] = UNLABELLED
        return Samples(self.device.images, labels)


@dataclass(frozen=True)
class Way:
    """What a mentee learns from: samples, and what is stored for them."""

    samples: Samples
    stored: StoredOutputs | None = None


@dataclass(frozen=True)
class Setting:
    """How a mentee is trained."""

    rate: float
    temperature: float
    soft_weight: float
    hint_weight: float


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        accuracies: on the test set, one a seed.
        taken: by a training step.
        disk_bytes: of what is stored for it.
        setting: the best on samples held out.
    """

    accuracies: list[float]
    taken: TrainingBytes
    disk_bytes: int = 0
    setting: Setting | None = None

    @property
    def mean(self) -> float:
        return statistics.mean(self.accuracies)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    options.cache.mkdir(parents=True, exist_ok=True)
    data = load_data(
        options.data, data_dir=options.data_dir, image_size=options.image_size, cache_dir=options.cache / "data"
    )
    classes = len(data.classes)
    parts = _parts(options, data.train, data.validation)
    mentor = _mentor(options, parts.mentor, classes)
    folder = options.cache / f"{_name(options)}-{options.labelled}-{options.unlabelled}-{options.copies}"
    device = parts.device.images
    of_labelled = odt.adapt.store_outputs(mentor, device[: parts.labelled], folder / "labelled")
    of_all = odt.adapt.store_outputs(mentor, device, folder / "all")
    hinted = odt.adapt.store_outputs(mentor, device, folder / "hints", layers=list(HINT))

    labelled = parts.device[: parts.labelled]
    ways = {
        "labels": Way(labelled),
        "logits of these": Way(labelled, of_labelled),
        "logits of all": Way(parts.known, of_all),
        "... and hints": Way(parts.known, hinted),
        "(labels of all)": Way(parts.device),
    }
    shape = (options.batch, *device.shape[1:])
    taken = training_bytes(_mentor_training, classes, options.width, shape)
    rows = {"mentor": Row([_accuracy(mentor, parts.test)], taken)}
    print(f"mentor: {rows['mentor'].mean:.1%}", file=sys.stderr, flush=True)
    for name, way in ways.items():
        setting = _best(options, way, classes, parts.held_out)
        mentees = [_trained(options, way, setting, classes, seed) for seed in range(options.seeds)]
        accuracies = [_accuracy(mentee, parts.test) for mentee in mentees]
        taken = training_bytes(_mentee_training, classes, options.mentee_width, shape, way.stored)
        rows[name] = Row(accuracies, taken, 0 if way.stored is None else way.stored.disk_bytes, setting)
        print(f"{name}: {rows[name].mean:.1%} with {setting}", file=sys.stderr, flush=True)
    _print(rows)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        told = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
        report = {"options": told, "rows": {name: asdict(row) for name, row in rows.items()}}
        (options.out / "mentee_distill.json").write_text(json.dumps(report, indent=1) + "\n")
    missed = _missed(rows)
    print("target met" if not missed else f"missed: {'; '.join(missed)}")
    return 1 if missed else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="digits, fashion-mnist, cifar10, or a folder of images")
    parser.add_argument("--data-dir", type=Path, help="where named data sets lie")
    parser.add_argument("--image-size", type=int, default=28)
    parser.add_argument("--labelled", type=int, help="samples of the device that have labels (500; 50 of the digits)")
    parser.add_argument("--unlabelled", type=int, help="its others (4500; 350 of the digits)")
    parser.add_argument("--copies", type=int, default=2, help="of each of its samples, all but the first shifted")
    parser.add_argument("--held-out", type=int, help="samples to choose settings by (2000; 300 of the digits)")
    parser.add_argument("--mentor-samples", type=int, default=30000, help="at most so many others that the mentor had")
    parser.add_argument("--test-samples", type=int, default=10000, help="at most so many of the test set")
    parser.add_argument("--width", type=int, default=16, help="of the mentor's first stage")
    parser.add_argument("--mentee-width", type=int, default=8)
    parser.add_argument("--mentor-steps", type=int, default=700, help="of twice the batch")
    parser.add_argument("--mentor-rate", type=float, default=3e-3, help="of Adam")
    parser.add_argument("--steps", type=int, default=1000, help="of each mentee")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--trials", type=int, default=8, help="settings that are tried for each way")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=default_folder() / "recipes", help="the mentor and its outputs")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="few steps, trials and seeds")
    options = parser.parse_args(arguments)
    if options.quick:
        quick = {"mentor_steps": 80, "steps": 200, "image_size": 16, "trials": 2, "seeds": 1}
        set_quick(parser, options, quick)
    defaults = {"labelled": (500, 50), "unlabelled": (4500, 350), "held_out": (2000, 300)}
    for name, (usual, of_digits) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, of_digits if options.data == "digits" else usual)
    return options


def _name(options: argparse.Namespace) -> str:
    """Everything that the mentor depends on."""
    names = ("data", "image_size", "mentor_samples", "width", "mentor_steps", "mentor_rate", "batch")
    # Few samples are shared out: what the device has is not the mentor's.
    names += ("labelled", "unlabelled", "held_out")
    return "mentor-" + "-".join(str(getattr(options, name)) for name in names).replace("/", "_")


def _parts(options: argparse.Namespace, train: Dataset[tuple[Tensor, int]], test: Dataset[tuple[Tensor, int]]) -> Parts:
    """The same at each call; the mentor's samples come from the end, and are none of the device's."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()  # type: ignore[arg-type]
    on_device = options.labelled + options.unlabelled
    taken = on_device + options.held_out
    left = len(order) - taken
    if left < 2 * options.batch:
        raise SystemExit(f"of {len(order)} samples, {left} are left for the mentor: give the device fewer")
    labelled = _copied(_stacked(train, order[: options.labelled]), options.copies)
    unlabelled = _copied(_stacked(train, order[options.labelled : on_device]), options.copies)
    return Parts(
        mentor=_stacked(train, order[-min(left, options.mentor_samples) :]),
        device=Samples(
            torch.cat([labelled.images, unlabelled.images]), torch.cat([labelled.labels, unlabelled.labels])
        ),
        labelled=len(labelled),
        held_out=_stacked(train, order[on_device:taken]),
        test=_stacked(test, list(range(min(len(test), options.test_samples)))),  # type: ignore[arg-type]
    )


def _stacked(data: Dataset[tuple[Tensor, int]], indices: list[int]) -> Samples:
    chosen = [data[index] for index in indices]
    return Samples(torch.stack([image for image, _ in chosen]), torch.tensor([label for _, label in chosen]))


def _copied(samples: Samples, copies: int) -> Samples:
    draw = torch.Generator().manual_seed(0)
    images = [samples.images, *(_shifted(samples.images, draw) for _ in range(copies - 1))]
    return Samples(torch.cat(images), samples.labels.repeat(copies))


def _shifted(images: Tensor, draw: torch.Generator) -> Tensor:
    """Each by a few pixels of its own; its edge is repeated."""
    height, width = images.shape[2:]
    wide = F.pad(images, (SHIFT,) * 4, mode="replicate")
    places = torch.randint(2 * SHIFT + 1, (len(images), 2), generator=draw).tolist()
    return torch.stack([image[:, y : y + height, x : x + width] for image, (y, x) in zip(wide, places, strict=True)])


def _mentor(options: argparse.Namespace, samples: Samples, classes: int) -> nn.Module:
    """The large network, trained on samples that the device does not have; remembered in the cache."""
    path = options.cache / f"{_name(options)}.pt"
    torch.manual_seed(0)
    mentor = SmallResNet(classes, width=options.width)
    if path.exists():
        mentor.load_state_dict(torch.load(path, weights_only=True))
        return mentor
    # Convolutions are faster in this layout.
    mentor.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    draw = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(mentor.parameters(), lr=options.mentor_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.mentor_rate, options.mentor_steps)
    mentor.train()
    for rows in _orders(len(samples), 2 * options.batch, options.mentor_steps, draw):
        optimizer.zero_grad()
        x = _shifted(samples.images[rows], draw).contiguous(memory_format=torch.channels_last)
        F.cross_entropy(mentor(x), samples.labels[rows]).backward()
        optimizer.step()
        schedule.step()
    mentor.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    with whole_file(path) as partial:
        torch.save(mentor.state_dict(), partial)
    return mentor


def _best(options: argparse.Namespace, way: Way, classes: int, held_out: Samples) -> Setting:
    """The best of the same draws for each way."""
    tried = []
    for setting in _settings(options.trials):
        mentee = _trained(options, way, setting, classes, TUNING_SEED)
        tried.append((_accuracy(mentee, held_out), setting))
    return max(tried, key=lambda pair: pair[0])[1]


def _settings(count: int) -> list[Setting]:
    """Drawn at random, but for the rates: one of each of so many parts of their range."""
    draw = random.Random(0)
    low, high = (math.log(rate) for rate in RATES)
    rates = [math.exp(low + (high - low) * (number + draw.random()) / count) for number in range(count)]
    return [
        Setting(rate, *(draw.choice(each) for each in (TEMPERATURES, SOFT_WEIGHTS, HINT_WEIGHTS))) for rate in rates
    ]


def _trained(options: argparse.Namespace, way: Way, setting: Setting, classes: int, seed: int) -> nn.Module:
    """A mentee after training in one way."""
    torch.manual_seed(seed)
    mentee = SmallConvNet(classes, width=options.mentee_width)
    trained: nn.Module = mentee
    loss_fn: Callable[..., Tensor] = F.cross_entropy
    stored = way.stored
    if stored is not None:
        loss_fn = DistillationLoss(
            temperature=setting.temperature, soft_weight=setting.soft_weight, hint_weight=setting.hint_weight
        )
        if stored.hint_shapes:
            trained = WithHints(mentee, HINT, stored.hint_shapes, way.samples.images[:1])
    optimizer = torch.optim.Adam(trained.parameters(), lr=setting.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    step = odt.TrainStep(trained, loss_fn, optimizer, budget=ROOMY, cache=options.cache / "odt")
    trained.train()
    draw = torch.Generator().manual_seed(seed)
    for rows in _orders(len(way.samples), options.batch, options.steps, draw):
        batch = way.samples[rows]
        step(batch.images, batch.labels if stored is None else (batch.labels, *stored.read(rows)))
        schedule.step()
    return mentee


def _orders(samples: int, batch: int, steps: int, draw: torch.Generator) -> Iterator[Tensor]:
    """Which samples each step sees: epoch by epoch, in random order; what does not fill a batch is left out."""
    if samples < batch:
        raise SystemExit(f"{samples} samples do not fill a batch of {batch}: choose a smaller --batch, or give more")
    done = 0
    while True:
        for rows in torch.randperm(samples, generator=draw).split(batch):
            if done == steps:
                return
            if len(rows) == batch:
                yield rows
                done += 1


@torch.no_grad()
def _accuracy(model: nn.Module, samples: Samples) -> float:
    model.eval()
    parts = zip(samples.images.split(500), samples.labels.split(500), strict=True)
    return sum(int((model(images).argmax(1) == labels).sum()) for images, labels in parts) / len(samples)


def _mentor_training(classes: int, width: int, shape: tuple[int, ...]) -> Training:
    """The mentor's steps, as the device would make them, on noise."""
    return _training(SmallResNet(classes, width=width), F.cross_entropy, torch.randn(shape), _labels(classes, shape))


def _mentee_training(classes: int, width: int, shape: tuple[int, ...], stored: StoredOutputs | None) -> Training:
    """The mentee's steps on noise, with outputs of the shapes that are stored."""
    model: nn.Module = SmallConvNet(classes, width=width)
    x, labels = torch.randn(shape), _labels(classes, shape)
    if stored is None:
        return _training(model, F.cross_entropy, x, labels)
    if stored.hint_shapes:
        model = WithHints(model, HINT, stored.hint_shapes, x[:1])
    return _training(model, DistillationLoss(), x, (labels, *stored.read(range(len(x)))))


def _labels(classes: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(classes, shape[:1])


def _training(model: nn.Module, loss_fn: Callable[..., Tensor], x: Tensor, target: Any) -> Training:
    optimizer = torch.optim.Adam(model.parameters())
    step = odt.TrainStep(model, loss_fn, optimizer, budget=ROOMY, cache=False)
    return Training(step, optimizer, (x, target))


def _missed(rows: dict[str, Row]) -> list[str]:
    labels, distilled, mentor = rows["labels"], rows["logits of all"], rows["mentor"]
    missed = []
    if distilled.mean < labels.mean + POINTS_ABOVE_LABELS:
        missed.append(f"logits of all samples reach {distilled.mean:.1%}, labels alone {labels.mean:.1%}")
    times = mentor.taken.process_bytes / distilled.taken.process_bytes
    if times < TIMES_LESS:
        missed.append(f"the mentor's training takes {times:.1f} times the mentee's bytes, not {TIMES_LESS:g}")
    return missed


def _print(rows: dict[str, Row]) -> None:
    print(f"{'':16}{'accuracy':>9}{'plan MiB':>10}{'process MiB':>13}{'disk KiB':>10}   of each seed")
    for way, row in rows.items():
        each = ", ".join(f"{value:.1%}" for value in row.accuracies)
        planned = (row.taken.plan_bytes or 0) / 2**20
        print(
            f"{way:16}{row.mean:9.1%}{planned:10.1f}{row.taken.process_bytes / 2**20:13.1f}"
            f"{row.disk_bytes / 2**10:10.0f}   {each}"
        )


if __name__ == "__main__":
    sys.exit(main())

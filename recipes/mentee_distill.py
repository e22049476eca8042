"""A small network on the device learns from a large one that never runs there: its stored logits and hints.

    python recipes/mentee_distill.py                                                 # scikit-learn's digits
    python recipes/mentee_distill.py --data fashion-mnist --data-dir DIR --out results
    python recipes/mentee_distill.py --quick                                         # a look, in half a minute

The mentor, a residual network, is trained on many samples, as in a data centre. The device has few others, and a small
convolutional network, the mentee. The mentor runs over the device's samples once; its logits, and the outputs of its
last stage as hints, are kept on disk. The mentee is then trained from the same starts, in the same order, for as many
steps (a) on the labels, (b) on stored logits and labels, (c) on these and hints.

Accuracies are of a test set that nothing was chosen by. Bytes of training are those of the plan, and those that a
process of its own holds above its level before there was a model, for a step of `TrainStep` at the same batch. The
recipe ends with code 1 where (b) is less accurate than (a), as the mean over seeds, or the mentor's training takes less
than four times the mentee's bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_odt as odt
from recipes.common.process_bytes import ROOMY, Training, TrainingBytes, training_bytes
from recipes.common.small_resnet import SmallConvNet, SmallResNet
from torch_odt.adapt import DistillationLoss, StoredOutputs, WithHints
from torch_odt.adapt.contributions import accuracy
from torch_odt.cache import default_folder
from torch_odt.commands.data import load_data

# The mentor's layer that hints come from, and the mentee's that follows it.
HINT = {"stage3": "stage3"}
TIMES_LESS = 4.0


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        accuracies: on the test set, one a seed.
        taken: by a training step.
        disk_bytes: of what is stored for it.
    """

    accuracies: list[float]
    taken: TrainingBytes
    disk_bytes: int = 0

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
    test = list(DataLoader(_tensors(data.validation, 0, options.test_samples), batch_size=500))
    mentor = _mentor(options, data.train, classes)
    ours = _tensors(data.train, 0, options.samples)
    name = _name(options)
    plain = odt.adapt.store_outputs(mentor, ours, options.cache / f"{name}-logits")
    hinted = odt.adapt.store_outputs(mentor, ours, options.cache / f"{name}-hints", layers=list(HINT))

    shape = (options.batch, 3, options.image_size, options.image_size)
    ways: dict[str, StoredOutputs | None] = {"labels": None, "stored logits": plain, "... and hints": hinted}
    rows = {"mentor": Row([accuracy(mentor, test)], training_bytes(_mentor_training, classes, options.width, shape))}
    for way, stored in ways.items():
        accuracies = [_trained(options, ours, stored, classes, test, seed) for seed in range(options.seeds)]
        taken = training_bytes(_mentee_training, classes, options.mentee_width, shape, stored)
        rows[way] = Row(accuracies, taken, 0 if stored is None else stored.disk_bytes)
        print(f"{way}: {rows[way].mean:.1%}", file=sys.stderr, flush=True)
    _print(rows)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        report = {"data": name, "rows": {way: asdict(row) for way, row in rows.items()}}
        (options.out / "mentee_distill.json").write_text(json.dumps(report, indent=1) + "\n")
    missed = _missed(rows)
    print("target met" if not missed else f"missed: {'; '.join(missed)}")
    return 1 if missed else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="digits, fashion-mnist, cifar10, or a folder of images")
    parser.add_argument("--data-dir", type=Path, help="where named data sets lie")
    parser.add_argument("--image-size", type=int, default=28)
    parser.add_argument("--samples", type=int, help="that the device has (2000; 300 of the digits)")
    parser.add_argument("--mentor-samples", type=int, default=12000, help="at most so many others that the mentor had")
    parser.add_argument("--test-samples", type=int, default=5000, help="at most so many of the test set")
    parser.add_argument("--width", type=int, default=24, help="of the mentor's first stage")
    parser.add_argument("--mentee-width", type=int, default=8)
    parser.add_argument("--mentor-steps", type=int, default=250)
    parser.add_argument("--steps", type=int, default=600, help="of each mentee")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3, help="of Adam, for mentee and mentor")
    parser.add_argument("--temperature", type=float, default=4.0)
    parser.add_argument("--soft-weight", type=float, default=0.9)
    parser.add_argument("--hint-weight", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=default_folder() / "recipes", help="the mentor and its outputs")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="few samples, epochs and seeds, and a narrow mentor")
    options = parser.parse_args(arguments)
    if options.quick:
        quick = {"mentor_samples": 1100, "width": 16, "mentor_steps": 200, "steps": 300, "image_size": 16, "seeds": 1}
        for name, value in quick.items():
            setattr(options, name, value)
    if options.samples is None:
        options.samples = 300 if options.data == "digits" else 2000
    return options


def _name(options: argparse.Namespace) -> str:
    """Everything that the mentor and its outputs depend on."""
    names = ("data", "image_size", "samples", "mentor_samples", "width", "mentor_steps", "batch", "lr")
    return "mentor-" + "-".join(str(getattr(options, name)) for name in names).replace("/", "_")


def _tensors(data: Dataset[tuple[Tensor, int]], start: int, stop: int) -> TensorDataset:
    """Some samples of a data set in random order, of which each draw is the same."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    samples = [data[index] for index in order[start:stop].tolist()]
    return TensorDataset(torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples]))


def _mentor(options: argparse.Namespace, data: Dataset[tuple[Tensor, int]], classes: int) -> nn.Module:
    """The large network, trained on samples that the device does not have; remembered in the cache."""
    path = options.cache / f"{_name(options)}.pt"
    torch.manual_seed(0)
    mentor = SmallResNet(classes, width=options.width)
    if path.exists():
        mentor.load_state_dict(torch.load(path, weights_only=True))
        return mentor
    samples = _tensors(data, options.samples, options.samples + options.mentor_samples)
    order = torch.Generator().manual_seed(0)
    batches = DataLoader(samples, batch_size=options.batch, shuffle=True, drop_last=True, generator=order)
    _fit(partial(_plain_step, mentor), mentor, batches, options.mentor_steps, options.lr)
    partial_path = path.with_suffix(".partial")
    torch.save(mentor.state_dict(), partial_path)
    partial_path.replace(path)
    return mentor


def _trained(
    options: argparse.Namespace,
    samples: TensorDataset,
    stored: StoredOutputs | None,
    classes: int,
    test: list[Any],
    seed: int,
) -> float:
    """A mentee's accuracy after training on labels alone, or on what is stored as well."""
    torch.manual_seed(seed)
    mentee = SmallConvNet(classes, width=options.mentee_width)
    order = torch.Generator().manual_seed(seed)
    data: Dataset[Any] = samples if stored is None else stored.beside(samples)
    batches = DataLoader(data, batch_size=options.batch, shuffle=True, drop_last=True, generator=order)
    trained: nn.Module = mentee
    loss_fn: Callable[..., Tensor] = cross_entropy
    if stored is not None:
        loss_fn = DistillationLoss(
            temperature=options.temperature, soft_weight=options.soft_weight, hint_weight=options.hint_weight
        )
    if stored is not None and stored.hint_shapes:
        trained = WithHints(mentee, HINT, stored.hint_shapes, samples[0][0][None])

    def make_step(optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Any], Tensor]:
        return odt.TrainStep(trained, loss_fn, optimizer, budget=ROOMY, cache=options.cache / "odt")

    _fit(make_step, trained, batches, options.steps, options.lr)
    return accuracy(mentee, test)


def _fit(
    make_step: Callable[[torch.optim.Optimizer], Callable[[Tensor, Any], Tensor]],
    model: nn.Module,
    batches: DataLoader[Any],
    steps: int,
    lr: float,
) -> None:
    """Adam, whose rate falls to 0 as a cosine does."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    step = make_step(optimizer)
    model.train()
    epochs = chain.from_iterable(batches for _ in range(steps))
    for x, target in islice(epochs, steps):
        step(x, target)
        schedule.step()


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Any], Tensor]:
    def step(x: Tensor, target: Any) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _mentor_training(classes: int, width: int, shape: tuple[int, ...]) -> Training:
    """The mentor's steps, as the device would make them, on noise."""
    return _training(SmallResNet(classes, width=width), cross_entropy, torch.randn(shape), _labels(classes, shape))


def _mentee_training(classes: int, width: int, shape: tuple[int, ...], stored: StoredOutputs | None) -> Training:
    """The mentee's steps on noise, with outputs of the shapes that are stored."""
    model: nn.Module = SmallConvNet(classes, width=width)
    x, labels = torch.randn(shape), _labels(classes, shape)
    if stored is None:
        return _training(model, cross_entropy, x, labels)
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
    labels, distilled, mentor = rows["labels"], rows["stored logits"], rows["mentor"]
    missed = []
    if distilled.mean < labels.mean:
        missed.append(f"stored logits reach {distilled.mean:.1%}, labels alone {labels.mean:.1%}")
    times = mentor.taken.process_bytes / distilled.taken.process_bytes
    if times < TIMES_LESS:
        missed.append(f"the mentor's training takes {times:.1f} times the mentee's bytes, not {TIMES_LESS:g}")
    return missed


def _print(rows: dict[str, Row]) -> None:
    print(f"{'':15}{'accuracy':>9}{'plan MiB':>10}{'process MiB':>13}{'disk KiB':>10}   of each seed")
    for way, row in rows.items():
        each = ", ".join(f"{value:.1%}" for value in row.accuracies)
        planned = (row.taken.plan_bytes or 0) / 2**20
        print(
            f"{way:15}{row.mean:9.1%}{planned:10.1f}{row.taken.process_bytes / 2**20:13.1f}"
            f"{row.disk_bytes / 2**10:10.0f}   {each}"
        )


if __name__ == "__main__":
    sys.exit(main())

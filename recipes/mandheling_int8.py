"""Training from scratch in integers of eight bits against float32 (Mandheling's experiment, NITI's arithmetic).

    python recipes/mandheling_int8.py                                       # scikit-learn's digits
    python recipes/mandheling_int8.py --data fashion-mnist --data-dir DIR --out results
    python recipes/mandheling_int8.py --quick                               # a look, in a minute or two

A network like VGG, without BatchNorm, is trained from the same weights in float32 and in integers: weights,
activations, gradients and updates are int8 with a power of two for each tensor. Both are tuned on samples held out of
the training set, with a seed of their own: float32 takes the learning rate of `--rates` that is best there (cosine
decay), the integers how many bits of a weight's gradient they begin with (`--bits`; one less in the third quarter of
the training, two less in the last). The recipe ends with code 1 where the integers' accuracy on the test set, as the
mean over seeds, is more than two points below float32's, or where scales were looked at in more than a fifth of the
batches, as the mean over tensors.

Seconds and energy until a stated accuracy is reached (`--accuracy`; else 97 % of what float32 reaches in the mean) are
told of both. Energy is that of the machine's counters; where there are none, that of a model, if `--watts` says what a
busy processor draws; else it is absent.

Then self-adaptive rescaling, batch splitting, reuse of packed weights and co-scheduling are each switched off once:
seconds a step, all ways in turn within each round, beside float32.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_odt as odt
from recipes.common.epochs import Epoch, Reached, measured_epoch, reached
from torch_odt.commands.data import load_data
from torch_odt.quant import NitiSGD, NitiTraining, PackedWeights, Placement, niti_, niti_cross_entropy

Samples = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor], None]
MOST_BELOW = 0.02
MOST_CHECKS = 0.20
STATED_SHARE = 0.97
MOMENTUM = 0.9
BITS_LESS = (0, 0, 1, 2)  # of gradients, in each quarter of a training
TUNING_SEED = 1000
EVALUATION_BATCH = 250


@dataclass(frozen=True)
class Task:
    """What is learnt: samples to train on, to choose by, and to test with; and the classes that there are."""

    train: Samples
    held_out: Samples
    test: Samples
    classes: int


@dataclass(frozen=True)
class Outcome:
    """A training.

    Attributes:
        accuracy: on the samples that were asked for.
        checked_share: of the batches in which a scale was looked at; None for float32.
        clipped_share: of those in which something was clipped meanwhile.
        epochs: what each took, and its accuracy on the samples that were asked for.
    """

    accuracy: float
    checked_share: float | None
    clipped_share: float | None
    epochs: list[Epoch]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    task = _task(options)
    rate = _best("learning rate", options.rates, lambda each: _float32(task, each, TUNING_SEED, options, task.held_out))
    bits = _best("bits", options.bits, lambda each: _integers(task, each, TUNING_SEED, options, task.held_out))
    rows: dict[str, list[Outcome]] = {"float32": [], "integers": []}
    for seed in range(options.seeds):
        rows["float32"].append(_float32(task, rate, seed, options, task.test))
        rows["integers"].append(_integers(task, bits, seed, options, task.test))
        print(
            f"seed {seed}: " + ", ".join(f"{name} {found[-1].accuracy:.1%}" for name, found in rows.items()), flush=True
        )
    placement = _placement(task, options)
    step_seconds = _step_seconds(task, placement, options) if options.rounds else {}
    stated = options.accuracy or STATED_SHARE * _mean(rows["float32"])
    taken = {name: [reached(each.epochs, stated) for each in found] for name, found in rows.items()}
    _print(rows, rate, bits, placement, step_seconds)
    _print_reached(taken, stated)
    missed = _missed(rows)
    print("\n".join(missed) if missed else "targets met")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        report = {
            "data": options.data,
            "image_size": options.image_size,
            "width": options.width,
            "train": options.train,
            "epochs": options.epochs,
            "batch": options.batch,
            "threads": options.threads,
            "rate": rate,
            "bits": bits,
            "rows": {name: [asdict(each) for each in found] for name, found in rows.items()},
            "stated_accuracy": stated,
            "reached": {name: [each and asdict(each) for each in found] for name, found in taken.items()},
            "step_seconds": step_seconds,
            "left_in_float32": placement.float32,
            "missed": missed,
        }
        (options.out / "mandheling_int8.json").write_text(json.dumps(report, indent=1) + "\n")
    return 1 if missed else 0


def network(classes: int, *, width: int, image_size: int) -> nn.Sequential:
    """Three stages of two convolutions and a pool, and two linear layers; weights are drawn as in NITI."""
    layers: list[nn.Module] = []
    channels, size = 3, image_size
    for stage in range(3):
        wide = width << stage
        layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(wide, wide, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels, size = wide, size // 2
    layers += [nn.Flatten(), nn.Linear(channels * size * size, 8 * width), nn.ReLU(), nn.Linear(8 * width, classes)]
    for layer in layers:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="digits, fashion-mnist, cifar10, or a folder of images")
    parser.add_argument("--data-dir", type=Path, help="where named data sets lie")
    parser.add_argument("--image-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    parser.add_argument("--train", type=int, default=4000, help="at most so many samples to train on")
    parser.add_argument("--held-out", type=int, default=1000, help="at most so many to choose by")
    parser.add_argument("--test", type=int, default=2000, help="at most so many to test with")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.02, 0.05, 0.1], help="float32's learning rates")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 5], help="of gradients, in the first half")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15, help="of steps that are timed; 0 times none")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--accuracy", type=float, help="a share of the test samples, see above")
    parser.add_argument("--watts", type=float, help="of a busy processor, for a model of energy")
    parser.add_argument("--out", type=Path, help="a folder for mandheling_int8.json")
    parser.add_argument("--quick", action="store_true", help="few samples, one seed, nothing tuned")
    options = parser.parse_args(arguments)
    if options.quick:
        options.train, options.held_out, options.test, options.epochs, options.seeds = 1200, 200, 300, 4, 1
        options.rates, options.bits, options.rounds = options.rates[1:2], options.bits[:1], 5
    return options


def _task(options: argparse.Namespace) -> Task:
    data = load_data(options.data, data_dir=options.data_dir, image_size=options.image_size)
    draw = torch.Generator().manual_seed(0)
    order = torch.randperm(len(data.train), generator=draw).tolist()  # type: ignore[arg-type]
    held = min(options.held_out, len(order) // 5)
    test = torch.randperm(len(data.validation), generator=draw).tolist()[: options.test]  # type: ignore[arg-type]
    return Task(
        _samples(data.train, order[held : held + options.train]),
        _samples(data.train, order[:held]),
        _samples(data.validation, test),
        len(data.classes),
    )


def _samples(data: Dataset[tuple[Tensor, int]], rows: list[int]) -> Samples:
    images, labels = zip(*(data[row] for row in rows), strict=True)
    return torch.stack(images).contiguous(memory_format=torch.channels_last), torch.tensor(labels)


def _best(what: str, choices: list[Any], run: Callable[[Any], Outcome]) -> Any:
    """The choice that is most accurate on the held-out samples; a single one is taken as it is."""
    if len(choices) == 1:
        return choices[0]
    found = {choice: run(choice).accuracy for choice in choices}
    print(f"{what}: " + ", ".join(f"{choice} {accuracy:.1%}" for choice, accuracy in found.items()), flush=True)
    return max(found, key=lambda choice: found[choice])


def _network(task: Task, seed: int, options: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(seed)
    return network(task.classes, width=options.width, image_size=options.image_size)


def _float32(task: Task, rate: float, seed: int, options: argparse.Namespace, test: Samples) -> Outcome:
    model = _network(task, seed, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
    steps = options.epochs * (len(task.train[1]) // options.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    step = _step(model, optimizer, nn.functional.cross_entropy)

    def scheduled(images: Tensor, labels: Tensor) -> None:
        step(images, labels)
        schedule.step()

    epochs = _train(task, model, scheduled, seed, options, test, lambda _: None)
    return Outcome(epochs[-1].accuracy, None, None, epochs)


def _integers(task: Task, bits: int, seed: int, options: argparse.Namespace, test: Samples) -> Outcome:
    model = _network(task, seed, options)
    training = niti_(model, gradient_bits=bits)

    def begin(epoch: int) -> None:
        training.set_gradient_bits(bits - BITS_LESS[len(BITS_LESS) * epoch // options.epochs])

    step = _step(model, NitiSGD(model, in_backward=True), niti_cross_entropy)
    epochs = _train(task, model, step, seed, options, test, begin)
    return Outcome(epochs[-1].accuracy, training.checked_share(), training.clipped_share(), epochs)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable[..., Tensor]) -> Step:
    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        loss = loss_fn(model(images), labels)
        loss.backward()
        optimizer.step()
        if not math.isfinite(float(loss.detach())):
            raise RuntimeError("the loss is not finite: the training has diverged")

    return step


def _train(
    task: Task,
    model: nn.Module,
    step: Step,
    seed: int,
    options: argparse.Namespace,
    test: Samples,
    begin_epoch: Callable[[int], None],
) -> list[Epoch]:
    """Epochs in the order that a seed draws."""
    images, labels = task.train
    draw = torch.Generator().manual_seed(seed)

    def steps() -> None:
        model.train()
        for rows in torch.randperm(len(labels), generator=draw).split(options.batch):
            if len(rows) == options.batch:
                step(images[rows], labels[rows])

    epochs = []
    for number in range(options.epochs):
        begin_epoch(number)
        epochs.append(measured_epoch(steps, lambda: _accuracy(model, test), options.watts))
    return epochs


@torch.no_grad()
def _accuracy(model: nn.Module, samples: Samples) -> float:
    model.eval()
    right = sum(
        int((model(images).argmax(1) == labels).sum())
        for images, labels in zip(*(part.split(EVALUATION_BATCH) for part in samples), strict=True)
    )
    return right / len(samples[1])


def _placement(task: Task, options: argparse.Namespace) -> Placement:
    images = task.train[0][: options.batch]
    return odt.quant.measure_placement(_network(task, 0, options), images)


def _step_seconds(task: Task, placement: Placement, options: argparse.Namespace) -> dict[str, float]:
    """The median seconds of a step in each way, all ways in turn within each round."""
    all_on: dict[str, Any] = {"split": "cache", "packs": PackedWeights()}
    # Where every layer is better left, nothing would be converted.
    in_float32 = placement.float32 if len(placement.float32) < len(placement.places) else []
    ways: dict[str, dict[str, Any]] = {
        "all techniques": {**all_on, "keep_float32": in_float32},
        "without self-adaptive rescaling": {**all_on, "keep_float32": in_float32, "longest_period": 1, "slack_bits": 0},
        "without batch splitting": {**all_on, "keep_float32": in_float32, "split": None},
        "without reuse of packed weights": {**all_on, "keep_float32": in_float32, "packs": None},
        "without co-scheduling": all_on,
    }
    base = _network(task, 0, options)
    plain = copy.deepcopy(base)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=MOMENTUM)
    steps: dict[str, Step] = {"float32": _step(plain, optimizer, nn.functional.cross_entropy)}
    trainings: list[NitiTraining] = []
    for name, way in ways.items():
        model = copy.deepcopy(base)
        trainings.append(niti_(model, gradient_bits=3, **way))
        steps[name] = _step(model, NitiSGD(model, lr=0.01, in_backward=True), niti_cross_entropy)
    images, labels = task.train
    taken: dict[str, list[float]] = {name: [] for name in steps}
    warm_ups = 10
    for number in range(warm_ups + options.rounds):
        rows = torch.arange(number * options.batch, (number + 1) * options.batch) % len(labels)
        for name, step in steps.items():
            began = time.perf_counter()
            step(images[rows], labels[rows])
            if number >= warm_ups:
                taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _missed(rows: dict[str, list[Outcome]]) -> list[str]:
    missed = []
    below = _mean(rows["float32"]) - _mean(rows["integers"])
    if below > MOST_BELOW:
        missed.append(f"integers are {100 * below:.1f} points below float32; {100 * MOST_BELOW:.0f} are allowed")
    checked = max(each.checked_share or 0.0 for each in rows["integers"])
    if checked > MOST_CHECKS:
        missed.append(f"scales were looked at in {checked:.1%} of the batches; {MOST_CHECKS:.0%} are allowed")
    return missed


def _mean(outcomes: list[Outcome]) -> float:
    return statistics.mean(outcome.accuracy for outcome in outcomes)


def _print(
    rows: dict[str, list[Outcome]], rate: float, bits: int, placement: Placement, step_seconds: dict[str, float]
) -> None:
    print(f"\nfloat32 with a learning rate of {rate}, integers from {bits} bits of gradients on")
    print(f"{'':<34}{'accuracy':>9}  {'of seeds':<26}{'looked at':>10}{'clipped':>9}")
    for name, found in rows.items():
        each = " ".join(f"{outcome.accuracy:.1%}" for outcome in found)
        shares = ""
        if found[0].checked_share is not None and found[0].clipped_share is not None:
            checked = statistics.mean(outcome.checked_share or 0.0 for outcome in found)
            clipped = statistics.mean(outcome.clipped_share or 0.0 for outcome in found)
            shares = f"{checked:>10.1%}{clipped:>9.1%}"
        print(f"{name:<34}{_mean(found):>9.1%}  {each:<26}{shares}")
    print(f"\n{placement}")
    if step_seconds:
        print(f"\n{'':<34}{'a step':>12}{'to float32':>12}")
        for name, seconds in step_seconds.items():
            print(f"{name:<34}{1e3 * seconds:>9.1f} ms{seconds / step_seconds['float32']:>12.2f}")


def _print_reached(taken: dict[str, list[Reached | None]], stated: float) -> None:
    print(f"\nuntil {stated:.1%} of the test samples are right, mean over the seeds that get there:")
    for name, outcomes in taken.items():
        there = [each for each in outcomes if each is not None]
        line = f"{name:<34}{len(there)} of {len(outcomes)}"
        if there:
            line += f"{statistics.mean(each.seconds for each in there):>9.2f} s"
            line += f"{statistics.mean(each.epochs for each in there):>7.1f} epochs"
            sources = set.intersection(*(set(each.energy_joules) for each in there))
            energy = {source: statistics.mean(each.energy_joules[source] for each in there) for source in sources}
            line += "".join(f"{joules:>9.1f} J ({source})" for source, joules in sorted(energy.items()))
            line += "" if energy else "   energy: absent (no counter here, and --watts says nothing)"
        print(line)


if __name__ == "__main__":
    sys.exit(main())

"""Octo: a network that trains in int8 in both passes, beside float32 and plain int8.

    python recipes/octo_int8.py --data-dir DIR --out recipes/results    # DIR/FashionMNIST/raw
    python recipes/octo_int8.py --quick                                 # a look, on scikit-learn's digits

A network is pretrained in float32 on one half of the classes, and all of it is adapted to the other half from a few
samples, by equal epochs of SGD with momentum from the same start: in float32; in plain int8, where inputs, weights and
gradients are rounded over their whole ranges; and by Octo, with loss-aware compensation and clipped ranges. Weights
have a range for each output channel, or (`--weight-ranges tensor`) one for all, as the authors' have. `--parts` adds
Octo with one of both alone. All ways of int8 round gradients alike (`--gradient-rounding`). Each way has the learning
rate (`--rates`) that is best on samples held out of the training set, in the mean over `--rate-seeds` trainings.
Compensation is for each position, because BatchNorm takes that of a channel out again.

Bytes are of all tensors of a step but the weights, at the peak of the simulated step where nothing is computed twice.

The recipe ends with code 1 where Octo, as the mean over seeds, is more than a point below float32, or not above plain
int8.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_odt as odt
from recipes.common.process_bytes import ROOMY
from recipes.common.quick import set_quick
from recipes.common.rates import best_rate
from recipes.common.small_resnet import SmallResNet
from recipes.common.transfer_task import TransferTask, accuracy, first_half, pretrained
from recipes.common.transfer_ways import make_network
from torch_odt.adapt.adaptation import Adapting
from torch_odt.adapt.head import replace_head
from torch_odt.adapt.step_bytes import step_bytes
from torch_odt.cache import default_folder

FLOAT32, PLAIN, OCTO = "float32", "plain int8", "octo"
JUDGED = (FLOAT32, PLAIN, OCTO)
PARTS = ("octo, compensation alone", "octo, clipping alone")
NETWORKS = ("small_resnet", "mobilenet_v2")
POINTS_BELOW_FLOAT32 = 0.01
MOMENTUM = 0.9


@dataclass(frozen=True)
class Row:
    """Of one way.

    Attributes:
        bytes: of a step, see the recipe's docstring.
        held_out: accuracies by learning rate, the mean over trainings; empty where there was no choice.
        rate: the best of these.
        test: of each seed, at that rate.
    """

    bytes: int
    held_out: dict[float, float]
    rate: float
    test: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return statistics.mean(self.test)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    options.cache.mkdir(parents=True, exist_ok=True)
    task = first_half(options)
    model = _start(options, task)
    print(f"pretrained: {accuracy(model, task.source):.1%} of what it was trained on", file=sys.stderr, flush=True)
    ways = (*JUDGED, *PARTS) if options.parts else JUDGED
    rows = {way: _row(options, model, task, way) for way in ways}
    _print(rows)
    missed = _missed(rows)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        data = Path(options.data).resolve().name
        plain = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
        report = {
            "options": plain | {"data": data},
            "torch": torch.__version__,
            "rows": {name: asdict(row) for name, row in rows.items()},
            "missed": missed,
        }
        ranges = "" if options.weight_ranges == "channel" else f"_by_{options.weight_ranges}"
        rounding = "" if options.gradient_rounding == "stochastic" else f"_{options.gradient_rounding}"
        name = f"octo_int8_{options.network}_{data}{ranges}{rounding}.json"
        (options.out / name).write_text(json.dumps(report, indent=1) + "\n")
    print("target met" if not missed else f"missed: {'; '.join(missed)}")
    return 1 if missed else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default=NETWORKS[0])
    parser.add_argument("--width", type=float, help="16 channels of small_resnet's first stage, 0.35 of mobilenet_v2")
    parser.add_argument("--data", help="digits, fashion-mnist, cifar10, or a folder of images")
    parser.add_argument("--data-dir", type=Path, help="where named data sets lie")
    parser.add_argument("--image-size", type=int, default=28)
    parser.add_argument("--source-samples", type=int, default=8000, help="at most so many to pretrain on")
    parser.add_argument("--samples", type=int, default=1000, help="to adapt to; as many are held out")
    parser.add_argument("--test-samples", type=int, default=2000)
    parser.add_argument("--pretrain-epochs", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=6, help="of each way to adapt")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rates", type=float, nargs="+", default=(0.01, 0.03), help="learning rates to choose from")
    parser.add_argument("--rate-seeds", type=int, default=1, help="trainings by whose mean a rate is chosen")
    parser.add_argument("--gradient-rounding", choices=("stochastic", "nearest"), default="stochastic")
    parser.add_argument("--weight-ranges", choices=("channel", "tensor"), default="channel", help="of all ways of int8")
    parser.add_argument("--parts", action="store_true", help="compensation and clipping alone as well")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=default_folder() / "recipes", help="pretrained weights")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="few samples and epochs, one seed")
    options = parser.parse_args(arguments)
    if options.data is None:
        options.data = "digits" if options.data_dir is None else "fashion-mnist"
    if options.width is None:
        options.width = 16 if options.network == "small_resnet" else 0.35
    if options.quick:
        quick = {"image_size": 16, "source_samples": 600, "samples": 200, "test_samples": 150}
        set_quick(parser, options, quick | {"pretrain_epochs": 4, "epochs": 3, "rates": [0.03], "seeds": 1})
    return options


def _start(options: argparse.Namespace, task: TransferTask) -> nn.Module:
    """The pretrained network."""
    names = ("network", "data", "width", "image_size", "source_samples", "pretrain_epochs")
    name = "octo-" + "-".join(str(getattr(options, each)) for each in names)
    classes = int(task.source.labels.max()) + 1

    def make() -> nn.Module:
        if options.network == "small_resnet":
            return SmallResNet(classes, width=int(options.width))
        return make_network(options.network, classes, options.width)

    rate = 0.02 if options.network == "mobilenet_v2" else 0.1
    cache = options.cache / f"{name.replace('/', '_')}-{rate:g}.pt"
    return pretrained(make, task.source, options.pretrain_epochs, cache, rate=rate)


def _row(options: argparse.Namespace, model: nn.Module, task: TransferTask, way: str) -> Row:
    adapted, optimizer = _prepared(options, model, task, way, options.rates[0], 0)
    batch = (task.train.images[: options.batch], task.train.labels[: options.batch])
    nbytes = step_bytes(adapted, cross_entropy, batch, optimizer=optimizer)

    def reached(rate: float, seed: int) -> float:
        return accuracy(_adapted(options, model, task, way, rate, seed), task.held_out)

    best, held_out = best_rate(options.rates, reached, trainings=options.rate_seeds)
    seeds = range(1, options.seeds + 1)
    test = [accuracy(_adapted(options, model, task, way, best, seed), task.test) for seed in seeds]
    print(f"{way}: {statistics.mean(test):.2%} at {best:g}", file=sys.stderr, flush=True)
    return Row(nbytes, held_out, best, test)


def _prepared(
    options: argparse.Namespace, model: nn.Module, task: TransferTask, way: str, rate: float, seed: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A copy of the pretrained network that is to train in a way, and its optimizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = copy.deepcopy(model)
        with Adapting(adapted) as adapting:
            replace_head(adapting, task.classes)
        groups: list[dict[str, object]] = [{"params": list(adapted.parameters())}]
        if way != FLOAT32:
            clips, compensates = way in (OCTO, PARTS[1]), way in (OCTO, PARTS[0])
            octo = odt.quant.octo_(
                adapted,
                compensation="position" if compensates else "none",
                clip=0.95 if clips else 1.0,
                learn_clip=clips,
                gradient_rounding=options.gradient_rounding,
                weight_ranges=options.weight_ranges,
                sample=task.train.images[:1],
            )
            groups = octo.parameter_groups()
    return adapted, torch.optim.SGD(groups, lr=rate, momentum=MOMENTUM)


def _adapted(
    options: argparse.Namespace, model: nn.Module, task: TransferTask, way: str, rate: float, seed: int
) -> nn.Module:
    """After training; it is evaluated as it trained."""
    adapted, optimizer = _prepared(options, model, task, way, rate, seed)
    draw = torch.Generator().manual_seed(seed)
    steps = options.epochs * (len(task.train.labels) // options.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    step = odt.TrainStep(adapted, cross_entropy, optimizer, budget=ROOMY, cache=options.cache / "odt")
    for _ in range(options.epochs):
        for x, y in task.train.batches(options.batch, draw):
            step(x, y)
            schedule.step()
    return adapted


def _missed(rows: dict[str, Row]) -> list[str]:
    full, plain, octo = (rows[way].mean for way in JUDGED)
    missed = []
    if octo < full - POINTS_BELOW_FLOAT32:
        missed.append(f"Octo reaches {octo:.2%}, float32 {full:.2%}")
    if octo <= plain:
        missed.append(f"Octo reaches {octo:.2%}, plain int8 {plain:.2%}")
    return missed


def _print(rows: dict[str, Row]) -> None:
    print(f"{'':28}{'accuracy':>9}{'rate':>8}{'MiB':>8}   of each seed")
    for name, row in rows.items():
        each = ", ".join(f"{value:.1%}" for value in row.test)
        print(f"{name:28}{row.mean:9.2%}{row.rate:8g}{row.bytes / 2**20:8.2f}   {each}")


if __name__ == "__main__":
    sys.exit(main())

"""Sparse update against updating the last layers, at equal memory (TTE's experiment).

    python recipes/tte_sparse_update.py                                            # scikit-learn's digits
    python recipes/tte_sparse_update.py --data fashion-mnist --data-dir DIR --out results
    python recipes/tte_sparse_update.py --less 8 12 --device-size 128              # in an 8th and a 12th of everything
    python recipes/tte_sparse_update.py --quick                                    # a look, in a minute or two

A network as MCUNet's search makes them (or another one, `--network`) is pretrained on one half of the classes and
adapted to the other half. What its parts are worth is measured on samples held out of the training set (contribution
analysis); the scheme that gains most in the bytes of updating the last layers is searched for, and both train from the
same start, beside the classifier alone and everything. With `--less` schemes are searched for in a share of what
everything takes, beside as many last layers as fit into it. Each way takes the learning rate that is best on the
held-out samples with another seed (of `--rates`; a single one is taken as it is). The recipe ends with code 1 where a
scheme that was found is less accurate than the last layers beside it, as the mean over seeds, or where the task says
nothing: everything has to be five points better than the classifier alone. It reports, too, how well the
sum of gains ranks random schemes: Spearman's correlation with the accuracy that they reach.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_odt as odt
from recipes.common import transfer_task
from recipes.common.narrow_networks import NARROW_NETWORKS, Network
from recipes.common.proxyless_mobile import ProxylessMobile
from recipes.common.quick import set_quick
from torch_odt.adapt import Adaptation, Contributions, FineTuning, Scheme, SchemeMemory
from torch_odt.adapt.adaptation import Adapting
from torch_odt.adapt.head import replace_head
from torch_odt.adapt.step_bytes import step_bytes
from torch_odt.cache import default_folder
from torch_odt.commands.data import load_data

Batches = list[tuple[Tensor, Tensor]]
Samples = tuple[Tensor, Tensor]
Adapt = Callable[[nn.Module], Adaptation]
RATIOS = (1 / 8, 1 / 4, 1 / 2, 1.0)
MOMENTUM = 0.9
# Of contributions.
LEARNING_RATE = 0.05
EVALUATION_BATCH = 100
LEAST_POINTS = 0.05


@dataclass(frozen=True)
class Shuffled:
    """Batches in another order each time, by torch's random numbers.

    Attributes:
        samples: images and labels.
        size: of a batch; what is left over at the end waits for another order.
    """

    samples: Samples
    size: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = self.samples
        for chosen in torch.randperm(len(labels)).split(self.size):
            if len(chosen) == self.size:
                yield images[chosen], labels[chosen]


@dataclass(frozen=True)
class Task:
    """What is adapted, and to what.

    Attributes:
        model: pretrained on other classes.
        classes: so many there are.
        train, held_out: of the training set; the second are what parts, schemes and learning rates are chosen by.
        test: samples that nothing was chosen by.
        epochs: of a fine-tuning.
    """

    model: nn.Module
    classes: int
    train: Shuffled
    held_out: Batches
    test: Batches
    epochs: int

    def fine_tuning(self, lr: float, *, on_test: bool = False) -> FineTuning:
        test = self.test if on_test else self.held_out
        return FineTuning(self.train, test, epochs=self.epochs, lr=lr, momentum=MOMENTUM)

    def accuracy(self, adapt: Adapt, run: FineTuning, seed: int) -> float:
        """Of a copy of the model that was adapted and trained; 0 where training diverged, which is told."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            adapted = copy.deepcopy(self.model)
            adaptation = adapt(adapted)
            try:
                return run(adapted, adaptation)
            except FloatingPointError as error:
                print(f"{adaptation.method} at a rate of {run.lr:g}: {error}", file=sys.stderr, flush=True)
                return 0.0

    def updating(self, scheme: Scheme) -> Adapt:
        return lambda model: odt.adapt.sparse_update_(model, scheme, classes=self.classes)


@dataclass(frozen=True)
class Row:
    """What a way to train has reached.

    Attributes:
        bytes: of all that is not weights in its step of one sample, by the simulator.
        learning_rate: the best one on the held-out samples.
        accuracies: on the test set, of each seed; `mean` is theirs.
        what: trains.
    """

    bytes: int
    learning_rate: float
    accuracies: list[float]
    mean: float
    what: str


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    options.cache.mkdir(parents=True, exist_ok=True)
    data = Path(options.data).resolve().name
    task = _task(options)
    sample = _sample(task, options.device_size or options.image_size)
    memory = SchemeMemory(task.model, nn.functional.cross_entropy, sample, classes=task.classes, optimizer=_optimizer)
    everything_bytes = _bytes_of_everything(task, sample)
    most = everything_bytes / memory.simulated(Scheme())
    if any(less > most for less in options.less):
        raise SystemExit(f"--less: the classifier alone takes {most:.1f} times less than everything, which is the most")
    contributions = _contributions(task, options)
    rows: dict[str, Row] = {}
    found: dict[str, str] = {}

    def add(name: str, adapt: Adapt, nbytes: int, what: str) -> None:
        rows[name] = _row(task, adapt, nbytes, what, options)
        print(f"{name}: {rows[name].mean:.1%}", flush=True)

    def add_scheme(name: str, scheme: Scheme) -> None:
        add(name, task.updating(scheme), memory.simulated(scheme), str(scheme))

    def search(name: str, budget: int, beside: int, file: str) -> None:
        best = odt.adapt.search_scheme(contributions, memory, budget=budget)
        found[name] = f"last {beside} layers" if beside else "classifier"
        if found[name] not in rows:
            add_scheme(found[name], _last_layers(task.model, beside))
        add_scheme(name, best.scheme)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            best.scheme.save(options.out / f"tte_scheme_{options.network}_{data}_{file}.json")

    add_scheme("classifier", Scheme())
    for count in options.last:
        last_bytes = memory.simulated(_last_layers(task.model, count))
        search(f"found, in the bytes of {count}", last_bytes, count, str(count))
    for less in options.less:
        budget = int(everything_bytes / less)
        beside = _most_last_layers(task.model, memory, budget)
        search(f"found, in 1/{less:g} of everything", budget, beside, f"less_{less:g}")
    add("everything", _train_everything(task), everything_bytes, "everything")
    ranked = _ranked(task, contributions, options.ranked)
    correlation = _rank_correlation(ranked)
    _print(rows, ranked, correlation)
    missed = _missed(rows, found)
    print("\n".join(missed) if missed else "targets met")
    if options.out is not None:
        plain = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
        report = {
            "options": plain | {"data": data},
            "torch": torch.__version__,
            "contributions": _measured(contributions),
            "rows": {name: asdict(row) for name, row in rows.items()},
            "beside": found,
            "rank_correlation": correlation,
            "ranked": ranked,
            "missed": missed,
        }
        shares = "".join(f"_{less:g}" for less in options.less)
        name = f"tte_sparse_update_{options.network}_{data}{'_less' * bool(shares)}{shares}.json"
        (options.out / name).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if missed else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=sorted(NETWORKS), default="mcunet")
    parser.add_argument("--data", default="digits", help="digits, fashion-mnist, cifar10, or a folder of images")
    parser.add_argument("--data-dir", type=Path, help="where named data sets lie")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--pretrain", type=int, default=4000, help="at most so many samples to pretrain on")
    parser.add_argument("--pretrain-epochs", type=int, default=6)
    parser.add_argument("--train", type=int, default=800, help="at most so many samples to adapt to")
    parser.add_argument("--held-out", type=int, default=2000, help="at most so many to choose by, and as many to test")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=6, help="of each fine-tuning")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0.02, 0.05, 0.1], help="learning rates to choose from"
    )
    parser.add_argument("--layers", type=int, default=24, help="measure so many of the last convolutions")
    parser.add_argument(
        "--ratios", type=int, default=2, choices=range(1, 5), help="measure so many ratios, from 1 down"
    )
    parser.add_argument("--last", type=int, nargs="*", default=[6, 12], help="so many last layers to compare with")
    parser.add_argument(
        "--less", type=_times, nargs="*", default=[], help="search in the bytes of everything divided by this, too"
    )
    parser.add_argument("--device-size", type=int, help="count bytes for images of this size, not of --image-size")
    parser.add_argument("--ranked", type=int, default=24, help="random schemes whose order is compared")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=default_folder() / "recipes", help="pretrained weights and gains")
    parser.add_argument("--out", type=Path, help="folder for the results and the schemes")
    parser.add_argument("--quick", action="store_true", help="few samples, epochs, layers and seeds")
    options = parser.parse_args(arguments)
    if options.quick:
        quick = {"pretrain": 480, "train": 384, "held_out": 96, "epochs": 3, "layers": 9, "last": [6]}
        set_quick(parser, options, quick | {"ranked": 4, "seeds": 1})
    return options


def _times(text: str) -> float:
    value = float(text)
    if not value >= 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1, which is everything")
    return value


def _name(options: argparse.Namespace) -> str:
    """Of the pretrained network: what its weights depend on."""
    numbers = (options.image_size, options.pretrain, options.pretrain_epochs, NETWORKS[options.network].rate)
    return "-".join(["tte", options.network, str(options.data).replace("/", "_"), *map(str, numbers)])


def _task(options: argparse.Namespace) -> Task:
    data = load_data(
        options.data, data_dir=options.data_dir, image_size=options.image_size, cache_dir=options.cache / "data"
    )
    classes = len(data.classes) // 2
    known = _of_classes(data.train, range(classes), options.pretrain)
    new = _of_classes(data.train, range(classes, 2 * classes), options.train + options.held_out)
    test = _of_classes(data.validation, range(classes, 2 * classes), options.held_out)
    # What there is may be less than what was asked for.
    cut = round(len(new[1]) * options.train / (options.train + options.held_out))
    train, held_out = (new[0][:cut], new[1][:cut]), (new[0][cut:], new[1][cut:])
    return Task(
        model=_pretrained(options, known, classes),
        classes=classes,
        train=Shuffled(train, options.batch),
        held_out=_batches(*held_out, EVALUATION_BATCH),
        test=_batches(*test, EVALUATION_BATCH),
        epochs=options.epochs,
    )


def _of_classes(data: Dataset[tuple[Tensor, int]], wanted: range, most: int) -> Samples:
    """Samples of some classes, which are counted from 0 anew."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()  # type: ignore[arg-type]
    images: list[Tensor] = []
    labels: list[int] = []
    for index in order:
        image, label = data[index]
        if label in wanted:
            images.append(image)
            labels.append(label - wanted.start)
        if len(images) == most:
            break
    return torch.stack(images), torch.tensor(labels)


def _batches(images: Tensor, labels: Tensor, size: int) -> Batches:
    return list(zip(images.split(size), labels.split(size), strict=True))


def _sample(task: Task, image_size: int) -> Samples:
    """A batch of one: what a device trains on."""
    images, labels = task.train.samples
    return images.new_zeros(1, images.shape[1], image_size, image_size), labels[:1]


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """As `FineTuning` trains: its momentum takes bytes."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


NETWORKS = NARROW_NETWORKS | {"proxyless": Network(partial(ProxylessMobile, width=0.3))}


def _pretrained(options: argparse.Namespace, samples: Samples, classes: int) -> nn.Module:
    """The network after training on the first half of the classes; remembered in the cache."""
    network, cache = NETWORKS[options.network], options.cache / f"{_name(options)}.pt"
    known = transfer_task.Samples(*samples)
    model = transfer_task.pretrained(
        lambda: network.make(classes), known, options.pretrain_epochs, cache, rate=network.rate
    )
    print(f"pretrained: {transfer_task.accuracy(model, known):.1%} of what it was trained on", flush=True)
    return model


def _convolutions(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]


def _last_layers(model: nn.Module, count: int) -> Scheme:
    convolutions = _convolutions(model)
    return Scheme(count, dict.fromkeys(convolutions[len(convolutions) - count :], 1.0))


def _most_last_layers(model: nn.Module, memory: SchemeMemory, budget: int) -> int:
    """So many fit into a budget; 0 where the classifier alone does."""
    count, most = 0, len(_convolutions(model))
    while count < most and memory.simulated(_last_layers(model, count + 1)) <= budget:
        count += 1
    return count


def _contributions(task: Task, options: argparse.Namespace) -> Contributions:
    layers = _convolutions(task.model)[-options.layers :]
    numbers = (options.train, options.held_out, options.batch, options.epochs)
    return odt.adapt.measure_contributions(
        task.model,
        task.fine_tuning(LEARNING_RATE),
        classes=task.classes,
        layers=layers,
        ratios=RATIOS[-options.ratios :],
        biases=sorted({0, *options.last, len(layers) * 3 // 4, len(layers)}),
        cache=options.cache / f"{'-'.join([_name(options), *map(str, numbers)])}.json",
    )


def _measured(contributions: Contributions) -> dict[str, object]:
    return {
        "classifier_accuracy": contributions.classifier_accuracy,
        "reference_biases": contributions.reference_biases,
        "bias_gains": dict(contributions.bias_gains),
        "weight_gains": [[name, ratio, gain] for (name, ratio), gain in contributions.weight_gains.items()],
    }


def _train_everything(task: Task) -> Adapt:
    """Plain fine-tuning, BatchNorm with the statistics of the batch."""

    def adapt(model: nn.Module) -> Adaptation:
        with Adapting(model) as adapting:
            replace_head(adapting, task.classes)
            adapting.train_only([name for name, _ in model.named_parameters()])
            return adapting.finish("everything")

    return adapt


def _bytes_of_everything(task: Task, sample: Samples) -> int:
    """With fixed statistics, as one sample has none."""
    model = copy.deepcopy(task.model)
    odt.adapt.tinytl_(model, mode="full", classes=task.classes)
    optimizer = _optimizer(list(model.parameters()))
    return step_bytes(model, nn.functional.cross_entropy, sample, optimizer=optimizer)


def _row(task: Task, adapt: Adapt, nbytes: int, what: str, options: argparse.Namespace) -> Row:
    lr = options.rates[0]
    if len(options.rates) > 1:
        lr = max(options.rates, key=lambda lr: task.accuracy(adapt, task.fine_tuning(lr), 0))
    run = task.fine_tuning(lr, on_test=True)
    accuracies = [task.accuracy(adapt, run, seed) for seed in range(1, options.seeds + 1)]
    return Row(nbytes, lr, accuracies, statistics.mean(accuracies), what)


def _ranked(task: Task, contributions: Contributions, count: int) -> list[tuple[float, float, str]]:
    """Random schemes: the sum of their gains, the accuracy that they reach, and what they train."""
    draw = random.Random(0)
    layers = list(dict.fromkeys(name for name, _ in contributions.weight_gains))
    ratios = sorted({ratio for _, ratio in contributions.weight_gains})
    biases = sorted(contributions.bias_gains)
    ranked = []
    for _ in range(count):
        # Few layers, and many: how many is drawn, too.
        chosen = set(draw.sample(layers, draw.randint(0, len(layers) // 2)))
        scheme = Scheme(draw.choice(biases), {name: draw.choice(ratios) for name in layers if name in chosen})
        reached = task.accuracy(task.updating(scheme), task.fine_tuning(LEARNING_RATE), 1)
        ranked.append((contributions.gain(scheme), reached, str(scheme)))
    return ranked


def _rank_correlation(ranked: list[tuple[float, float, str]]) -> float | None:
    """Spearman's, between gains and accuracies; None where these or those are all alike."""
    if any(len({row[column] for row in ranked}) < 2 for column in (0, 1)):
        return None
    gains, reached = (torch.tensor([row[column] for row in ranked]) for column in (0, 1))
    return float(torch.corrcoef(torch.stack([_ranks(gains), _ranks(reached)]))[0, 1])


def _ranks(values: Tensor) -> Tensor:
    """Places in ascending order; equal values share the mean of theirs."""
    below = (values[:, None] > values).sum(1)
    return below + ((values[:, None] == values).sum(1) - 1) / 2


def _missed(rows: dict[str, Row], found: dict[str, str]) -> list[str]:
    gained = rows["everything"].mean - rows["classifier"].mean
    missed = [
        f"missed: what was {name} reaches {rows[name].mean:.1%}, the {last} {rows[last].mean:.1%}"
        for name, last in found.items()
        if rows[name].mean < rows[last].mean
    ]
    if gained < LEAST_POINTS:
        missed.append(f"the task says nothing: everything gains {100 * gained:.1f} points over the classifier alone")
    return missed


def _print(rows: dict[str, Row], ranked: list[tuple[float, float, str]], correlation: float | None) -> None:
    width = max(map(len, rows))
    print(f"{'':{width}}{'KiB a sample':>14}{'rate':>7}{'accuracy':>10}   of each seed")
    for name, row in rows.items():
        each = ", ".join(f"{value:.1%}" for value in row.accuracies)
        print(f"{name:{width}}{row.bytes / 1024:14.0f}{row.learning_rate:7g}{row.mean:10.1%}   {each}")
    for name, row in rows.items():
        print(f"{name}: {row.what}")
    if ranked:
        told = "none, as all are alike" if correlation is None else f"{correlation:.2f}"
        print(f"rank correlation of the sum of gains with accuracy: {told}")


if __name__ == "__main__":
    sys.exit(main())

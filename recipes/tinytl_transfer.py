"""TinyTL against full fine-tuning: accuracy of a transfer, and what a training step takes of the process.

    python recipes/tinytl_transfer.py --data-dir DIR --out recipes/results    # DIR/FashionMNIST/raw
    python recipes/tinytl_transfer.py --quick                                 # a look, on scikit-learn's digits

Accuracy: a narrow network (`--network`) is pretrained on small images of one half of the classes and adapted to the
other half from a few samples, by equal epochs of Adam from the same start: everything trains, the classifier, the norms
and it, the biases and it, lite residual modules and it, or modules and biases (TinyTL-L+B). The modules were pretrained
with the network, as in the paper, or are new: TinyTL-L+B is the one of these that is better on samples held out. One
more row tells what pretrained modules are worth to everything in plain PyTorch, and where peft is installed, one what
LoRA reaches at the pointwise convolutions. Images are turned, zoomed, shifted,
brightened and mirrored at random, when the network is pretrained and when it is adapted (`--no-augment`: mirrored
alone). `--data spoken-digits` takes spectrograms of one half of the speakers, and adapts to the voices of the others.
Each way has the learning rate (`--rates`) that is best on samples held out of the training set, in the mean over
`--rate-seeds` trainings with seeds of their own. Where BatchNorm is frozen, its statistics are those of the samples to
adapt to as they are seen in training, taken in a forward pass (`odt.adapt.estimate_batch_norm_`); in plain PyTorch it
follows the batch, and so it does by `--norm detached`, but that no gradient passes through its statistics.

Memory: each way trains in a process of its own, the network in full width, batch 8, 224x224, Adam; bytes are what the
process holds above its level before there was a model, with everything counted. `--micro-batches 8 1` adds a table
with one sample at a time on both sides, for which plain PyTorch accumulates gradients.

The recipe ends with code 1 where the task does not count, because full fine-tuning is not 5 points better than the
classifier alone, or where a target is missed: TinyTL-L+B takes at least 6 times less than full fine-tuning in plain
PyTorch and is within half a point of its accuracy, takes at least 5 times less than norms and classifier there and is
at least as good, also as these in torch_odt, and biases alone take at least 8 times less.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import statistics
import sys
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_odt as odt
from recipes.common.process_bytes import TrainingBytes, training_bytes
from recipes.common.quick import set_quick
from recipes.common.rates import best_rate
from recipes.common.transfer_task import (
    Augmentation,
    Samples,
    TransferTask,
    accuracy,
    first_half,
    other_speakers,
    pretrained,
)
from recipes.common.transfer_ways import (
    NETWORKS,
    PRETRAINING,
    Pretraining,
    Way,
    adapt,
    make_network,
    make_step,
    training,
)
from torch_odt.cache import default_folder

FULL, NORMS, OUR_NORMS = Way("full", "plain"), Way("norm+last", "plain"), Way("norm+last")
TINYTL = Way("lite+bias", weight_code="affine", pretrained_modules=True)
NEW_MODULES = replace(TINYTL, pretrained_modules=False)
BIASES, PLAIN_BIASES = Way("bias", weight_code="affine"), Way("bias", "plain")
HAS_PEFT = importlib.util.find_spec("peft") is not None
# Accuracy is measured of these; in plain PyTorch BatchNorm follows the batch where something of it trains.
TRAINED = (
    FULL,
    NORMS,
    OUR_NORMS,
    Way("last"),
    PLAIN_BIASES,
    BIASES,
    Way("lite", weight_code="affine", pretrained_modules=True),
    TINYTL,
    NEW_MODULES,
    replace(FULL, pretrained_modules=True),
    *([Way("LoRA", "plain"), Way("LoRA")] if HAS_PEFT else []),
)
# Accuracy is judged by these, and bytes by those.
COMPARED = (FULL, NORMS, OUR_NORMS, Way("last"), TINYTL, NEW_MODULES)
JUDGED = (FULL, NORMS, BIASES, TINYTL)
MEASURED = (
    FULL,
    NORMS,
    PLAIN_BIASES,
    Way("full"),
    OUR_NORMS,
    Way("last"),
    BIASES,
    Way("lite", weight_code="affine", pretrained_modules=True),
    Way("lite+bias", pretrained_modules=True),
    TINYTL,
    Way("lite+bias", weight_code="codebook", pretrained_modules=True),
    *([Way("LoRA", "plain"), Way("LoRA")] if HAS_PEFT else []),
)
RATES = (1e-3, 3e-3, 1e-2)
NARROW = 0.35
TIMES_LESS_THAN_FULL, TIMES_LESS_THAN_NORMS, TIMES_LESS_OF_BIASES = 6.0, 5.0, 8.0
POINTS_BELOW_FULL, POINTS_ABOVE_LAST = 0.005, 0.05
BATCH, MEASURED_SIZE = 8, 224
SPOKEN_DIGITS = "spoken-digits"
# Where data sets have them: with 300 samples a few answers would choose.
HELD_OUT = {"fashion-mnist": 4000, SPOKEN_DIGITS: 600}
# Time and pitch are no directions that a spectrogram could be turned between.
OF_SMALL_PICTURES = Augmentation(turn=0.15, zoom=0.2, shift=0.1, contrast=0.2, brightness=0.2)
AUGMENTATIONS = {
    SPOKEN_DIGITS: Augmentation(turn=0.0, zoom=0.1, shift=0.1, contrast=0.2, brightness=0.2),
    "fashion-mnist": OF_SMALL_PICTURES,
    "digits": OF_SMALL_PICTURES,
}
OF_PHOTOS = Augmentation(turn=0.35, zoom=0.25, shift=0.2, contrast=0.4, brightness=0.3)


@dataclass(frozen=True)
class Accuracies:
    """Of one way.

    Attributes:
        held_out: by learning rate, the mean over trainings; empty where there was no choice.
        rate: the best of these.
        test: of each seed, at that rate.
    """

    held_out: dict[float, float]
    rate: float
    test: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return statistics.mean(self.test)


Bytes = dict[str, TrainingBytes]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    options.cache.mkdir(parents=True, exist_ok=True)
    accuracies: dict[str, Accuracies] = {}
    if not options.memory_only:
        transfer = other_speakers if options.data == SPOKEN_DIGITS else first_half
        task = transfer(options, held_out=options.held_out)
        if options.augment:
            task = task.augmented(AUGMENTATIONS.get(options.data, OF_PHOTOS))
        ways = [way for way in TRAINED if way.trains in options.ways]
        wanted = sorted({way.pretrained_modules for way in ways})
        starts = {with_modules: _start(options, task, with_modules) for with_modules in wanted}
        own = ", ".join(f"{accuracy(model, task.source):.1%}" for model in starts.values())
        of = " and ".join("with modules" if each else "without modules" for each in wanted)
        sizes = f"{len(task.train.labels)} samples to adapt to, {len(task.test.labels)} to test with"
        print(f"pretrained {of}: {own} of its own; {sizes}", file=sys.stderr, flush=True)
        accuracies = {
            str(way): _accuracies(options, starts[way.pretrained_modules], task, _with_norm(options, way))
            for way in ways
        }
        _print_accuracies(accuracies)
    judges = all(str(way) in accuracies for way in COMPARED)
    if judges:
        print(f"TinyTL-L+B by samples held out: {_chosen_modules(accuracies)}")
    tables: dict[str, Bytes] = {}
    for network in options.networks:
        for micro_batch in options.micro_batches:
            title = f"{network}, {micro_batch} of {BATCH} samples at once"
            tables[title] = _bytes(options, network, micro_batch)
            _print_bytes(title, tables[title])
    missed = _missed_accuracies(accuracies) if judges else []
    for title, rows in tables.items():
        # The targets are for steps of the whole batch, as the paper counts them.
        missed += _missed_bytes(title, rows) if f"{BATCH} of" in title else []
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        plain = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
        report = {
            "options": plain | {"data": Path(options.data).resolve().name},
            "torch": torch.__version__,
            "accuracies": {name: asdict(each) for name, each in accuracies.items()},
            "bytes": {title: {name: asdict(row) for name, row in rows.items()} for title, rows in tables.items()},
            "missed": missed,
        }
        name = f"tinytl_transfer_{options.network}_{Path(options.data).resolve().name}" + "_augmented" * options.augment
        name += f"_width_{options.width:g}" * (options.width != NARROW)
        name = "tinytl_memory" if options.memory_only else name
        name += "_detached" * (options.norm == "detached")
        is_whole = len(accuracies) == len(TRAINED)
        name += "" if is_whole or options.memory_only else f"_{'_'.join(options.ways)}"
        (options.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    if not judges and not any(f"{BATCH} of" in title for title in tables):
        print(f"nothing was judged: targets are of all accuracies, and of bytes with --micro-batches {BATCH}")
    else:
        print("target met" if not missed else f"missed: {'; '.join(missed)}")
    return 1 if missed else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="digits, fashion-mnist, cifar10, spoken-digits, or a folder of images")
    parser.add_argument("--data-dir", type=Path, help="where named data sets lie")
    parser.add_argument("--network", choices=NETWORKS, default=NETWORKS[0], help="whose accuracy is measured")
    parser.add_argument("--width", type=float, default=NARROW, help="of that network")
    parser.add_argument("--image-size", type=int, default=48)
    parser.add_argument("--source-samples", type=int, default=24000, help="at most so many to pretrain on")
    parser.add_argument("--samples", type=int, default=300, help="to adapt to")
    parser.add_argument(
        "--held-out", type=int, help=f"samples that rates and modules are chosen by; --samples, but for {HELD_OUT}"
    )
    parser.add_argument("--test-samples", type=int, default=2000)
    parser.add_argument("--pretrain-epochs", type=int, default=6)
    parser.add_argument(
        "--augment", action=argparse.BooleanOptionalAction, default=True, help="change images each time they are seen"
    )
    parser.add_argument(
        "--norm", choices=("frozen", "detached"), default="frozen", help="what BatchNorm becomes in torch_odt's ways"
    )
    parser.add_argument("--epochs", type=int, default=50, help="of each way to adapt; the paper's")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates to choose from")
    parser.add_argument("--rate-seeds", type=int, default=1, help="trainings by whose mean a rate is chosen")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=NETWORKS, help="whose memory is measured")
    parser.add_argument(
        "--measured-size", type=int, default=MEASURED_SIZE, help="of the images that memory is measured with"
    )
    trained = tuple(dict.fromkeys(way.trains for way in TRAINED))
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=trained,
        default=trained,
        help="accuracy of these alone: where one that is compared is left out, no verdict",
    )
    parser.add_argument("--micro-batches", type=int, nargs="+", default=(BATCH,), help="samples that run at once")
    parser.add_argument("--memory-only", action="store_true", help="train nothing, and judge memory alone")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=default_folder() / "recipes", help="pretrained weights")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument(
        "--quick", action="store_true", help="few samples and epochs, one seed, one network at 96 pixels"
    )
    options = parser.parse_args(arguments)
    if options.data is None:
        options.data = "digits" if options.data_dir is None else "fashion-mnist"
    if options.data == SPOKEN_DIGITS and options.data_dir is None:
        parser.error("--data spoken-digits: name the folder of the recordings by --data-dir")
    if options.quick:
        quick = {"image_size": 32, "width": 0.25, "source_samples": 600, "samples": 200, "test_samples": 150}
        quick |= {"pretrain_epochs": 4, "epochs": 3, "rates": [1e-2], "seeds": 1, "networks": NETWORKS[:1]}
        set_quick(parser, options, quick | {"measured_size": 96, "micro_batches": [BATCH]})
    if options.held_out is None:
        options.held_out = HELD_OUT.get(options.data, options.samples)
    if options.held_out < 1:
        parser.error(f"--held-out {options.held_out}: at least one sample is needed to choose by")
    return options


def _with_norm(options: argparse.Namespace, way: Way) -> Way:
    """The way, with BatchNorm as the options say. In front of a classifier that trains alone it stays frozen."""
    return way if way.engine == "plain" or way.trains == "last" else replace(way, norm=options.norm)


def _start(options: argparse.Namespace, task: TransferTask, with_modules: bool) -> nn.Module:
    """The pretrained network."""
    names = ("network", "data", "width", "image_size", "source_samples", "pretrain_epochs")
    name = "tinytl-" + "-".join(str(getattr(options, each)) for each in names) + "-modules" * with_modules
    name += "-" + "-".join(map(str, astuple(task.source.augmentation))) if task.source.augmentation else ""
    pretraining = PRETRAINING[options.network]
    name += "" if pretraining == Pretraining() else f"-{'-'.join(map(str, astuple(pretraining)))}"
    classes = int(task.source.labels.max()) + 1
    modules_for = options.image_size if with_modules else None
    return pretrained(
        lambda: make_network(options.network, classes, options.width, modules_for=modules_for),
        task.source,
        options.pretrain_epochs,
        options.cache / f"{name.replace('/', '_')}.pt",
        rate=pretraining.rate,
        optimizer=pretraining.optimizer,
        label_smoothing=pretraining.label_smoothing,
    )


def _accuracies(options: argparse.Namespace, model: nn.Module, task: TransferTask, way: Way) -> Accuracies:
    def reached(rate: float, seed: int, samples: Samples) -> float:
        return accuracy(_adapted(options, model, task, way, rate, seed), samples)

    best, held_out = best_rate(
        options.rates, lambda rate, seed: reached(rate, seed, task.held_out), trainings=options.rate_seeds
    )
    seeds = range(1, options.seeds + 1)
    test = [reached(best, seed, task.test) for seed in seeds]
    print(f"{way}: {statistics.mean(test):.1%} at {best:g}", file=sys.stderr, flush=True)
    return Accuracies(held_out, best, test)


def _adapted(
    options: argparse.Namespace, model: nn.Module, task: TransferTask, way: Way, rate: float, seed: int
) -> nn.Module:
    """A copy of the pretrained network after it was adapted."""
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = copy.deepcopy(model)
        if way.engine == "torch_odt":
            odt.adapt.estimate_batch_norm_(adapted, (x for x, _ in task.train.batches(BATCH, draw)))
        optimizer = torch.optim.Adam(adapt(adapted, way, task.classes, options.image_size), lr=rate)
        steps = options.epochs * (len(task.train.labels) // BATCH)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        step = make_step(adapted, optimizer, way, BATCH, cache=options.cache / "odt")
        for _ in range(options.epochs):
            for x, y in task.train.batches(BATCH, draw):
                step(x, y)
                schedule.step()
    return adapted


def _bytes(options: argparse.Namespace, network: str, micro_batch: int) -> Bytes:
    rows = {}
    for way in JUDGED if options.quick else MEASURED:
        measured = _with_norm(options, way)
        rows[str(way)] = training_bytes(training, network, measured, options.measured_size, BATCH, micro_batch)
        print(f"{network}, {way}: {rows[str(way)].process_bytes / 2**20:.1f} MiB", file=sys.stderr, flush=True)
    return rows


def _missed_accuracies(rows: dict[str, Accuracies]) -> list[str]:
    full, norms, our_norms, last = (rows[str(way)].mean for way in (FULL, NORMS, OUR_NORMS, Way("last")))
    chosen = _chosen_modules(rows)
    tinytl = rows[str(chosen)].mean
    missed = []
    if full < last + POINTS_ABOVE_LAST:
        missed.append(f"the task does not count: full fine-tuning reaches {full:.1%}, the classifier alone {last:.1%}")
    others = (
        ("full fine-tuning", full, POINTS_BELOW_FULL),
        ("norms and classifier in plain PyTorch", norms, 0.0),
        ("norms and classifier in torch_odt", our_norms, 0.0),
    )
    for name, other, points in others:
        if tinytl < other - points:
            missed.append(f"{chosen} reaches {tinytl:.1%}, {name} {other:.1%}")
    return missed


def _chosen_modules(rows: dict[str, Accuracies]) -> Way:
    """TinyTL-L+B with the modules that are better on samples held out; pretrained ones where nothing was."""
    return max((TINYTL, NEW_MODULES), key=lambda way: max(rows[str(way)].held_out.values(), default=0.0))


def _missed_bytes(title: str, rows: Bytes) -> list[str]:
    wanted = (
        (TINYTL, FULL, TIMES_LESS_THAN_FULL),
        (TINYTL, NORMS, TIMES_LESS_THAN_NORMS),
        (BIASES, FULL, TIMES_LESS_OF_BIASES),
    )
    missed = []
    for ours, theirs, times in wanted:
        found = rows[str(theirs)].process_bytes / rows[str(ours)].process_bytes
        if found < times:
            missed.append(f"{title}: {ours} takes {found:.2f} times less than {theirs}, not {times:g}")
    return missed


def _print_accuracies(rows: dict[str, Accuracies]) -> None:
    width = max(map(len, rows))
    print(f"{'':{width}}{'accuracy':>9}{'rate':>8}   of each seed")
    for name, row in rows.items():
        each = ", ".join(f"{value:.1%}" for value in row.test)
        print(f"{name:{width}}{row.mean:9.1%}{row.rate:8g}   {each}")


def _print_bytes(title: str, rows: Bytes) -> None:
    full, norms = (rows[str(way)].process_bytes for way in (FULL, NORMS))
    print(f"{title:58}{'MiB':>8}{'than full':>11}{'than norms':>12}{'trained':>12}{'CPU s':>8}")
    for name, row in rows.items():
        less = f"{full / row.process_bytes:10.1f}x{norms / row.process_bytes:11.1f}x"
        seconds = f"{row.cpu_seconds or 0:8.3f}" + "   (sampled)" * row.is_sampled
        print(f"  {name:56}{row.process_bytes / 2**20:8.1f}{less}{row.trained_parameters:12,}{seconds}")


if __name__ == "__main__":
    sys.exit(main())

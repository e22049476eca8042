"""Clients of different memory learn one model: in depth (FeDepth), in width (HeteroFL, Split-Mix), or without some.

    python recipes/fedepth_blocks.py --data-dir DIR            # six speakers of the spoken digits, each a client
    python recipes/fedepth_blocks.py --data digits --quick     # scikit-learn's digits, split unevenly; a minute or two

Six clients have memory for a step of the whole model, of half its width or of a quarter, two each; which ones changes
with the seed. FedAvg runs one client after the other, without an engine, and every client trains by `TrainStep` inside
its memory, with nothing recomputed. Compared are FedAvg of those who can hold the model, HeteroFL, Split-Mix, and
FeDepth, where `odt.adapt.blockwise` cuts the model to the client's memory; FedAvg with memory for everybody stands
beside them. The recipe ends with code 1 where HeteroFL or FeDepth is less accurate than leaving small clients out, or
where training in blocks takes more than 1.15 times what its largest block does.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_odt as odt
from recipes.common.client_device import Batch, Client, Device, State, copied
from recipes.common.quick import set_quick
from recipes.common.spoken_digits import Samples, load_speakers
from torch_odt.adapt import Blockwise, ClientUpdate, Mix, SubModel, merge_sub_models
from torch_odt.cache import default_folder

CLASSES = 10
CHANNELS = (32, 32, 32, 32, 64, 64, 64, 128, 128)
STRIDES = (2, 1, 1, 1, 2, 1, 1, 2, 1)
RATES = (1.0, 0.5, 0.25)
# What clients have beyond what the largest sub-model takes that fits them.
SPARE = 1.1
BLOCKS_OVER_LARGEST = 1.15
# As the papers have it: what is compared is memory without recomputation.
PLANNER = "keep-all"


@dataclass(frozen=True)
class Row:
    """What a method has reached.

    Attributes:
        clients: so many take part.
        accuracies: of each seed the mean over all clients' test sets, also of those that were left out.
        worst: of each seed the client that is served worst.
        planned_bytes, measured_bytes: of a step of the smallest client that takes part, above its weights: all that the
            process adds, and what torch allocates.
        weight_bytes: what its model holds.
    """

    method: str
    clients: int
    accuracies: list[float]
    worst: list[float]
    planned_bytes: int
    measured_bytes: int
    weight_bytes: int


# The global model, the device of the smallest client, and who takes part.
Learnt = tuple[nn.Module, Device, list[Client]]


@dataclass
class Setting:
    """What all methods share.

    Attributes:
        clients: of one seed.
        memory_bytes: of each size of client.
    """

    options: argparse.Namespace
    clients: list[Client]
    memory_bytes: list[int]
    devices: dict[tuple[str, int], Device]

    def device(self, method: str, size: int, make: Callable[[], Device]) -> Device:
        """Planned once; what it holds is loaded anew whenever a client trains."""
        if (method, size) not in self.devices:
            self.devices[method, size] = make()
        return self.devices[method, size]

    def rounds(self) -> Iterator[float]:
        """The learning rate of each round, from the first to the last."""
        for number in range(self.options.rounds):
            yield self.options.lr * (1 + math.cos(math.pi * number / self.options.rounds)) / 2

    def one_piece(self, method: str, size: int, model: nn.Module) -> Device:
        """A device that trains all of a model at once, in the memory of clients of that size."""
        return self.device(method, size, lambda: self.new_device(model, size).in_one_piece())

    def new_device(self, model: nn.Module, size: int) -> Device:
        memory_bytes, cache = self.memory_bytes[size], self.options.cache
        return Device(model, self.batch(), memory_bytes, classes=CLASSES, planner=PLANNER, cache=cache)

    def batch(self) -> Batch:
        return _first_batch(self.clients[0].samples, self.options.batch)

    def update(self, device: Device, state: State, client: Client, learning_rate: float) -> ClientUpdate:
        """What a client sends back for the state that it was sent, counted by its samples."""
        trained = device.train(state, client, learning_rate, self.options.epochs)
        return ClientUpdate(trained, weight=len(client.samples.train[0]), classes=client.classes)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    if not odt.memory.install():
        raise SystemExit("torch_odt's allocator, which counts bytes, is not built: `torch-odt doctor` says why")
    speakers = _load(options)
    batch = _first_batch(next(iter(speakers.values())), options.batch)
    memory_bytes = [int(SPARE * each) for each in _needed(options, batch)]
    print("memory of clients:", ", ".join(f"{_mib(each)} MiB" for each in memory_bytes))
    devices: dict[tuple[str, int], Device] = {}
    methods: dict[str, Callable[[Setting], Learnt]] = {
        "FedAvg, memory for all": partial(fedavg, everyone=True),
        "FedAvg, small ones left out": fedavg,
        "HeteroFL": heterofl,
        "Split-Mix": split_mix,
        "FeDepth": fedepth,
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    smallest: dict[str, tuple[Device, int]] = {}
    for seed in _seeds(options):
        setting = Setting(options, _clients(speakers, seed), memory_bytes, devices)
        for name, method in methods.items():
            torch.manual_seed(seed)
            began = time.perf_counter()
            model, device, taking_part = method(setting)
            _estimate_batch_norm(model, taking_part, options.batch)
            smallest[name] = (device, len(taking_part))
            accuracies = [_accuracy(model, client.samples.test) for client in setting.clients]
            found[name].append((statistics.mean(accuracies), min(accuracies)))
            print(f"seed {seed}, {name}: {found[name][-1][0]:.1%} in {time.perf_counter() - began:.0f} s", flush=True)
    rows = [_row(name, found[name], *smallest[name]) for name in methods]
    return _report(options, rows, memory_bytes, devices)


def fedavg(setting: Setting, *, everyone: bool = False) -> Learnt:
    """Clients that cannot hold a step of the whole model are left out, unless everyone can."""
    taking_part = [client for client in setting.clients if everyone or client.size == 0]
    model = network()
    device = setting.one_piece("whole", 0, network())
    for learning_rate in setting.rounds():
        state = copied(model)
        updates = [setting.update(device, state, client, learning_rate) for client in taking_part]
        model.load_state_dict(merge_sub_models(state, updates, head=_head(model)))
    return model, device, taking_part


def heterofl(setting: Setting) -> Learnt:
    """Each client trains the first channels that fit it."""
    model, parts, devices = network(), [], []
    for size, rate in enumerate(RATES):
        narrow = network(rate)
        parts.append(SubModel.leading(model, narrow, setting.batch()[0][:1]))
        odt.adapt.heterofl_(narrow, rate)
        devices.append(setting.one_piece("HeteroFL", size, narrow))
    for learning_rate in setting.rounds():
        state, updates = copied(model), []
        for client in setting.clients:
            part = parts[client.size]
            trained = devices[client.size].train(part.extract(state), client, learning_rate, setting.options.epochs)
            updates.append(ClientUpdate(trained, sub_model=part, classes=client.classes))
        model.load_state_dict(merge_sub_models(state, updates, head=_head(model)))
    return model, devices[-1], setting.clients


def split_mix(setting: Setting) -> Learnt:
    """Each client trains as many narrow base models as its width is worth, one after the other."""
    model, rate = network(), RATES[-1]
    bases = SubModel.split(model, network(rate), setting.batch()[0][:1])
    device = setting.one_piece("Split-Mix", len(RATES) - 1, network(rate))
    states = [base.extract(model.state_dict()) for base in bases]
    for learning_rate in setting.rounds():
        updates: list[list[ClientUpdate]] = [[] for _ in bases]
        counts = [round(RATES[client.size] / rate) for client in setting.clients]
        for client, hand in zip(setting.clients, _deal(counts, len(bases)), strict=True):
            for base in hand:
                updates[base].append(setting.update(device, states[base], client, learning_rate))
        states = [
            merge_sub_models(state, of_base, head=_head(device.model))
            for state, of_base in zip(states, updates, strict=True)
        ]
    mixed = []
    for state in states:
        base_model = network(rate)
        base_model.load_state_dict(state)
        mixed.append(base_model)
    return Mix(mixed), device, setting.clients


def fedepth(setting: Setting) -> Learnt:
    """Each client trains the whole model, in as few blocks as fit it."""
    model = network()

    def make(size: int) -> Device:
        local, budget = network(), odt.Budget(setting.memory_bytes[size], of="training")
        blocks = _blocks(setting.options, local, setting.batch(), budget=budget)
        print(blocks)
        return setting.new_device(local, size).in_blocks(blocks)

    devices = [setting.device("FeDepth", size, partial(make, size)) for size in range(len(RATES))]
    heads = {client.name: fresh_heads(devices[client.size]) for client in setting.clients}
    for learning_rate in setting.rounds():
        state, updates = copied(model), []
        for client in setting.clients:
            device = devices[client.size]
            for head, kept in zip(device.heads, heads[client.name], strict=True):
                head.load_state_dict(kept)
            updates.append(setting.update(device, state, client, learning_rate))
            heads[client.name] = [copied(head) for head in device.heads]
        model.load_state_dict(merge_sub_models(state, updates, head=_head(model)))
    return model, devices[-1], setting.clients


def fresh_heads(device: Device) -> list[State]:
    """As new ones would be: the device's own have learnt, from its first steps and from the seeds before."""
    heads = [copy.deepcopy(head) for head in device.heads]
    for head in heads:
        for module in head.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
    return [copied(head) for head in heads]


def network(rate: float = 1.0) -> nn.Sequential:
    """Convolutions in a row, each with BatchNorm and ReLU; the rate is that of its channels."""
    widths = [1, *(math.ceil(rate * each) for each in CHANNELS)]
    layers: list[nn.Module] = []
    for given, width, stride in zip(widths, widths[1:], STRIDES, strict=False):
        convolution = nn.Conv2d(given, width, 3, stride, 1, bias=False)
        layers.append(nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU()))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("speakers", "digits"), default="speakers")
    parser.add_argument("--data-dir", type=Path, help="the spoken digits (fsdd), or the folder that holds them")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=1, help="of a client in each round")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.1, help="in the first round; it falls as a cosine")
    parser.add_argument("--alpha", type=float, default=0.5, help="of the Dirichlet distribution; smaller is less even")
    parser.add_argument("--seeds", type=int, default=1, help="each gives the clients other sizes, too")
    parser.add_argument("--first-seed", type=int, default=0, help="to go on behind those of an earlier run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=default_folder() / "recipes", help="for recordings and plans")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    options = parser.parse_args(arguments)
    if options.data == "speakers" and options.data_dir is None:
        parser.error(
            "the spoken digits are not part of the recipe: name their folder by --data-dir (they are the Free Spoken "
            "Digit Dataset), or take --data digits, which needs none"
        )
    if options.quick:
        set_quick(parser, options, {"rounds": 3})
    return options


def _seeds(options: argparse.Namespace) -> range:
    return range(options.first_seed, options.first_seed + options.seeds)


def _load(options: argparse.Namespace) -> dict[str, Samples]:
    if options.data == "speakers":
        return load_speakers(options.data_dir.expanduser(), options.cache)
    return _uneven_digits(options.alpha)


def _uneven_digits(alpha: float) -> dict[str, Samples]:
    """Of each class, shares that are drawn from a Dirichlet distribution go to six clients."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    images, labels = nn.functional.interpolate(images, scale_factor=4), torch.tensor(data.target)
    parts: list[list[Tensor]] = [[] for _ in range(6)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for label in range(CLASSES):
            indices = (labels == label).nonzero()[:, 0]
            shares = torch.distributions.Dirichlet(torch.full((6,), alpha)).sample()
            bounds = (shares.cumsum(0) * len(indices)).round().long().tolist()
            for part, start, end in zip(parts, [0, *bounds], bounds, strict=False):
                part.append(indices[start:end])
    found = {}
    for number, part in enumerate(parts):
        mine = torch.cat(part)
        test = torch.arange(len(mine)) % 5 == 0
        train, held = mine[~test], mine[test]
        found[f"client {number}"] = Samples((images[train], labels[train]), (images[held], labels[held]))
    return found


def _clients(speakers: dict[str, Samples], seed: int) -> list[Client]:
    """In order of names, two of each size; the next seed gives each another size."""
    return [
        Client(name, samples, tuple(samples.train[1].unique().tolist()), (number // 2 + seed) % len(RATES))
        for number, (name, samples) in enumerate(sorted(speakers.items()))
    ]


def _needed(options: argparse.Namespace, batch: Batch) -> list[int]:
    """What a step takes at each width, with nothing recomputed; the smallest holds FeDepth's largest layer, too."""
    # Compiled kernels and buffers that libraries make once would count for whichever width came first.
    for rate in RATES:
        nn.functional.cross_entropy(network(rate)(batch[0]), batch[1]).backward()
    found = []
    for rate in RATES:
        made = odt.plan(
            network(rate).train(),
            nn.functional.cross_entropy,
            batch,
            budget=odt.Budget(1 << 40, of="training"),
            planner=PLANNER,
            cache=options.cache,
        )
        assert made.smallest_feasible_bytes is not None
        found.append(made.smallest_feasible_bytes)
    found[-1] = max(found[-1], _blocks(options, network(), batch, blocks=len(CHANNELS) + 1).largest_bytes)
    return found


def _blocks(options: argparse.Namespace, model: nn.Module, batch: Batch, **size: Any) -> Blockwise:
    """SGD without momentum, as all clients use it, has no state to be counted."""
    loss_fn = nn.functional.cross_entropy
    return odt.adapt.blockwise(model.train(), loss_fn, batch, planner=PLANNER, cache=options.cache, **size)


def _first_batch(samples: Samples, size: int) -> Batch:
    return samples.train[0][:size], samples.train[1][:size]


def _deal(counts: Sequence[int], bases: int) -> list[list[int]]:
    """So many different bases for each client, as cards are dealt: none again before all others were."""
    pile: list[int] = []
    hands: list[list[int]] = [[] for _ in counts]
    for hand, count in zip(hands, counts, strict=True):
        while len(hand) < count:
            if not set(pile) - set(hand):
                pile += torch.randperm(bases).tolist()
            card = next(each for each in pile if each not in hand)
            pile.remove(card)
            hand.append(card)
    return hands


def _head(model: nn.Module) -> str:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]


def _estimate_batch_norm(model: nn.Module, clients: list[Client], batch: int) -> None:
    """As HeteroFL does after training, but for all methods, so that they differ in what they train."""
    for number, client in enumerate(clients):
        odt.adapt.estimate_batch_norm_(model, client.samples.train[0].split(batch), reset=number == 0)


@torch.no_grad()
def _accuracy(model: nn.Module, samples: tuple[Tensor, Tensor]) -> float:
    return float((model.eval()(samples[0]).argmax(1) == samples[1]).float().mean())


def _row(method: str, found: list[tuple[float, float]], device: Device, clients: int) -> Row:
    weight_bytes = sum(value.nbytes for value in device.model.state_dict().values())
    means, worst = ([pair[place] for pair in found] for place in (0, 1))
    return Row(method, clients, means, worst, device.planned_bytes, device.peak_bytes, weight_bytes)


def _report(
    options: argparse.Namespace, rows: list[Row], memory_bytes: list[int], devices: dict[tuple[str, int], Device]
) -> int:
    columns = f"{'clients':>8}{'accuracy':>10}{'worst':>8}{'planned':>9}{'measured':>10}{'weights':>9}"
    print(f"\n{'':28}{columns}   the smallest client's MiB")
    for row in rows:
        bytes_of = f"{_mib(row.planned_bytes):>9}{_mib(row.measured_bytes):>10}{row.weight_bytes / 2**20:9.2f}"
        reached = f"{statistics.mean(row.accuracies):10.1%}{statistics.mean(row.worst):8.1%}"
        print(f"{row.method:28}{row.clients:>8}{reached}{bytes_of}")
    ratios = {
        size: device.peak_bytes / device.alone_bytes for (name, size), device in devices.items() if name == "FeDepth"
    }
    print(f"training in blocks takes at most {max(ratios.values()):.2f} times what the largest block does")
    missed = _missed(rows, max(ratios.values()))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        report = {
            "data": options.data,
            "rounds": options.rounds,
            "seeds": list(_seeds(options)),
            "torch": torch.__version__,
            "memory_bytes": memory_bytes,
            "rows": [asdict(row) for row in rows],
            "blocks_over_largest": ratios,
            "missed": missed,
        }
        (options.out / "fedepth_blocks.json").write_text(json.dumps(report, indent=1) + "\n")
    print("missed: " + "; ".join(missed) if missed else "target met")
    return 1 if missed else 0


def _missed(rows: list[Row], blocks_over_largest: float) -> list[str]:
    by_name = {row.method: statistics.mean(row.accuracies) for row in rows}
    missed = [
        f"{name} is less accurate than leaving small clients out"
        for name in ("HeteroFL", "FeDepth")
        if by_name[name] < by_name["FedAvg, small ones left out"]
    ]
    if blocks_over_largest > BLOCKS_OVER_LARGEST:
        missed.append(f"blocks take more than {BLOCKS_OVER_LARGEST} times what the largest of them does")
    return missed


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f}"


if __name__ == "__main__":
    sys.exit(main())

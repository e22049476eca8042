"""A small BERT learns new intents of bank customers by its biases alone (BitFit), beside full fine-tuning.

    python recipes/bert_bias_only.py --data-dir DIR --out results       # DIR/banking77/train.csv and test.csv
    python recipes/bert_bias_only.py --data-dir DIR --quick             # a look, in a minute or two

Nothing is downloaded: word pieces and weights are made from the queries of every second intent. The others are then
learnt from the same start, by so many steps on the same queries in the same order: everything trains, biases and the
classifier (`odt.adapt.bias_only_`), the classifier alone, and, where peft is installed, LoRA of rank 8 at queries and
values. The learning rate of each is the best of four on a fifth of the training queries, by a seed of its own.

Accuracies are of the test set's queries. Bytes are what a process of its own holds above its level before there was a
model, for a step over texts of `--bytes-length` word pieces: in plain PyTorch, where what is frozen has
`requires_grad=False`, in `TrainStep` with room for everything, and in `TrainStep` with half the bytes that its plan
took then, or the fewest that it can be planned in. The recipe ends with code 1 where biases are not at least 5 points
better than the classifier alone, are more than 3 points below full fine-tuning, or take more than half of the bytes
that this takes in plain PyTorch.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_odt as odt
from recipes.common.process_bytes import ROOMY, Training, TrainingBytes, training_bytes
from recipes.common.quick import set_quick
from recipes.common.small_bert import PAD, Pretraining, bert_config, make_classifier, make_tokenizer, token_ids
from torch_odt._whole_file import whole_file
from torch_odt.cache import default_folder

# Of AdamW, for each way to train; four are tried, by these factors below and above.
RATES = {"full": 5e-4, "biases": 4e-3, "classifier": 1e-2, "LoRA": 4e-3}
FACTORS = (1 / 3, 1.0, 3.0, 9.0)
# Of the models that rates are chosen by; those that are tested have 0, 1, 2 ...
TUNING_SEED = 1000
WAYS = ("plain", "roomy", "half")
POINTS_ABOVE_CLASSIFIER = 0.05
POINTS_BELOW_FULL = 0.03
TIMES_LESS = 2.0


@dataclass(frozen=True)
class Queries:
    """Queries of some intents.

    Attributes:
        ids: `(n, length)` word pieces.
        labels: `(n,)`, counted from 0.
    """

    ids: Tensor
    labels: Tensor

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """As transformers takes it."""
        ids = self.ids[rows]
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": self.labels[rows]}


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        accuracies: on the test set, one a seed.
        rate: the best on queries held out.
        plain, roomy, half: what a step takes in plain PyTorch, by `TrainStep` that has room for everything, and in half
            the bytes of that plan, or the fewest.
    """

    accuracies: list[float]
    rate: float
    plain: TrainingBytes
    roomy: TrainingBytes
    half: TrainingBytes

    @property
    def mean(self) -> float:
        return statistics.mean(self.accuracies)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    options.cache.mkdir(parents=True, exist_ok=True)
    folder = options.data_dir / "banking77"
    texts = {name: _read(folder / f"{name}.csv") for name in ("train", "test")}
    intents = sorted({intent for _, intent in texts["train"]})
    known, new = intents[0::2], intents[1::2]
    tokenizer = make_tokenizer(
        [text for text, intent in texts["train"] if intent in known],
        vocabulary=options.vocabulary,
        length=options.length,
    )
    first, second, test = (
        _queries(tokenizer, texts[name], wanted) for name, wanted in (("train", known), ("train", new), ("test", new))
    )
    sizes = {"layers": options.layers, "width": options.width, "length": options.length}
    config = bert_config(tokenizer.get_vocab_size(), classes=len(known), **sizes)
    encoder = _pretrained(options, config, first)
    config.num_labels = len(new)
    cut = len(second.labels) * 4 // 5
    kept, held_out = (Queries(second.ids[s], second.labels[s]) for s in (slice(0, cut), slice(cut, None)))

    long = bert_config(config.vocab_size, classes=len(new), **(sizes | {"length": options.bytes_length}))
    rows = {}
    for method in RATES:
        if method == "LoRA" and importlib.util.find_spec("peft") is None:
            continue
        train = partial(_trained, options, config, encoder, method)
        tried = [(train(rate, kept, held_out, TUNING_SEED), rate) for rate in _rates(method)]
        rate = max(tried)[1]
        accuracies = [train(rate, second, test, seed) for seed in range(options.seeds)]
        taken = [training_bytes(_training, long, method, options.bytes_batch, way) for way in WAYS]
        rows[method] = Row(accuracies, rate, *taken)
        print(f"{method}: {rows[method].mean:.1%} at {rate:.1e}, held out {tried}", file=sys.stderr, flush=True)
    _print(rows)
    missed = _missed(rows)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        told = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
        report = {
            "options": told,
            "rows": {method: asdict(row) for method, row in rows.items()},
            "missed": missed,
        }
        (options.out / "bert_bias_only.json").write_text(json.dumps(report, indent=1) + "\n")
    print("target met" if not missed else f"missed: {'; '.join(missed)}")
    return 1 if missed else 0


def _rates(method: str) -> list[float]:
    return [RATES[method] * factor for factor in FACTORS]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="the folder that holds banking77/train.csv and test.csv")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=20, help="word pieces of a query")
    parser.add_argument("--vocabulary", type=int, default=2000, help="at most so many word pieces")
    parser.add_argument("--pretrain-steps", type=int, default=1200)
    parser.add_argument("--pretrain-rate", type=float, default=5e-4)
    parser.add_argument("--steps", type=int, default=400, help="of each way to train")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--bytes-length", type=int, default=64, help="word pieces of the texts that bytes are of")
    parser.add_argument("--bytes-batch", type=int, default=32, help="... and how many are in a batch")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=default_folder() / "recipes", help="pretrained weights")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="a smaller network, few steps and one seed")
    options = parser.parse_args(arguments)
    if options.quick:
        quick = {"layers": 2, "width": 64, "pretrain_steps": 300, "steps": 150, "seeds": 1}
        set_quick(parser, options, quick)
    wanted = [f"banking77/{name}.csv" for name in ("train", "test")]
    if options.data_dir is None or not all((options.data_dir / name).is_file() for name in wanted):
        parser.error(
            f"--data-dir must name the folder that holds {' and '.join(wanted)}: the banking77 queries of "
            "PolyAI-LDN/task-specific-datasets, CSV with the columns text and category"
        )
    return options


def _name(options: argparse.Namespace) -> str:
    """Everything that pretrained weights depend on."""
    names = ("layers", "width", "length", "vocabulary", "pretrain_steps", "pretrain_rate", "batch")
    return "bert-banking77-" + "-".join(str(getattr(options, name)) for name in names)


def _read(path: Path) -> list[tuple[str, str]]:
    """Texts and their intents."""
    with path.open(encoding="utf-8", newline="") as file:
        return [(row["text"], row["category"]) for row in csv.DictReader(file)]


def _queries(tokenizer: Any, rows: Sequence[tuple[str, str]], intents: Sequence[str]) -> Queries:
    """Those of some intents, in random order."""
    chosen = [(text, intents.index(intent)) for text, intent in rows if intent in intents]
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))
    ids = token_ids(tokenizer, [text for text, _ in chosen])
    return Queries(ids[order], torch.tensor([label for _, label in chosen])[order])


def _orders(samples: int, batch: int, steps: int, seed: int) -> list[Tensor]:
    """Which samples each step sees: epoch by epoch, in random order; what does not fill a batch is left out."""
    if samples < batch:
        raise SystemExit(f"{samples} queries do not fill a batch of {batch}: choose a smaller --batch, or give more")
    draw = torch.Generator().manual_seed(seed)
    rows: list[Tensor] = []
    while len(rows) < steps:
        rows += [part for part in torch.randperm(samples, generator=draw).split(batch) if len(part) == batch]
    return rows[:steps]


def _pretrained(options: argparse.Namespace, config: BertConfig, queries: Queries) -> dict[str, Tensor]:
    """The encoder after training on the first intents; remembered in the cache."""
    path = options.cache / f"{_name(options)}.pt"
    if path.exists():
        found: dict[str, Tensor] = torch.load(path, weights_only=True)
        return found
    torch.manual_seed(0)
    model = Pretraining(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.pretrain_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.pretrain_rate, options.pretrain_steps, cycle_momentum=False
    )
    for rows in _orders(len(queries.labels), options.batch, options.pretrain_steps, 0):
        optimizer.zero_grad()
        model(queries.ids[rows], queries.labels[rows]).backward()
        optimizer.step()
        schedule.step()
    encoder = {name: tensor.detach().clone() for name, tensor in model.bert.state_dict().items()}
    with whole_file(path) as partial:
        torch.save(encoder, partial)
    return encoder


def _adapted(config: BertConfig, encoder: dict[str, Tensor] | None, method: str) -> nn.Module:
    """A classifier of the new intents, in which that trains which a method trains."""
    model = make_classifier(config, encoder)
    if method == "biases":
        odt.adapt.bias_only_(model)
    elif method == "LoRA":
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"]), model)
        model.classifier.requires_grad_(True)
    elif method == "classifier":
        model.bert.requires_grad_(False)
    return model


def _optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)


def _trained(
    options: argparse.Namespace,
    config: BertConfig,
    encoder: dict[str, Tensor],
    method: str,
    rate: float,
    queries: Queries,
    test: Queries,
    seed: int,
) -> float:
    """Accuracy after training by one method."""
    torch.manual_seed(seed)
    model = _adapted(config, encoder, method)
    optimizer = _optimizer(model, rate)
    # Betas that change would be captured anew at every step.
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, options.steps, cycle_momentum=False)
    step = odt.TrainStep(model, None, optimizer, budget=ROOMY, cache=options.cache / "odt")
    model.train()
    for rows in _orders(len(queries.labels), options.batch, options.steps, seed):
        step(**queries.batch(rows))
        schedule.step()
    return _accuracy(model, test)


def _accuracy(model: nn.Module, queries: Queries) -> float:
    model.eval()
    right = 0
    with torch.no_grad():
        for rows in torch.arange(len(queries.labels)).split(256):
            batch = queries.batch(rows)
            right += int((model(**batch).logits.argmax(1) == batch["labels"]).sum())
    return right / len(queries.labels)


def _training(config: BertConfig, method: str, batch: int, way: str) -> Training:
    """Steps on random word pieces, for measuring bytes."""
    model = _adapted(config, None, method).train()
    optimizer = _optimizer(model, 1e-4)
    ids = torch.randint(PAD + 1, config.vocab_size, (batch, config.max_position_embeddings))
    rows = Queries(ids, torch.randint(config.num_labels, (batch,))).batch(torch.arange(batch))
    if way == "roomy":
        return Training(odt.TrainStep(model, None, optimizer, budget=ROOMY, cache=False), optimizer, kwargs=rows)
    if way == "half":
        roomy = odt.plan(model, None, rows, budget=ROOMY, optimizer=optimizer, cache=False)
        budget = odt.Budget(max(roomy.peak_bytes // 2, roomy.smallest_feasible_bytes or 0), of="training")
        return Training(odt.TrainStep(model, None, optimizer, budget=budget, cache=False), optimizer, kwargs=rows)

    def step(**batch: Tensor) -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return Training(step, optimizer, kwargs=rows)


def _missed(rows: dict[str, Row]) -> list[str]:
    full, biases, classifier = rows["full"], rows["biases"], rows["classifier"]
    missed = []
    if biases.mean < classifier.mean + POINTS_ABOVE_CLASSIFIER:
        missed.append(f"biases reach {biases.mean:.1%}, the classifier alone {classifier.mean:.1%}")
    if biases.mean < full.mean - POINTS_BELOW_FULL:
        missed.append(f"biases reach {biases.mean:.1%}, full fine-tuning {full.mean:.1%}")
    times = full.plain.process_bytes / biases.roomy.process_bytes
    if times < TIMES_LESS:
        missed.append(f"full fine-tuning takes {times:.1f} times the bytes, not {TIMES_LESS:g}")
    return missed


def _print(rows: dict[str, Row]) -> None:
    columns = "".join(f"{f'{way} MiB':>12}{'s':>7}" for way in WAYS)
    print(f"{'':12}{'accuracy':>9}{'trained':>11}{columns}   of each seed")
    for method, row in rows.items():
        taken = "".join(
            f"{each.process_bytes / 2**20:12.1f}{each.cpu_seconds or 0:7.3f}"
            for each in (row.plain, row.roomy, row.half)
        )
        each = ", ".join(f"{value:.1%}" for value in row.accuracies)
        print(f"{method:12}{row.mean:9.1%}{row.plain.trained_parameters:11,}{taken}   {each}")
    if "LoRA" not in rows:
        print("LoRA        not installed: pip install peft")


if __name__ == "__main__":
    sys.exit(main())

"""Contribution analysis: what accuracy each bias and each part of a weight is worth, measured one at a time.

J. Lin et al., "On-Device Training Under 256KB Memory", NeurIPS 2022, section 3.2: the gain of the last k biases over
the classifier alone, and of a layer's weights at a ratio on top of biases, by fine-tuning. It is made once, on a server
and one data set, and its result serves others.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from torch_odt._whole_file import whole_file
from torch_odt.adapt.adaptation import Adaptation
from torch_odt.adapt.head import find_head
from torch_odt.adapt.scheme import RATIOS, Scheme, body_biases, updatable_layers, why_whole
from torch_odt.adapt.sparse_update import sparse_update_
from torch_odt.adapt.weights_digest import weights_digest
from torch_odt.errors import OdtWarning

TrainAndEvaluate = Callable[[nn.Module, Adaptation], float]
_NO_BATCHES = "yields no batches: give what can be gone through again and again, as a list or a DataLoader can"
_FORMAT, _VERSION = "torch_odt.contributions", 2


@dataclass(frozen=True)
class Contributions:
    """What parts of a model are worth, in accuracy.

    Attributes:
        classifier_accuracy: of training the classifier alone.
        reference_biases: so many of the last biases train wherever a weight's gain is measured.
        bias_gains: number of last biases -> accuracy above the classifier's alone; that of 0 is 0.
        weight_gains: layer and ratio -> accuracy above that of the reference biases.
        shapes: of these layers' weights, so that a scheme that is found notices another model.
    """

    classifier_accuracy: float
    reference_biases: int
    bias_gains: Mapping[int, float]
    weight_gains: Mapping[tuple[str, float], float]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if 0 not in self.bias_gains:
            raise ValueError("bias_gains lacks the gain of 0 biases, which is 0: {0: 0.0, ...}")

    def gain(self, scheme: Scheme) -> float:
        """The sum of its parts' gains: what is taken for a scheme's accuracy above the classifier's alone.

        Raises:
            KeyError: a part was not measured.
        """
        return self.bias_gains[scheme.biases] + sum(self.weight_gains[name, r] for name, r in scheme.weights.items())


@dataclass(frozen=True)
class FineTuning:
    """Trains a model for some epochs in plain PyTorch and returns its accuracy: a `train_and_evaluate`.

    Attributes:
        train, test: batches of inputs and classes, gone through as often as needed (a list, a DataLoader).
        epochs, lr, momentum: of stochastic gradient descent, whose rate falls to 0 as a cosine does.

    Raises:
        FloatingPointError: by the call, where a loss is not finite.
        ValueError: by the call, where there are no batches.

    Example:
        >>> batches = [(torch.randn(8, 4), torch.randint(2, (8,)))]
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> adaptation = sparse_update_(model, Scheme(1))
        >>> 0 <= FineTuning(batches, batches, epochs=1)(model, adaptation) <= 1
        True
    """

    train: Iterable[tuple[Tensor, Tensor]]
    test: Iterable[tuple[Tensor, Tensor]]
    epochs: int = 5
    lr: float = 0.05
    momentum: float = 0.9

    def __call__(self, model: nn.Module, adaptation: Adaptation) -> float:
        optimizer = torch.optim.SGD(adaptation.parameters(), lr=self.lr, momentum=self.momentum)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)
        model.train()
        for epoch in range(self.epochs):
            losses = []
            for x, y in self.train:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            if not losses:
                raise ValueError(f"train {_NO_BATCHES}")
            if not bool(torch.stack(losses).isfinite().all()):
                raise FloatingPointError(
                    f"a loss of epoch {epoch} is not finite: look for NaN in train, or take a lower lr than {self.lr}"
                )
            schedule.step()
        return accuracy(model, self.test)


def accuracy(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The share of samples whose class has the largest output, in evaluation mode."""
    model.eval()
    right = samples = 0
    with torch.no_grad():
        for x, y in batches:
            right += int((model(x).argmax(1) == y).sum())
            samples += len(y)
    if not samples:
        raise ValueError(f"test {_NO_BATCHES}")
    return right / samples


def measure_contributions(
    model: nn.Module,
    train_and_evaluate: TrainAndEvaluate,
    *,
    classes: int | None = None,
    head: str | None = None,
    layers: Sequence[str] | None = None,
    ratios: Sequence[float] = RATIOS,
    biases: Sequence[int] | None = None,
    reference_biases: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> Contributions:
    """Fine-tune once for each part of a model, from the same start, and note what it gains.

    Args:
        model: left as it is; each run trains a copy.
        train_and_evaluate: trains an adapted model and returns its accuracy; `FineTuning` is one.
        classes, head: as for `sparse_update_`.
        layers: whose weights are measured, by name; by default all linear layers and convolutions but the classifier.
        ratios: of their input channels, each measured for each layer; layers of other classes than torch's own train
            as a whole.
        biases: numbers of last biases; by default eight of them, spread evenly.
        reference_biases: so many train while weights are measured; by default the largest of `biases`.
        cache: a JSON file that takes each result as soon as there is one, and from which an interrupted analysis goes
            on. Use another file for other data or another way to train.
        seed: of torch's random numbers before each run: new classifiers are alike.

    Raises:
        ValueError: the cache is of another start, or a part is none of the model's.
        TypeError: `train_and_evaluate` returns no number.
        FloatingPointError: it raises one for the classifier alone or with biases. A layer's weights that diverge count
            as an accuracy of 0, by a warning.

    Example:
        >>> batches = [(torch.randn(8, 4), torch.randint(2, (8,)))]
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> found = measure_contributions(model, FineTuning(batches, batches, epochs=1), ratios=[1 / 2])
        >>> sorted(found.bias_gains), list(found.weight_gains)
        ([0, 1], [('0', 0.5)])
    """
    if isinstance(layers, str):
        raise TypeError(f"layers={layers!r}: give a list of names, [{layers!r}]")
    ratios = list(ratios)
    counts = _spread(len(body_biases(model, head=head))) if biases is None else sorted({0, *biases})
    reference = counts[-1] if reference_biases is None else reference_biases
    names = updatable_layers(model, head=head) if layers is None else list(layers)
    results = _Results(cache, _fingerprint(model, classes, head, seed))

    def train(scheme: Scheme) -> float:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            trained = copy.deepcopy(model)
            return train_and_evaluate(trained, sparse_update_(trained, scheme, classes=classes, head=head))

    def accuracy_of(scheme: Scheme) -> float:
        return results.get(scheme.key(), lambda: train(scheme))

    def accuracy_of_part(scheme: Scheme) -> float:
        def run() -> float:
            try:
                return train(scheme)
            except FloatingPointError as error:
                warnings.warn(f"{scheme.key()} counts as 0 %, because its training diverged: {error}", OdtWarning, 3)
                return 0.0

        return results.get(scheme.key(), run)

    measured = Scheme(weights=dict.fromkeys(names, 1.0)).check(model, head=head)
    ratios_of = {name: [1.0] if why_whole(model, name) else ratios for name in names}
    # A wrong number is to be found now, and not after hours of training.
    for ratio in ratios:
        Scheme(weights={"any": ratio})
    for count in (*counts, reference):
        Scheme(count).check(model, head=head)
    alone = accuracy_of(Scheme(0))
    bias_gains = {count: accuracy_of(Scheme(count)) - alone for count in counts}
    with_biases = accuracy_of(Scheme(reference))
    weight_gains = {
        (name, ratio): accuracy_of_part(Scheme(reference, {name: ratio})) - with_biases
        for name in names
        for ratio in ratios_of[name]
    }
    shapes = {name: tuple(layer.weight.shape) for name, layer in measured.items()}
    return Contributions(alone, reference, bias_gains, weight_gains, shapes)


def _spread(most: int, count: int = 8) -> list[int]:
    return sorted({0, *(round(most * i / count) for i in range(1, count + 1))})


def _fingerprint(model: nn.Module, classes: int | None, head: str | None, seed: int) -> str:
    """What an analysis starts from, in a few characters."""
    return weights_digest(model, prefix=f"{classes} {find_head(model, head)} {seed}")


class _Results:
    """Accuracies by scheme, in a file if there is to be one."""

    def __init__(self, path: str | os.PathLike[str] | None, start: str) -> None:
        self._path = None if path is None else Path(path)
        self._data: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "start": start, "accuracies": {}}
        if self._path is not None and self._path.exists():
            self._data = self._read(self._path, start)

    def get(self, key: str, run: Callable[[], float]) -> float:
        found: dict[str, float] = self._data["accuracies"]
        if key not in found:
            reached = run()
            if not isinstance(reached, SupportsFloat):
                raise TypeError(f"train_and_evaluate returned a {type(reached).__name__}: it returns an accuracy")
            found[key] = float(reached)
            self._write()
        return found[key]

    def _write(self) -> None:
        if self._path is not None:
            with whole_file(self._path) as partial:
                partial.write_text(json.dumps(self._data, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def _read(path: Path, start: str) -> dict[str, Any]:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} holds no contributions: {error}") from error
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (_FORMAT, _VERSION):
            raise ValueError(f"{path} holds no contributions of version {_VERSION}; give another file")
        if data.get("start") != start:
            raise ValueError(
                f"{path} is of another model, classifier, number of classes or seed: give another file, or remove it"
            )
        if not isinstance(data.get("accuracies"), dict):
            raise ValueError(f"{path} is damaged: it has no accuracies")
        return data

"""MiniLearn: a deployed network becomes a smaller one for the user's classes, trained on the device.

C. Profentzas, M. Almgren, O. Landsiedel, "MiniLearn: On-Device Learning for Low-Power IoT Devices", EWSN 2022. The
early layers stay as they are, in int8; their outputs are computed once for each sample and kept as int8. Of the layers
behind, the filters of largest L1 norm are kept, dequantised, trained in float32 on what was kept, and quantised again;
the fully connected layers are then trained a little longer on the new outputs, which makes good what that lost.

The steps are methods of `MiniLearn`, in this order, and `minilearn_` is all of them in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_odt.adapt.adaptation import Adapting, footprint
from torch_odt.adapt.chain import Chain, Cut
from torch_odt.adapt.head import find_head
from torch_odt.memory._units import format_bytes
from torch_odt.quant.feature_store import FeatureStore, store_features
from torch_odt.quant.filters import Criterion
from torch_odt.quant.int8_weights import (
    float_weights,
    restore_float_weights_,
    storable_layers,
    store_int8_weights_,
)
from torch_odt.quant.pruning import Pruning, keep_outputs_, prune_

Step = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MakeStep = Callable[[nn.Module, Callable[..., Tensor], torch.optim.Optimizer], Step]


class MiniLearn:
    """A network cut into what stays and what is trained anew for some of its classes; each step is a method.

    Choose it over `minilearn_` to train in a loop of your own, to look at what lies between the steps, or to leave some
    out. Call them in this order: `store_features`, `prune_`, (train `back`), `requantize_`, `head_features`, (train
    `head`), `finish_`.

    Args:
        model: a classifier of one input, changed in place. Layers whose weights are stored in 8 bits
            (`store_int8_weights_`) are what it was written for; they are dequantised where they train.
        example: a batch of inputs; only its shape and dtype are used.
        at: where to cut, by the name of the layer behind which the frozen front ends; see `Chain.cuts`.
        classes: which of the model's classes there are, in the order in which the smaller one counts them; all by
            default.

    Attributes:
        model: the same object.
        classes: as given.
        front: the model up to the cut, frozen, with int8 weights.
        back: what lies behind it, in float32; an ordinary module of features that trains.
        body, head: the back up to its fully connected layers, and these.

    Raises:
        ValueError: there is no such cut (those that there are are named), a class is none of the model's, or the model
            is no chain.

    Example:
        >>> layers = (nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5))
        >>> data = [(torch.rand(1, 8, 8), 2 + number % 2) for number in range(16)]
        >>> flow = MiniLearn(nn.Sequential(*layers), torch.ones(1, 1, 8, 8), at="1", classes=[2, 3])
        >>> store = flow.store_features(data)
        >>> flow.prune_(0.75).kept.keys()
        dict_keys(['2'])
        >>> optimizer = torch.optim.SGD(flow.back.parameters(), lr=0.1)
        >>> losses = train_on_features(flow.back, store, optimizer, epochs=2, batch_size=8)
        >>> flow.requantize_()
        ('2',)
        >>> store = flow.head_features(store)
        >>> losses = train_on_features(flow.head, store, torch.optim.SGD(flow.head.parameters(), lr=0.1), epochs=1)
        >>> flow.finish_()
        ('5',)
        >>> flow.model[2].codes.shape, flow.model(torch.ones(1, 1, 8, 8)).shape
        (torch.Size([4, 8, 3, 3]), torch.Size([1, 2]))
    """

    def __init__(self, model: nn.Module, example: Tensor, *, at: str, classes: Sequence[int] | None = None) -> None:
        self.model = model
        stored = restore_float_weights_(model)
        try:
            self._head_layer = find_head(model)
            self.classes = _checked_classes(classes, model.get_submodule(self._head_layer))
            chain = Chain(model, example[:1])
            cut = _cut_named(chain, at)
        except ValueError:
            store_int8_weights_(model, stored)
            raise
        head_cut = _head_cut(chain, cut)
        self.front = chain.segment(None, cut, training=False)
        self.back = chain.segment(cut, None)
        self.body = nn.Identity() if head_cut == cut else chain.segment(cut, head_cut)
        self.head = chain.segment(head_cut, None)
        self._feature_shape = (1, *cut.shape[1:])
        self._feature_dtype = cut.dtype
        self._to_int8(self.front)
        for parameter in self.front.parameters():
            parameter.requires_grad_(False)
        self.front.eval()

    def store_features(
        self, data: Any, folder: str | Path | None = None, *, per_channel: bool = False, batch_size: int = 32
    ) -> FeatureStore:
        """Run the front over samples and keep its outputs as int8; see `store_features`.

        Args:
            data: samples `(input, label)`, labels as the model counts its classes. In the store they are counted in
                the order of `classes`.

        Raises:
            ValueError: a label is none of the classes; or as `store_features`.
        """
        labelled = _Relabelled(data, self.classes)
        return store_features(self.front, labelled, folder, per_channel=per_channel, batch_size=batch_size)

    def prune_(self, ratio: float = 0.75, criterion: Criterion = "l1") -> Pruning:
        """Prune filters of the back, and keep the classifier's outputs of the classes alone; see `prune_`."""
        _check_ratio(ratio)
        example = torch.zeros(self._feature_shape, dtype=self._feature_dtype)
        pruning = prune_(self.back, example, ratio=ratio, criterion=criterion)
        keep_outputs_(self.model.get_submodule(self._head_layer), self.classes)
        return replace(pruning, after=footprint(self.back))

    def requantize_(self) -> tuple[str, ...]:
        """Store the weights of the trained body as int8 and freeze it; the names of its layers."""
        names = self._to_int8(self.body)
        for parameter in self.body.parameters():
            parameter.requires_grad_(False)
        self.body.eval()
        return names

    def head_features(self, store: FeatureStore, folder: str | Path | None = None) -> FeatureStore:
        """What the fully connected layers are given, from what the front made: the body runs once over the store."""
        return store_features(self.body, store, folder)

    def finish_(self) -> tuple[str, ...]:
        """Store the weights of the fully connected layers as int8, too; the model is in evaluation mode then."""
        names = self._to_int8(self.head)
        self.model.eval()
        return names

    def _to_int8(self, of: nn.Module) -> tuple[str, ...]:
        """The weights of a part's layers, in the model and in all parts that have them."""
        own = dict(of.named_modules())
        stored = store_int8_weights_(self.model, [name for name in storable_layers(self.model) if name in own])
        for part in (self.front, self.back, self.body, self.head):
            with Adapting(part) as adapting:
                layers = dict(part.named_modules())
                for name in stored:
                    if name in layers:
                        adapting.replace(name, self.model.get_submodule(name))
        return stored


def train_on_features(
    module: nn.Module,
    store: FeatureStore,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    batch_size: int = 16,
    loss_fn: Callable[..., Tensor] = F.cross_entropy,
    make_step: MakeStep | None = None,
    seed: int = 0,
) -> list[float]:
    """Train a module on stored features, batch by batch.

    Choose it for the plain loop; `store.batches` and a step of your own are all that another one needs.

    Args:
        module: of features; put into training mode.
        store: dequantised batch by batch. Batches are whole: what is left over waits for the next order.
        optimizer: of the module's parameters.
        epochs: so many times through the store, in another order each time.
        batch_size: samples of a step; all of the store's where it holds fewer.
        loss_fn: `loss_fn(outputs, labels)`.
        make_step: makes what is called with a batch and returns its loss: `odt.TrainStep` itself, or with its options
            bound by `functools.partial`, trains inside a budget; a plain step by default.
        seed: of the orders.

    Returns:
        The mean loss of each epoch.

    Raises:
        ValueError: epochs or batch_size is below 1.
        FloatingPointError: a loss is not finite; it says in which epoch.

    Example:
        >>> store = store_features(nn.Identity(), [(torch.tensor([1.0, x]), int(x > 0)) for x in (-1.0, 1.0)])
        >>> layer = nn.Linear(2, 2)
        >>> losses = train_on_features(layer, store, torch.optim.SGD(layer.parameters(), lr=1.0), epochs=20)
        >>> losses[-1] < losses[0]
        True
    """
    if epochs < 1 or batch_size < 1:
        raise ValueError(f"epochs={epochs}, batch_size={batch_size}: at least one each")
    draw = torch.Generator().manual_seed(seed)
    module.train()
    step = (make_step or _plain_step)(module, loss_fn, optimizer)
    means = []
    for epoch in range(epochs):
        losses = [
            step(features, labels).detach()
            for features, labels in store.batches(min(batch_size, len(store)), generator=draw, drop_last=True)
        ]
        means.append(float(torch.stack(losses).mean()))
        if not torch.isfinite(torch.tensor(means[-1])):
            raise FloatingPointError(f"the loss is {means[-1]} in epoch {epoch}: try a smaller learning rate")
    return means


@dataclass(frozen=True)
class MiniLearned:
    """What `minilearn_` made.

    Attributes:
        model: smaller, for the classes alone, weights in int8, in evaluation mode; the same object as before.
        classes: the model's old numbers of its outputs.
        pruning: what was pruned behind the front, and what was not and why.
        in_float: layers whose weights could not be stored in 8 bits.
        losses: mean loss of each epoch of the back's training.
        head_losses: of the fully connected layers' fine-tuning.
        samples: so many it was trained on.
        feature_bytes: what their int8 features and labels took.
        weight_bytes_before, weight_bytes: of the model, as it was given and now.
    """

    model: nn.Module
    classes: tuple[int, ...]
    pruning: Pruning
    in_float: tuple[str, ...]
    losses: tuple[float, ...]
    head_losses: tuple[float, ...]
    samples: int
    feature_bytes: int
    weight_bytes_before: int
    weight_bytes: int

    def __str__(self) -> str:
        rows = (
            ("classes", ", ".join(map(str, self.classes))),
            ("weights", f"{format_bytes(self.weight_bytes)} instead of {format_bytes(self.weight_bytes_before)}"),
            ("features", f"{format_bytes(self.feature_bytes)} for {self.samples} samples"),
            ("loss", f"{self.losses[0]:.3g} to {self.losses[-1]:.3g}, head {self.head_losses[-1]:.3g}"),
        )
        lines = [f"MiniLearn of {type(self.model).__name__}"] + [f"  {label:<10} {text}" for label, text in rows]
        lines += [f"  in float32 {', '.join(self.in_float)}"] if self.in_float else []
        return "\n".join([*lines, str(self.pruning)])


def minilearn_(
    model: nn.Module,
    data: Any,
    *,
    at: str,
    classes: Sequence[int] | None = None,
    ratio: float = 0.75,
    criterion: Criterion = "l1",
    epochs: int = 20,
    head_epochs: int = 5,
    batch_size: int = 16,
    optimizer: MakeOptimizer | None = None,
    make_step: MakeStep | None = None,
    folder: str | Path | None = None,
    per_channel: bool = False,
    seed: int = 0,
) -> MiniLearned:
    """Make a smaller network for the user's classes of a deployed one, and train it on the device; all in place.

    Choose it where a device needs some of the classes that a network knows, and holds few samples of them: inference
    takes less time and memory afterwards, and what is kept to train are int8 features. Choose `MiniLearn` for the
    single steps, and `odt.adapt` where the network is to stay as large as it is.

    Args:
        model, at, classes: see `MiniLearn`.
        data: samples `(input, label)`, labels as the model counts its classes.
        ratio, criterion: which share of the filters behind the cut goes, and which; see `prune_`.
        epochs, head_epochs: through the features in front of the back, and of its fully connected layers.
        batch_size: samples of a step.
        optimizer: makes one from parameters; SGD with rate 0.01 and momentum 0.9 by default.
        make_step: `odt.TrainStep` (with a budget bound to it by `functools.partial`), say; see `train_on_features`.
        folder: where the front's features are kept; in memory without one.
        per_channel: steps of stored features, see `store_features`.
        seed: of the orders of samples.

    Returns:
        What was made. `load_int8_weights_` reads the model's state_dict back.

    Raises:
        ValueError: as the single steps. Ratio, classes and the cut are looked at before anything is changed.

    Example:
        >>> layers = (nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5))
        >>> model = nn.Sequential(*layers)
        >>> data = [(torch.full((1, 8, 8), float(number % 2)), 2 + number % 2) for number in range(16)]
        >>> made = minilearn_(model, data, at="1", classes=[2, 3], epochs=2, head_epochs=1)
        >>> made.weight_bytes < made.weight_bytes_before / 8, made.samples
        (True, 16)
    """
    _check_ratio(ratio)
    before = footprint(model).weight_bytes
    make = optimizer or _sgd
    if not len(data):
        raise ValueError("the data have no samples of the classes: features of one at least are needed")
    flow = MiniLearn(model, data[0][0][None], at=at, classes=classes)
    store = flow.store_features(data, folder, per_channel=per_channel)
    pruning = flow.prune_(ratio, criterion)

    def train(module: nn.Module, features: FeatureStore, count: int) -> tuple[float, ...]:
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        options: dict[str, Any] = {"batch_size": batch_size, "make_step": make_step, "seed": seed}
        return tuple(train_on_features(module, features, make(parameters), epochs=count, **options))

    losses = train(flow.back, store, epochs)
    flow.requantize_()
    head_losses = train(flow.head, flow.head_features(store), head_epochs)
    flow.finish_()
    return MiniLearned(
        model,
        flow.classes,
        pruning,
        float_weights(model),
        losses,
        head_losses,
        len(store),
        store.nbytes,
        before,
        footprint(model).weight_bytes,
    )


class _Relabelled:
    """Samples with labels counted in the order of classes."""

    def __init__(self, data: Any, classes: Sequence[int]) -> None:
        self._data = data
        self._numbers = {each: number for number, each in enumerate(classes)}

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        sample = self._data[index]
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise TypeError(f"sample {index} is a {type(sample).__name__}: it must be a pair of a tensor and a label")
        label = int(sample[1])
        if label not in self._numbers:
            raise ValueError(f"sample {index} has the label {label}, which is none of {list(self._numbers)}")
        return sample[0], self._numbers[label]


def _check_ratio(ratio: float) -> None:
    if not 0 < ratio < 1:
        raise ValueError(f"ratio={ratio}: it is the share of the filters that go, between 0 and 1 without these")


def _checked_classes(classes: Sequence[int] | None, head: nn.Module) -> tuple[int, ...]:
    outputs = head.get_parameter("weight").shape[0]
    wanted = tuple(range(outputs) if classes is None else classes)
    wrong = [each for each in wanted if not 0 <= each < outputs]
    if wrong or not wanted or len(set(wanted)) < len(wanted):
        what = f"{wrong[0]} is none of its classes" if wrong else "each once, and one at least"
        raise ValueError(f"classes={list(wanted)}: the model has those of 0 to {outputs - 1}; {what}")
    return wanted


def _cut_named(chain: Chain, at: str) -> Cut:
    found = next((cut for cut in chain.cuts if cut.name == at), None)
    if found is None:
        places = ", ".join(f"{cut.name} ({cut.shape[1:]})" for cut in chain.cuts)
        raise ValueError(f"at={at!r}: the model cannot be cut there, but behind {places}")
    return found


def _head_cut(chain: Chain, cut: Cut) -> Cut:
    """In front of the fully connected layers at the end; of the last layer, where that is none."""
    later = [each for each in chain.cuts if each.position >= cut.position]
    for each in later:
        if not any(isinstance(module, nn.modules.conv._ConvNd) for module in chain.segment(each, None).modules()):
            return each
    return later[-1]


def _plain_step(module: nn.Module, loss_fn: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step(features: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(module(features), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

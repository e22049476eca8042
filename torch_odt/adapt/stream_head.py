"""A classifier that learns from a stream, one sample at a time (TinyOL).

H. Ren, D. Anicic, T. A. Runkler, "TinyOL: TinyML with Online-Learning on Microcontrollers", IJCNN 2021: a layer behind
a frozen network, or in the place of one of its layers, is trained while it is used. Of each sample the features are
standardised by running statistics, the class is predicted, and if there is a label, one step of plain SGD is made and
the sample is forgotten: memory does not grow. A label that was never seen becomes a class by one more row.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_odt.adapt.drift import FadingMean, PageHinkley
from torch_odt.adapt.frozen_features import FrozenFeatures, check_samples
from torch_odt.adapt.head import find_head
from torch_odt.adapt.linear import linear_of
from torch_odt.adapt.stream_layer import OnlineLayer, check_state, place_of_layer


@dataclass(frozen=True, slots=True)
class OnlineStep:
    """What was made of one sample.

    Attributes:
        prediction: its class as predicted before anything was learnt from it; None while no class was known.
        is_correct: whether that is its label.
        loss: the cross-entropy that the step was made for.
        is_new_class: the label was never seen before.
        is_drift: errors have become more: the test for drift gave its signal.
    """

    prediction: Hashable
    is_correct: bool
    loss: float
    is_new_class: bool
    is_drift: bool


@torch.inference_mode(False)
def online_head(
    model: nn.Module,
    sample: Tensor,
    *,
    replace: str | None = None,
    attach: str | None = None,
    classes: Iterable[Hashable] = (),
    lr: float | None = None,
    forgetting: float = 1.0,
    eps: float = 1e-3,
    fading: float = 0.998,
    drift: PageHinkley | None = None,
) -> OnlineHead:
    """Put a classifier that learns from a stream on a frozen network.

    Choose it where samples come one by one and cannot be stored, classes appear that nobody had foreseen, or what is
    seen changes in the course of time: nothing but the layer learns, and it takes its weights, two numbers for each
    feature, and the gradient of one step. Where samples can be stored and gone through several times, `bias_only_` and
    `tinytl_` learn more.

    Args:
        model: takes one tensor of samples. It is not changed, and runs in evaluation mode without gradients, up to the
            layer that is named, once for each sample.
        sample: one or more, `(n, ...)`, as they will come; nothing is learnt from it.
        replace: the head takes the place of this layer: its features are what the layer is given. By default that is
            the last linear layer, or the last convolution where none is linear.
        attach: ... or it goes behind this layer: its features are what the layer returns. "" is the whole model.
        classes: labels that are known to come. Others are added when they come.
        lr: of SGD, without momentum. By default 0.5 / features: standardised features have a squared length of their
            number, so that a step changes the scores alike however many there are.
        forgetting: how fast the statistics of the features forget, see `RunningStatistics`: 1 for a stream that stays
            what it is, 0.999 for one that drifts.
        eps: added to the variance of each feature.
        fading: how fast the accuracy that is shown forgets, see `FadingMean`.
        drift: the test for drift on errors; `PageHinkley()` by default.

    Returns:
        The head, which has not learnt anything: its weights are 0.

    Raises:
        ValueError: an option is out of its range; the layer does not exist or has no features.
        TypeError: `classes` is a single text.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> head = online_head(model, torch.ones(1, 8))
        >>> for number in range(100):
        ...     [step] = head.learn(torch.full((1, 8), number % 2.0), ["dark" if number % 2 else "light"])
        >>> head.predict(torch.zeros(1, 8)), head.classes
        (['light'], ('light', 'dark'))
        >>> head.to_module()(torch.ones(1, 8)).shape
        torch.Size([1, 2])
    """
    features = place_of_layer(model, sample, replace=replace, attach=attach, default=lambda: find_head(model))
    return OnlineHead(
        features,
        classes=classes,
        lr=0.5 / features.count if lr is None else lr,
        forgetting=forgetting,
        eps=eps,
        accuracy=FadingMean(fading),
        drift=drift,
    )


class OnlineHead(OnlineLayer):
    """A classifier on frozen features that learns from each sample after it has predicted its class.

    `online_head` makes one. It has a state for `Checkpointer(folder, others={"head": head})`.

    Attributes:
        accuracy: of the predictions, prequential and fading: `accuracy.value`.
    """

    layer: nn.Linear

    def __init__(
        self,
        features: FrozenFeatures,
        *,
        classes: Iterable[Hashable],
        lr: float,
        forgetting: float,
        eps: float,
        accuracy: FadingMean,
        drift: PageHinkley | None,
    ) -> None:
        super().__init__(features, lr=lr, forgetting=forgetting, eps=eps, drift=drift)
        self.accuracy = accuracy
        self._rows: dict[Hashable, int] = {}
        self.layer = self._layer_of_zeros(0)
        if isinstance(classes, str | bytes):
            raise TypeError(f"classes={classes!r} is one label: give a list of them, [{classes!r}]")
        if not isinstance(classes, Iterable):
            raise TypeError(f"classes={classes!r}: give the labels that are known to come, as list(range(n)), or none")
        for label in classes:
            self._add_class(_checked_label(label))

    @property
    def classes(self) -> tuple[Hashable, ...]:
        """The labels seen or named, in the order of the outputs."""
        return tuple(self._rows)

    def learn(self, x: Tensor, labels: Sequence[Hashable] | Tensor) -> list[OnlineStep]:
        """Predict each sample's class, then learn from its label, one sample after the other.

        A batch gives the very results that its samples give one by one.

        Args:
            x: samples, `(n, ...)`.
            labels: one for each; any hashable values, or a tensor of integers, `(n,)`.

        Returns:
            What was made of each sample.

        Raises:
            TypeError, ValueError: samples or labels are no such; or a sample's features are not finite, or the loss is
                not: those before it were learnt from.
        """
        check_samples(x)
        checked = _checked_labels(labels, len(x))
        steps: list[OnlineStep] = self._for_each(x, lambda number, features: self._learn_one(features, checked[number]))
        return steps

    def scores(self, x: Tensor) -> Tensor:
        """The outputs for samples, `(n, classes)`; nothing is learnt."""
        return self._outputs_of(x)

    def predict(self, x: Tensor) -> list[Hashable]:
        """The classes of samples; nothing is learnt.

        Raises:
            ValueError: no class is known yet.
        """
        if not self._rows:
            raise ValueError("no class is known yet: learn from samples first")
        labels = self.classes
        return [labels[row] for row in self.scores(x).argmax(1).tolist()]

    def start_from_replaced_layer(self, classes: Sequence[Hashable]) -> None:
        """Begin with what the layer that was replaced knows.

        Let `observe` see some samples first: its weights are for features as they are, and are brought to standardised
        ones by the statistics.

        Args:
            classes: the label of each of its outputs.

        Raises:
            ValueError: no linear layer was replaced, the head knows classes already, or nothing was observed.
        """
        if self._rows:
            raise ValueError(f"the head knows {len(self._rows)} classes already: start with a new one")
        layer = self._unfolded()
        labels = _checked_labels(classes, layer.out_features)
        if len(set(labels)) < len(labels):
            raise ValueError("two outputs have the same label")
        self.layer = layer
        self._rows = {label: row for row, label in enumerate(labels)}

    def to_module(self) -> nn.Module:
        """An ordinary module: a copy of the network with this head, whose outputs are `scores`, in evaluation mode.

        Standardisation is folded into the weights of one `nn.Linear`. Outputs are in the order of `classes`.

        Raises:
            ValueError: no class is known yet; or more of the network runs behind the layer, and cannot be cut off.
        """
        if not self._rows:
            raise ValueError("no class is known yet: learn from samples first")
        return self.features.with_end(self.statistics.fold_into(self.layer))

    def state_dict(self) -> dict[str, Any]:
        """Weights, classes, statistics and counts; the tensors are the head's own."""
        return self._state() | {"classes": list(self._rows), "accuracy": self.accuracy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of a head on the same features, as a copy.

        Raises:
            ValueError: it has another number of features, or is no state of an online head.
        """
        check_state(state, "online head", {"layer", "classes", "accuracy"})
        width = state["layer"]["weight"].shape[1]
        if width != self.features.count:
            raise ValueError(f"the state is of a head for {width} features; here there are {self.features.count}")
        self.layer = self._layer_of_zeros(len(state["classes"]))
        self._rows = {label: row for row, label in enumerate(state["classes"])}
        self.accuracy.load_state_dict(state["accuracy"])
        self._load(state)

    def __str__(self) -> str:
        accuracy = f"  accuracy   {self.accuracy.value:.1%} of the last predictions" if self.accuracy.values else ""
        return self._summary("online_head", f"{len(self._rows)} classes", [accuracy] if accuracy else [])

    def _learn_one(self, features: Tensor, label: Hashable) -> OnlineStep:
        row = self._rows.get(label)
        predicted = None
        if self._rows:
            scores = self._output_of(features)
            # Before anything has been changed.
            self._require_finite(float(scores.abs().max()), "output")
            predicted = int(scores.argmax())
        prediction = None if predicted is None else self.classes[predicted]
        is_correct = row is not None and predicted == row
        self.accuracy.update(float(is_correct))
        is_drift = self.drift.update(float(not is_correct))
        if row is None:
            self._add_class(label)
        self.statistics.update_(features[0])
        target = torch.tensor([self._rows[label]], device=features.device)
        loss = self._step(self.statistics.standardise(features), lambda scores: F.cross_entropy(scores, target))
        return OnlineStep(prediction, is_correct, loss, row is None, is_drift)

    def _add_class(self, label: Hashable) -> None:
        """One more output, whose score is 0 until it learns."""
        if label in self._rows:
            return
        weight, bias = (
            F.pad(p.detach(), (0, 0) * (p.dim() - 1) + (0, 1)) for p in (self.layer.weight, self.layer.bias)
        )
        self.layer = linear_of(weight, bias)
        self._rows[label] = len(self._rows)

    def _layer_of_zeros(self, rows: int) -> nn.Linear:
        weight = torch.zeros(rows, self.features.count, dtype=self.features.dtype, device=self.features.device)
        return linear_of(weight, torch.zeros_like(weight[:, 0]))


def _checked_labels(labels: Sequence[Hashable] | Tensor, count: int) -> list[Hashable]:
    if isinstance(labels, Tensor):
        if labels.dim() != 1 or labels.is_floating_point():
            raise TypeError(f"labels are a tensor of integers (n,), not of {labels.dtype} and {tuple(labels.shape)}")
        labels = labels.tolist()
    if isinstance(labels, str | bytes) or not isinstance(labels, Sequence | np.ndarray):
        raise TypeError(f"labels are a list with one for each sample, not a {type(labels).__name__}: write [label]")
    if len(labels) != count:
        raise ValueError(f"{len(labels)} labels for {count}: give one for each; samples are (n, ...)")
    return [_checked_label(label) for label in labels]


def _checked_label(label: Any) -> Hashable:
    """Tensors are equal to nothing but themselves, so that each would be a class of its own."""
    if isinstance(label, Tensor | np.generic):
        label = label.item()
    if not isinstance(label, Hashable):
        raise TypeError(f"a label is any hashable value (a text, a number, a tuple), not a {type(label).__name__}")
    if label != label:
        raise ValueError("a label is NaN, which equals no label, not even itself")
    return label

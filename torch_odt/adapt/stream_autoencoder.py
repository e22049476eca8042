"""An auto-encoder's layer that learns from a stream what is normal, and tells what is not (TinyOL).

H. Ren, D. Anicic, T. A. Runkler, "TinyOL: TinyML with Online-Learning on Microcontrollers", IJCNN 2021: nobody labels
what a device sees, but a sample can be its own target. What is reconstructed badly is an anomaly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_odt.adapt.arguments import require_whole_numbers
from torch_odt.adapt.drift import PageHinkley
from torch_odt.adapt.frozen_features import FrozenFeatures
from torch_odt.adapt.head import find_head
from torch_odt.adapt.linear import linear_of
from torch_odt.adapt.running_statistics import RunningStatistics
from torch_odt.adapt.stream_layer import OnlineLayer, check_state, place_of_layer

# Which are a part of its state.
_SETTINGS = ("deviations", "warm_up", "learn_anomalies", "clip_grad_norm")

Reconstructed = Literal["features", "input"]


@dataclass(frozen=True, slots=True)
class AnomalyStep:
    """What was made of one sample, judged before anything was learnt from it.

    Attributes:
        score: the mean squared error of its reconstruction.
        threshold: what scores of normal samples are below; infinite until so many have been seen.
        is_anomaly: whether the score is above.
        is_drift: anomalies have become more: the test for drift gave its signal.
        is_learnt: whether it was learnt from.
    """

    score: float
    threshold: float
    is_anomaly: bool
    is_drift: bool
    is_learnt: bool


@torch.inference_mode(False)
def online_autoencoder(
    model: nn.Module,
    sample: Tensor,
    *,
    replace: str | None = None,
    attach: str | None = None,
    reconstruct: Reconstructed = "features",
    bottleneck: int | None = None,
    lr: float = 0.05,
    clip_grad_norm: float | None = 1.0,
    deviations: float = 3.0,
    warm_up: int = 200,
    learn_anomalies: bool = True,
    forgetting: float = 1.0,
    score_forgetting: float = 0.998,
    eps: float = 1e-3,
    drift: PageHinkley | None = None,
) -> OnlineAutoencoder:
    """Put a layer on a frozen network that learns, without labels, to reconstruct what is normal in a stream.

    Choose it to notice what a device has not seen before, and to get used to where it is. There are two ways: what a
    classifier computes is narrowed to `bottleneck` numbers and widened again (`reconstruct="features"`); or the
    model is an auto-encoder whose last layer goes on learning (`reconstruct="input"`, as in the paper).

    Args:
        model: takes one tensor of samples. It is not changed, and runs in evaluation mode without gradients, up to the
            layer that is named, once for each sample.
        sample: one or more, `(n, ...)`, as they will come; nothing is learnt from it.
        replace: the layer takes the place of this one: its features are what that one is given. By default that is the
            last linear layer.
        attach: ... or it goes behind this one: its features are what that one returns. "" is the whole model.
        reconstruct: the standardised features, or the input as it is.
        bottleneck: so many numbers in between, as two linear layers; by default a quarter of the features, and none
            (one layer) where the input is reconstructed.
        lr: of SGD, without momentum. A larger one reconstructs better, until the loss becomes infinite.
        clip_grad_norm: gradients are shortened to this length, for a squared error knows no bounds, and one anomaly
            could undo everything; None for plain SGD.
        deviations: a score is an anomaly's where it is so many standard deviations above the mean of the scores.
        warm_up: so many samples are seen before any is called an anomaly. The scores of the first half of them tell
            nothing yet, and are not counted.
        learn_anomalies: whether statistics, layer and threshold learn from anomalies, too: then what stays becomes
            normal in time. Otherwise it is an anomaly for ever.
        forgetting, score_forgetting: how fast the statistics of features and of scores forget, see `RunningStatistics`.
        eps: added to the variance of each feature.
        drift: the test for drift, on whether samples are anomalies; `PageHinkley()` by default.

    Returns:
        The auto-encoder. A bottleneck is initialised as PyTorch does it; a single layer is 0.

    Raises:
        ValueError: an option is out of its range; the layer does not exist or has no features.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> watcher = online_autoencoder(model, torch.ones(1, 8), bottleneck=2)
        >>> steps = watcher.learn(torch.randn(300, 8))
        >>> bool(watcher.score(torch.full((1, 8), 9.0)) > watcher.threshold)
        True
    """
    if reconstruct not in get_args(Reconstructed):
        raise ValueError(f"reconstruct={reconstruct!r}: it is 'features' or 'input'")
    features = place_of_layer(model, sample, replace=replace, attach=attach, default=lambda: find_head(model))
    if bottleneck is None and reconstruct == "features":
        bottleneck = max(1, features.count // 4)
    target = features.count if reconstruct == "features" else sample[0].numel()
    if bottleneck is not None:
        require_whole_numbers(bottleneck=bottleneck)
    if bottleneck is not None and not 1 <= bottleneck < features.count:
        raise ValueError(f"bottleneck={bottleneck}: it is narrower than the {features.count} features, and at least 1")
    return OnlineAutoencoder(
        features,
        reconstruct=reconstruct,
        layer=_layers(features, bottleneck, target),
        scores=RunningStatistics(1, forgetting=score_forgetting),
        deviations=deviations,
        warm_up=warm_up,
        learn_anomalies=learn_anomalies,
        lr=lr,
        clip_grad_norm=clip_grad_norm,
        forgetting=forgetting,
        eps=eps,
        drift=drift,
    )


class OnlineAutoencoder(OnlineLayer):
    """Reconstructs samples from frozen features, and learns from each one after it has judged it.

    `online_autoencoder` makes one. It has a state for `Checkpointer(folder, others={"watcher": watcher})`.

    Attributes:
        reconstruct: "features" or "input".
        scores: the statistics of the scores that were learnt from.
        deviations, warm_up, learn_anomalies, clip_grad_norm: as for `online_autoencoder`; they may be changed.
    """

    layer: nn.Sequential

    def __init__(
        self,
        features: FrozenFeatures,
        *,
        reconstruct: Reconstructed,
        layer: nn.Sequential,
        scores: RunningStatistics,
        deviations: float,
        warm_up: int,
        learn_anomalies: bool,
        lr: float,
        clip_grad_norm: float | None,
        forgetting: float,
        eps: float,
        drift: PageHinkley | None,
    ) -> None:
        super().__init__(features, lr=lr, forgetting=forgetting, eps=eps, drift=drift)
        if not (deviations > 0 and warm_up >= 2):
            raise ValueError(f"deviations={deviations}, warm_up={warm_up}: give more than 0, and 2 samples or more")
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm={clip_grad_norm}: a length above 0, or None")
        self.reconstruct = reconstruct
        self.layer = layer
        self.scores = scores
        self.deviations = deviations
        self.warm_up = warm_up
        self.learn_anomalies = learn_anomalies
        self.clip_grad_norm = clip_grad_norm

    @property
    def threshold(self) -> float:
        """What a sample's score must exceed to be an anomaly's; infinite during the warm-up."""
        if self.scores.samples < self.warm_up - self.warm_up // 2:
            return float("inf")
        return float(self.scores.mean) + self.deviations * float(self.scores.variance) ** 0.5

    def learn(self, x: Tensor) -> list[AnomalyStep]:
        """Judge each sample, then learn from it, one sample after the other.

        A batch gives the very results that its samples give one by one.

        Args:
            x: samples, `(n, ...)`.

        Raises:
            TypeError, ValueError: they are no samples of the network; or a sample's features are not finite, or the
                loss is not: those before it were learnt from.
        """
        steps: list[AnomalyStep] = self._for_each(x, lambda number, features: self._learn_one(features, x[number]))
        return steps

    def score(self, x: Tensor) -> Tensor:
        """How badly samples are reconstructed, `(n,)`: compare it with `threshold`; nothing is learnt."""
        return torch.stack(self._for_each(x, lambda number, features: self._score_of(features, x[number])))

    def reconstruction(self, x: Tensor) -> Tensor:
        """What is made of samples, `(n, outputs)`: inputs, flattened, or features, not standardised."""
        outputs = self._outputs_of(x)
        return outputs if self.reconstruct == "input" else self.statistics.restore(outputs)

    def start_from_replaced_layer(self) -> None:
        """Begin with what the layer that was replaced knows: the auto-encoder's last one, which returns the input.

        Let `observe` see some samples first: its weights are for features as they are, and are brought to standardised
        ones by the statistics.

        Raises:
            ValueError: no linear layer was replaced, it does not return as many numbers as the input has, there is a
                bottleneck, or nothing was observed.
        """
        if len(self.layer) > 1:
            raise ValueError("there is a bottleneck: only a single layer can be what the replaced one was")
        layer, outputs = self._unfolded(), _linear(self.layer, 0).out_features
        if layer.out_features != outputs:
            raise ValueError(f"{self.features.layer!r} returns {layer.out_features} numbers; the input has {outputs}")
        self.layer = nn.Sequential(layer)

    def to_module(self) -> nn.Module:
        """An ordinary module: a copy of the network with this layer, whose output is `reconstruction`.

        Standardisation is folded into the weights. It is in evaluation mode.

        Raises:
            ValueError: more of the network runs behind the layer, and cannot be cut off.
        """
        folded = nn.Sequential(*self.layer)
        folded[0] = self.statistics.fold_into(_linear(folded, 0))
        if self.reconstruct == "features":
            folded[-1] = self.statistics.fold_behind(_linear(folded, -1))
        return self.features.with_end(folded)

    def state_dict(self) -> dict[str, Any]:
        """Weights, statistics, counts and settings; the tensors are its own."""
        settings = {name: getattr(self, name) for name in _SETTINGS}
        return self._state() | {"scores": self.scores.state_dict(), "settings": settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of an auto-encoder on the same features, as a copy.

        Raises:
            ValueError: it has another number of features, outputs or numbers in between, or is no state of one.
        """
        check_state(state, "online auto-encoder", {"layer", "scores", "settings"})
        shapes = {name: tuple(parameter.shape) for name, parameter in self.layer.named_parameters()}
        found = {name: tuple(tensor.shape) for name, tensor in state["layer"].items()}
        if found != shapes:
            raise ValueError(f"the state is of an auto-encoder with weights of {found}; here there are {shapes}")
        self._load(state)
        self.scores.load_state_dict(state["scores"])
        for name in _SETTINGS:
            setattr(self, name, state["settings"][name])

    def __str__(self) -> str:
        outputs = f"{_linear(self.layer, -1).out_features} outputs"
        if len(self.layer) > 1:
            outputs = f"{_linear(self.layer, 0).out_features} to {outputs}"
        scores = f"  scores     {float(self.scores.mean):.4g} in the mean, anomalies above {self.threshold:.4g}"
        return self._summary("online_autoencoder", outputs, [scores] if self.scores.samples else [])

    def _learn_one(self, features: Tensor, sample: Tensor) -> AnomalyStep:
        threshold = self.threshold
        score = self._score_of(features, sample)
        self._require_finite(float(score), "loss")
        is_anomaly = float(score) > threshold
        is_learnt = self.learn_anomalies or not is_anomaly
        is_drift = not math.isinf(threshold) and self.drift.update(float(is_anomaly))
        if is_learnt:
            if self.samples >= self.warm_up // 2:
                self.scores.update_(score.reshape(1).cpu())
            self.statistics.update_(features[0])
            standardised = self.statistics.standardise(features)
            target = self._target(standardised, sample)
            self._step(standardised, lambda output: F.mse_loss(output, target), clip_grad_norm=self.clip_grad_norm)
        return AnomalyStep(float(score), threshold, is_anomaly, is_drift, is_learnt)

    def _score_of(self, features: Tensor, sample: Tensor) -> Tensor:
        standardised = self.statistics.standardise(features)
        with torch.no_grad():
            return F.mse_loss(self.layer(standardised), self._target(standardised, sample))

    def _target(self, standardised: Tensor, sample: Tensor) -> Tensor:
        return standardised if self.reconstruct == "features" else sample.reshape(1, -1).to(standardised, copy=True)


def _layers(features: FrozenFeatures, bottleneck: int | None, target: int) -> nn.Sequential:
    if bottleneck is None:
        weight = torch.zeros(target, features.count, dtype=features.dtype, device=features.device)
        return nn.Sequential(linear_of(weight, torch.zeros_like(weight[:, 0])))
    layers = nn.Sequential(nn.Linear(features.count, bottleneck), nn.Linear(bottleneck, target))
    return layers.to(features.device, features.dtype)


def _linear(layers: nn.Sequential, place: int) -> nn.Linear:
    layer = layers[place]
    assert isinstance(layer, nn.Linear)
    return layer

"""What a layer that learns from a stream has, whatever it learns: frozen features, their statistics, a step of SGD."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_odt.adapt.arguments import require_numbers
from torch_odt.adapt.drift import PageHinkley
from torch_odt.adapt.frozen_features import FrozenFeatures, check_samples
from torch_odt.adapt.running_statistics import RunningStatistics
from torch_odt.errors import OdtWarning
from torch_odt.memory._units import format_bytes


class OnlineLayer:
    """The base of `OnlineHead` and `OnlineAutoencoder`.

    Attributes:
        features: the frozen network in front.
        statistics: of the features, by which they are standardised.
        layer: what learns, on standardised features.
        lr: the learning rate; it may be changed between samples.
        drift: the test for drift, and how often it has given the signal.
    """

    layer: nn.Module

    def __init__(
        self, features: FrozenFeatures, *, lr: float, forgetting: float, eps: float, drift: PageHinkley | None
    ) -> None:
        require_numbers(lr=lr)
        if not lr > 0:
            raise ValueError(f"lr={lr}: the learning rate must be above 0")
        if drift is not None and not isinstance(drift, PageHinkley):
            raise TypeError(f"drift={drift!r}: give a PageHinkley(...), or leave it out for the default one")
        self.features = features
        self.statistics = RunningStatistics(features.count, forgetting=forgetting, eps=eps, device=features.device)
        self.lr = lr
        self.drift = PageHinkley() if drift is None else drift
        # The digest of the network that a loaded state is for, until something runs.
        self._network: int | None = None

    @property
    def samples(self) -> int:
        """How many samples the statistics have seen."""
        return self.statistics.samples

    def observe(self, x: Tensor) -> None:
        """Let the statistics see samples, and nothing learn from them: for what comes without a label.

        Args:
            x: `(n, ...)`.

        Raises:
            TypeError, ValueError: they are no samples of the network, or one's features are not finite; those before
                it were seen.
        """
        self._for_each(x, lambda number, features: self.statistics.update_(features[0]))

    def features_of(self, x: Tensor) -> Tensor:
        """The features of samples, `(n, count)`, before standardisation; nothing is learnt."""
        return torch.cat(self._for_each(x, lambda number, features: features))

    def _outputs_of(self, x: Tensor) -> Tensor:
        """What the layer says of samples, `(n, outputs)`; nothing is learnt."""
        return torch.cat(self._for_each(x, lambda number, features: self._output_of(features)))

    def _output_of(self, features: Tensor) -> Tensor:
        with torch.no_grad():
            output: Tensor = self.layer(self.statistics.standardise(features))
        return output

    def _for_each(self, x: Tensor, do: Callable[[int, Tensor], Any]) -> list[Any]:
        """One sample after the other: a batch takes no more memory than its samples, and gives no other bits."""
        check_samples(x)
        if not len(x):
            raise ValueError("the batch is empty: give at least one sample")
        self._compare_networks()
        # Whoever only infers beside may do so in inference mode, in which nothing learns.
        with torch.inference_mode(False), self.features.running() as features_of:
            return [do(number, features_of(x[number : number + 1])) for number in range(len(x))]

    def _compare_networks(self) -> None:
        """Warn where a state was loaded, and the network does not have the weights that it was saved with."""
        network, self._network = self._network, None
        if network is not None and network != self.features.digest():
            warnings.warn(
                "the state that was loaded is of a layer on a network with other weights, to whose features it may "
                "mean nothing: load that network's weights, too",
                OdtWarning,
                stacklevel=4,
            )

    def _step(
        self, features: Tensor, loss_of: Callable[[Tensor], Tensor], *, clip_grad_norm: float | None = None
    ) -> float:
        """W <- W - lr dL/dW and b <- b - lr dL/db; returns the loss L from before."""
        parameters = list(self.layer.parameters())
        with torch.enable_grad():
            loss = loss_of(self.layer(features))
            gradients = torch.autograd.grad(loss, parameters)
        value = loss.item()
        self._require_finite(value, "loss")
        if clip_grad_norm is not None:
            factor = clip_grad_norm / max(float(nn.utils.get_total_norm(gradients)), clip_grad_norm)
            gradients = tuple(gradient.mul_(factor) for gradient in gradients)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.add_(gradient, alpha=-self.lr)
        return value

    def _require_finite(self, value: float, what: str) -> None:
        """Raises ValueError for what a sample gives in a layer whose weights have become too large."""
        if not math.isfinite(value):
            raise ValueError(
                f"the {what} of sample {self.samples} is {value}, and it was not learnt from: lr={self.lr} is too "
                f"large for {self.features.count} features"
            )

    def _unfolded(self) -> nn.Linear:
        """The replaced layer, on standardised features."""
        replaced = self.features.model.get_submodule(self.features.layer)
        if not self.features.is_replaced or not isinstance(replaced, nn.Linear):
            raise ValueError(
                f"there is no layer to start from: {self.features.layer!r} is no linear layer that was replaced"
            )
        if self.samples < 2:
            raise ValueError("observe some samples first: there are no statistics to standardise by")
        return self.statistics.unfold_from(replaced)

    def _state(self) -> dict[str, Any]:
        layer = {name: parameter.detach() for name, parameter in self.layer.named_parameters()}
        statistics, drift = self.statistics.state_dict(), self.drift.state_dict()
        state = {"layer": layer, "statistics": statistics, "drift": drift, "lr": self.lr}
        return state | {"network": self.features.digest()}

    def _load(self, state: Mapping[str, Any]) -> None:
        self.statistics.load_state_dict(state["statistics"])
        self.layer.load_state_dict(state["layer"])
        self.drift.load_state_dict(state["drift"])
        self.lr = state["lr"]
        self._network = state["network"]

    def _summary(self, method: str, outputs: str, more: list[str]) -> str:
        features = self.features
        where = f"in place of {features.layer!r}" if features.is_replaced else f"on {features.layer or 'the model'!r}"
        trained = sum(parameter.numel() for parameter in self.layer.parameters())
        own, all_of_it = (
            sum(parameter.nbytes for parameter in module.parameters()) for module in (self.layer, features.model)
        )
        lines = [
            f"{method} {where} of {type(features.model).__name__}",
            f"  trains     {trained:,} parameters, {features.count} features to {outputs}",
            f"  gradients  {format_bytes(own)} instead of {format_bytes(all_of_it)}, and no activations of the network",
            f"  samples    {self.samples:,}",
            *more,
            f"  drift      {self.drift.signals} signals",
        ]
        return "\n".join(lines)


def check_state(state: Mapping[str, Any], what: str, needed: set[str]) -> None:
    """Raise `ValueError` where a state is of something else."""
    missing = sorted((needed | {"statistics", "drift", "lr", "network"}) - set(state))
    if missing:
        raise ValueError(f"this is no state of an {what}: it lacks {', '.join(missing)}")


def place_of_layer(
    model: nn.Module, sample: Tensor, *, replace: str | None, attach: str | None, default: Callable[[], str]
) -> FrozenFeatures:
    """The features in front of the layer to replace, or behind the one to attach to."""
    if replace is not None and attach is not None:
        raise ValueError(f"replace={replace!r} and attach={attach!r}: a layer goes to one place")
    if attach is not None:
        return FrozenFeatures(model, sample, layer=attach, is_replaced=False)
    return FrozenFeatures(model, sample, layer=default() if replace is None else replace, is_replaced=True)

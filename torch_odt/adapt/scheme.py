"""What of a model a sparse update trains, as data: small enough to travel, and checked where it arrives."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from torch import nn

from torch_odt.adapt.adaptation import adapted_by
from torch_odt.adapt.bias_only import bias_names
from torch_odt.adapt.head import find_head, is_auxiliary
from torch_odt.adapt.layers import int8_hint
from torch_odt.adapt.sparse_layers import CONVOLUTIONS, SPARSE_TYPES, padding_of
from torch_odt.adapt.whole_weights import reader_of

RATIOS = (1 / 8, 1 / 4, 1 / 2, 1.0)
_FORMAT, _VERSION = "torch_odt.scheme", 1


@dataclass(frozen=True)
class Scheme:
    """A selection of what trains besides the classifier (TTE's update scheme).

    Made on a server, by `search_scheme` or by hand, it is saved to a file and applied by `sparse_update_` on devices,
    which never search.

    Attributes:
        biases: so many of the last biases train, not counting the classifier's. A BatchNorm's bias counts as that of
            the convolution in front of it.
        weights: layers whose weights train, by name, and the ratio of their input channels that do, in (0, 1].
        shapes: the shapes of these weights where the scheme was made, so that another model is noticed; may be empty.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
        >>> scheme = Scheme.for_model(model, biases=1, weights={"0": 1 / 4})
        >>> print(scheme)
        the last 1 biases, weights of 0 (1/4), classifier
    """

    biases: int = 0
    weights: Mapping[str, float] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.biases, bool) or not isinstance(self.biases, int) or self.biases < 0:
            raise ValueError(f"biases={self.biases!r}: give the number of last biases that train, 0 or more")
        if not isinstance(self.weights, Mapping):
            raise TypeError(f"weights is a {type(self.weights).__name__}: give each layer's ratio, {{name: ratio}}")
        for name, ratio in self.weights.items():
            if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
                raise ValueError(f"the ratio of {name!r} is {ratio!r}; it is a share of the input channels, in (0, 1]")
        object.__setattr__(self, "weights", {name: float(ratio) for name, ratio in self.weights.items()})

    @classmethod
    def for_model(
        cls, model: nn.Module, *, biases: int = 0, weights: Mapping[str, float] | None = None, head: str | None = None
    ) -> Scheme:
        """A scheme that notes the shapes of the model that it is made for, and fits it.

        Args:
            head: the classifier's name, as for `sparse_update_`.

        Raises:
            ValueError: the model has no such layers, or fewer biases.
        """
        scheme = cls(biases, dict(weights or {}))
        layers = scheme.check(model, head=head)
        return cls(biases, scheme.weights, {name: tuple(layer.weight.shape) for name, layer in layers.items()})

    def check(self, model: nn.Module, *, head: str | None = None) -> dict[str, Any]:
        """The layers whose weights train, by name; makes sure that this is a model that the scheme fits.

        Args:
            head: the classifier's name; by default it is the last linear layer.

        Raises:
            ValueError: a layer is missing, of another kind or shape, or is the classifier; or there are fewer biases.
        """
        classifier = find_head(model, head)
        modules = dict(model.named_modules())
        for name in self.weights:
            layer = modules.get(name)
            if layer is None or not isinstance(layer, SPARSE_TYPES):
                what = "the model has none of this name" if layer is None else f"it is a {type(layer).__name__}"
                known = ", ".join(updatable_layers(model, head=head)[:5])
                has = f"it has {known}, ..." if known else f"it has none of float weights{int8_hint(model)}"
                if earlier := list(adapted_by(model).values()):
                    has += f"; {earlier[-1]} has adapted the model: call merge() or unload() of what it returned first"
                raise ValueError(f"{name!r} is no linear layer or convolution: {what}; {has}")
            if "weight" not in layer._parameters:
                raise ValueError(f"{name!r} has a weight that is computed, as by a parametrization: leave it out")
            if self.weights[name] != 1 and (reason := why_whole(model, name)):
                raise ValueError(f"{name!r} {reason}: its weight trains as a whole (ratio 1) or not at all")
            if name == classifier:
                raise ValueError(f"{name!r} is the classifier, which trains anyway: leave it out of the scheme")
            shape = tuple(layer.weight.shape)
            if name in self.shapes and tuple(self.shapes[name]) != shape:
                raise ValueError(
                    f"the scheme was made for a {name!r} of {tuple(self.shapes[name])}; here it has {shape}"
                )
        most = len(body_biases(model, head=head))
        if self.biases > most:
            raise ValueError(f"the scheme trains the last {self.biases} biases; the model has {most} of them")
        return {name: modules[name] for name in self.weights}

    def key(self) -> str:
        """What trains, exactly: the same for schemes that select the same, whatever the order of their layers."""
        return json.dumps([self.biases, sorted(self.weights.items())])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file of JSON."""
        rows = {
            name: {"ratio": str(Fraction(ratio)), "shape": list(self.shapes.get(name, ())) or None}
            for name, ratio in self.weights.items()
        }
        data = {"format": _FORMAT, "version": _VERSION, "biases": self.biases, "weights": rows}
        Path(path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Scheme:
        """Read what `save` has written.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no scheme, or of a later version.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no scheme: {error}") from error
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ValueError(f"{path} is no scheme: it does not say that it is a {_FORMAT!r}")
        if data.get("version") != _VERSION:
            raise ValueError(f"{path} is a scheme of version {data.get('version')!r}; this release reads {_VERSION}")
        try:
            rows = {str(name): (float(Fraction(row["ratio"])), row["shape"]) for name, row in data["weights"].items()}
            shapes = {name: tuple(map(int, shape)) for name, (_, shape) in rows.items() if shape is not None}
            return cls(data["biases"], {name: ratio for name, (ratio, _) in rows.items()}, shapes)
        except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
            raise ValueError(f"{path} is a damaged scheme: {error!r}") from error

    def __str__(self) -> str:
        parts = [f"the last {self.biases} biases"] if self.biases else []
        if self.weights:
            ratios = [f"{name} ({Fraction(ratio).limit_denominator(64)})" for name, ratio in self.weights.items()]
            parts.append(f"weights of {', '.join(ratios)}")
        return ", ".join([*parts, "classifier"])


def updatable_layers(model: nn.Module, *, head: str | None = None) -> list[str]:
    """Names of the layers whose weights a scheme may name: linear layers and convolutions but for the classifier.

    Layers whose weight is computed from other parameters are not among them.
    """
    classifier = find_head(model, head)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, SPARSE_TYPES) and name != classifier and "weight" in module._parameters
    ]


def why_whole(model: nn.Module, name: str) -> str | None:
    """Why some of a layer's input channels cannot train alone, when another layer would stand in its place.

    Returns:
        The reason, to follow the layer's name; None where they can.
    """
    layer = model.get_submodule(name)
    base = next(kind for kind in SPARSE_TYPES if isinstance(layer, kind))
    computes = ("forward", "_conv_forward")
    is_own = all(getattr(type(layer), each, None) is getattr(base, each, None) for each in computes)
    if not is_own:
        return f"is a {type(layer).__name__}, which may compute more than torch's own layer"
    if reader := reader_of(model, name):
        return f"has a weight that is read by {reader}"
    if isinstance(layer, CONVOLUTIONS):
        try:
            padding_of(layer)
        except ValueError as error:
            return f"has {error}"
    return None


def body_biases(model: nn.Module, *, head: str | None = None) -> list[str]:
    """Names of the biases that a scheme counts, in the order in which the model registers them.

    Those of auxiliary classifiers are left out: they stand behind the body's, run elsewhere, and not at all once it is
    trained.
    """
    classifier = find_head(model, head)
    names = [name for name in bias_names(model) if name.rpartition(".")[0] != classifier]
    return [name for name in names if not is_auxiliary(name)]

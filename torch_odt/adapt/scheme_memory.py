"""What a scheme's training step takes: counted from shapes for a search, and by the simulator for its result."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_odt.adapt.fold_frozen_norms import FrozenNorms
from torch_odt.adapt.head import find_head
from torch_odt.adapt.layers import run_layers
from torch_odt.adapt.scheme import Scheme, body_biases
from torch_odt.adapt.sparse_layers import SPARSE_TYPES
from torch_odt.adapt.sparse_update import sparse_update_
from torch_odt.adapt.step_bytes import step_bytes

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
# Their backward pass needs a bit of each element.
_CLAMPS = (nn.ReLU, nn.ReLU6, nn.Hardtanh)
# Theirs needs shapes and constants alone.
_LINEAR_MAPS = (*SPARSE_TYPES, _BatchNorm, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Identity)


class MemoryModel(Protocol):
    """What `search_scheme` asks for a scheme's bytes."""

    def counted(self, scheme: Scheme) -> int:
        """About so many bytes; asked for thousands of schemes."""

    def simulated(self, scheme: Scheme) -> int:
        """Exactly so many bytes; asked for a few schemes."""


@dataclass(frozen=True)
class _Stage:
    """A layer as it runs: bytes of what goes in, comes out, and is kept for the gradient that goes on through it."""

    name: str
    input_bytes: int
    output_bytes: int
    kept_bytes: int
    overwrites: bool


class SchemeMemory:
    """Bytes of all that is not weights in a scheme's training step: activations, gradients, the optimizer's state.

    A simulation captures the step, which takes seconds. A search asks about thousands of schemes: `counted` walks over
    the layers of both passes with what is kept for the scheme, and is corrected by what that misses where single layers
    train alone: the first one, and in its own backward pass each other, by one simulation for each. It knows no
    branches, so a search checks its result by `simulated`.

    Args:
        model: left as it is.
        loss_fn, batch: as for `odt.plan`; the batch is a tuple of the model's inputs and the target.
        classes, head: as for `sparse_update_`.
        optimizer: makes the optimizer of what trains; by default SGD without momentum.
        norm: as for `sparse_update_`, which the search's result is to be given to with the same.

    Raises:
        ValueError: the batch is no such tuple, or the model has no classifier that can be found.

    Example:
        >>> model = nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 2))
        >>> memory = SchemeMemory(model, nn.functional.cross_entropy, (torch.randn(64, 100), torch.zeros(64).long()))
        >>> memory.counted(Scheme(1, {"0": 1 / 4})) < memory.counted(Scheme(1, {"0": 1 / 2}))
        True
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        batch: tuple[Tensor, ...],
        *,
        classes: int | None = None,
        head: str | None = None,
        optimizer: MakeOptimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        norm: FrozenNorms = "frozen",
    ) -> None:
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise ValueError("batch: give the model's inputs and the target, (x, y)")
        if not callable(optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}: give what makes one of parameters")
        self._model, self._loss_fn, self._batch = model, loss_fn, batch
        self._classes, self._head = classes, head
        self._make_optimizer = optimizer
        self._norm = norm
        self._classifier = find_head(model, head)
        self._biases = body_biases(model, head=head)
        self._modules = dict(model.named_modules())
        self._sizes = {name: parameter.nbytes for name, parameter in model.named_parameters(remove_duplicate=False)}
        item = batch[0].element_size() if batch[0].is_floating_point() else 4
        layers = run_layers(model, *batch[:-1])
        self._stages = [
            _stage(layer.name, layer.module, item * math.prod(layer.input_shape), item * math.prod(layer.output_shape))
            for layer in layers
        ]
        self._place = {stage.name: place for place, stage in reversed(list(enumerate(self._stages)))}
        self._moments = self._count_moments()
        self._simulated: dict[str, int] = {}
        self._corrections: dict[str, int] = {}

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(each.shape)) for each in self._batch)
        return f"SchemeMemory({type(self._model).__name__}, batch of {shapes})"

    def counted(self, scheme: Scheme) -> int:
        """Bytes by a walk over the layers, corrected by what that misses where single ones of them train alone."""
        first = self._correction(self._first_alone(scheme))
        own = {name: self._correction(Scheme(0, {name: 1.0})) for name in scheme.weights}
        return max(nbytes + own.get(name, first) for name, nbytes in self._walk(scheme))

    def _correction(self, alone: Scheme) -> int:
        if alone.key() not in self._corrections:
            walked = max(nbytes for _, nbytes in self._walk(alone))
            self._corrections[alone.key()] = self.simulated(alone) - walked
        return self._corrections[alone.key()]

    def simulated(self, scheme: Scheme) -> int:
        """Bytes by the simulator, for a copy of the model that is adapted and captured; remembered."""
        key = scheme.key()
        if key not in self._simulated:
            model = copy.deepcopy(self._model)
            with torch.random.fork_rng(devices=[]):
                adaptation = sparse_update_(model, scheme, classes=self._classes, head=self._head, norm=self._norm)
            optimizer = self._make_optimizer(adaptation.parameters())
            self._simulated[key] = step_bytes(model, self._loss_fn, self._batch, optimizer=optimizer)
        return self._simulated[key]

    def _walk(self, scheme: Scheme) -> list[tuple[str, int]]:
        """What is held at most in the forward pass, and in the backward pass of each layer, by its name."""
        if any(f"{name}.weight" not in self._sizes for name in scheme.weights):
            scheme.check(self._model, head=self._head)
        biases = self._last_biases(scheme)
        gradients = {name: round(self._sizes[f"{name}.weight"] * ratio) for name, ratio in scheme.weights.items()}
        start = self._place_of(self._first(scheme))
        saved = peak = 0
        backward: list[tuple[str, int]] = []
        for place, stage in enumerate(self._stages):
            other_bytes = 0 if stage.overwrites else stage.input_bytes
            ratio = 1.0 if stage.name == self._classifier else scheme.weights.get(stage.name, 0.0)
            own_bytes = round(ratio * stage.input_bytes)
            # All channels of the input are the input; some are a copy.
            copied_bytes = own_bytes if ratio < 1 else 0
            peak = max(peak, saved + stage.output_bytes + other_bytes + copied_bytes)
            if place < start:
                continue
            is_passed_on = place > start
            saved += own_bytes + (stage.kept_bytes if is_passed_on else 0)
            inside = stage.output_bytes + (other_bytes if is_passed_on else 0)
            backward.append((stage.name, saved + inside + gradients.get(stage.name, 0)))
        state = sum(gradients.values()) + sum(self._sizes[name] for name in biases)
        return [(name, nbytes + self._moments * state) for name, nbytes in (("", peak), *backward)]

    def _first(self, scheme: Scheme) -> str:
        """The layer at which back-propagation ends."""
        with_bias = (name.rpartition(".")[0] for name in self._last_biases(scheme))
        return min([*scheme.weights, *with_bias, self._classifier], key=self._place_of)

    def _last_biases(self, scheme: Scheme) -> list[str]:
        return self._biases[len(self._biases) - scheme.biases :]

    def _first_alone(self, scheme: Scheme) -> Scheme:
        """What back-propagates as far, by that layer's weight or, where this does not train, by as many biases."""
        first = self._first(scheme)
        if first in scheme.weights:
            return Scheme(0, {first: 1.0})
        return Scheme(0 if first == self._classifier else scheme.biases)

    def _place_of(self, name: str) -> int:
        return self._place.get(name, len(self._stages))

    def _count_moments(self) -> int:
        """How many tensors the optimizer keeps for each that trains."""
        probe = nn.Parameter(torch.zeros(2, 2))
        optimizer = self._make_optimizer([probe])
        probe.grad = torch.ones_like(probe)
        optimizer.step()
        state = optimizer.state[probe].values()
        return sum(isinstance(value, Tensor) and value.shape == probe.shape for value in state)


def _stage(name: str, module: nn.Module, input_bytes: int, output_bytes: int) -> _Stage:
    kept = 0 if isinstance(module, _LINEAR_MAPS) else input_bytes
    if isinstance(module, _CLAMPS):
        kept = -(-output_bytes // 32)
    overwrites = isinstance(module, (*_CLAMPS, _BatchNorm, nn.Identity))
    return _Stage(name, input_bytes, output_bytes, kept, overwrites)

"""What "the same training" means: three steps of plain PyTorch against three steps of ours, tensor by tensor.

Under `keep-all` everything is equal bit for bit. Otherwise each tensor is no further from a float64 run than twice
plain float32's own distance from it. Dropout draws the same masks in float32 and in float64 (a Bernoulli draw does not
depend on the dtype of what it fills), so the float64 run is a reference for models with random masks too.

A ReLU has two gradients at its kink, and an input that is 0 but for rounding gets the one or the other by the order in
which a sum was added up. What those inputs change is known from two more float64 runs, and allowed
(`train_beside_kinks`).

Everything is kept as NumPy arrays: they are outside the allocator whose count the tests look at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from models import Batch, ModelCase
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_odt.capture.rewrite import inexact_rewrites

STEPS = 3
SEED = 7
ROUNDING = 1e-6
BFLOAT16_ROUNDING = 2**-7
# The part of all gradients' (or parameters', or buffers') norm below which a tensor's own norm says nothing about its
# scale: the gradient of a bias in front of a BatchNorm is 0 in theory and rounding in practice.
NEGLIGIBLE = 1e-6
# Off where a test compares every bit and all gradients: what rounds otherwise, and what uses up gradients.
WITH_GRADIENTS = inexact_rewrites() | {"update_in_backward"}
# How far a sum of some thousand float32 products is off, in units of the root mean square of all such sums.
KINK = 3e-6

GRADIENTS = ("first gradients", "last gradients")

Arrays = dict[str, np.ndarray]


@dataclass
class Outcome:
    """What a training run left behind.

    Attributes:
        tensors: losses, gradients of the first and the last step, buffers and parameters at the end, by group and name.
        random_state: torch's random state at the end.
        step_peaks: the allocator's peak in each step above the level at the start; empty where nothing counts.
    """

    tensors: dict[str, Arrays] = field(default_factory=dict)
    random_state: np.ndarray | None = None
    step_peaks: list[int] = field(default_factory=list)


def train(
    model: nn.Module,
    batches: list[Batch],
    step: Callable[[Batch], torch.Tensor],
    count: Callable[[], contextlib.AbstractContextManager[list[int]]] | None = None,
) -> Outcome:
    """Run `step` over the batches and collect everything that training has changed."""
    outcome = Outcome()
    losses = []
    for index, batch in enumerate(batches):
        with count() if count else contextlib.nullcontext([]) as peaks:
            loss = step(batch)
        outcome.step_peaks += peaks
        losses.append(loss.detach())
        if index == 0:
            outcome.tensors["first gradients"] = _gradients(model)
    outcome.tensors["last gradients"] = _gradients(model)
    outcome.tensors["losses"] = {str(index): _array(loss) for index, loss in enumerate(losses)}
    outcome.tensors["parameters"] = {name: _array(parameter) for name, parameter in model.named_parameters()}
    outcome.tensors["buffers"] = {name: _array(buffer) for name, buffer in model.named_buffers()}
    outcome.random_state = torch.get_rng_state().numpy().copy()
    return outcome


class _ReluAbove(TorchDispatchMode):
    """ReLUs pass on what is above `threshold` times the root mean square of their input."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self._threshold = threshold

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in (torch.ops.aten.relu.default, torch.ops.aten.relu_.default):
            return func(*args, **(kwargs or {}))
        (x,) = args
        # The backward pass looks at the sign of the output, so that what is passed on has to be above 0.
        output = torch.where(x > self._threshold * x.square().mean().sqrt(), x.clamp(min=1e-300), 0.0)
        return x.copy_(output) if func is torch.ops.aten.relu_.default else output


def train_beside_kinks(case: ModelCase) -> tuple[Outcome, Outcome]:
    """Two float64 runs: a ReLU's inputs within float32's rounding of 0 are cut off in one, passed on in the other."""
    runs = []
    for threshold in (KINK, -KINK):
        with _ReluAbove(threshold):
            runs.append(train_plainly(case, torch.float64))
    return runs[0], runs[1]


def train_plainly(
    case: ModelCase, dtype: torch.dtype = torch.float32, autocast: bool = False, steps: int = STEPS
) -> Outcome:
    """Plain PyTorch's run of a case."""
    model = case.model().to(dtype)
    batches = [to_dtype(batch, dtype) for batch in case.batches(steps)]
    optimizer = make_optimizer(model.parameters())

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = case.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    torch.manual_seed(SEED)
    return train(model, batches, step)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of all exactness tests; its small learning rate keeps three steps well conditioned."""
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


def to_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its floating-point tensors in another dtype."""

    def convert(item: object) -> object:
        return item.to(dtype) if isinstance(item, torch.Tensor) and item.is_floating_point() else item

    args, kwargs = batch
    return tuple(map(convert, args)), {key: convert(value) for key, value in kwargs.items()}


def assert_identical(ours: Outcome, plain: Outcome) -> None:
    """Equal bit for bit, random state included."""
    different = [
        f"{group}: {name} (largest difference {_largest_difference(ours.tensors[group][name], array):.3g})"
        for group, name, array in _pairs(ours, plain)
        if not np.array_equal(ours.tensors[group][name], array, equal_nan=array.dtype.kind == "f")
    ]
    assert not different, f"{len(different)} tensors differ: " + "; ".join(different[:5])
    assert_same_random_state(ours, plain)


def assert_as_exact(
    ours: Outcome,
    plain: Outcome,
    reference: Outcome,
    rounding: float = ROUNDING,
    beside_kinks: Callable[[], tuple[Outcome, Outcome]] | None = None,
) -> None:
    """No further from the float64 reference than twice plain's own distance, plus `rounding`; integers are equal.

    `beside_kinks` is asked for two runs if something is further, and what they differ by is allowed as well.
    """
    too_far = _too_far(ours, plain, reference, rounding)
    if too_far and beside_kinks is not None:
        too_far = _too_far(ours, plain, reference, rounding, beside_kinks())
    assert not too_far, f"{len(too_far)} tensors are too far from float64: " + "; ".join(too_far[:5])


def _too_far(
    ours: Outcome,
    plain: Outcome,
    reference: Outcome,
    rounding: float,
    beside_kinks: tuple[Outcome, Outcome] | None = None,
) -> list[str]:
    too_far = []
    negligible = {group: NEGLIGIBLE * _group_norm(arrays) for group, arrays in reference.tensors.items()}
    for group, name, expected in _pairs(ours, reference):
        actual, usual = ours.tensors[group][name], plain.tensors[group][name]
        if expected.dtype.kind != "f":
            if not np.array_equal(actual, expected):
                too_far.append(f"{group}: {name} is {actual.ravel()[:4]}, not {expected.ravel()[:4]}")
            continue
        scale = max(_norm(expected), negligible[group])
        distance, allowed = _norm(actual - expected), 2 * _norm(usual - expected) + rounding * scale
        if beside_kinks is not None:
            below, above = (run.tensors[group][name] for run in beside_kinks)
            allowed += _norm(above - below)
        if not distance <= allowed:
            too_far.append(f"{group}: {name} is {distance / scale:.2e} away, allowed {allowed / scale:.2e}")
    return too_far


def without_gradients(outcome: Outcome) -> Outcome:
    """What a step leaves that updates parameters in its backward pass."""
    kept = {group: arrays for group, arrays in outcome.tensors.items() if group not in GRADIENTS}
    return replace(outcome, tensors=kept)


def assert_same_random_state(ours: Outcome, plain: Outcome) -> None:
    """As many random numbers were drawn as plain PyTorch draws, from the same generator."""
    assert np.array_equal(ours.random_state, plain.random_state), "the random state differs after training"


def _pairs(ours: Outcome, expected: Outcome) -> Iterable[tuple[str, str, np.ndarray]]:
    for group, arrays in expected.tensors.items():
        assert list(ours.tensors[group]) == list(arrays), f"other {group} than expected"
        for name, array in arrays.items():
            yield group, name, array


def _gradients(model: nn.Module) -> Arrays:
    return {name: _array(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy().copy()


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype(np.float64).ravel()))


def _group_norm(arrays: Arrays) -> float:
    return float(np.linalg.norm([_norm(array) for array in arrays.values() if array.dtype.kind == "f"]))


def _largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0.0)) if a.shape == b.shape else np.inf

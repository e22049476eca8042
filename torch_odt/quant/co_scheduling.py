"""Co-scheduling (Mandheling): each layer goes where it is cheapest, integers or float32, by what it takes here.

D. Xu et al., MobiCom 2022, place each operator on the CPU or on the accelerator for integers, and count what it takes
to go from the one to the other. Here both are the same cores: a layer of few channels, or one that lies alone between
float32 neighbours, may take longer in integers than in float32.

Layers are taken for a chain in the order of their first call. For a chain the choice is the best one of all, by dynamic
programming over where each layer runs and in which form its output leaves it. What lies between layers is not counted.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_odt.cache import Cache, CacheOption
from torch_odt.capture.machine import machine_name, settings_name
from torch_odt.quant.niti import niti_
from torch_odt.quant.niti_layers import NitiLayer
from torch_odt.quant.niti_numbers import Scaled, as_carrier

FLOAT, INTEGERS = "float32", "integers"
REPEATS = 7
WARM_UPS = 3


@dataclass(frozen=True)
class LayerCost:
    """What a forward and backward pass of one layer takes, in seconds.

    Attributes:
        name: of the layer.
        float32_seconds: as an ordinary layer.
        integer_seconds: in integers, by the form of its input and of its output: ("integers", "float32"), say.
        takes_integers: whether its input comes in integers where the layer in front computes in them.
        gives_integers: whether its output leaves in integers where the next layer computes in them.
    """

    name: str
    float32_seconds: float
    integer_seconds: dict[tuple[str, str], float]
    takes_integers: bool
    gives_integers: bool


@dataclass(frozen=True)
class Placement:
    """Where each layer goes; `print` it for the table.

    Attributes:
        costs: of the layers, in the order of their first call.
        places: "integers" or "float32" for each.
        seconds: what all layers take, so placed.
        integer_seconds, float32_seconds: with all in integers, and with all in float32.
    """

    costs: tuple[LayerCost, ...]
    places: tuple[str, ...]
    seconds: float
    integer_seconds: float
    float32_seconds: float

    @property
    def float32(self) -> list[str]:
        """The layers that are better left: for `niti_(keep_float32=...)`."""
        return [cost.name for cost, place in zip(self.costs, self.places, strict=True) if place == FLOAT]

    def __str__(self) -> str:
        lines = [f"{'layer':<32}{'float32':>10}{'integers':>10}{'converted':>11}  goes to"]
        for cost, place in zip(self.costs, self.places, strict=True):
            alone = cost.integer_seconds[FLOAT, FLOAT]
            inside = min(cost.integer_seconds.values())
            lines.append(
                f"{cost.name:<32}{1e3 * cost.float32_seconds:>7.2f} ms{1e3 * inside:>7.2f} ms{1e3 * alone:>8.2f} ms  "
                f"{place}"
            )
        lines.append(
            f"together {1e3 * self.seconds:.1f} ms; all in float32 {1e3 * self.float32_seconds:.1f} ms, "
            f"all in integers {1e3 * self.integer_seconds:.1f} ms"
        )
        return "\n".join(lines)


def measure_placement(
    model: nn.Module, inputs: Tensor, *, batch_norm: str = "float32", cache: CacheOption = None, **options: Any
) -> Placement:
    """Measure every layer in integers and in float32, conversions included, and choose.

    When to choose it: before `niti_`, for a model with layers of few channels; on the device that trains, with nothing
    else running.

    Args:
        model: of float32, in the layout in which it would train; it is left as it is.
        inputs: a batch.
        batch_norm, options: as `niti_` will be given them.
        cache: where measurements are kept, see `Cache`; False measures anew.

    Raises:
        ValueError: `niti_` refuses the model.

    Example:
        >>> from torch import nn
        >>> import torch_odt as odt
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        >>> placement = odt.quant.measure_placement(model, torch.randn(2, 3, 8, 8), cache=False)
        >>> training = odt.quant.niti_(model, keep_float32=placement.float32) if len(placement.float32) < 2 else None
        >>> len(placement.places)
        2
    """
    converted = copy.deepcopy(model)
    training = niti_(converted, batch_norm=batch_norm, **options)  # type: ignore[arg-type]
    seen = _seen(converted, inputs)
    kept = Cache.of_value(cache)
    key = f"niti layers; {machine_name()}; {settings_name()}; {torch.get_num_threads()} threads"
    known = kept.load_profile(key)
    fresh: dict[str, dict[str, float]] = {}
    costs = []
    for name, call in seen.items():
        layer, made = model.get_submodule(name), training.layers()[name]
        described = f"{layer!r} {tuple(call.input_shape)} in parts of {made.part_bytes}"
        seconds = known.get(described) or fresh.get(described)
        if seconds is None:
            seconds = fresh[described] = _measured(layer, made, call.input_shape)
        integers = {(a, b): seconds[f"{a} {b}"] for a in (FLOAT, INTEGERS) for b in (FLOAT, INTEGERS)}
        costs.append(LayerCost(name, seconds[FLOAT], integers, call.takes_integers, not made.to_float))
    if fresh:
        kept.save_profile(key, fresh)
    return placed(costs)


def placed(costs: list[LayerCost]) -> Placement:
    """The cheapest places for a chain of layers.

    Example:
        >>> slow = {(a, b): 3.0 for a in (FLOAT, INTEGERS) for b in (FLOAT, INTEGERS)}
        >>> placed([LayerCost("layer", 1.0, slow, False, False)]).places
        ('float32',)
    """
    places, seconds = _cheapest(costs, (FLOAT, INTEGERS))
    return Placement(
        tuple(costs), places, seconds, _cheapest(costs, (INTEGERS,))[1], sum(cost.float32_seconds for cost in costs)
    )


def _cheapest(costs: list[LayerCost], allowed: tuple[str, ...]) -> tuple[tuple[str, ...], float]:
    """By dynamic programming over the form in which a tensor leaves a layer, which the next one has to take."""
    reached: dict[str, tuple[float, tuple[str, ...]]] = {FLOAT: (0.0, ())}
    for index, cost in enumerate(costs):
        last = index == len(costs) - 1
        following: dict[str, tuple[float, tuple[str, ...]]] = {}
        for form, (before, path) in reached.items():
            for place in allowed:
                if form == INTEGERS and place == FLOAT:
                    continue
                gives = [FLOAT]
                if place == INTEGERS and cost.gives_integers and not last and costs[index + 1].takes_integers:
                    gives.append(INTEGERS)
                for leaving in gives:
                    spent = cost.float32_seconds if place == FLOAT else cost.integer_seconds[form, leaving]
                    total = before + spent
                    if leaving not in following or total < following[leaving][0]:
                        following[leaving] = (total, (*path, place))
        reached = following
    seconds, path = reached[FLOAT]
    return path, seconds


@dataclass(frozen=True)
class _Call:
    input_shape: torch.Size
    takes_integers: bool


def _seen(model: nn.Module, inputs: Tensor) -> dict[str, _Call]:
    """What each converted layer is given, in the order of the calls."""
    seen: dict[str, _Call] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            is_scaled = isinstance(arguments[0], Scaled)
            given = arguments[0].mantissas if is_scaled else arguments[0]
            seen.setdefault(name, _Call(given.shape, is_scaled))

        return hook

    handles = [
        module.register_forward_pre_hook(note(name))
        for name, module in model.named_modules()
        if isinstance(module, NitiLayer)
    ]
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _measured(layer: nn.Module, made: NitiLayer, shape: torch.Size) -> dict[str, float]:
    """Seconds of both passes, in float32 and in integers with each form of input and output."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        values = torch.randn(shape)
    if values.dim() == 4:
        values = values.contiguous(memory_format=torch.channels_last)
    plain = copy.deepcopy(layer).requires_grad_()
    found = {FLOAT: _seconds(plain, values.clone().requires_grad_())}
    for form in (FLOAT, INTEGERS):
        for leaving in (FLOAT, INTEGERS):
            integer: NitiLayer = copy.deepcopy(made).train()
            integer.to_float = leaving == FLOAT
            given: Tensor | Scaled = values.clone().requires_grad_()
            if form == INTEGERS:
                mantissas = values.mul(32).clamp_(-127, 127).to(torch.int8)
                given = Scaled(as_carrier(mantissas).requires_grad_(), torch.full((1,), -5.0, requires_grad=True))
            found[f"{form} {leaving}"] = _seconds(integer, given)
    return found


def _seconds(layer: nn.Module, given: Tensor | Scaled) -> float:
    """The quickest of some forward and backward passes: what else runs makes passes slower, never quicker."""
    taken = []
    for repeat in range(WARM_UPS + REPEATS):
        layer.zero_grad()
        for tensor in (given,) if isinstance(given, Tensor) else given:
            tensor.grad = None
        start = time.perf_counter()
        output = layer(given)
        if isinstance(output, Tensor):
            output.backward(output.detach())
        else:
            torch.autograd.backward(list(output), [each.detach() for each in output])
        if repeat >= WARM_UPS:
            taken.append(time.perf_counter() - start)
        if isinstance(layer, NitiLayer):
            state = layer.gradient_rescaling
            state.data.copy_(state.grad)  # type: ignore[arg-type]
    return min(taken)

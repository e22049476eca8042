"""How an optimizer of torch changes int8 weights, in its step or in the backward pass.

A copy of all weights in float32 would be as large as the model was before it was converted, and would be read and
written in main memory. What SGD does without momentum is one pass over gradient and weight, and needs no copy. For
other optimizers some layers at a time are float32 for a moment, which stay in a cache.

In the backward pass a layer's gradient is used up as soon as it is there. All of them would be as large as the model
in float32. What is taken off the weight in one pass is not even written to memory, see `in_backward.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_odt.capture.parameter_updates import INT8
from torch_odt.capture.update_in_backward import UpdateRule
from torch_odt.execute.one_operator import Number, OperatorUse
from torch_odt.execute.optimizer_updates import IN_STEP, StepNotice
from torch_odt.quant.in_backward import USED_UP, InBackward
from torch_odt.quant.layer import Descent, arguments_of_descent, pass_back_and_descend
from torch_odt.quant.modules import Int8Layer

# What these do to a parameter depends on no other one, so that a step may be taken in parts.
PARTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
_TAKEN = "_torch_odt_taken"
PART_WEIGHTS = 1 << 20  # four megabytes in float32


class Int8Updates:
    """Hooks that change the int8 weights of layers as an optimizer's step does.

    Args:
        optimizer: whose step is meant; one of another class than those of torch.optim takes all layers at once.
        layers: whose weights are int8 alone.
        in_backward: update a layer in the backward pass, when its gradient is there, and drop the gradient. The
            optimizer is one of `PARTWISE` then.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layers: list[Int8Layer], in_backward: bool = False) -> None:
        for layer in layers:
            earlier = getattr(layer.weight_slot, USED_UP, None)
            if isinstance(earlier, InBackward):
                # Of an optimizer whose step is taken no more; else both would update.
                earlier.release()
        self._optimizer = optimizer
        self._layers = layers
        self._in_parts = type(optimizer) in PARTWISE
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._place_of: dict[int, tuple[dict[str, Any], int]] = {}
        # They look at gradients of int8 weights alone, which `TrainStep` may have used up by then.
        self._handles = [
            optimizer.register_step_pre_hook(StepNotice(self._before)),
            optimizer.register_step_post_hook(StepNotice(self._after)),
        ]
        in_step = vars(optimizer).setdefault(IN_STEP, {})
        in_step.update({id(layer.weight_slot): _InStep(layer, self._descent_of) for layer in layers})
        # Where a step that fails is undone: what is left of it is not to be kept.
        vars(optimizer).setdefault(_TAKEN, []).append(self._gradients)
        self._in_backward: list[InBackward[Descent]] = []
        for layer in layers if in_backward else ():
            slot = layer.weight_slot
            if slot.requires_grad:
                self._handles.append(slot.register_post_accumulate_grad_hook(self._hook_of(layer)))
                self._in_backward.append(InBackward(slot, partial(self._descent_of, layer), self.stop))

    def stop(self) -> None:
        """The optimizer is as before."""
        of_optimizer = vars(self._optimizer)
        slots = {id(layer.weight_slot) for layer in self._layers}
        in_step = {slot: each for slot, each in of_optimizer.pop(IN_STEP, {}).items() if slot not in slots}
        taken = [gradients for gradients in of_optimizer.pop(_TAKEN, []) if gradients is not self._gradients]
        of_optimizer.update(({IN_STEP: in_step} if in_step else {}) | ({_TAKEN: taken} if taken else {}))
        while self._handles:
            self._handles.pop().remove()
        while self._in_backward:
            self._in_backward.pop().stop()

    def _hook_of(self, layer: Int8Layer) -> Callable[[Tensor], None]:
        def update(slot: Tensor) -> None:
            if slot.grad is not None:
                self._update([layer])
                slot.grad = None

        return update

    def _before(self) -> None:
        # Of a step that has failed.
        self._gradients.clear()
        due = [layer for layer in self._layers if layer.weight_slot.grad is not None]
        if not self._in_parts:
            for layer in due:
                layer.unpack_()
            return
        self._update(due)
        # The step proper is to leave them as they are.
        for layer in due:
            gradient: Tensor = layer.weight_slot.grad  # type: ignore[assignment]
            self._gradients.append((layer.weight_slot, gradient))
            layer.weight_slot.grad = None

    def _after(self) -> None:
        if not self._in_parts:
            for layer in self._layers:
                if layer.weight_slot.grad is not None:
                    # What an optimizer has put there may be a tensor that it keeps.
                    layer.weight_slot.data = layer.weight_slot.data.clone()
                    layer.pack_()
        while self._gradients:
            slot, gradient = self._gradients.pop()
            slot.grad = gradient

    def _update(self, due: list[Int8Layer]) -> None:
        """What the optimizer's step does to layers that have gradients."""
        others = []
        for layer in due:
            descent = self._descent_of(layer)
            if descent is None:
                others.append(layer)
            else:
                gradient: Tensor = layer.weight_slot.grad  # type: ignore[assignment]
                layer.descend_(gradient, descent.rate, descent.weight_decay)
        for part in _parts_of(others):
            with _only(self._optimizer, {id(layer.weight_slot) for layer in part}) as step:
                try:
                    for layer in part:
                        layer.unpack_()
                    step()
                    for layer in part:
                        layer.pack_()
                finally:
                    for layer in part:
                        layer.discard_()

    def _descent_of(self, layer: Int8Layer) -> Descent | None:
        """What becomes of a layer, where that is no more than gradient descent; as the optimizer's options are now."""
        if type(self._optimizer) is not torch.optim.SGD:
            return None
        # A fused step unscales gradients itself, by what a scaler notes at the optimizer.
        if any(getattr(self._optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            return None
        group = self._group_of(layer.weight_slot)
        if group is None or group["momentum"] != 0 or group["maximize"] or group.get("fused"):
            return None
        tensors = (layer.weight, layer.rounding, layer.saturated)
        return Descent(float(group["lr"]), float(group["weight_decay"]), *tensors)

    def _group_of(self, slot: Tensor) -> dict[str, Any] | None:
        """The optimizer's group that holds a parameter now; places are found anew where it has left its own."""
        groups = self._optimizer.param_groups
        group, index = self._place_of.get(id(slot), ({}, 0))
        members = group.get("params", ())
        if index < len(members) and members[index] is slot and any(each is group for each in groups):
            return group
        self._place_of = {id(each): (group, i) for group in groups for i, each in enumerate(group["params"])}
        return self._place_of.get(id(slot), (None, 0))[0]


class _InStep:
    """An int8 weight's update inside of a planned step, where it is plain descent."""

    def __init__(self, layer: Int8Layer, descent_of: Callable[[Int8Layer], Descent | None]) -> None:
        self._layer, self._descent_of = layer, descent_of
        self.parameter = layer.weight_slot

    def changed(self) -> list[Tensor]:
        return [self._layer.weight, self._layer.rounding, self._layer.saturated]

    def rule(self, parameter: str) -> UpdateRule | None:
        prefix = parameter.rpartition("weight_slot")[0]
        return None if self._descent_of(self._layer) is None else UpdateRule(INT8, (), into=f"{prefix}weight")

    def update(self, gradient: Tensor) -> None:
        descent = self._descent_of(self._layer)
        assert descent is not None
        self._layer.descend_(gradient, descent.rate, descent.weight_decay)

    def fused(self, *arguments: Any) -> tuple[Tensor, None, Tensor]:
        descent = self._descent_of(self._layer)
        assert descent is not None
        of_input, of_bias = pass_back_and_descend(arguments, descent)
        return of_input, None, of_bias

    def fused_operator(self, arguments: tuple[Any, ...], number: Callable[[str], Number]) -> OperatorUse:
        counters = (self._layer.rounding, self._layer.saturated)
        descent = arguments_of_descent(arguments, counters, number("lr"), number("weight_decay"))
        return OperatorUse(torch.ops.torch_odt.int8_layer_descend_.default, descent, (0, 2))


def _parts_of(layers: list[Int8Layer]) -> Iterator[list[Int8Layer]]:
    """Layers one after another, of `PART_WEIGHTS` weights at most or one alone."""
    part: list[Int8Layer] = []
    weights = 0
    for layer in layers:
        if part and weights + layer.weight.numel() > PART_WEIGHTS:
            yield part
            part, weights = [], 0
        part.append(layer)
        weights += layer.weight.numel()
    if part:
        yield part


@contextmanager
def _only(optimizer: torch.optim.Optimizer, wanted: set[int]) -> Iterator[Callable[[], Any]]:
    """For the time of a context the optimizer has these parameters alone; gives its step without hooks."""
    groups = optimizer.param_groups
    step: Any = type(optimizer).step
    some = [
        {**group, "params": [parameter for parameter in group["params"] if id(parameter) in wanted]} for group in groups
    ]
    optimizer.param_groups = [group for group in some if group["params"]]
    try:
        yield lambda: getattr(step, "__wrapped__", step)(optimizer)
    finally:
        optimizer.param_groups = groups

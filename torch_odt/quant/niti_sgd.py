"""The optimizer of a model in NITI's arithmetic: integers are taken off integers, and SGD does the rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_odt.capture.parameter_updates import NITI
from torch_odt.capture.update_in_backward import UpdateRule
from torch_odt.execute.one_operator import OperatorUse
from torch_odt.execute.optimizer_updates import IN_STEP
from torch_odt.ops import int8_take_off_
from torch_odt.quant.in_backward import InBackward
from torch_odt.quant.niti_integers import FOR_WEIGHT, pass_back_and_take_off
from torch_odt.quant.niti_layers import NitiLayer
from torch_odt.quant.niti_numbers import as_int8

INTEGERS, STATES, FLOATS = "integers", "states", "floats"


class NitiSGD(torch.optim.Optimizer):
    """W := clip(W - g, -127, 127) for mantissas, with no learning rate: a layer's `gradient_bits` say how large g is.

    When to choose it: for a model that `niti_` has converted. What of it stayed float32 (BatchNorm, for one) trains by
    SGD with momentum. Gradients of mantissas cannot be added, clipped or scaled: one `backward()` for each `step()`.

    Args:
        model: converted by `niti_`.
        lr, momentum, weight_decay: of what is float32, as in `torch.optim.SGD`.
        in_backward: take gradients of mantissas off in the backward pass: those of all layers would be as large as the
            converted model. That of a weight is taken off as it is computed, and never stored, unless somebody else is
            to see it: a hook at the weight, `torch.autograd.grad`, or another graph of the model that lives (a loss
            that was computed without `torch.no_grad` and is kept, or a recomputed part of
            `torch.utils.checkpoint`). The bits are the same. The weights keep to it until the model is converted
            back; a backward pass that fails has changed those that it had come to. `TrainStep` does it whether it is
            asked for or not, but where an option of its own needs all gradients.

    Raises:
        ValueError: nothing of the model is in NITI's arithmetic, or a number is negative.

    Example:
        >>> from torch import nn
        >>> import torch_odt as odt
        >>> model = nn.Linear(4, 2)
        >>> training = odt.quant.niti_(nn.Sequential(model), gradient_bits=3)
        >>> optimizer = odt.quant.NitiSGD(training.model)
        >>> [group["kind"] for group in optimizer.param_groups]
        ['integers', 'states']
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        in_backward: bool = False,
    ) -> None:
        if min(lr, momentum, weight_decay) < 0:
            raise ValueError("lr, momentum and weight_decay must not be negative")
        if not isinstance(model, nn.Module):
            raise TypeError(f"NitiSGD takes the model, not its parameters: it was given a {type(model).__name__}")
        layers = [module for module in model.modules() if isinstance(module, NitiLayer)]
        if not layers:
            raise ValueError("no layer of the model is in NITI's arithmetic: convert it by odt.quant.niti_")
        integers = [p for layer in layers for p in (layer.weight, layer.bias) if p is not None and p.requires_grad]
        states = [layer.gradient_rescaling for layer in layers]
        known = {id(parameter) for parameter in (*integers, *states)}
        floats = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
        groups = [{"params": params, "kind": kind} for params, kind in
                  ((integers, INTEGERS), (states, STATES), (floats, FLOATS)) if params]  # fmt: skip
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "kind": FLOATS})
        # What a captured step may do by itself; not where a class of the user's makes the step.
        if inspect.unwrap(type(self).step) is inspect.unwrap(NitiSGD.step):
            vars(self)[IN_STEP] = {id(layer.weight): _InStep(layer) for layer in layers if layer.weight.requires_grad}
        for parameter in integers if in_backward else ():
            parameter.register_post_accumulate_grad_hook(_take_off)
        for layer in layers if in_backward else ():
            if layer.weight.requires_grad:
                InBackward(layer.weight, partial(getattr, layer, "weight"))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply what the backward pass has left; see `torch.optim.Optimizer.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if group["kind"] == INTEGERS:
                    int8_take_off_(as_int8(parameter), as_int8(parameter.grad))
                elif group["kind"] == STATES:
                    parameter.copy_(parameter.grad)
                else:
                    self._descend(parameter, group)
        return loss

    def _descend(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient: Tensor = parameter.grad  # type: ignore[assignment]
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        if group["momentum"]:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = gradient.clone()
            else:
                state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
            gradient = state["momentum_buffer"]
        parameter.add_(gradient, alpha=-group["lr"])


class _InStep:
    """A weight's update inside of a planned step."""

    def __init__(self, layer: NitiLayer) -> None:
        self.parameter = layer.weight

    def changed(self) -> list[Tensor]:
        return [self.parameter]

    def rule(self, parameter: str) -> UpdateRule:
        return UpdateRule(NITI, ())

    def update(self, gradient: Tensor) -> None:
        int8_take_off_(as_int8(self.parameter), as_int8(gradient))

    def fused(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        return pass_back_and_take_off(*arguments)

    def fused_operator(self, arguments: tuple[Any, ...], number: Callable[[str], Any]) -> OperatorUse:
        # Whether a weight is wanted is not asked, and whether it has changed is dropped.
        operator = torch.ops.torch_odt.niti_layer_take_off_.default
        return OperatorUse(operator, (*arguments[:FOR_WEIGHT], *arguments[FOR_WEIGHT + 1 :]), (0, 1, 3, 4, None))


@torch.no_grad()
def _take_off(parameter: Tensor) -> None:
    # Another optimizer of the same parameter may have been here.
    if parameter.grad is not None:
        int8_take_off_(as_int8(parameter), as_int8(parameter.grad))
        parameter.grad = None

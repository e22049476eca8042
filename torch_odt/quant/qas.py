"""Quantization-aware scaling, and optimizers of torch that change int8 weights in place.

J. Lin et al., "On-Device Training Under 256KB Memory", NeurIPS 2022, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from torch_odt.quant.modules import Int8Layer
from torch_odt.quant.updates import PARTWISE, Int8Updates


def int8_layers(model: nn.Module) -> dict[str, Int8Layer]:
    """The int8 layers of a converted model that have weights, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Int8Layer)}


def scale_gradients_(model: nn.Module, enabled: bool = True) -> None:
    """Turn quantization-aware scaling (QAS) on, which it is, or off.

    An int8 weight counts steps s_W, and a bias products of steps s_W s_x. Gradient descent of such counts hardly moves
    the real numbers: the gradient is smaller by the step, and what it is taken off larger. QAS multiplies the gradients
    of counts by s_W^-2, of each output channel, and (s_W s_x)^-2, and the descent is that of float32 training. Here
    parameters and gradients of int8 layers are real numbers, and an update of a weight is divided by its step when it
    is rounded: which is the same for gradient descent, and makes of momentum, weight decay, Adam and clipping by norm
    what they are in float32. There is nothing to choose.

    Without QAS gradients are multiplied by s_W^2 and (s_W s_x)^2, and gradient descent is that of the counts. Choose
    that to see what QAS is worth.

    The layers do it: any optimizer, `TrainStep`, `wrap` and a plain loop see it. Call it before the first step, since
    one that was captured stays as it was.

    Args:
        model: a converted one; changed in place.
        enabled: False is without QAS.

    Raises:
        ValueError: the model has no int8 layers.

    Example:
        >>> import torch_odt as odt
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> _ = odt.quant.convert_(model, [torch.randn(16, 4)])
        >>> odt.quant.scale_gradients_(model, enabled=False)
    """
    for layer in _layers_of(model).values():
        layer.scales_gradients = enabled


@dataclass
class Int8Training:
    """An optimizer that changes int8 weights, see `train_int8_`.

    Attributes:
        layers: those of the model whose weights are int8 alone, by name.
    """

    layers: dict[str, Int8Layer] = field(repr=False)
    _updates: Int8Updates = field(repr=False)

    @property
    def saturated(self) -> dict[str, int]:
        """How many times updates wanted a weight beyond 127 steps, by layer; those with none are left out.

        A weight that stays there is counted at each update. Many of them mean that a layer has outgrown its steps:
        convert with more `headroom`, or train it with a lower rate.
        """
        counts = {name: int(layer.saturated) for name, layer in self.layers.items()}
        return {name: count for name, count in counts.items() if count}

    def stop(self) -> None:
        """The optimizer is as before; it cannot change int8 weights any more."""
        self._updates.stop()


def train_int8_(model: nn.Module, optimizer: torch.optim.Optimizer, *, in_backward: bool = False) -> Int8Training:
    """Let an optimizer of torch change the int8 weights of a converted model in place.

    Choose it always, unless the model was converted with `masters="fp32"`. In `optimizer.step()` the weights that have
    gradients are float32 for a moment, some layers at a time with the optimizers of torch.optim; then they are rounded
    to int8, stochastically: up with the probability of the fraction. An update of a hundredth of a step
    moves one of a hundred weights by one, so that small updates are not lost, and nothing in float32 is kept. The draws
    depend on the layer and on the number of its updates, both in the model's state_dict: a run that is resumed goes on
    bit for bit. SGD without momentum takes one pass over gradient and weight, which is fastest.

    The gradients of all weights in float32 are most of what a step of a large network needs. With `in_backward` each
    layer is updated in the backward pass as soon as its gradient is there, which is dropped at once; `optimizer.step()`
    changes biases and everything else. With SGD without momentum the gradient is not even written to memory, which
    makes a step of a network like VGG about twice as fast; it is stored all the same where a hook at `weight_slot` or
    `torch.autograd.grad` is to see it, and while another graph of the model lives (a loss that was computed without
    `torch.no_grad` and is kept, or a recomputed part of `torch.utils.checkpoint`). Choose it where each step is one
    `backward()`, and nothing looks at gradients of int8 weights or changes them in between: they are not clipped,
    accumulated or unscaled. Weights come out the same: with the rate that the optimizer has in the backward pass, so
    schedulers step behind `optimizer.step()`, as everywhere. A backward pass that fails has changed the layers that it
    had come to. A later call for the same layers, with another optimizer, takes over: the one before does nothing more.

    `TrainStep` needs this call, but not `in_backward`: with SGD without momentum it updates int8 weights inside of
    its schedule, and each gradient is gone before the next one is there. Where it needs all gradients (an
    accumulation, clipping, a transaction) it refuses `in_backward`; the optimizer's step changes the weights then,
    and a call that fails puts them back. Batches of a converted model are not cut into micro-batches, since its
    gradients are rounded to the range of the whole batch.

    Without this call a loop ends with torch's error that a tensor's elements share memory.

    Args:
        model: a converted one.
        optimizer: made from its parameters; any one whose `step` takes no closure.
        in_backward: see above; layers whose weights do not train as of now are left to `optimizer.step()`.

    Returns:
        What counts the weights that are clamped, and can be stopped.

    Raises:
        ValueError: the model has no int8 weights, or the optimizer holds none of them; or its step takes a closure, or
            it is none of torch.optim that can update in the backward pass.

    Example:
        >>> import torch_odt as odt
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> _ = odt.quant.convert_(model, [torch.randn(16, 4)])
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> training = odt.quant.train_int8_(model, optimizer)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> model[0].weight.dtype
        torch.int8
    """
    layers = {name: layer for name, layer in _layers_of(model).items() if layer.masters == "none"}
    if not layers:
        raise ValueError('the weights have masters in float32 (masters="fp32"), which any optimizer trains as it is')
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates the model inside of its step, and cannot train int8 weights; take another one"
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    layers = {name: layer for name, layer in layers.items() if id(layer.weight_slot) in held}
    if not layers:
        raise ValueError("the optimizer holds no int8 weight of this model: make it from model.parameters() as of now")
    if in_backward and type(optimizer) not in PARTWISE:
        names = ", ".join(kind.__name__ for kind in PARTWISE)
        raise ValueError(f"{type(optimizer).__name__} cannot update in the backward pass; those that can: {names}")

    updates = Int8Updates(optimizer, list(layers.values()), in_backward)
    return Int8Training(layers, updates)


def _layers_of(model: nn.Module) -> dict[str, Int8Layer]:
    layers = int8_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no int8 layers: convert it with odt.quant.convert_ first")
    return layers

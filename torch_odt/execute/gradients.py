"""Takes what a step delivers: losses, results, buffer contents and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from torch_odt import memory
from torch_odt.capture.graph import Output
from torch_odt.capture.parameter_updates import lie_alike

# The attribute of parameters whose gradients are used up, and dropped, in the backward pass.
USED_UP = "_torch_odt_in_backward"


class StepReceiver:
    """The receiver of one training step, over all of its micro-batches.

    Gradients go into `.grad` as autograd puts them there: the first one is adopted without a copy, later ones are
    added.

    Args:
        parameters, buffers: by the names that the graph uses for them.
        shared: names of parameters whose gradients share storage with another's in the graph.
        check_loss: called with each loss; what it raises ends the step before the backward pass.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        shared: frozenset[str] = frozenset(),
        check_loss: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._parameters = parameters
        self._buffers = buffers
        self._shared = shared
        self._check_loss = check_loss
        self.loss: torch.Tensor | None = None
        self.results: dict[int, list[torch.Tensor]] = {}
        self.loss_weight = 1.0
        self.adopts_gradients = True

    def deliver(self, output: Output, tensor: torch.Tensor) -> None:
        if output.kind == "gradient":
            self._add_gradient(str(output.target), tensor)
        elif output.kind == "mutation":
            self._buffers[str(output.target)].copy_(tensor)
        elif output.kind == "loss":
            self._add_loss(tensor)
        else:
            self.results.setdefault(int(output.target), []).append(tensor)

    def gradient(self, name: str) -> torch.Tensor:
        """A parameter's gradient as operators add to it."""
        parameter = self._parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def _add_loss(self, tensor: torch.Tensor) -> None:
        if self._check_loss is not None:
            self._check_loss(tensor)
        if self.loss is None and self.loss_weight == 1.0:
            self.loss = tensor
        else:
            weighted = tensor * self.loss_weight
            self.loss = weighted if self.loss is None else self.loss + weighted

    def _add_gradient(self, name: str, tensor: torch.Tensor) -> None:
        parameter = self._parameters[name]
        if parameter.grad is not None:
            if parameter.grad.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
                parameter.grad.add_(tensor)
        elif self.adopts_gradients and name not in self._shared and _obeys_layout(tensor, parameter):
            parameter.grad = tensor
        else:
            parameter.grad = torch.empty_like(parameter).copy_(tensor)
        memory.tag(parameter.grad, "gradient")


class ResultsOnly:
    """Passes the model's outputs on and drops the rest."""

    def __init__(self, receiver: StepReceiver) -> None:
        self._receiver = receiver

    def deliver(self, output: Output, tensor: torch.Tensor) -> None:
        if output.kind == "result":
            self._receiver.deliver(output, tensor)


def _obeys_layout(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Autograd's contract: a gradient has the strides of its parameter, and nothing else lies in its storage. Where
    elements of the parameter share memory, or something lies between them, it is contiguous.
    """
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return False
    # Equal strides, as most are, are seen sooner than by looking at each.
    if tensor.stride() == parameter.stride() or all(
        size <= 1 or ours == theirs
        for size, ours, theirs in zip(tensor.shape, tensor.stride(), parameter.stride(), strict=True)
    ):
        return True
    return tensor.is_contiguous() and not lie_alike((parameter,))


def run_gradient_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Call the tensor hooks and post-accumulate hooks that autograd would have called."""
    # A tied parameter has several names and one gradient.
    for parameter in {id(parameter): parameter for parameter in parameters.values()}.values():
        if parameter.grad is None:
            continue
        for hook in list((parameter._backward_hooks or {}).values()):
            replaced = hook(parameter.grad)
            if replaced is not None:
                parameter.grad = replaced
        for hook in list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
            hook(parameter)


def require_gradients_stay(parameters: Mapping[str, nn.Parameter], why: str, *, adds: bool) -> None:
    """Check parameters where all gradients are needed behind the backward pass.

    Args:
        why: they are.
        adds: they are added up or clipped, too.

    Raises:
        ValueError: a gradient would be used up in the backward pass, or is made of eight bits and cannot be added up.
    """
    used_up = [name for name, p in parameters.items() if p.requires_grad and hasattr(p, USED_UP)]
    if used_up:
        raise ValueError(
            f"{_some_of(used_up)} would be updated in the backward pass, but {why}: leave that to optimizer.step(), "
            "without in_backward=True"
        )
    in_bytes = [name for name, p in parameters.items() if p.requires_grad and p.element_size() == 1]
    if adds and in_bytes:
        raise ValueError(f"{why}, but those of {_some_of(in_bytes)} have eight bits, and can only be taken as they are")


def _some_of(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{' and others' if names[3:] else ''}"


def set_aside_hooked(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
    """Take gradients away where a parameter has hooks: they see that of one backward pass, not the sum of several."""
    parameters = list(parameters)
    if not any(has_gradient_hooks(p) for p in parameters):
        return {}
    found = {p: p.grad for p in parameters if p.grad is not None}
    for parameter in found:
        parameter.grad = None
    return found


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))

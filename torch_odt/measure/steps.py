"""The steps that are measured: inference and training, as plain PyTorch makes them and as torch_odt does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_odt import memory


@dataclass(frozen=True)
class Work:
    """What is measured: a model with its loss, optimizer and one batch.

    Attributes:
        loss_fn: `loss_fn(model(input), target)`.
        batch: (input, target).
    """

    model: nn.Module
    loss_fn: Callable[..., torch.Tensor]
    optimizer: torch.optim.Optimizer
    batch: tuple[Any, Any]


class PlainStep:
    """Forward, backward, optimizer, as everybody writes it; tensors count under what they are.

    Gradients of activations, and all that operators of the backward pass hold, count as workspace.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        for tensor in (*work.model.parameters(), *work.model.buffers()):
            memory.tag(tensor, "parameter")
        for parameter in work.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_tag_gradient)

    def __call__(self) -> torch.Tensor:
        inputs, target = self._work.batch
        self._work.optimizer.zero_grad()
        with memory.category("activation"):
            loss = self._work.loss_fn(self._work.model(inputs), target)
        with memory.category("workspace"):
            loss.backward()
        with memory.category("optimizer"):
            self._work.optimizer.step()
        return loss.detach()


class Inference:
    """The model's forward pass in evaluation mode, without a graph."""

    def __init__(self, work: Work) -> None:
        self._work = work
        work.model.eval()
        for tensor in (*work.model.parameters(), *work.model.buffers()):
            memory.tag(tensor, "parameter")

    def __call__(self) -> Any:
        with torch.inference_mode(), memory.category("activation"):
            return self._work.model(self._work.batch[0])


def _tag_gradient(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        memory.tag(parameter.grad, "gradient")

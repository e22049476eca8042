"""What each layer takes of a training step's memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torch_odt.measure.record import LayerMemory
from torch_odt.measure.steps import Work


def layer_memory(work: Work) -> list[LayerMemory]:
    """Makes a forward and a backward pass, and says of every layer that takes memory what it takes.

    A tensor that several layers keep counts where it is kept first, and views count as what they are views of. The
    optimizer must have made a step for its state to be there. Parameters' gradients count as large as they are.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> batch = (torch.ones(2, 8), torch.tensor([0, 1]))
        >>> [(row.layer, row.weights_bytes, row.activations_bytes)
        ...     for row in layer_memory(Work(model, nn.functional.cross_entropy, optimizer, batch))]
        [('0', 144, 64), ('1', 40, 32), ('', 0, 36)]
    """
    saved = _Saved(work.model)
    inputs, target = work.batch
    with saved:
        loss = work.loss_fn(work.model(inputs), target)
    loss.backward()
    return [
        _row(work, name, module, saved.bytes[name])
        for name, module in [*list(work.model.named_modules())[1:], ("", work.model)]
        if saved.bytes[name] or any(True for _ in _own(module))
    ]


class _Saved:
    """Attributes what autograd saves to the layer that runs."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes: dict[str, int] = defaultdict(int)
        self._running: list[str] = [""]
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        # Alive, or another tensor may come to lie where one has been counted.
        self._kept: list[torch.Tensor] = []
        self._hooks: list[Any] = []
        self._model = model
        self._saving = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)))
            self._hooks.append(
                module.register_forward_hook(lambda *_: (self._running.pop(), None)[1], always_call=True)
            )
        self._saving.__enter__()

    def __exit__(self, *details: Any) -> None:
        self._saving.__exit__(*details)
        for hook in self._hooks:
            hook.remove()
        self._kept.clear()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self._kept.append(tensor.detach())
            self.bytes[self._running[-1]] += storage.nbytes()
        return tensor


def _row(work: Work, name: str, module: nn.Module, activations_bytes: int) -> LayerMemory:
    trained = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
    return LayerMemory(
        layer=name,
        kind=type(module).__name__,
        weights_bytes=sum(tensor.nbytes for tensor in _own(module)),
        gradients_bytes=sum(parameter.nbytes for parameter in trained),
        optimizer_bytes=sum(_state_bytes(work.optimizer, parameter) for parameter in trained),
        activations_bytes=activations_bytes,
    )


def _own(module: nn.Module) -> Iterable[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _state_bytes(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    state = optimizer.state.get(parameter, {})
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))

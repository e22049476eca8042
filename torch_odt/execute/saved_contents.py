"""What tensors and containers hold, to be put back into the same objects."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_odt.execute.checkpointing import PlainAttributes

# Subclasses may have a mind of their own about being emptied.
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, deque)


class SavedContents:
    """Copies of the tensors in a value, and of the containers that they are in.

    Dicts, lists, sets and deques are followed, and tuples; other objects are not looked into.

    Args:
        root: where to begin.
        copies: whether a tensor is to be copied.
    """

    def __init__(self, root: Any, copies: Callable[[torch.Tensor], bool]) -> None:
        self._copies = copies
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._containers: list[tuple[Any, Any]] = []
        # The objects themselves: a number that is an id may be given again.
        self._seen: dict[int, Any] = {}
        self._save(root)

    def restore(self) -> None:
        """Everything holds what it held; it takes no memory."""
        with torch.no_grad():
            for tensor, content in self._tensors:
                if not _is_expanded(content):
                    tensor.copy_(content)
                elif _is_expanded(tensor):
                    _own(tensor).copy_(_own(content))
                else:
                    # Who changed it gave it other memory.
                    tensor.data = content
        for container, content in self._containers:
            if _items(container) != _items(content):
                container.clear()
                (container.extend if type(container) in _SEQUENCES else container.update)(content)

    def _save(self, value: Any) -> None:
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor and type(value) not in (*_DICTS, *_SEQUENCES, set, tuple):
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if is_tensor:
            if self._copies(value):
                self._tensors.append((value, _copy_of(value)))
            return
        if type(value) is not tuple:
            self._containers.append((value, dict(value) if type(value) in _DICTS else type(value)(value)))
        for member in value.values() if type(value) in _DICTS else value:
            self._save(member)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, because a dimension was expanded."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of an expanded tensor that share no memory."""
    own = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        own = own.narrow(dim, 0, 1) if stride == 0 and own.shape[dim] > 1 else own
    return own


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that takes no more memory than the tensor."""
    own = _own(tensor)
    return own.clone().expand(tensor.shape) if _is_expanded(tensor) else own.clone()


def _items(container: Any) -> list[Any]:
    """By identity: tensors do not compare as one object does."""
    if type(container) in _DICTS:
        return [(id(key), id(member)) for key, member in container.items()]
    members = [id(member) for member in container]
    return sorted(members) if type(container) is set else members


class SavedModules:
    """What a step may change about modules: buffers and plain attributes.

    Args:
        model: all of its submodules belong to it.
        changed: the buffers whose contents change; None where Python code runs that may change any of them, and what
            lies in plain attributes.
    """

    def __init__(self, model: nn.Module, changed: list[torch.Tensor] | None) -> None:
        self._attributes = PlainAttributes(model)
        buffers = [module._buffers for module in model.modules()]
        if changed is None:
            self._contents = SavedContents([buffers, self._attributes.values], lambda t: not t.requires_grad)
        else:
            wanted = {id(tensor) for tensor in changed}
            self._contents = SavedContents(buffers, lambda t: id(t) in wanted)

    def restore(self) -> None:
        """Everything is bound to what it was bound to, and holds what it held."""
        self._attributes.restore()
        self._contents.restore()

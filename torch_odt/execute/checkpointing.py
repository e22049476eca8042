"""Activation checkpointing of a model's submodules that leaves nothing behind but the memory it saves.

`torch.utils.checkpoint` runs a module's forward a second time during the backward pass. What forward changes about
the module (BatchNorm's running statistics and `num_batches_tracked`, spectral norm's vectors, a step counter kept as a
plain attribute) would be changed twice, and a forward that depends on it would recompute something else. Here the
second run sees the module as it was before the first one, and the module afterwards is as if there had been none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_odt.execute.randomness import PythonRandomState, RandomState

# Buffers up to this size are copied for every checkpointed call, larger ones only where forward changes them.
_ALWAYS_KEPT_BYTES = 1 << 16

_STRUCTURE = (frozenset(nn.Module().__dict__) - {"training"}) | {"forward"}

Forward = Callable[..., Any]


@contextmanager
def checkpointed(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Within the context, the named submodules keep their inputs alone and run again in the backward pass.

    The module tree and the keys of `state_dict` stay as they are; the context has to be active while forward runs, not
    during the backward pass.

    Args:
        model: the model that the names refer to.
        names: qualified names of submodules (`""` is the model itself), as `named_modules` gives them.

    Raises:
        AttributeError: a name does not belong to the model.
    """
    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            stack.enter_context(overridden_forward(module, functools.partial(_checkpointing_forward, module)))
        yield


@contextmanager
def overridden_forward(module: nn.Module, make: Callable[[Forward], Forward]) -> Iterator[None]:
    """Within the context, `module.forward` is `make(forward)`; hooks and everything else stay untouched."""
    original = module.forward
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = functools.wraps(original)(make(original))
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


@contextmanager
def rehearsal(model: nn.Module) -> Iterator[None]:
    """The model may run in the context; its buffers, plain attributes and the random numbers stay as they are."""
    random_before = RandomState.capture()
    try:
        with _ModuleState(model).rewound():
            yield
    finally:
        random_before.restore()


def _checkpointing_forward(module: nn.Module, original: Forward) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            state = _ModuleState(module)
            return state.watched(), state.rewound()

        # The keyword arguments travel in the closure: checkpoint has keywords of its own that they could collide with.
        call = functools.partial(_call, original, kwargs)
        return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=True, context_fn=contexts)

    return forward


def _call(original: Forward, kwargs: dict[str, Any], *args: Any) -> Any:
    return original(*args, **kwargs)


class PlainAttributes:
    """What the modules of a model are bound to besides their structure, as it is when this object is made."""

    def __init__(self, model: nn.Module) -> None:
        self._of_module = [(module, self._found(module)) for module in model.modules()]

    @staticmethod
    def _found(module: nn.Module) -> dict[str, Any]:
        return {name: value for name, value in vars(module).items() if name not in _STRUCTURE}

    @property
    def values(self) -> list[Any]:
        return [value for _, attributes in self._of_module for value in attributes.values()]

    def restore(self) -> None:
        for module, attributes in self._of_module:
            for name in self._found(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)


@dataclass(slots=True)
class _Buffer:
    """A buffer as it was before forward: `copy` holds its content unless forward left it alone."""

    owner: dict[str, Any]
    name: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None


@dataclass
class _ModuleState:
    """What forward may change about a module and its submodules, as it is when this object is made."""

    module: nn.Module
    _buffers: list[_Buffer] = field(init=False)
    _attributes: PlainAttributes = field(init=False)
    _random: PythonRandomState = field(init=False)

    def __post_init__(self) -> None:
        self._buffers = [
            _Buffer(owner, name, tensor, tensor._version, tensor.detach().clone())
            for owner, name, tensor in _tensors(self.module)
        ]
        self._attributes = PlainAttributes(self.module)
        self._random = PythonRandomState.capture()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around the first forward: forgets the copies of buffers that it did not change."""
        yield
        for buffer in self._buffers:
            if buffer.tensor._version == buffer.version and buffer.tensor.nbytes > _ALWAYS_KEPT_BYTES:
                buffer.copy = None

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Around the second forward: the module as it was before the first, and afterwards as it is now."""
        attributes_now = PlainAttributes(self.module)
        tensors_now = [(owner, name, tensor) for owner, name, tensor in _tensors(self.module)]
        random_now = PythonRandomState.capture()
        try:
            self._attributes.restore()
            # Stand-ins instead of copying the content back and forth: the real buffers are never touched, so that
            # autograd's check for changed tensors keeps its meaning.
            stand_ins: dict[int, torch.Tensor] = {}
            for buffer in self._buffers:
                buffer.owner[buffer.name] = stand_ins.setdefault(id(buffer.tensor), _stand_in(buffer))
            self._random.restore()
            yield
        finally:
            attributes_now.restore()
            for owner, name, tensor in tensors_now:
                owner[name] = tensor
            random_now.restore()


def _stand_in(buffer: _Buffer) -> torch.Tensor:
    if buffer.copy is not None:
        return buffer.copy.clone()
    if buffer.tensor._version != buffer.version:
        raise RuntimeError(
            f"buffer {buffer.name!r} of a checkpointed module was changed in place between forward and backward"
        )
    return buffer.tensor


def _tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Buffers, and tensors that are plain attributes: where they are kept, under which name, and what they are now."""
    for member in module.modules():
        for owner in (member._buffers, member.__dict__):
            for name, tensor in list(owner.items()):
                if isinstance(tensor, torch.Tensor) and not tensor.requires_grad:
                    yield owner, name, tensor

"""Modules, parameters and buffers of a model, found in one walk.

Each step looks at all of them several times over. nn.Module's own generators hand each one up through all levels of the
model, which takes longer than many an operator where modules are small; a walk that fills a list does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from sys import intern

from torch import Tensor, nn

# The attributes of a module that hold hooks, which run as Python at every step.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Found = list[tuple[str, nn.Module]]


class Walk:
    """Through a module and all that it holds, each under each of its names, as they are now."""

    def __init__(self, root: nn.Module) -> None:
        self._found: Found = []
        _walk(root, "", self._found)

    def modules(self) -> list[nn.Module]:
        """As `root.modules()`: each module once, in order."""
        return list({id(module): module for _, module in self._found}.values())

    def parameters(self) -> list[nn.Parameter]:
        """As `root.parameters()`: each one once, in order."""
        members = (p for module in self.modules() for p in module._parameters.values() if p is not None)
        return list({id(parameter): parameter for parameter in members}.values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """As `root.named_parameters(remove_duplicate=False)`: shared ones under each of their names."""
        return {
            intern(f"{prefix}{name}"): parameter
            for prefix, module in self._found
            for name, parameter in module._parameters.items()
            if parameter is not None
        }

    def named_buffers(self) -> dict[str, Tensor]:
        """As `root.named_buffers(remove_duplicate=False)`: shared ones under each of their names."""
        return {
            intern(f"{prefix}{name}"): buffer
            for prefix, module in self._found
            for name, buffer in module._buffers.items()
            if buffer is not None
        }


def modules_of(root: nn.Module) -> list[nn.Module]:
    """See `Walk.modules`."""
    return Walk(root).modules()


def hook_identities(modules: Iterable[nn.Module]) -> tuple[int, ...]:
    """The hooks on modules, so that a new one is noticed."""
    return tuple(
        id(hook)
        for module in modules
        for name in HOOKS
        if (hooks := getattr(module, name, None))
        for hook in hooks.values()
    )


def _walk(module: nn.Module, prefix: str, found: Found) -> None:
    found.append((prefix, module))
    for name, child in module._modules.items():
        if child is not None:
            _walk(child, f"{prefix}{name}.", found)

"""Modules, parameters and buffers of a model, found in one walk.

Each step looks at all of them several times over. nn.Module's own generators hand each one up through all levels of the
model, which takes longer than many an operator where modules are small; a walk that fills a list does not.
"""

from __future__ import annotations

from torch import Tensor, nn

Found = list[tuple[str, nn.Module]]


def modules_of(root: nn.Module) -> list[nn.Module]:
    """As `root.modules()`: each module once, in order."""
    found: Found = []
    _walk(root, "", found)
    return list({id(module): module for _, module in found}.values())


def parameters_of(root: nn.Module) -> list[nn.Parameter]:
    """As `root.parameters()`: each one once, in order."""
    members = (p for module in modules_of(root) for p in module._parameters.values() if p is not None)
    return list({id(parameter): parameter for parameter in members}.values())


def named_parameters_of(root: nn.Module) -> dict[str, nn.Parameter]:
    """As `root.named_parameters(remove_duplicate=False)`: shared ones under each of their names."""
    found: Found = []
    _walk(root, "", found)
    return {
        f"{prefix}{name}": parameter
        for prefix, module in found
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


def named_buffers_of(root: nn.Module) -> dict[str, Tensor]:
    """As `root.named_buffers(remove_duplicate=False)`: shared ones under each of their names."""
    found: Found = []
    _walk(root, "", found)
    return {
        f"{prefix}{name}": buffer
        for prefix, module in found
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


def _walk(module: nn.Module, prefix: str, found: Found) -> None:
    found.append((prefix, module))
    for name, child in module._modules.items():
        if child is not None:
            _walk(child, f"{prefix}{name}.", found)

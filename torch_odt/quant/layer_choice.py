"""Which layers of a model a verb takes, and why others stay in float32."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_odt.capture.module_walk import HOOKS

_NAMED = 5


@dataclass(frozen=True)
class LayerChoice:
    """What was found.

    Attributes:
        taken: layers by name; one that has several names is there once.
        left: why others with a weight stay as they are, by name.
    """

    taken: dict[str, nn.Module]
    left: dict[str, str]

    def notes(self) -> Iterator[str]:
        """What stays in float32, a line for each reason."""
        for reason in dict.fromkeys(self.left.values()):
            names = [name for name, other in self.left.items() if other == reason]
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            yield f"{', '.join(names[:_NAMED])}{more}: float32, {reason}"


def choose_layers(
    model: nn.Module, supported: Callable[[nn.Module], str | None], *, skip: Collection[str] = ()
) -> LayerChoice:
    """Look at every layer that has a weight matrix.

    Args:
        supported: says why a layer cannot be taken, or None if it can.
        skip: names of layers that are to stay in float32; a container's name is for all inside it.

    Raises:
        ValueError: `skip` names what the model does not have, or nothing can be taken.
    """
    unknown = sorted(set(skip) - {name for name, _ in model.named_modules(remove_duplicate=False)})
    if unknown:
        raise ValueError(f"skip names {', '.join(unknown)}, which the model does not have; see model.named_modules()")
    taken: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if not any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
            continue
        if not name:
            reason: str | None = "because the model itself cannot be replaced: put it into another"
        elif any(name == each or name.startswith(f"{each}.") for each in skip):
            reason = "as asked for"
        else:
            reason = supported(module) or _watched(module)
        if reason is None:
            taken[name] = module
        else:
            left[name] = reason
    if not taken:
        found = "; ".join(LayerChoice(taken, left).notes()) or "it has no layer with a weight matrix"
        raise ValueError(f"nothing of {type(model).__name__} can be quantized: {found}")
    return LayerChoice(taken, left)


def copy_layer(kind: type[nn.Module], layer: nn.Module) -> Any:
    """A module of another class with the attributes of a layer, whose tensors it shares."""
    copied = kind.__new__(kind)
    nn.Module.__init__(copied)
    own = vars(nn.Module())
    vars(copied).update({name: value for name, value in vars(layer).items() if name not in own})
    copied._parameters.update(layer._parameters)
    copied._buffers.update(layer._buffers)
    return copied.train(layer.training)


def _watched(module: nn.Module) -> str | None:
    return "because it has hooks" if any(getattr(module, hooks, None) for hooks in HOOKS) else None

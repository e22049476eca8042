"""The classifier at the end of a model: found, and replaced by one for other classes."""

from __future__ import annotations

import copy
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn

from torch_odt.adapt.adaptation import Adapting
from torch_odt.adapt.norms_behind import norms_behind
from torch_odt.errors import CaptureError

HEAD_TYPES = (nn.Linear, nn.Conv2d)
# Where models of timm and transformers keep how many classes they have.
_COUNTS = ("num_classes", "num_labels")


def find_head(model: nn.Module, head: str | None = None) -> str:
    """The name of the layer that computes the classes: the last linear layer, or convolution where none is linear.

    torchvision, timm and transformers register modules in the order in which they run. Where a model of your own does
    not, name the layer. What a model of timm says by `get_classifier()` comes first, a convolution with as many outputs
    as a model of transformers has labels comes before linear layers, and auxiliary classifiers come last.

    Args:
        head: the name, where it is known; it is checked.

    Raises:
        ValueError: there is no such layer, or none at all.
    """
    if head is not None:
        found = dict(model.named_modules()).get(head)
        if not isinstance(found, HEAD_TYPES):
            what = "there is no such module" if found is None else f"it is a {type(found).__name__}"
            raise ValueError(f"head={head!r} is no linear layer or convolution: {what}")
        return head
    names = _heads_of_timm(model) or _registered(model)
    # An auxiliary classifier helps in training alone.
    names = [name for name in names if not is_auxiliary(name)] or names
    if names:
        return names[-1]
    kinds = sorted({type(module).__name__ for module in model.modules()})
    raise ValueError(f"no linear layer or convolution was found to be the classifier; the model has {', '.join(kinds)}")


def _registered(model: nn.Module) -> list[str]:
    """Layers that may be the classifier, the last the most likely."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, HEAD_TYPES)]
    labels = getattr(getattr(model, "config", None), "num_labels", None)
    if layers and isinstance(last := layers[-1][1], nn.Conv2d) and last.out_channels == labels:
        return [layers[-1][0]]
    return [name for name, module in layers if isinstance(module, nn.Linear)] or [name for name, _ in layers]


def is_auxiliary(name: str) -> bool:
    return any(part.lower().startswith("aux") for part in name.split("."))


def _heads_of_timm(model: nn.Module) -> list[str]:
    """The last layer of each classifier that the model itself names, as those of timm do; empty where it names none."""
    try:
        said: Any = model.get_classifier()  # type: ignore[operator]
    except (AttributeError, TypeError):
        return []
    heads = list(said) if isinstance(said, tuple | list | nn.ModuleList) else [said]
    found: list[str] = []
    for head in heads:
        inside = set(head.modules()) if isinstance(head, nn.Module) else set()
        layers = {n: m for n, m in model.named_modules() if m in inside and isinstance(m, HEAD_TYPES)}
        outputs = [m.weight.shape[0] for m in layers.values()]
        last = [n for n, count in zip(layers, outputs, strict=True) if count == outputs[-1]]
        # RepViT's holds two, side by side.
        found += last[-1:] if isinstance(head, nn.Sequential) else last
    return found


def _require_classifier(model: nn.Module, name: str) -> None:
    """Raises ValueError where the layer that was found is not all that computes the classes, or none that does."""
    heads = _heads_of_timm(model)
    if len(heads) > 1:
        raise ValueError(f"{type(model).__name__} has {len(heads)} classifiers, {', '.join(heads)}: name one by head=")
    norm = None
    if isinstance(model.get_submodule(name), nn.Conv2d):
        # Code that torch.fx cannot follow tells nothing.
        with suppress(CaptureError):
            norm = norms_behind(model).get(name)
    if norm is not None or (not heads and getattr(model, "num_classes", None) == 0):
        behind = "" if norm is None else f", and the norm {norm} takes what that computes"
        raise ValueError(
            f"{type(model).__name__} seems to have no classifier: its last layer is {name}{behind}. Put one behind it, "
            "or say by head= that it is this layer"
        )


def classifier_of(adapting: Adapting, classes: int | None, *, head: str | None = None) -> str:
    """The name of the classifier, which is a new one where there are to be so many classes.

    A note says which it is, where the order of a class's own layers has told: it may register them in any.
    """
    if classes is not None:
        return replace_head(adapting, classes, head=head)
    name = find_head(adapting.model, head)
    library = type(adapting.model).__module__.partition(".")[0]
    if head is None and library not in ("torch", "torchvision", "timm", "transformers"):
        adapting.notes.append(f"{name} is taken for the classifier; head= names another")
    return name


def replace_head(adapting: Adapting, classes: int, *, head: str | None = None) -> str:
    """Put a new classifier in the place of the last layer, initialised as PyTorch does.

    A model that keeps how many classes it has, as those of timm and transformers do, is told.

    Returns:
        Its name.
    """
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        raise ValueError(f"classes={classes!r}: give how many there are, 1 or more")
    name = find_head(adapting.model, head)
    if head is None:
        _require_classifier(adapting.model, name)
    old = adapting.model.get_submodule(name)
    new: nn.Module
    if isinstance(old, nn.Linear):
        new = nn.Linear(old.in_features, classes, bias=old.bias is not None)
    else:
        assert isinstance(old, nn.Conv2d)
        if classes % old.groups:
            raise ValueError(f"classes={classes}: {name!r} is a convolution of {old.groups} groups, which divide them")
        geometry: dict[str, Any] = {
            option: getattr(old, option) for option in ("stride", "padding", "dilation", "groups", "padding_mode")
        }
        new = nn.Conv2d(old.in_channels, classes, old.kernel_size, bias=old.bias is not None, **geometry)  # type: ignore[arg-type]
    if name != (last := find_head(adapting.model)):
        adapting.notes.append(f"the classifier is {name}, as head= says, though {last} is registered as the last layer")
    adapting.replace(name, new.to(old.weight.device, old.weight.dtype), is_added=True)
    adapting.notes.append(f"{name} is a new classifier of {classes} classes")
    _tell(adapting, classes)
    return name


def _tell(adapting: Adapting, classes: int) -> None:
    model = adapting.model
    told: dict[str, Any] = {name: classes for name in _COUNTS if isinstance(vars(model).get(name), int)}
    config = vars(model).get("config")
    if isinstance(getattr(config, "num_labels", None), int):
        # Other models may have been made from the same object.
        told["config"] = copy.deepcopy(config)
        told["config"].num_labels = classes
    before = {name: vars(model)[name] for name in told}
    if told:
        vars(model).update(told)
        adapting.also_undo(partial(_restore, model, before), is_added=True)


def _restore(model: nn.Module, before: dict[str, Any]) -> None:
    vars(model).update(before)

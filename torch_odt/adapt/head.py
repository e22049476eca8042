"""The classifier at the end of a model: found, and replaced by one for other classes."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_odt.adapt.adaptation import Adapting

HEAD_TYPES = (nn.Linear, nn.Conv2d)
# Where models of timm and transformers keep how many classes they have.
_COUNTS = ("num_classes", "num_labels")


def find_head(model: nn.Module, head: str | None = None) -> str:
    """The name of the layer that computes the classes: the last linear layer or convolution.

    torchvision, timm and transformers register modules in the order in which they run. Where a model of your own does
    not, name the layer. A model that says by `get_classifier()` which layer it is, as those of timm do, is believed.

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
    names = _of_timm(model) or [name for name, module in model.named_modules() if isinstance(module, HEAD_TYPES)]
    # An auxiliary classifier helps in training alone.
    names = [name for name in names if not _is_auxiliary(name)] or names
    if names:
        return _without_norm_behind(model, names[-1])
    kinds = sorted({type(module).__name__ for module in model.modules()})
    raise ValueError(f"no linear layer or convolution was found to be the classifier; the model has {', '.join(kinds)}")


def _is_auxiliary(name: str) -> bool:
    return "aux" in name.partition(".")[0].lower()


def _without_norm_behind(model: nn.Module, name: str) -> str:
    """The name again; raises ValueError where its layer is the last of features, which a norm goes behind."""
    modules = [(other, module) for other, module in model.named_modules() if not _is_auxiliary(other)]
    place = [other for other, _ in modules].index(name) if name in dict(modules) else len(modules)
    layer: Any = model.get_submodule(name)
    outputs = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    for other, module in modules[place + 1 :]:
        if isinstance(module, _BatchNorm) and module.num_features == outputs:
            raise ValueError(
                f"{type(model).__name__} has no classifier: behind its last layer, {name}, there is a norm ({other}); "
                "put a classifier behind it, or name the layer by head="
            )
    return name


def _of_timm(model: nn.Module) -> list[str]:
    """What the model itself says, as those of timm do; empty where it says nothing."""
    ask = getattr(model, "get_classifier", None)
    if not callable(ask):
        return []
    said = ask()
    heads = list(said) if isinstance(said, tuple | list | nn.ModuleList | nn.ModuleDict) else [said]
    found = []
    for head in heads:
        inside = set(head.modules()) if isinstance(head, nn.Module) else set()
        layers = {n: m for n, m in model.named_modules() if m in inside and isinstance(m, HEAD_TYPES)}
        classes = [each.weight.shape[0] for each in layers.values()]
        found += [name for name, count in zip(layers, classes, strict=True) if count == classes[-1]] or [""]
    if len(found) > 1:
        named = ", ".join(found)
        raise ValueError(f"{type(model).__name__} has {len(found)} classifiers, {named}: name one by head=")
    if found == [""]:
        raise ValueError(
            f"{type(model).__name__} was made without a classifier (num_classes=0): name the last layer by head="
        )
    return found


def replace_head(adapting: Adapting, classes: int, *, head: str | None = None) -> str:
    """Put a new classifier in the place of the last layer, initialised as PyTorch does.

    A model that keeps how many classes it has, as those of timm and transformers do, is told.

    Returns:
        Its name.
    """
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        raise ValueError(f"classes={classes!r}: give how many there are, 1 or more")
    name = find_head(adapting.model, head)
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

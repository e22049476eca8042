"""The classifier at the end of a model: found, and replaced by one for other classes."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import nn

from torch_odt.adapt.adaptation import Adapting

HEAD_TYPES = (nn.Linear, nn.Conv2d)
# Where models of timm and transformers keep how many classes they have.
_COUNTS = ("num_classes", "num_labels")


def find_head(model: nn.Module, head: str | None = None) -> str:
    """The name of the layer that computes the classes: the last linear layer, or convolution where none is linear.

    torchvision, timm and transformers register modules in the order in which they run. Where a model of your own does
    not, name the layer.

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
    for kind in HEAD_TYPES:
        names = [name for name, module in model.named_modules() if isinstance(module, kind)]
        if names:
            return names[-1]
    kinds = sorted({type(module).__name__ for module in model.modules()})
    raise ValueError(f"no linear layer or convolution was found to be the classifier; the model has {', '.join(kinds)}")


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

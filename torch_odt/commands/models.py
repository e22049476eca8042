"""Models by name: torchvision's and timm's classifiers, the measured papers' networks, and a user's own code."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from torch_odt.commands import options
from torch_odt.commands.errors import UserError
from torch_odt.errors import first_line
from torch_odt.measure.networks import is_network, make_network

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

INSTALL_TORCHVISION = 'torchvision is not installed: pip install "torch_odt[vision]"'
TIMM = "timm/"
# Auxiliary classifiers return more than class scores; their own initialisation of the weights takes a minute.
WITHOUT_AUXILIARY = ("googlenet", "inception_v3")


@dataclass
class Task:
    """What a command works on: a model, its loss and one batch, which a user's function may have brought."""

    name: str
    model: nn.Module
    loss_fn: Callable[..., torch.Tensor]
    batch: tuple[Any, Any]
    brings_batch: bool = False


def load_model(name: str, *, classes: int, image_size: int | None = None, channels_last: bool = False) -> nn.Module:
    """A model that scores `classes` classes, with new weights.

    Args:
        name: a torchvision classifier, "timm/NAME", one of `measure.networks`, or "FILE.py:FUNCTION" or
            "PACKAGE.MODULE:FUNCTION". The function is called without arguments, or with `num_classes` if it has a
            parameter of that name.
        classes: how many classes it is to tell apart.
        image_size: height and width of its images, for models that must know beforehand.
        channels_last: lay its weights out channels last.
    """
    model = _make(name, classes, image_size)
    if isinstance(model, tuple):
        raise UserError(
            f"--model {name} brings a loss and a batch of its own; to learn classes of images return the module alone"
        )
    return model.to(memory_format=torch.channels_last) if channels_last else model


def load_task(name: str, *, shape: tuple[int, ...], classes: int, channels_last: bool = False, seed: int = 0) -> Task:
    """A model with its loss and a random batch of the given shape.

    A function in a user's file may return the model alone, or (model, loss_fn, (input, target)) where classes and
    cross-entropy do not apply.
    """
    torch.manual_seed(seed)
    made = _make(name, classes, shape[-1] if len(shape) == 4 else None)
    if isinstance(made, tuple):
        model, loss_fn, batch = made
    else:
        model, (loss_fn, batch) = made, _classification(name, made, shape)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        batch = (_channels_last(batch[0]), batch[1])
    return Task(name, model, loss_fn, batch, brings_batch=isinstance(made, tuple))


def task_of(arguments: argparse.Namespace) -> Task:
    """The task that the options of `options.add_model` and `options.add_input` describe."""
    return load_task(
        arguments.model,
        shape=arguments.input or options.shape(options.DEFAULT_INPUT),
        classes=arguments.classes,
        channels_last=arguments.channels_last,
        seed=arguments.seed,
    )


def torchvision_names() -> list[str]:
    """Every classifier that torchvision can build."""
    try:
        from torchvision import models
    except ImportError:
        raise UserError(INSTALL_TORCHVISION) from None
    return list(models.list_models(module=models))


def _make(name: str, classes: int, image_size: int | None) -> Any:
    if ":" in name:
        return _from_function(name, classes)
    if name.startswith(TIMM):
        return _from_timm(name.removeprefix(TIMM), classes)
    return make_network(name, classes) if is_network(name) else _from_torchvision(name, classes, image_size)


def _from_timm(name: str, classes: int) -> nn.Module:
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError:
        raise UserError("timm is not installed: pip install timm") from None
    try:
        return timm.create_model(name, pretrained=False, num_classes=classes)
    except (RuntimeError, ValueError) as error:
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        guess = f": did you mean {' or '.join(close)}?" if close else ""
        raise UserError(f"timm makes no model {name!r} ({first_line(error)}){guess}") from None


def _from_torchvision(name: str, classes: int, image_size: int | None) -> nn.Module:
    names = torchvision_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        guess = f"did you mean {' or '.join(close)}? Otherwise give" if close else "give"
        raise UserError(
            f"no model is called {name!r}: {guess} one of torchvision's classifiers ({', '.join(names)}), "
            "or your own as FILE.py:FUNCTION"
        )
    from torchvision import models

    options: dict[str, Any] = {"weights": None, "num_classes": classes}
    if name in WITHOUT_AUXILIARY:
        options |= {"aux_logits": False, "init_weights": False}
    if name.startswith("vit_") and image_size is not None:
        options["image_size"] = image_size
    try:
        return models.get_model(name, **options)
    except (ValueError, AssertionError) as error:
        raise UserError(f"{name} cannot be built for images of {image_size} pixels: {error}") from None


def _from_function(name: str, classes: int) -> Any:
    place, _, function_name = name.rpartition(":")
    path = Path(place).expanduser()
    if path.is_file():
        module = _import(path)
    elif all(word.isidentifier() for word in place.split(".")):
        module = _import_module(place)
    else:
        raise UserError(f"--model {name}: there is no file {path}")
    function = getattr(module, function_name, None)
    if not callable(function):
        possible = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        names = ", ".join(possible) or "none"
        raise UserError(f"--model {name}: {place} has no function {function_name!r}; it has {names}")
    takes_classes = "num_classes" in inspect.signature(function).parameters
    try:
        made = function(num_classes=classes) if takes_classes else function()
    except Exception as error:
        raise UserError(f"--model {name}: {function_name}() fails: {type(error).__name__}: {error}") from error
    is_triple = isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module)
    if not (isinstance(made, nn.Module) or is_triple):
        raise UserError(
            f"--model {name}: {function_name}() must return a torch.nn.Module, or (module, loss_fn, (input, target)), "
            f"not {type(made).__name__}"
        )
    return made


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UserError(f"there is no file {name}, and no module of that name can be imported: {error}") from error


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # The file's neighbours are importable, as if it had been started as a script.
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    return module


def _classification(name: str, model: nn.Module, shape: tuple[int, ...]) -> tuple[Any, tuple[Any, Any]]:
    """Cross-entropy on random images and labels, as many classes as the model scores."""
    images = torch.randn(shape)
    scored = _score_one(name, model, images[:1])
    if not isinstance(scored, torch.Tensor) or scored.dim() != 2 or not scored.is_floating_point():
        raise UserError(
            f"--model {name}: it returns no class scores (batch x classes), so its loss is unknown; let the function "
            "return (module, loss_fn, (input, target))"
        )
    return F.cross_entropy, (images, torch.randint(scored.shape[1], (shape[0],)))


def _score_one(name: str, model: nn.Module, image: torch.Tensor) -> Any:
    """What the model makes of one sample; nothing in it changes."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return model(image)
    except Exception as error:
        shape = "x".join(map(str, image.shape[1:]))
        raise UserError(f"--model {name} does not take samples of {shape}: {first_line(error)}") from error
    finally:
        model.train(was_training)


def _channels_last(value: Any) -> Any:
    is_image = isinstance(value, torch.Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if is_image else value

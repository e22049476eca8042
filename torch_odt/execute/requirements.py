"""What a plan demands of the model and the batch that it is used with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from sys import intern
from types import FunctionType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from torch_odt.capture.library import is_library_class
from torch_odt.capture.loss_modules import loss_module
from torch_odt.capture.reads import MODULE_OWN, is_own, is_own_class
from torch_odt.capture.strides import same_layout
from torch_odt.execute.named_tensors import StepTensors

_PLAIN = (bool, int, float, str, type(None))
_WITHOUT_EFFECT = frozenset({"inplace"})


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor, but for its data.

    Attributes:
        dtype: torch's name, as in `Value.dtype`.
        trains: whether it wants a gradient.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    trains: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        return cls(tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)

    @classmethod
    def from_data(cls, data: Any) -> TensorForm:
        shape, stride, dtype, trains = data
        if len(shape) != len(stride):
            raise ValueError("a shape and its strides differ in length")
        return cls(tuple(map(int, shape)), tuple(map(int, stride)), str(dtype), bool(trains))

    def to_data(self) -> list[Any]:
        return [list(self.shape), list(self.stride), self.dtype, self.trains]

    def matches(self, other: TensorForm) -> bool:
        """Whether one may take the other's place: strides of dimensions of size 1 say nothing."""
        is_alike = (self.shape, self.dtype, self.trains) == (other.shape, other.dtype, other.trains)
        return is_alike and same_layout(self.shape, self.stride, other.stride)

    def __str__(self) -> str:
        trains = ", trained" if self.trains else ""
        return f"{self.dtype}{list(self.shape)} with strides {self.stride}{trains}"


@dataclass(frozen=True)
class Requirements:
    """The forms of everything that a step is given.

    Attributes:
        batch: what stands at each place of the batch: a tensor's form, or a plain value as text.
        parameters, buffers: by the names that the graph uses.
        tied: parameters that are another one under a second name, with the first.
        modes: whether each module is in training mode.
        settings: plain values that the modules of installed packages hold (a dropout's rate, a BatchNorm's epsilon),
            as text, and their classes. Those of the user's own may count steps or name files.
        autocast: the type of autocast; empty without it.
    """

    batch: Mapping[str, TensorForm | str]
    parameters: Mapping[str, TensorForm]
    buffers: Mapping[str, TensorForm]
    tied: Mapping[str, str] = field(default_factory=dict)
    modes: Mapping[str, bool] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    autocast: str = ""

    @classmethod
    def of(cls, model: nn.Module, loss_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Requirements:
        """Of a step as it is about to run.

        Raises:
            TypeError: a tensor of the batch lies on another device.
        """
        leaves, _ = pytree.tree_flatten_with_path((args, kwargs))
        roots = list(_roots(model, loss_fn))
        parameters = {intern(p + n): t for p, m in roots for n, t in m.named_parameters(remove_duplicate=False)}
        buffers = {intern(p + n): t for p, m in roots for n, t in m.named_buffers(remove_duplicate=False)}
        modules = {p + n: module for p, m in roots for n, module in m.named_modules()}
        settings = {name: own for name, module in modules.items() if (own := _settings(module))}
        return cls(
            batch={_place(path): _leaf_form(leaf) for path, leaf in leaves},
            parameters=_forms(parameters),
            buffers=_forms(buffers),
            tied=_tied(parameters),
            modes={name: module.training for name, module in modules.items()},
            settings=_shared(settings),
            autocast=_autocast_type(),
        )

    def difference(self, found: Requirements) -> str:
        """What is not as it must be, in words; empty if everything is."""
        checks = (
            _difference("parameter", self.parameters, found.parameters, "the model"),
            _difference("buffer", self.buffers, found.buffers, "the model"),
            _difference("argument", self.batch, found.batch, "the batch"),
            "" if self.tied == found.tied else f"it is for a model that ties {dict(self.tied)}, not {dict(found.tied)}",
            self._difference_of_order(found),
            self._difference_of_modes(found),
        )
        return next(filter(None, checks), "")

    def _difference_of_order(self, found: Requirements) -> str:
        # The graph knows arguments by their number.
        if list(self.batch) == list(found.batch):
            return ""
        return f"the batch has its arguments in another order; the plan is for {', '.join(self.batch)}"

    def _difference_of_modes(self, found: Requirements) -> str:
        for name, trains in self.modes.items():
            if found.modes.get(name, trains) != trains:
                what = f"module {name}" if name else "the model"
                return f"{what} is to be in {_mode(trains)} mode, and is in {_mode(not trains)} mode"
        if self.autocast != found.autocast:
            return f"it is for {_autocast(self.autocast)}, and runs under {_autocast(found.autocast)}"
        return ""

    def difference_of_settings(self, found: Requirements) -> str:
        """The same of settings, which a graph that is traced anew follows by itself."""
        for name, wanted in self.settings.items():
            # Other versions of a class may have other ones.
            there = found.settings.get(name, {})
            for setting in wanted.keys() & there.keys():
                if wanted[setting] != there[setting]:
                    path = f"{name}.{setting}" if name else setting
                    return f"{path} is {there[setting]}; the plan is for {wanted[setting]}"
        return ""

    def to_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "batch": {place: form if isinstance(form, str) else form.to_data() for place, form in self.batch.items()},
            "parameters": {name: form.to_data() for name, form in self.parameters.items()},
            "buffers": {name: form.to_data() for name, form in self.buffers.items()},
            "tied parameters": dict(self.tied),
            "modules in training mode": [name for name, trains in self.modes.items() if trains],
            "modules in evaluation mode": [name for name, trains in self.modes.items() if not trains],
            "settings": _grouped(self.settings),
            "autocast": self.autocast,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Requirements:
        """The inverse of `to_data`.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it is something else.
        """

        def forms(group: str) -> dict[str, TensorForm]:
            return {name: TensorForm.from_data(form) for name, form in data[group].items()}

        batch = data["batch"].items()
        return cls(
            batch={place: form if isinstance(form, str) else TensorForm.from_data(form) for place, form in batch},
            parameters=forms("parameters"),
            buffers=forms("buffers"),
            tied={str(name): str(first) for name, first in data["tied parameters"].items()},
            modes=dict.fromkeys(data["modules in training mode"], True)
            | dict.fromkeys(data["modules in evaluation mode"], False),
            # Files of earlier versions have none.
            settings={str(name): dict(own) for own, names in data.get("settings", []) for name in names},
            autocast=str(data["autocast"]),
        )


class Unchanged:
    """Whether a step is still what it was when it was compared with its requirements; that takes longer than many an
    operator.

    Args:
        tensors: of the step as it was compared: what modules hold is the same as long as these are current.
        args, kwargs: the batch that it was compared with.
    """

    def __init__(self, tensors: StepTensors, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._tensors = tensors
        # Lists change in place.
        self._changing = [module for module in tensors.modules if _has_lists(module) and _settings(module)]
        self._state = self._look(args, kwargs)

    def is_as(self, tensors: StepTensors, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is like the one that was compared."""
        return tensors is self._tensors and self._look(args, kwargs) == self._state

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        leaves, _ = pytree.tree_flatten_with_path((args, kwargs))
        return (
            [(_place(path), _leaf_form(leaf)) for path, leaf in leaves],
            self._tensors.forms(),
            _autocast_type(),
            list(map(_settings, self._changing)),
        )


def _has_lists(module: nn.Module) -> bool:
    return any(_holds_a_list(value) for name, value in vars(module).items() if name not in MODULE_OWN)


def _holds_a_list(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, tuple) and any(map(_holds_a_list, value)))


def _autocast_type() -> str:
    return str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else ""


def _roots(model: nn.Module, loss_fn: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a step, and what the graph puts before their names."""
    yield "", model
    own = loss_module(model, loss_fn)
    if own is not None:
        yield "loss_fn:", own


def _tied(parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    first: dict[int, str] = {}
    named = {name: first.setdefault(id(parameter), name) for name, parameter in parameters.items()}
    return {name: other for name, other in named.items() if name != other}


def _settings(module: nn.Module) -> dict[str, str]:
    kind = type(module)
    if is_own_class(kind) and (not isinstance(kind.forward, FunctionType) or is_own(kind.forward)):
        return {}
    base = next(each for each in kind.__mro__ if not is_own_class(each))
    # Names and paths are of no account, but for torch's words.
    kinds = _PLAIN if is_library_class(base) else tuple(each for each in _PLAIN if each is not str)
    found = {
        name: _as_text(value)
        for name, value in vars(module).items()
        if name not in MODULE_OWN and name not in _WITHOUT_EFFECT and _is_made_of(value, kinds)
    }
    return {"class": base.__name__} | found


def _forms(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorForm]:
    """Those of tensors, with one object for those that are equal: networks repeat their layers."""
    first: dict[TensorForm, TensorForm] = {}
    forms = ((name, TensorForm.of(tensor)) for name, tensor in tensors.items())
    return {name: first.setdefault(form, form) for name, form in forms}


def _shared(settings: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The same, with one object for those that are equal: networks repeat their layers."""
    first: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    return {name: first.setdefault(tuple(own.items()), own) for name, own in settings.items()}


def _is_made_of(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_made_of(each, kinds) for each in value)
    return isinstance(value, kinds)


def _as_text(value: Any) -> str:
    """The same for a number and as many of it as there are dimensions."""
    if isinstance(value, (tuple, list)):
        texts = list(map(_as_text, value))
        return texts[0] if texts and len(set(texts)) == 1 else f"({', '.join(texts)})"
    return repr(value)


def _grouped(settings: Mapping[str, Mapping[str, str]]) -> list[Any]:
    """Each with the names of the modules that have it: networks repeat their layers."""
    groups: dict[str, tuple[dict[str, str], list[str]]] = {}
    for name, own in settings.items():
        groups.setdefault(repr(sorted(own.items())), (dict(own), []))[1].append(name)
    return [list(group) for group in groups.values()]


def _place(path: Any) -> str:
    """Where something stands in the batch: a position, or a keyword."""
    _, *inner = path
    return pytree.keystr(tuple(inner))


def _leaf_form(leaf: Any) -> TensorForm | str:
    if isinstance(leaf, torch.Tensor):
        if leaf.device.type != "cpu":
            raise TypeError(f"the batch holds a tensor on {leaf.device}; torch_odt trains on the CPU in this version")
        return TensorForm.of(leaf)
    return repr(leaf) if isinstance(leaf, _PLAIN) else f"a {type(leaf).__qualname__}"


def _difference(kind: str, wanted: Mapping[str, Any], found: Mapping[str, Any], where: str) -> str:
    for name, form in wanted.items():
        if name not in found:
            return f"{where} has no {kind} {name}"
        if not _is_as(form, found[name]):
            return f"{kind} {name} is {found[name]}; the plan is for {form}"
    unknown = next((name for name in found if name not in wanted), None)
    return f"{where} has {kind} {unknown}, of which the plan does not know" if unknown is not None else ""


def _is_as(wanted: TensorForm | str, found: TensorForm | str) -> bool:
    if isinstance(wanted, str) or isinstance(found, str):
        return wanted == found
    return wanted.matches(found)


def _mode(trains: bool) -> str:
    return "training" if trains else "evaluation"


def _autocast(dtype: str) -> str:
    return f"autocast to {dtype}" if dtype else "no autocast"

"""What a verb of this room makes of a model: which parameters train, what that leaves to hold, and the way back."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from torch_odt.adapt.sparse_layers import SparseLayer
from torch_odt.execute.compiled import is_compiled
from torch_odt.memory._units import format_bytes

Undo = Callable[[], None]
# A model's attribute: the methods that have adapted it and were not taken back or merged, in their order.
_ADAPTED_BY = "_adapted_by"


@dataclass(frozen=True)
class _Change:
    """How a change is taken back, and whether it added something that learns: `merge` keeps that.

    Attributes:
        held: what stands in what was changed by now, with what stood there before.
    """

    undo: Undo
    is_added: bool
    held: Callable[[], list[tuple[nn.Module, nn.Module]]] | None = None


@dataclass(frozen=True)
class Footprint:
    """What a model holds whatever the batch is.

    Attributes:
        parameters: elements of all parameters and of the frozen weights that are stored otherwise.
        trained_parameters: those that train.
        weight_bytes: parameters and buffers, as they are stored.
        gradient_bytes: gradients of what trains, and so many again for each moment that the optimizer keeps.
    """

    parameters: int
    trained_parameters: int
    weight_bytes: int
    gradient_bytes: int


def footprint(model: nn.Module) -> Footprint:
    """What a model holds as it is now; tensors that several modules share are counted once."""
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return Footprint(
        sum(parameter.numel() for parameter in parameters)
        # Trained slices are a part of whole weights.
        - sum(layer.trained_weight.numel() for layer in model.modules() if isinstance(layer, SparseLayer))
        + sum(math.prod(module.stored_shape) for module in model.modules() if isinstance(module, StoresWeight)),
        sum(parameter.numel() for parameter in trained),
        # What takes the gradient of an int8 weight is large by its shape alone.
        sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in (*parameters, *model.buffers())),
        sum(parameter.nbytes for parameter in trained),
    )


def adapted_by(model: nn.Module) -> dict[int, str]:
    """The methods that have adapted a model and were not taken back or merged, by their place in the order."""
    found: dict[int, str] = vars(model).get(_ADAPTED_BY, {})
    return found


class StoresWeight(nn.Module):
    """A module whose frozen weight is no parameter, but computed from what is stored in fewer bits.

    Attributes:
        stored_shape: the shape of the weight.
    """

    stored_shape: tuple[int, ...]


@dataclass
class Adaptation:
    """A model that was adapted in place, and what is left to undo.

    `print` it to see what trains and what that saves; give `parameters()` to the optimizer.

    Attributes:
        method: what was done, in words ("tinytl (lite+bias)").
        model: the adapted model; the same object as before.
        trained: names of the parameters that train, as `model.named_parameters()` has them.
        before, after: what the model held and holds now, whatever the batch.
        notes: what was chosen, and what was left as it is and why.
    """

    method: str
    model: nn.Module
    trained: tuple[str, ...]
    before: Footprint
    after: Footprint
    notes: tuple[str, ...] = ()
    _changes: list[_Change] = field(default_factory=list, repr=False)
    _place: int = field(default=0, repr=False)
    _is_unloaded: bool = field(default=False, repr=False)

    @property
    def kept_bytes(self) -> int:
        """Of what was replaced and is no part of the model now; `unload` puts it back, `merge` lets go of it."""
        undone = [change.undo for change in self._changes]
        replaced = (tensor for undo in undone if isinstance(undo, _Return) for tensor in _tensors(undo.old))
        held = {tensor.untyped_storage().data_ptr() for tensor in _tensors(self.model)}
        kept = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in replaced}
        return sum(nbytes for pointer, nbytes in kept.items() if pointer not in held)

    def parameters(self) -> list[nn.Parameter]:
        """What trains, for the optimizer.

        Raises:
            ValueError: `unload` has taken it back; or a later method has given a parameter another name: its own
                `parameters()` are what trains now.
        """
        if self._is_unloaded:
            raise ValueError(f"{self.method} was taken back by unload(): nothing is left that it trains")
        wanted = set(self.trained)
        found = {name: parameter for name, parameter in self.model.named_parameters() if name in wanted}
        if missing := wanted - found.keys():
            if not self._changes:
                raise ValueError(f"{self.method} was merged, and all of the model may train: take model.parameters()")
            raise ValueError(
                f"{min(missing)} of {self.method} has another name by now, or is gone: take the parameters() of what "
                "adapted the model last"
            )
        return list(found.values())

    def unload(self) -> nn.Module:
        """Take the model's structure, modes and what may train back to what they were; trained values stay.

        What the method added (a new classifier, lite residual modules) is removed with what it has learnt: choose
        `merge` to use the trained model. Frozen weights that were stored in 8 bits stay what these bits say. Where the
        model was moved to another device or type since, what comes back is moved, too. A second call does nothing.

        Raises:
            ValueError: a later method's changes are to be taken back first, or something else stands where this method
                has put a module. Nothing has changed then.
        """
        self._require_own(self._changes)
        # What was merged has nothing left to take back.
        self._is_unloaded |= bool(self._changes)
        while self._changes:
            self._changes.pop().undo()
        self._leave()
        return self.model

    def _require_own(self, changes: Collection[_Change]) -> None:
        """Raise ValueError where something else has changed the model since, or stands in what these put in."""
        present = set(self.model.modules())
        own = {change.undo.new for change in self._changes if isinstance(change.undo, _Return)}
        for change in changes:
            undo = change.undo
            if isinstance(undo, _Return) and undo.new not in present and not self._is_replaced_later(undo.new):
                raise ValueError(
                    f"a {type(undo.new).__name__} that {self.method} has put into the model is not in it any more: "
                    "take back what was changed afterwards first, by its unload() or merge(); if that was merged, it "
                    "stays, and this can only be merged, too"
                )
            for now, before in change.held() if change.held else ():
                if now is not before and now not in own:
                    raise ValueError(
                        f"a {type(now).__name__} stands where {self.method} has found a {type(before).__name__}: take "
                        "back what was changed afterwards first, by its unload() or merge()"
                    )
        later = [method for place, method in adapted_by(self.model).items() if place > self._place]
        if later and changes:
            raise ValueError(
                f"{later[-1]} has changed the model after {self.method}: call unload() or merge() of what it "
                "returned first"
            )

    def _leave(self) -> None:
        methods = adapted_by(self.model)
        methods.pop(self._place, None)
        # The next method may get this place.
        self._place = -1
        if not methods:
            vars(self.model).pop(_ADAPTED_BY, None)

    def _is_replaced_later(self, module: nn.Module) -> bool:
        """By this method itself."""
        return any(isinstance(change.undo, _Return) and change.undo.old is module for change in self._changes)

    def merge(self) -> nn.Module:
        """Make an ordinary model of what was trained, which computes in evaluation mode what the adapted one does.

        Choose it to deploy or to save the model, or to train it further in another way. Trained slices are written into
        the weights of ordinary layers, frozen BatchNorms become BatchNorms again, weights in 8 bits are stored in full,
        and all may train that could before. What was added and has learnt stays: a new classifier, lite residual
        modules, GroupNorm in BatchNorm's place, standardised weights. It cannot be taken back by `unload` then. To
        train on, make a new optimizer and a new step: what trains is more now, and BatchNorm follows the batch.

        Raises:
            ValueError: it was taken back by `unload` before: what was added is gone with what it has learnt. Or
                something else stands where this method has put a module: what a later one has changed comes first.

        Example:
            >>> import torch_odt as odt
            >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
            >>> adaptation = odt.adapt.bias_only_(model, classes=3)
            >>> [type(layer).__name__ for layer in adaptation.merge()]
            ['Linear', 'BatchNorm1d', 'Linear']
            >>> model[2].out_features
            3
        """
        if self._is_unloaded:
            raise ValueError(
                f"{self.method} was taken back by unload(): what it had added is gone, with what that has learnt. Call "
                "merge() instead of unload() to use a trained model"
            )
        self._require_own([change for change in self._changes if not change.is_added])
        while self._changes:
            change = self._changes.pop()
            if not change.is_added:
                change.undo()
        self._leave()
        return self.model

    def __str__(self) -> str:
        before, after = self.before, self.after
        share = after.trained_parameters / max(1, after.parameters)
        rows = (
            ("trains", f"{after.trained_parameters:,} of {after.parameters:,} parameters ({share:.1%})"),
            ("in", f"{len(self.trained)} tensors"),
            ("gradients", f"{format_bytes(after.gradient_bytes)} instead of {format_bytes(before.gradient_bytes)}"),
            ("weights", f"{format_bytes(after.weight_bytes)} instead of {format_bytes(before.weight_bytes)}"),
            *([("kept", f"{format_bytes(kept)} for unload(), until merge()")] if (kept := self.kept_bytes) else []),
        )
        state = ", taken back" if self._is_unloaded else "" if self._changes else ", merged"
        lines = [f"{self.method} of {type(self.model).__name__}{state}"]
        lines += [f"  {label:<10} {text}" for label, text in rows]
        lines.append("  activations and all else that a step holds: odt.plan(model, loss_fn, batch, budget=...)")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


class Adapting:
    """Collects what a verb changes, so that all of it can be undone; the verbs are written with it.

    Where the verb raises half way, leaving the `with` block takes back what was done.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> with Adapting(model) as adapting:
        ...     adapting.train_only(["1.bias"])
        >>> adaptation = adapting.finish("last bias")
        >>> adaptation.trained
        ('1.bias',)
        >>> _ = adaptation.unload()
        >>> all(parameter.requires_grad for parameter in model.parameters())
        True
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"the model is a {type(model).__name__}: give an nn.Module")
        if is_compiled(model):
            raise TypeError("the model is what torch.compile returned: adapt the model itself, and compile that")
        self.model = model
        self.notes: list[str] = []
        self._before = footprint(model)
        self._changes: list[_Change] = []

    def __enter__(self) -> Adapting:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._take_back()

    def replace(self, name: str, module: nn.Module, *, is_added: bool = False) -> None:
        """Put a module in the place of the submodule of that name, wherever the model has that.

        Args:
            is_added: it does not stand for the old one, but has something of its own to learn.

        Raises:
            ValueError: the name is "", the model itself; or a module reaches it by something else than its name.
        """
        if not name:
            raise ValueError(f"the model ({type(self.model).__name__}) itself cannot be replaced: put it into another")
        old = self.model.get_submodule(name)
        _require_registered(self.model, name, old)
        if _has_hooks(old) and not _has_hooks(module):
            self.notes.append(f"{name} has hooks, which do not run while another module is in its place")
        module.train(old.training)
        swap_module(self.model, old, module)
        self._changes.append(_Change(_Return(self.model, old, module), is_added))

    def train_only(self, names: Iterable[str]) -> None:
        """Let the parameters of these names train and no others.

        Raises:
            ValueError: the model has no parameter of a name, or none is named, or one is no float.
        """
        wanted = list(names)
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        missing = [name for name in wanted if name not in parameters]
        if missing:
            raise ValueError(f"the model has no parameters {', '.join(missing[:5])}; see model.named_parameters()")
        if not wanted:
            raise ValueError("nothing would train: no parameter was selected")
        wrong = [name for name in wanted if not parameters[name].is_floating_point()]
        if wrong:
            raise ValueError(f"{', '.join(wrong[:5])} cannot train: only floating-point parameters have gradients")
        chosen = {id(parameters[name]) for name in wanted}
        owners: dict[int, list[str]] = {}
        for module_name, module in self.model.named_modules():
            for local, parameter in module._parameters.items():
                owners.setdefault(id(parameter), []).append(f"{module_name}.{local}")
        for names_of in (owners[id(parameters[name])] for name in dict.fromkeys(wanted)):
            note = f"{names_of[0]} is {', '.join(names_of[1:])}, too, and trains in all of these"
            if len(names_of) > 1 and note not in self.notes:
                self.notes.append(note)
        for parameter in parameters.values():
            self._set_requires_grad(parameter, id(parameter) in chosen)

    def also_undo(
        self,
        undo: Undo,
        *,
        is_added: bool = False,
        held: Callable[[], list[tuple[nn.Module, nn.Module]]] | None = None,
    ) -> None:
        """Something else to be taken back, after all that is recorded later.

        Args:
            is_added: what it takes back is something that learns, or without which the model computes something else.
            held: modules that stand by now in what it takes out of the model, each with what stood there before; what
                a later method has put there would be lost.

        Both are to be no closures but, say, partials of functions: `copy.deepcopy` of an adaptation copies what these
        hold along with the model, and a closure would go on changing the original.
        """
        self._changes.append(_Change(undo, is_added, held))

    def gradients_grow(self) -> bool:
        """Whether what trains now has more gradients than what trained before."""
        return footprint(self.model).gradient_bytes > self._before.gradient_bytes

    def finish(self, method: str) -> Adaptation:
        """The adaptation, from what trains now."""
        trained = tuple(name for name, parameter in self.model.named_parameters() if parameter.requires_grad)
        place = max(adapted_by(self.model), default=-1) + 1
        vars(self.model).setdefault(_ADAPTED_BY, {})[place] = method
        after = footprint(self.model)
        return Adaptation(method, self.model, trained, self._before, after, tuple(self.notes), self._changes, place)

    def _set_requires_grad(self, parameter: nn.Parameter, requires_grad: bool) -> None:
        if parameter.requires_grad == requires_grad:
            return
        parameter.requires_grad_(requires_grad)
        parameter.grad = None
        owner, local = next(
            (module, local)
            for module in self.model.modules()
            for local, each in module._parameters.items()
            if each is parameter
        )
        self.also_undo(partial(_set, owner, local, not requires_grad))

    def _take_back(self) -> None:
        while self._changes:
            self._changes.pop().undo()


class _Return:
    """Puts a module back in whose place another one is, as that has become meanwhile.

    `model.to` puts new buffers into the modules that it finds, and loading may put new parameters there: those that
    both modules had in common are taken from the one in place. What the old one has alone follows to its device and
    type.
    """

    def __init__(self, model: nn.Module, old: nn.Module, new: nn.Module) -> None:
        self._model, self.old, self.new = model, old, new
        self._parameters = _common(old._parameters, new._parameters)
        self._buffers = _common(old._buffers, new._buffers)
        self._placement = self._find_placement()

    def __call__(self) -> None:
        old, new = self.old, self.new
        old._parameters.update({name: new._parameters[name] for name in self._parameters})
        old._buffers.update({name: new._buffers[name] for name in self._buffers})
        placement = self._find_placement()
        if placement is not None and placement != self._placement:
            old.to(*placement)
        old.training = new.training
        swap_module(self._model, new, old)

    def _find_placement(self) -> tuple[torch.device, torch.dtype] | None:
        tensors = (*self.new.parameters(), *self.new.buffers(), *self._model.parameters())
        return next(((each.device, each.dtype) for each in tensors if each.is_floating_point()), None)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def _common(old: Mapping[str, Tensor | None], new: Mapping[str, Tensor | None]) -> list[str]:
    return [name for name, tensor in old.items() if tensor is not None and new.get(name) is tensor]


def swap_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put one module in the place of another under each of its names."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)


def _set(owner: nn.Module, local: str, requires_grad: bool) -> None:
    # Loading may have put another parameter there.
    parameter = owner._parameters[local]
    if parameter is not None:
        parameter.requires_grad_(requires_grad)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _require_registered(model: nn.Module, name: str, module: nn.Module) -> None:
    """Raise ValueError where Python's own list or dict holds a module: code that looks there finds the old one."""
    for owner_name, owner in model.named_modules():
        for attribute, value in vars(owner).items():
            if attribute.startswith("_") or not isinstance(value, list | tuple | dict):
                continue
            if any(each is module for each in (value.values() if isinstance(value, dict) else value)):
                raise ValueError(
                    f"{owner_name or type(owner).__name__} has {name} in its {attribute}, too, a "
                    f"{type(value).__name__}, where nothing can take its place: use an nn.ModuleList or nn.ModuleDict"
                )

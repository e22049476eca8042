"""What a verb of this room makes of a model: which parameters train, what that leaves to hold, and the way back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import nn

from torch_odt.memory._units import format_bytes

Undo = Callable[[], None]


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
        + sum(math.prod(module.stored_shape) for module in model.modules() if isinstance(module, StoresWeight)),
        sum(parameter.numel() for parameter in trained),
        sum(tensor.nbytes for tensor in (*parameters, *model.buffers())),
        sum(parameter.nbytes for parameter in trained),
    )


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
    _undo: list[Undo] = field(default_factory=list, repr=False)

    def parameters(self) -> list[nn.Parameter]:
        """What trains, for the optimizer."""
        wanted = set(self.trained)
        return [parameter for name, parameter in self.model.named_parameters() if name in wanted]

    def unload(self) -> nn.Module:
        """Take the model's structure, modes and what may train back to what they were; trained values stay.

        What the method added (lite residual modules, say) is removed with what it has learnt. Frozen weights that were
        stored in 8 bits stay what these bits say. A second call does nothing.
        """
        while self._undo:
            self._undo.pop()()
        return self.model

    def __str__(self) -> str:
        before, after = self.before, self.after
        share = after.trained_parameters / max(1, after.parameters)
        rows = (
            ("trains", f"{after.trained_parameters:,} of {after.parameters:,} parameters ({share:.1%})"),
            ("in", f"{len(self.trained)} tensors"),
            ("gradients", f"{format_bytes(after.gradient_bytes)} instead of {format_bytes(before.gradient_bytes)}"),
            ("weights", f"{format_bytes(after.weight_bytes)} instead of {format_bytes(before.weight_bytes)}"),
        )
        lines = [f"{self.method} of {type(self.model).__name__}"]
        lines += [f"  {label:<10} {text}" for label, text in rows]
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
        self.model = model
        self.notes: list[str] = []
        self._before = footprint(model)
        self._undo: list[Undo] = []

    def __enter__(self) -> Adapting:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._take_back()

    def replace(self, name: str, module: nn.Module) -> None:
        """Put a module in the place of the submodule of that name."""
        old = self.model.get_submodule(name)
        self.model.set_submodule(name, module)
        module.train(old.training)
        self._undo.append(lambda: self.model.set_submodule(name, old))

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
        for parameter in parameters.values():
            self._set_requires_grad(parameter, id(parameter) in chosen)

    def also_undo(self, undo: Undo) -> None:
        """Something else to be taken back, after all that is recorded later."""
        self._undo.append(undo)

    def finish(self, method: str) -> Adaptation:
        """The adaptation, from what trains now."""
        trained = tuple(name for name, parameter in self.model.named_parameters() if parameter.requires_grad)
        return Adaptation(
            method, self.model, trained, self._before, footprint(self.model), tuple(self.notes), self._undo
        )

    def _set_requires_grad(self, parameter: nn.Parameter, requires_grad: bool) -> None:
        if parameter.requires_grad == requires_grad:
            return
        parameter.requires_grad_(requires_grad)
        parameter.grad = None
        self._undo.append(lambda: _set(parameter, not requires_grad))

    def _take_back(self) -> None:
        while self._undo:
            self._undo.pop()()


def _set(parameter: nn.Parameter, requires_grad: bool) -> None:
    parameter.requires_grad_(requires_grad)

"""What clients have trained, merged into the global model: each element from those clients that hold it.

E. Diao, J. Ding, V. Tarokh, "HeteroFL", ICLR 2021, equations 3 to 5, and its masking trick for clients without some of
the classes. With clients that hold the whole model it is FedAvg (B. McMahan et al., AISTATS 2017, algorithm 1).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_odt.adapt.arguments import require_numbers
from torch_odt.adapt.sub_model import StateDict, SubModel, check_shapes, shapes_of


@dataclass(frozen=True)
class ClientUpdate:
    """What a client sends back.

    Attributes:
        state_dict: of the model that it has trained; names that it leaves out (layers that it has not trained) it does
            not hold.
        weight: how much it counts; FedAvg takes the client's number of samples, HeteroFL 1.
        sub_model: which part of the global model that is; None for the whole.
        classes: the classes that it has samples of: of the classifier it holds these rows alone. None for all.
    """

    state_dict: StateDict
    weight: float = 1.0
    sub_model: SubModel | None = None
    classes: Sequence[int] | None = None


def merge_sub_models(
    global_state: StateDict, updates: Iterable[ClientUpdate], *, head: str | None = None
) -> dict[str, Any]:
    """The next global model: of each element, the weighted mean over the clients that hold it.

    Elements that no client holds keep their values: all of them, where there are no updates. Sums are made in double
    precision, one tensor after the other; tensors of integers (BatchNorm's count of batches) get the mean, rounded.

    Args:
        global_state: state_dict of the model that clients were given parts of; left as it is.
        updates: what the clients of the round have trained.
        head: the classifier's name ("classifier.1"), whose rows are the classes; needed where an update has `classes`.

    Returns:
        A new state_dict, to be loaded into the global model.

    Raises:
        ValueError: an update does not fit the global model or its sub-model, holds numbers that are not finite, or has
            a weight that is no positive number; or classes are given without the head, or there are none of these
            numbers; or whole numbers differ, as the channels of sparse updates may.

    Example:
        >>> wide, narrow = (torch.nn.Sequential(torch.nn.Linear(1, n), torch.nn.Linear(n, 1)) for n in (3, 1))
        >>> part = SubModel.leading(wide, narrow, torch.ones(1, 1))
        >>> zeros = {name: torch.zeros_like(value) for name, value in wide.state_dict().items()}
        >>> ones = {name: torch.ones_like(value) for name, value in narrow.state_dict().items()}
        >>> merged = merge_sub_models(zeros, [ClientUpdate(zeros), ClientUpdate(ones, weight=3.0, sub_model=part)])
        >>> merged["0.bias"]
        tensor([0.7500, 0.0000, 0.0000])
    """
    updates = list(updates)
    shapes = shapes_of(global_state)
    if head is not None and f"{head}.weight" not in shapes:
        raise ValueError(f"head={head!r} is no layer of the global model: name one of {_layers(shapes)}")
    for number, update in enumerate(updates):
        if not isinstance(update, ClientUpdate):
            raise TypeError(f"update {number} is a {type(update).__name__}: give ClientUpdate(state_dict, ...)")
        shapes_of(update.state_dict)
        _check(number, update, global_state, head)
        _check_finite(number, update, head)
    return {name: _merged(name, value, updates, head) for name, value in global_state.items()}


def _merged(name: str, value: Any, updates: list[ClientUpdate], head: str | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    of_head = head is not None and name.rpartition(".")[0] == head
    total = torch.zeros(value.shape, dtype=torch.promote_types(value.dtype, torch.float64))
    weight = torch.zeros(value.shape, dtype=torch.float64)
    for update in updates:
        if name not in update.state_dict:
            continue
        block = (...,) if update.sub_model is None else update.sub_model.block(name)
        held = torch.full_like(weight[block], update.weight)
        if of_head and update.classes is not None:
            mask = torch.zeros(value.shape[0], dtype=torch.bool)
            mask[list(map(operator.index, update.classes))] = True
            held[~mask] = 0
        # A row that is not held may be anything, also not finite.
        own = update.state_dict[name].detach().cpu()
        if _names_places(value) and not torch.equal(own, value.detach().cpu()[block]):
            raise ValueError(
                f"{name} holds whole numbers that differ between models, such as the channels of a sparse update or "
                "weights in 8 bits, and their mean is none: merge() or unload() each model's adaptation first"
            )
        part = own.to(total.dtype).where(held > 0, 0)
        total[block] += held * part
        weight[block] += held
    mean = total / weight
    if not value.is_floating_point() and not value.is_complex():
        mean = mean.round()
    return torch.where((weight > 0).to(value.device), mean.to(value.device, value.dtype), value.detach())


def _names_places(value: Tensor) -> bool:
    """Whether a tensor holds indices or codes; a single number is a count, as BatchNorm has."""
    return value.dim() > 0 and not value.is_floating_point() and not value.is_complex()


def _layers(shapes: Mapping[str, Any]) -> str:
    return ", ".join(name.removesuffix(".weight") for name in shapes if name.endswith(".weight"))


def _check(number: int, update: ClientUpdate, global_state: StateDict, head: str | None) -> None:
    whose = f"update {number}"
    require_numbers(weight=update.weight)
    if not 0 < update.weight < float("inf"):
        raise ValueError(f"{whose} has the weight {update.weight}; it is a positive number")
    shapes = shapes_of(global_state)
    expected = shapes
    if update.sub_model is not None:
        check_shapes(global_state, update.sub_model.wide, f"the wide model of {whose}")
        expected = dict(update.sub_model.narrow)
    held = {name: shape for name, shape in expected.items() if name in update.state_dict}
    check_shapes(update.state_dict, held, whose)
    if update.classes is None:
        return
    try:
        classes = [operator.index(each) for each in update.classes]
    except TypeError as error:
        raise TypeError(f"{whose} has the classes {update.classes!r}: give a list of whole numbers") from error
    if head is None:
        raise ValueError(f"{whose} has classes: name the classifier by head=, one of {_layers(shapes)}")
    rows = shapes[f"{head}.weight"][0]
    if not classes or not all(0 <= each < rows for each in classes):
        raise ValueError(f"{whose} has the classes {classes}; the classifier {head!r} has 0 to {rows - 1}")


def _check_finite(number: int, update: ClientUpdate, head: str | None) -> None:
    """Of a classifier the rows that are held are asked alone."""
    for name, value in update.state_dict.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        of_head = head is not None and name.rpartition(".")[0] == head and update.classes is not None
        rows = value[list(map(operator.index, update.classes or ()))] if of_head else value
        if not bool(rows.isfinite().all()):
            raise ValueError(f"update {number} has numbers that are not finite in {name!r}: leave this client out")

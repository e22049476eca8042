"""Structural pruning: filters go with everything that their outputs meet, and what is left is an ordinary module.

Channels are found by `channel_ids`; by which weights filters are chosen is in `filters`. Whether the smaller network
computes what the other one does without those channels is found out by running both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from torch_odt.adapt.adaptation import Footprint, footprint
from torch_odt.adapt.layers import evaluating
from torch_odt.errors import first_line
from torch_odt.memory._units import format_bytes
from torch_odt.quant.channel_ids import CONVOLUTIONS, NORMS, ChannelIds, find_channel_ids
from torch_odt.quant.filters import Criterion, kept_filters

# Sums of the same terms in another order differ by far less, other terms by far more.
_RELATIVE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Pruning:
    """What was pruned, and what was not.

    Attributes:
        model: the pruned model; the same object as before.
        criterion, ratio: by which filters were chosen, and how many of each layer went.
        kept: of each layer that lost filters, which rows of its weight stayed.
        not_pruned: of each layer that lost none, why.
        before, after: what the model held and holds now, whatever the batch.
    """

    model: nn.Module
    criterion: Criterion
    ratio: float
    kept: Mapping[str, tuple[int, ...]]
    not_pruned: Mapping[str, str]
    before: Footprint
    after: Footprint

    def __str__(self) -> str:
        before, after = self.before, self.after
        lines = [
            f"{self.ratio:.0%} of the filters of {len(self.kept)} layers of {type(self.model).__name__} are gone "
            f"({self.criterion})",
            f"  parameters {after.parameters:,} instead of {before.parameters:,}",
            f"  weights    {format_bytes(after.weight_bytes)} instead of {format_bytes(before.weight_bytes)}",
        ]
        lines += [f"  {name}: {len(rows)} filters stay" for name, rows in self.kept.items()]
        lines += [f"  not {name}: {why}" for name, why in self.not_pruned.items()]
        return "\n".join(lines)


def prune_(
    model: nn.Module,
    example: Tensor,
    *,
    ratio: float,
    criterion: Criterion = "l1",
    layers: Iterable[str] | None = None,
) -> Pruning:
    """Remove filters from a network, in place; its tensors shrink, and it stays an ordinary module.

    Choose it before training on what the device has seen: a smaller network trains and runs in less time and memory,
    and training makes good what it lost. A filter goes with what its output meets: rows of BatchNorm and of depthwise
    convolutions, columns of the layers behind, and, where outputs are added (residual blocks), the filters of all the
    layers that are added, which are chosen by their weights together. Of each set of such layers the same share goes.
    Parameters are new ones afterwards: make the optimizer then.

    Args:
        model: any network of one input that torch.fx traces, in whichever mode. Filters of convolutions (depthwise
            ones included) and linear layers go; the model's outputs stay as many as they are.
        example: a batch of inputs, of which only the shape and the type are used.
        ratio: the share of the filters that go, in (0, 1). One at least stays.
        criterion: "l1" keeps the filters of largest L1 norm, "geometric_median" removes those that are nearest to the
            geometric median of all (FPGM); see `filter_scores`.
        layers: names of the layers that may lose filters, as `model.named_modules()` has them; all by default. A set of
            layers whose channels belong together is pruned where all of them are named.

    Returns:
        What was pruned, and what was not and why. Layers that were left: those of whose channels nothing certain is
        known (behind operators that are not known, in convolutions of several groups, under GroupNorm or LayerNorm),
        and those that make the model's output.

    Raises:
        ValueError: the ratio, the criterion or a name is none, no layer can be pruned, the model cannot be traced or
            does not take the example, or the smaller network does not compute what it should (code of the model that
            counts channels itself, as a rule); it is then left as it was.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))
        >>> pruning = prune_(model, torch.ones(1, 1, 4, 4), ratio=0.75)
        >>> pruning.kept.keys(), pruning.not_pruned
        (dict_keys(['0']), {'4': "its channels are the model's output"})
        >>> model[0].weight.shape, model[1].num_features, model[4].in_features
        (torch.Size([2, 1, 3, 3]), 2, 8)
    """
    channels = find_channel_ids(model, example)
    wanted = _chosen(channels, model, layers)
    before = footprint(model)
    removed, not_pruned = _removed(channels, model, wanted, ratio, criterion)
    kept_rows = {name: ~torch.isin(ids, removed) for name, ids in channels.outputs.items()}
    kept = {name: tuple(rows.nonzero().flatten().tolist()) for name, rows in kept_rows.items() if not bool(rows.all())}
    if not kept:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(not_pruned.items())[:5])
        raise ValueError(f"no layer of {type(model).__name__} can lose filters at ratio={ratio} ({why})")
    not_pruned = {name: why for name, why in not_pruned.items() if name not in kept}
    _shrink_and_check(model, example, channels, removed)
    return Pruning(model, criterion, ratio, kept, not_pruned, before, footprint(model))


def load_pruned_(model: nn.Module, state_dict: Mapping[str, Any]) -> nn.Module:
    """Give a model as it was before pruning the shapes and values of a pruned one's state_dict, in place.

    Choose it to read a pruned network back from a file: only its state_dict need be kept beside the code that makes
    the network.

    Args:
        model: of the same architecture, with all of its filters.
        state_dict: of a model that `prune_` has made smaller.

    Returns:
        The model.

    Raises:
        ValueError: a tensor is missing, too many, or larger than the model's; it is named, and the model left as it
            was.

    Example:
        >>> pruned, fresh = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
        >>> _ = prune_(pruned, torch.ones(1, 4), ratio=0.5)
        >>> load_pruned_(fresh, pruned.state_dict())[0]
        Linear(in_features=4, out_features=4, bias=True)
    """
    own = model.state_dict()
    for name in [*own, *state_dict]:
        if name not in own or name not in state_dict:
            which = "the model" if name not in own else "the state_dict"
            raise ValueError(f"{which} has no {name!r}: give the architecture that was pruned")
        shapes = [tuple(each[name].shape) if isinstance(each[name], Tensor) else () for each in (own, state_dict)]
        if len(shapes[0]) != len(shapes[1]) or any(new > old for old, new in zip(*shapes, strict=True)):
            raise ValueError(f"{name!r} is {shapes[1]} in the state_dict and {shapes[0]} in the model: no part of it")
    shrinking = _Shrinking()
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        for local, tensor in [*module._parameters.items(), *module._buffers.items()]:
            new = state_dict.get(f"{prefix}{local}")
            if tensor is not None and new is not None and new.shape != tensor.shape:
                shrinking.set(module, local, torch.empty(new.shape, dtype=tensor.dtype, device=tensor.device))
        shrinking.set_sizes(module)
    model.load_state_dict(state_dict)
    return model


def keep_outputs_(layer: nn.Module, outputs: Sequence[int]) -> None:
    """Keep some of a layer's outputs, in the order given, in place: of a classifier, some of its classes.

    Args:
        layer: linear, or a convolution of one group.

    Raises:
        ValueError: the layer is none of these, or it has no such output.

    Example:
        >>> layer = nn.Linear(3, 10)
        >>> keep_outputs_(layer, [7, 2])
        >>> layer
        Linear(in_features=3, out_features=2, bias=True)
    """
    if type(layer) not in (*CONVOLUTIONS, nn.Linear) or getattr(layer, "groups", 1) > 1:
        raise ValueError(f"{layer} is no linear layer, and no convolution of one group")
    rows = torch.tensor(list(outputs), dtype=torch.int64)
    count = layer.get_parameter("weight").shape[0]
    if not len(rows) or bool(((rows < 0) | (rows >= count)).any()):
        raise ValueError(f"outputs={list(outputs)}: the layer has those of 0 to {count - 1}")
    shrinking = _Shrinking()
    for name, tensor in list(layer.named_parameters(recurse=False)):
        shrinking.set(layer, name, tensor.detach()[rows.to(tensor.device)])
    shrinking.set_sizes(layer)


def _chosen(channels: ChannelIds, model: nn.Module, layers: Iterable[str] | None) -> set[str]:
    known = list(channels.outputs)
    if layers is None:
        return set(known)
    names = list(layers)
    unknown = [name for name in names if name not in known]
    if unknown:
        modules = dict(model.named_modules())
        what = "there is no such module" if unknown[0] not in modules else type(modules[unknown[0]]).__name__
        raise ValueError(
            f"layers: {unknown[0]!r} is no convolution or linear layer that runs ({what}); there are {', '.join(known)}"
        )
    if not names:
        raise ValueError("layers is empty: name the layers that may lose filters, or leave it out for all")
    return set(names)


@dataclass
class _Coupled:
    """Channels that lie in the same layers, and so compete with each other.

    Attributes:
        rows: for each channel, its rows of each layer.
    """

    channels: list[int] = field(default_factory=list)
    rows: list[dict[str, list[int]]] = field(default_factory=list)


def _removed(
    channels: ChannelIds, model: nn.Module, wanted: set[str], ratio: float, criterion: Criterion
) -> tuple[Tensor, dict[str, str]]:
    """The channels that go, and why layers keep theirs."""
    rows_of: dict[int, dict[str, list[int]]] = {}
    for name, ids in channels.outputs.items():
        for row, each in enumerate(ids.tolist()):
            rows_of.setdefault(each, {}).setdefault(name, []).append(row)
    sets: dict[tuple[tuple[str, int], ...], _Coupled] = {}
    not_pruned: dict[str, str] = {}
    for each, rows in rows_of.items():
        unwanted = [name for name in rows if name not in wanted]
        reason = channels.pinned.get(each)
        if unwanted and reason is None:
            reason = f"its channels belong to those of {unwanted[0]}, which is not among the layers"
        for name in rows if reason is not None else ():
            not_pruned.setdefault(name, "it is not among the layers" if name not in wanted else str(reason))
        if reason is None:
            coupled = sets.setdefault(tuple((name, len(places)) for name, places in rows.items()), _Coupled())
            coupled.channels.append(each)
            coupled.rows.append(rows)
    removed: list[int] = []
    for names, coupled in sets.items():
        kept = kept_filters(_filters(model, coupled), ratio, criterion).tolist()
        removed += [each for number, each in enumerate(coupled.channels) if number not in set(kept)]
        if len(kept) == len(coupled.channels):
            share = f"{ratio:g} of its {len(kept)} filters is less than one"
            not_pruned |= {name: share for name, _ in names if name not in not_pruned}
    return torch.tensor(removed, dtype=torch.int64), _in_order(channels, not_pruned)


def _in_order(channels: ChannelIds, reasons: dict[str, str]) -> dict[str, str]:
    return {name: reasons[name] for name in channels.outputs if name in reasons}


def _filters(model: nn.Module, coupled: _Coupled) -> Tensor:
    """A row for each channel: its filters in all of the layers, one behind the other."""
    parts = []
    for name in coupled.rows[0]:
        weight = model.get_submodule(name).get_parameter("weight").detach()
        rows = torch.tensor([each[name] for each in coupled.rows])
        is_whole = rows.shape == (len(weight), 1) and torch.equal(rows[:, 0], torch.arange(len(weight)))
        # A copy of a large linear layer would be the most that pruning takes.
        parts.append(weight.flatten(1) if is_whole else weight[rows.to(weight.device)].flatten(1))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _shrink_and_check(model: nn.Module, example: Tensor, channels: ChannelIds, removed: Tensor) -> None:
    """Shrink a model, and leave it as it was where the result is not the model without those channels."""
    inputs = _inputs_like(example)
    with evaluating(model), torch.no_grad():
        expected = _tensors(functional_call(model, _without(model, channels, removed), (inputs,)))
        shrinking = _shrink(model, channels, removed)
        try:
            found = _tensors(model(inputs))
        # The model's own code runs with other shapes than it was written for, and may raise anything.
        except Exception as error:
            shrinking.undo()
            raise ValueError(
                f"{type(model).__name__} does not run with fewer channels: {first_line(error)}. Its code counts "
                "channels itself, it seems: name layers that may lose filters"
            ) from error
        if not all(map(_agree, expected, found)):
            shrinking.undo()
            raise ValueError(
                f"{type(model).__name__} with fewer channels does not compute what it does without them. Its code "
                "counts channels itself, it seems, or its weights are not finite: name layers that may lose filters"
            )


def _inputs_like(example: Tensor) -> Tensor:
    if not example.is_floating_point():
        return example
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randn((1, *example.shape[1:]), generator=draw, dtype=torch.float64)
    return drawn.to(example.device, example.dtype)


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _agree(expected: Tensor, found: Tensor) -> bool:
    if expected.shape != found.shape:
        return False
    return bool((expected - found).abs().max() <= _RELATIVE_TOLERANCE * expected.abs().max())


def _without(model: nn.Module, channels: ChannelIds, removed: Tensor) -> dict[str, Tensor]:
    """The weights of the layers that read removed channels, which read zeros then."""
    masked = {}
    for name, ids in channels.inputs.items():
        gone = torch.isin(ids, removed)
        if bool(gone.any()):
            weight = model.get_submodule(name).get_parameter("weight").detach().clone()
            weight[:, gone.to(weight.device)] = 0
            masked[f"{name}.weight" if name else "weight"] = weight
    return masked


def _shrink(model: nn.Module, channels: ChannelIds, removed: Tensor) -> _Shrinking:
    shrinking = _Shrinking()
    for name in channels.outputs.keys() | channels.norms.keys():
        module = model.get_submodule(name)
        rows = channels.outputs.get(name, channels.norms.get(name))
        columns = channels.inputs.get(name)
        for local, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or not tensor.dim():
                continue
            cut = tensor.detach()[_stay(rows, removed, tensor)]
            if columns is not None and tensor.dim() > 1:
                cut = cut[:, _stay(columns, removed, tensor)]
            if cut.shape != tensor.shape:
                shrinking.set(module, local, cut)
        shrinking.set_sizes(module)
    return shrinking


def _stay(ids: Tensor | None, removed: Tensor, like: Tensor) -> Tensor:
    assert ids is not None
    return (~torch.isin(ids, removed)).to(like.device)


class _Shrinking:
    """Puts smaller tensors into modules, and knows the way back."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, dict[str, Any]]] = []

    def set(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        self._remember(module)
        old = getattr(module, name)
        if isinstance(old, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=old.requires_grad)
        setattr(module, name, tensor)

    def set_sizes(self, module: nn.Module) -> None:
        """What a module says of its own sizes, by its tensors."""
        self._remember(module)
        if type(module) is nn.Linear:
            module.out_features, module.in_features = module.weight.shape
        elif type(module) in CONVOLUTIONS:
            assert isinstance(module, nn.modules.conv._ConvNd)
            if 1 < module.groups == module.in_channels:
                module.groups = module.weight.shape[0] * module.in_channels // module.out_channels
            module.out_channels = module.weight.shape[0]
            module.in_channels = module.weight.shape[1] * module.groups
        elif type(module) in NORMS:
            assert isinstance(module, nn.modules.batchnorm._BatchNorm)
            sized = next((each for each in (module.weight, module.running_mean) if each is not None), None)
            module.num_features = module.num_features if sized is None else len(sized)

    def undo(self) -> None:
        while self._before:
            module, state = self._before.pop()
            vars(module).update(state)

    def _remember(self, module: nn.Module) -> None:
        sizes = {name: value for name, value in vars(module).items() if isinstance(value, int)}
        tensors = {name: dict(vars(module)[name]) for name in ("_parameters", "_buffers")}
        self._before.append((module, sizes | tensors))

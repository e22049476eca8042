"""Sub-models of less width: which channels of a wide model a narrow one has, and what these hold.

E. Diao, J. Ding, V. Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients", ICLR 2021: a client that cannot hold the model trains the first channels of every hidden layer.
J. Hong et al., "Efficient Split-Mix Federated Learning for On-Demand and In-Situ Customization", ICLR 2022: a wide
model is split into narrow base models that share no hidden channels and train apart.

Where a narrow model lies in the wide one follows from the shapes of a narrow instance of the same architecture, so that
no family of networks needs a table of its own: a dimension that is as large in both is whole (the input's channels, the
classes, kernels), of any other there is one block. Features that are flattened in front of a linear layer, and
depthwise convolutions, follow that rule; whether everything else does is found out by running both (`check_sub_model`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from torch_odt.adapt.sub_model_check import Block, Shape, block_of, check_sub_model

StateDict = Mapping[str, Any]


@dataclass(frozen=True)
class SubModel:
    """Where a narrow model lies in a wide one of the same architecture.

    It holds shapes and no tensors: make it once, keep it where models are merged, and send it to whom it concerns.

    Attributes:
        wide: shapes of the wide model's tensors, by their names in its state_dict.
        narrow: those of the sub-model, by the same names.
        base: which block of the channels it has, counted from 0.

    Example:
        >>> import torch
        >>> wide, narrow = (nn.Sequential(nn.Linear(4, n), nn.ReLU(), nn.Linear(n, 2)) for n in (6, 3))
        >>> half = SubModel.leading(wide, narrow, torch.ones(1, 4))
        >>> narrow.load_state_dict(half.extract(wide.state_dict()))
        <All keys matched successfully>
        >>> torch.equal(narrow[0].weight, wide[0].weight[:3])
        True
    """

    wide: Mapping[str, Shape] = field(repr=False)
    narrow: Mapping[str, Shape] = field(repr=False)
    base: int = 0

    def __post_init__(self) -> None:
        missing = sorted(self.wide.keys() ^ self.narrow.keys())
        if missing:
            whose = "narrow" if missing[0] in self.wide else "wide"
            raise ValueError(f"the {whose} model has no tensor {missing[0]!r}: give the same architecture twice")
        for name, shape in self.wide.items():
            narrow = self.narrow[name]
            if len(narrow) != len(shape) or any(n > wide for n, wide in zip(narrow, shape, strict=True)):
                raise ValueError(f"{name!r} of {narrow} is no part of {shape}: the narrow model is wider there")
            for n, wide in zip(narrow, shape, strict=True):
                if n < wide < (self.base + 1) * n:
                    raise ValueError(f"{name!r} of {shape} has no block {self.base} of {n} of {wide}")

    def __str__(self) -> str:
        narrow, wide = (sum(map(math.prod, shapes.values())) for shapes in (self.narrow, self.wide))
        return f"{narrow:,} of a wide model's {wide:,} numbers, block {self.base}"

    @classmethod
    def leading(cls, wide: nn.Module, narrow: nn.Module, *inputs: Any) -> SubModel:
        """The first channels of every hidden layer (HeteroFL).

        Choose it where one model is to learn from all clients, and a client's share of it is all that it holds.

        Args:
            wide: the model that is trained together.
            narrow: the same architecture with less width, as its constructor makes it (`mobilenet_v2(width_mult=0.5)`).
                The rate may differ from layer to layer.
            inputs: a batch that both are called with, to check that they fit; one sample is enough.

        Raises:
            ValueError: they are not the same architecture, or the narrow one is not made of the first channels; the
                tensor is named. Concatenated branches (DenseNet, SqueezeNet), convolutions with the same number of
                groups in both (ResNeXt), shuffled channels, and the gates and heads of LSTMs and attention are not.

        Example:
            >>> import torch
            >>> from torchvision.models import mobilenet_v2
            >>> wide, narrow = mobilenet_v2(), mobilenet_v2(width_mult=0.5)
            >>> half = SubModel.leading(wide, narrow, torch.ones(1, 3, 32, 32))
        """
        found = cls(shapes_of(wide.state_dict()), shapes_of(narrow.state_dict()))
        check_sub_model(found, wide, narrow, inputs)
        return found

    @classmethod
    def split(cls, wide: nn.Module, narrow: nn.Module, *inputs: Any) -> tuple[SubModel, ...]:
        """All the base models of a wide model, which have disjoint channels (Split-Mix).

        Choose it where clients of more memory are to train several small models, one after the other, and devices are
        to choose at inference how many they run (`Mix`). Weights between the channels of two bases are in none of them.
        What the narrow model has as wide (the classifier's bias, say) is in each.

        Args:
            wide, narrow, inputs: as for `leading`. Every width must be the same multiple of the narrow one.

        Raises:
            ValueError: as for `leading`; or a tensor's width is another multiple, which is named.

        Example:
            >>> import torch
            >>> wide, narrow = (nn.Sequential(nn.Linear(4, n), nn.ReLU(), nn.Linear(n, 2)) for n in (8, 2))
            >>> bases = SubModel.split(wide, narrow, torch.ones(1, 4))
            >>> states = [base.extract(wide.state_dict()) for base in bases]
            >>> len(states), torch.equal(states[3]["0.bias"], wide[0].bias[6:])
            (4, True)
        """
        first = cls(shapes_of(wide.state_dict()), shapes_of(narrow.state_dict()))
        multiples = [
            (name, whole / part)
            for name, shape in first.wide.items()
            for whole, part in zip(shape, first.narrow[name], strict=True)
            if whole != part
        ]
        like, count = multiples[0] if multiples else ("", 1.0)
        for name, multiple in multiples:
            if multiple != count or multiple != int(multiple):
                raise ValueError(
                    f"{name!r} of {first.wide[name]} is {multiple:g} times {first.narrow[name]}, and {like!r} "
                    f"{count:g} times: base models make up a model that is the same whole number of times as wide"
                )
        bases = tuple(cls(first.wide, first.narrow, base) for base in range(int(count)))
        for base in bases:
            check_sub_model(base, wide, narrow, inputs)
        return bases

    def block(self, name: str) -> Block:
        """The sub-model's part of the wide model's tensor of that name, as an index."""
        return block_of(self.wide[name], self.narrow[name], self.base)

    def extract(self, state_dict: StateDict) -> dict[str, Any]:
        """The state_dict of the sub-model: copies of its parts of the wide model's.

        Raises:
            ValueError: it is not the state_dict of the wide model; a tensor is named.
        """
        check_shapes(state_dict, self.wide, "the wide model")
        return {name: _part(value, self.block(name)) for name, value in state_dict.items()}


def shapes_of(state_dict: StateDict) -> dict[str, Shape]:
    """Shapes by name; what is no tensor (a module's extra state) has none, and is carried as it is."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state_dict is needed, not a {type(state_dict).__name__}: call its state_dict()")
    return {name: tuple(value.shape) if isinstance(value, Tensor) else () for name, value in state_dict.items()}


def check_shapes(state_dict: StateDict, expected: Mapping[str, Shape], whose: str) -> None:
    """Make sure that it is the state_dict of a model with tensors of these shapes.

    Raises:
        ValueError: a tensor is missing, too many, or of another shape; it is named.
    """
    found = shapes_of(state_dict)
    for name in [*expected, *found]:
        if found.get(name) != expected.get(name):
            has, wants = (f"{each[name]}" if name in each else "none" for each in (found, expected))
            raise ValueError(f"the tensor {name!r} is not that of {whose}: expected {wants}, found {has}")


def _part(value: Any, block: Block) -> Any:
    return value.detach()[block].clone() if isinstance(value, Tensor) else value

"""Lite residual modules beside the blocks of a network: before its pretraining, or when it is adapted."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn

from torch_odt.adapt.adaptation import Adaptation, Adapting
from torch_odt.adapt.arguments import require_numbers, require_whole_numbers
from torch_odt.adapt.layers import int8_hint
from torch_odt.adapt.lite_residual import LiteBranch, LiteResidual
from torch_odt.adapt.residual_blocks import Block, Blocks, find_blocks
from torch_odt.adapt.sparse_layers import SparseConv
from torch_odt.adapt.stored_weights import StoredConv2d


def add_lite_residuals_(
    model: nn.Module,
    *,
    blocks: Blocks | None = None,
    without: Collection[str] = (),
    kernel_size: int = 5,
    expand: float = 1.0,
    weight_standardization: bool = False,
    input_size: int | tuple[int, int] = 224,
    example: Any = None,
) -> Adaptation:
    """Put lite residual modules beside the blocks of a CNN that is to be pretrained; nothing is frozen.

    Choose it where the pretraining is yours: TinyTL's own networks learn their modules together with everything else,
    and modules that know what the network knows adapt better from few samples than new ones, whose first task is to
    become of use at all. On the device the network gets its modules by the same call, then their weights by
    `load_state_dict`; `tinytl_` trains those that are there and adds none beside them. Just after the call the model
    computes what it computed before.

    Args:
        model: changed in place; every parameter trains or does not, as before.
        blocks, without, kernel_size, expand, example: see `tinytl_`.
        weight_standardization: of the modules' convolutions.
        input_size: see `tinytl_`; kernels depend on it, so that it is the same wherever the weights go.

    Returns:
        What trains now; its `unload()` removes the modules.

    Raises:
        ValueError: an argument is wrong, or the model has no block of a known type, or each has a module already.

    Example:
        >>> from torchvision.models import mobilenet_v2
        >>> import torch_odt as odt
        >>> model = mobilenet_v2(num_classes=1000)
        >>> _ = odt.adapt.add_lite_residuals_(model, without=["features.1"])
        >>> pretrained = model.state_dict()
        >>> on_device = mobilenet_v2(num_classes=1000)
        >>> _ = odt.adapt.add_lite_residuals_(on_device, without=["features.1"])
        >>> _ = on_device.load_state_dict(pretrained)
        >>> adaptation = odt.adapt.tinytl_(on_device, classes=5, without=["features.1"])
        >>> adaptation.notes[-1]
        '16 lite residual modules, features.2 to features.17, as they were pretrained'
    """
    check_sizes(kernel_size, expand)
    with Adapting(model) as adapting:
        found = blocks_beside_which(model, input_size, example, blocks, without)
        bare = [block for block in found if lite_beside(model, block) is None]
        if not bare:
            raise ValueError(f"each of the {len(found)} blocks of {type(model).__name__} has a lite residual module")
        for block in bare:
            lite = LiteResidual(
                block.shape, kernel_size=kernel_size, expand=expand, weight_standardization=weight_standardization
            )
            insert(adapting, block, lite)
        adapting.notes.append(f"{len(bare)} lite residual modules, {bare[0].name} to {bare[-1].name}")
        return adapting.finish("add_lite_residuals")


def check_sizes(kernel_size: int, expand: float) -> None:
    """Raises ValueError or TypeError where they are none of a lite residual module."""
    require_whole_numbers(kernel_size=kernel_size)
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size={kernel_size}: it is odd")
    require_numbers(expand=expand)
    if not 0 < expand < math.inf:
        raise ValueError(f"expand={expand}: it is a multiple of a block's input channels, above 0")


def blocks_beside_which(
    model: nn.Module,
    input_size: int | tuple[int, int],
    example: Any,
    blocks: Blocks | None,
    without: Collection[str],
) -> list[Block]:
    """The blocks that lite residual modules are for.

    Raises:
        ValueError: there is none, or a name of `without` is of none.
    """
    if isinstance(without, str):
        raise ValueError(f"without={without!r}: give a list of names, [{without!r}]")
    without = list(without)
    found = find_blocks(model, _example(model, input_size) if example is None else example, blocks=blocks)
    names = [block.name for block in found]
    unknown = [name for name in without if name not in names]
    if unknown:
        raise ValueError(f"without={', '.join(unknown)}: the blocks are {', '.join(names)}")
    return [block for block in found if block.name not in without]


def lite_beside(model: nn.Module, block: Block) -> LiteResidual | None:
    """The module that runs beside a block already."""
    branch = dict(model.named_modules()).get(block.branch)
    return branch.lite if isinstance(branch, LiteBranch) else None


def lite_parameters(model: nn.Module, blocks: Collection[Block], *, last_bias: bool) -> list[str]:
    """Names of the parameters of the modules beside blocks, with or without the biases of their last norms."""
    beside = [f"{block.branch}.lite" for block in blocks if lite_beside(model, block) is not None]
    names = [f"{name}.{local}" for name in beside for local, _ in model.get_submodule(name).named_parameters()]
    return [name for name in names if last_bias or not name.endswith(".lite.last_norm.bias")]


def insert(adapting: Adapting, block: Block, lite: LiteResidual) -> None:
    """Put a lite residual module beside a block's branch."""
    model = adapting.model
    parent = model.get_submodule(block.name)
    reference = next(parent.parameters())
    lite.to(reference.device, reference.dtype)
    attribute = block.branch.removeprefix(block.name).strip(".")
    old = getattr(parent, attribute) if attribute else parent
    modes = [(module, module.training) for module in parent.modules()]
    branch = LiteBranch(old, lite).train(parent.training)

    if attribute:
        setattr(parent, attribute, branch)
        take_back = partial(_take_back, parent, attribute, old, branch)
        adapting.also_undo(take_back, is_added=True, held=partial(_held, old, branch))
    else:
        adapting.replace(block.name, branch, is_added=True)
    # The layers of the branch keep modes of their own.
    for module, training in modes:
        module.training = training


def _take_back(parent: nn.Module, attribute: str, old: nn.Module | None, branch: LiteBranch) -> None:
    if old is not None:
        old.training = branch.training
    setattr(parent, attribute, old)


def _held(old: nn.Module, branch: LiteBranch) -> list[tuple[nn.Module, nn.Module]]:
    layers = dict(old.named_children()) if isinstance(old, nn.Sequential) else {"main": old}
    return [(now, layers[name]) for name, now in branch.named_children() if name != "lite"]


def _example(model: nn.Module, input_size: int | tuple[int, int]) -> torch.Tensor:
    first = next((module for module in model.modules() if _is_conv2d(module)), None)
    if first is None:
        raise ValueError(
            f"{type(model).__name__} has no 2-D convolution of float weights: lite residual modules are for CNNs"
            f"{int8_hint(model)}"
        )
    size = (input_size, input_size) if isinstance(input_size, int) else input_size
    if not isinstance(size, tuple | list) or len(size) != 2 or any(not isinstance(n, int) or n < 1 for n in size):
        raise ValueError(f"input_size={input_size!r}: give height and width of an image in pixels")
    return next(model.parameters()).new_zeros(1, first.in_channels, *size)


def _is_conv2d(module: nn.Module) -> TypeGuard[nn.Conv2d | StoredConv2d | SparseConv]:
    """Whether it is one, or what an earlier method has made of one."""
    return isinstance(module, nn.Conv2d | StoredConv2d) or (isinstance(module, SparseConv) and len(module.stride) == 2)

"""The blocks of a CNN beside which lite residual modules run, and where in each type of block they are added.

A new type of block is one more row of `BRANCHES`, or an entry of the argument `blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_odt.adapt.layers import evaluating
from torch_odt.adapt.lite_residual import LiteBranch, LiteShape

# By the type's full name, so that neither library is imported: the attribute to whose result the module's is added,
# before the block's own shortcut is or an activation follows. "" is the block as a whole, which ends without an
# activation. A ResNet's blocks call no sequence but `downsample`; what it returns, or the input where it is None, is
# added to the main branch before the last ReLU.
BRANCHES = {
    "torchvision.models.mobilenetv2.InvertedResidual": "conv",
    "torchvision.models.mobilenetv3.InvertedResidual": "block",
    "torchvision.models.mnasnet._InvertedResidual": "layers",
    "torchvision.models.efficientnet.MBConv": "block",
    "torchvision.models.efficientnet.FusedMBConv": "block",
    "torchvision.models.resnet.BasicBlock": "downsample",
    "torchvision.models.resnet.Bottleneck": "downsample",
    "torchvision.models.regnet.ResBottleneckBlock": "f",
    "timm.models.resnet.BasicBlock": "downsample",
    "timm.models.resnet.Bottleneck": "downsample",
    "timm.models._efficientnet_blocks.InvertedResidual": "",
    "timm.models._efficientnet_blocks.DepthwiseSeparableConv": "",
    "timm.models._efficientnet_blocks.EdgeResidual": "",
}


# Types with the attribute of each, or a function of a module's name and the module.
Blocks = Mapping[type[nn.Module], str] | Callable[[str, nn.Module], str | None]


@dataclass(frozen=True)
class Block:
    """A block as it ran.

    Attributes:
        name: the block's, as `model.named_modules()` has it.
        branch: the name of the module beside which the lite one runs; it may have the value None in a ResNet.
        shape: of the block's input and output.
    """

    name: str
    branch: str
    shape: LiteShape


def find_blocks(model: nn.Module, example: Any, *, blocks: Blocks | None = None) -> list[Block]:
    """The blocks of known types, in order, with their shapes; those with a lite residual module are among them.

    Args:
        model: runs once, without gradients and in evaluation mode.
        example: one sample, with the batch dimension.
        blocks: further types, each with the attribute to whose result a lite module's is added; "" for the whole block.
            Or a function that says so of a module and its name, or None where that is no block.

    Raises:
        ValueError: the model has no such block; a block lacks the attribute, or is not called with images.
    """
    if blocks is not None and (isinstance(blocks, type) or not (callable(blocks) or isinstance(blocks, Mapping))):
        raise ValueError(f"blocks={blocks!r}: give {{YourBlock: attribute}}, or a function of a name and a module")
    branch_of = blocks if callable(blocks) else lambda name, module: None
    types: Mapping[type[nn.Module], str] = {} if blocks is None or callable(blocks) else blocks
    for kind in types:
        if not isinstance(kind, type):
            raise ValueError(f"blocks has {kind!r}: its keys are the types of blocks themselves, {{YourBlock: ...}}")
    branches = {**BRANCHES, **{_full_name(kind): branch for kind, branch in types.items()}}
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        # The model itself is no block, though it may be of the same type as one, as nn.Sequential is.
        known = [_full_name(kind) for kind in type(module).__mro__ if name and _full_name(kind) in branches]
        if isinstance(module, LiteBranch):
            # In the place of a whole block, or inside of one whose type is not known this time.
            found[name] = name
        elif (branch := branch_of(name, module) if name else None) is not None or known:
            branch = branches[known[0]] if branch is None else branch
            if not isinstance(branch, str):
                raise ValueError(f"blocks says {branch!r} of {name!r}: it is the name of an attribute, '', or None")
            if branch and not hasattr(module, branch):
                has = ", ".join(local for local, _ in module.named_children()) or "no modules"
                raise ValueError(f"{name} is a {type(module).__name__}, which has {has}, but no {branch!r}")
            found[name] = f"{name}.{branch}".strip(".") if branch else name
    if not found:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"{type(model).__name__} has no block of a known type; it has {', '.join(kinds)}. Name the type of its "
            'blocks, and the branch beside which a lite module is to run: blocks={YourBlock: "branch"}'
        )
    with _seen(model, {*found, *found.values()}) as seen, evaluating(model), torch.no_grad():
        model(example)
    result = []
    for name, branch in found.items():
        if name not in seen or any(each.dim() != 4 for each in seen[name]):
            raise ValueError(
                f"{name} is not called with images (samples, channels, height, width) in a run of the model"
            )
        into, out = seen[name]
        if branch in seen and not _is_same(seen[branch][0], into):
            raise ValueError(
                f"{branch} is not given what {name} is, so that it is a part of a branch alone: name what is all of "
                "it, as a sequence is, or '' where the block ends without an activation"
            )
        shape = LiteShape(into.shape[1], tuple(into.shape[2:]), out.shape[1], tuple(out.shape[2:]))  # type: ignore[arg-type]
        result.append(Block(name, branch, shape))
    return result


@contextmanager
def _seen(model: nn.Module, names: Set[str]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """What modules are given and return while the model runs, by their names."""
    modules, seen = dict(model.named_modules()), dict[str, tuple[Tensor, Tensor]]()
    handles = []
    for name in names & modules.keys():

        def note(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                seen[name] = args[0], output

        handles.append(modules[name].register_forward_hook(note))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"

"""Whether a narrow model is what a wide one computes with a part of its channels: found out by running both.

The wide model's other channels are set to zero, in all tensors. If every layer reads its inputs from the channels that
its weights were cut out for, both compute the same, layer by layer. Otherwise channels that do not belong together
meet somewhere (concatenated branches, groups, heads), and the first layer to differ is named.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_odt.adapt.layers import evaluating

if TYPE_CHECKING:
    from torch_odt.adapt.sub_model import SubModel

Shape = tuple[int, ...]
Block = tuple[slice, ...]

# In double precision: sums of the same terms in another order differ by far less, other terms by far more.
_RELATIVE_TOLERANCE = 1e-8


def block_of(shape: Shape, narrow: Shape, base: int) -> Block:
    """Of a dimension that is as large in both, all; of another, the block of that number."""
    return tuple(
        slice(0, whole) if part == whole else slice(base * part, (base + 1) * part)
        for whole, part in zip(shape, narrow, strict=True)
    )


def check_sub_model(sub_model: SubModel, wide: nn.Module, narrow: nn.Module, inputs: Sequence[Any]) -> None:
    """Make sure that a sub-model computes what the wide model does with its channels alone.

    Both run once, in evaluation mode and double precision, as copies with random weights: what the models hold does not
    matter, and a layer whose weights happen to be zero hides nothing. LayerNorm and GroupNorm run without their
    statistics, which in a sub-model are those of the channels that it has.

    Raises:
        ValueError: it does not; the layer and its tensor are named.
    """
    if not any(isinstance(value, Tensor) for value in inputs):
        raise ValueError("give a batch of inputs, of one sample at least, that both models are run on")
    wide, narrow = (_without_statistics(copy.deepcopy(model)).double() for model in (wide, narrow))
    values = [value.double() if isinstance(value, Tensor) and value.is_floating_point() else value for value in inputs]
    _randomize(wide)
    narrow.load_state_dict(sub_model.extract(wide.state_dict()))
    for name, value in wide.state_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point():
            part = value[sub_model.block(name)].clone()
            value.zero_()[sub_model.block(name)] = part

    expected: list[tuple[str, Tensor]] = []
    _run(narrow, values, lambda name, output: expected.append((name, output.clone())))
    following = iter(expected)

    def compare(name: str, output: Tensor) -> None:
        narrow_name, wanted = next(following, ("", output))
        if narrow_name != name or not _is_alike(output, wanted, sub_model.base):
            raise ValueError(_difference(sub_model, wide, name))
        if not name and narrow_name == name and output.shape != wanted.shape:
            raise ValueError(
                f"the wide model returns {tuple(output.shape)}, the narrow one {tuple(wanted.shape)}: give both "
                "as many classes"
            )

    _run(wide, values, compare)


def _without_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        # Subclasses may take their channels from another dimension.
        if isinstance(module, nn.LayerNorm | nn.GroupNorm) and type(module) in (nn.LayerNorm, nn.GroupNorm):
            module.forward = partial(_affine, module)  # type: ignore[method-assign]
    return model


def _affine(norm: nn.LayerNorm | nn.GroupNorm, x: Tensor) -> Tensor:
    for combine, vector in ((torch.mul, norm.weight), (torch.add, norm.bias)):
        if isinstance(vector, Tensor):
            ones = (1,) * (x.dim() - 2)
            x = combine(x, vector.view(-1, *ones) if isinstance(norm, nn.GroupNorm) else vector)
    return x


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    """Weights of about the size of an initialisation; positive vectors, so that activations and variances live."""
    generator = torch.Generator().manual_seed(0)
    for value in model.state_dict().values():
        if isinstance(value, Tensor) and value.is_floating_point():
            drawn = torch.rand(value.shape, generator=generator, dtype=value.dtype)
            terms = value[0].numel() if value.dim() > 1 else 0
            value.copy_((2 * drawn - 1) * (3 / max(1, terms)) ** 0.5 if terms else drawn + 0.5)


def _run(model: nn.Module, inputs: Sequence[Any], see: Callable[[str, Tensor], object]) -> None:
    """Show every tensor that a module returns, those of submodules first."""
    handles = []
    for name, module in model.named_modules():

        def look(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            for tensor in _tensors(output):
                see(name, tensor)

        handles.append(module.register_forward_hook(look))
    try:
        with evaluating(model), torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | tuple | list):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)


def _is_alike(wide: Tensor, narrow: Tensor, base: int) -> bool:
    if wide.dim() != narrow.dim():
        return False
    part = wide[block_of(tuple(wide.shape), tuple(narrow.shape), base)]
    if part.shape != narrow.shape:
        return False
    return float((part - narrow).abs().max()) <= _RELATIVE_TOLERANCE * max(1.0, float(narrow.abs().max()))


def _difference(sub_model: SubModel, wide: nn.Module, name: str) -> str:
    module = wide.get_submodule(name)
    local = max(module.named_parameters(), key=lambda each: each[1].dim(), default=("", None))[0]
    tensor = ".".join(part for part in (name, local) if part)
    cut = f" ({tensor!r}, {sub_model.wide[tensor]} cut to {sub_model.narrow[tensor]})" if local else ""
    return (
        f"the {type(module).__name__} {name!r}{cut} does not compute in the narrow model what it does in the wide one "
        "with all other channels zero. Channels that do not belong together meet there: of concatenated branches, of "
        "as many groups as in the wide model, of gates or heads, shuffled ones. Or blocks differ, as where one has a "
        "shortcut at one width alone; or the models are adapted: make sub-models before, or after merge(). Such a "
        "layer has no sub-model of less width"
    )

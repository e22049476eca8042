"""What the backward pass of clamps and of dropout needs, as a bit an element.

Bits stand for the elements in the order of a memory format that the caller names, so that a mask goes with a gradient
whatever either's strides are. The operators have no gradient of their own: they stand in graphs that hold both passes
already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_odt.ops.bits import pack_bits, unpack_bits
from torch_odt.ops.registration import register

SCHEMAS = {
    "clamp_with_mask": "(Tensor self, float low, float? high, bool channels_last) -> (Tensor, Tensor)",
    "clamp_with_mask_": "(Tensor(a!) self, float low, float? high, bool channels_last) -> Tensor",
    "clamp_with_mask_backward_": "(Tensor(a!) grad_output, Tensor mask, bool channels_last) -> ()",
    "clamp_with_mask_backward": "(Tensor grad_output, Tensor mask, bool channels_last) -> Tensor",
    "scale_masked": "(Tensor self, Tensor mask, float scale, bool channels_last) -> Tensor",
}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def clamp_with_mask(
    input: Tensor, low: float, high: float | None = None, channels_last: bool = False
) -> tuple[Tensor, Tensor]:
    """Clamps to `[low, high]` and notes where the gradient passes, in one pass over the input.

    When to choose it: in place of `relu` or `hardtanh` where the backward pass would keep a tensor for the clamp alone.
    The output has the bits of theirs.

    Args:
        input: float32, float64 or bfloat16, of any shape.
        low, high: the bounds, rounded to the input's dtype; None for no upper one.
        channels_last: the order of the bits; the input then has 4 dimensions. Another memory format costs copies.

    Returns:
        The output, laid out as the input; and a bit for each element, as `pack_bits` packs them: 0 at a bound and
        beyond it, 1 for NaN.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> clamp_with_mask(torch.tensor([-1.0, 0.5, 2.0]), 0.0)
        (tensor([0.0000, 0.5000, 2.0000]), tensor([6], dtype=torch.uint8))
    """
    return torch.ops.torch_odt.clamp_with_mask(input, low, high, channels_last)


def clamp_with_mask_backward(grad_output: Tensor, mask: Tensor, channels_last: bool = False) -> Tensor:
    """The gradient of `clamp_with_mask`: `grad_output` where the bit is set, and 0 elsewhere.

    When to choose it: in place of `threshold_backward`, whose bits it has, and of `hardtanh_backward`, whose bits it
    has but for NaNs: some of them pass there, depending on their place, and all do here.

    Args:
        grad_output: float32, float64 or bfloat16.
        mask, channels_last: as `clamp_with_mask` returned it, and as it was given there.

    Returns:
        A tensor like `grad_output`.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> clamp_with_mask_backward(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([6], dtype=torch.uint8))
        tensor([0., 2., 3.])
    """
    return torch.ops.torch_odt.clamp_with_mask_backward(grad_output, mask, channels_last)


def clamp_with_mask_(input: Tensor, low: float, high: float | None = None, channels_last: bool = False) -> Tensor:
    """As `clamp_with_mask`, with the output in the place of the input.

    When to choose it: nobody reads the input any more. One tensor is in memory in place of two.

    Returns:
        The mask.

    Example:
        >>> x = torch.tensor([-1.0, 0.5, 2.0])
        >>> clamp_with_mask_(x, 0.0), x
        (tensor([6], dtype=torch.uint8), tensor([0.0000, 0.5000, 2.0000]))
    """
    return torch.ops.torch_odt.clamp_with_mask_(input, low, high, channels_last)


def clamp_with_mask_backward_(grad_output: Tensor, mask: Tensor, channels_last: bool = False) -> None:
    """As `clamp_with_mask_backward`, with the input's gradient in the place of `grad_output`.

    When to choose it: nobody reads `grad_output` any more.

    Example:
        >>> g = torch.tensor([1.0, 2.0, 3.0])
        >>> clamp_with_mask_backward_(g, torch.tensor([6], dtype=torch.uint8))
        >>> g
        tensor([0., 2., 3.])
    """
    torch.ops.torch_odt.clamp_with_mask_backward_(grad_output, mask, channels_last)


def scale_masked(input: Tensor, mask: Tensor, scale: float, channels_last: bool = False) -> Tensor:
    """Computes `input * mask * scale`, in that order: dropout, forward and backward, with a mask of bits.

    When to choose it: in place of products with a mask of booleans, eight times as large.

    Args:
        input: float32, float64 or bfloat16, of any shape.
        mask: a bit for each element, as `bernoulli_bits` draws them and `pack_bits` packs them.
        scale: rounded to float32, for float64 not at all.
        channels_last: the order of the bits; the input then has 4 dimensions. Another memory format costs copies.

    Returns:
        A tensor like the input.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> scale_masked(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5], dtype=torch.uint8), 2.0)
        tensor([2., 0., 6.])
    """
    return torch.ops.torch_odt.scale_masked(input, mask, scale, channels_last)


def memory_format_of(channels_last: bool) -> torch.memory_format:
    return torch.channels_last if channels_last else torch.contiguous_format


def in_order(tensor: Tensor, channels_last: bool) -> Tensor:
    """The tensor, or a copy of it, with its elements in the order of the bits."""
    if channels_last and tensor.dim() != 4:
        raise RuntimeError("only a tensor of 4 dimensions can have its channels last")
    return tensor.contiguous(memory_format=memory_format_of(channels_last))


def pack_in_order(mask: Tensor, channels_last: bool) -> Tensor:
    """Booleans as bits, in the order of a memory format."""
    return pack_bits(_flat(in_order(mask, channels_last)))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _check(tensor: Tensor) -> None:
    if tensor.dtype not in _DTYPES:
        raise RuntimeError("the input must be float32, float64 or bfloat16")


def _bits(mask: Tensor, elements: Tensor) -> Tensor:
    """The booleans for elements in the order of the bits, in their shape and strides."""
    if mask.shape != ((elements.numel() + 7) // 8,):
        raise RuntimeError("the mask must be contiguous uint8, with a bit for each element")
    return unpack_bits(mask, 0, elements.numel()).as_strided(elements.shape, elements.stride())


def _laid_out(result: Tensor, like: Tensor) -> Tensor:
    return torch.empty_like(like).copy_(result)


def _clamp_in_torch(input: Tensor, low: float, high: float | None, channels_last: bool) -> tuple[Tensor, Tensor]:
    """As the compiled operator, in plain torch."""
    _check(input)
    source = in_order(input, channels_last)
    stopped = source <= torch.tensor(low, dtype=source.dtype)
    if high is not None:
        stopped |= source >= torch.tensor(high, dtype=source.dtype)
    return _laid_out(source.clamp(low, high), input), pack_in_order(~stopped, channels_last)


def _clamp_in_place_in_torch(input: Tensor, low: float, high: float | None, channels_last: bool) -> Tensor:
    """As the compiled operator, in plain torch."""
    output, mask = _clamp_in_torch(input, low, high, channels_last)
    input.copy_(output)
    return mask


def _clamp_backward_in_place_in_torch(grad_output: Tensor, mask: Tensor, channels_last: bool) -> None:
    """As the compiled operator, in plain torch."""
    grad_output.copy_(_clamp_backward_in_torch(grad_output, mask, channels_last))


def _clamp_backward_in_torch(grad_output: Tensor, mask: Tensor, channels_last: bool) -> Tensor:
    """As the compiled operator, in plain torch."""
    _check(grad_output)
    gradient = in_order(grad_output, channels_last)
    return _laid_out(gradient.clone().masked_fill_(~_bits(mask, gradient), 0), grad_output)


def _scale_in_torch(input: Tensor, mask: Tensor, scale: float, channels_last: bool) -> Tensor:
    """As the compiled operator, in plain torch."""
    _check(input)
    source = in_order(input, channels_last)
    wide = source if source.dtype == torch.float64 else source.float()
    return _laid_out(wide.mul(_bits(mask, source)).mul_(scale), input)


def _clamp_fake(input: Tensor, low: float, high: float | None, channels_last: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), input.new_empty((input.numel() + 7) // 8, dtype=torch.uint8)


def _clamp_in_place_fake(input: Tensor, low: float, high: float | None, channels_last: bool) -> Tensor:
    return _clamp_fake(input, low, high, channels_last)[1]


def _nothing_fake(*_: Any) -> None:
    return None


def _masked_fake(input: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(input)


register("clamp_with_mask", SCHEMAS["clamp_with_mask"], _clamp_in_torch, _clamp_fake)
register("clamp_with_mask_backward", SCHEMAS["clamp_with_mask_backward"], _clamp_backward_in_torch, _masked_fake)
register("clamp_with_mask_", SCHEMAS["clamp_with_mask_"], _clamp_in_place_in_torch, _clamp_in_place_fake)
register(
    "clamp_with_mask_backward_",
    SCHEMAS["clamp_with_mask_backward_"],
    _clamp_backward_in_place_in_torch,
    _nothing_fake,
)
register("scale_masked", SCHEMAS["scale_masked"], _scale_in_torch, _masked_fake)

"""Weights as the int8 kernels read them, packed once for as long as they stay the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_odt.ops import int8_plain as plain
from torch_odt.ops.int8_arguments import WINDOWS, Pair, pair, windows_of
from torch_odt.ops.registration import register


def int8_pack_weight(
    weight: Tensor,
    *,
    for_grad_input: bool = False,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    """Packs a convolution's weight for the argument `packed`.

    When to choose it: for a weight that is used more than once before it changes; `PackedInt8Weight` keeps the result
    and notices changes. The bytes depend on the instruction set in use: they are not to be stored. An operator notices
    what was packed for other shapes or windows, but not what was packed of another weight of the same shape.

    Args:
        weight: int8 of shape (out_channels, in_channels / groups, rows, columns).
        for_grad_input: for the gradient of the input; otherwise for the output.
        stride, padding, dilation, groups: as in `int8_conv2d`.

    Returns:
        uint8 of one dimension; empty without compiled parts, which need none.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> weight = torch.ones(1, 2, 1, 1, dtype=torch.int8)
        >>> packed = int8_pack_weight(weight)
        >>> torch.ops.torch_odt.int8_conv2d(weight, weight, packed, 0, (1, 1, 0, 0, 1, 1, 1)).item()
        2
    """
    return torch.ops.torch_odt.int8_pack_weight(weight, windows_of(stride, padding, dilation, groups), for_grad_input)


class PackedInt8Weight:
    """A weight and what was packed of it, anew whenever the weight has changed.

    When to choose it: for a layer that is called several times between updates, as in inference, gradient accumulation
    or recomputation. Changes are told by the tensor's version counter, which writing through `.data`, another
    library or an operator under `torch.ops` does not move, and inference tensors do not have: call `forget()` then.

    Args:
        weight, stride, padding, dilation, groups: see `int8_pack_weight`.

    Example:
        >>> from torch_odt.ops import int8_conv2d
        >>> weight = torch.ones(1, 2, 1, 1, dtype=torch.int8)
        >>> cached = PackedInt8Weight(weight)
        >>> int8_conv2d(weight, weight, packed=cached.for_forward()).item()
        2
        >>> cached.for_forward() is cached.for_forward()
        True
    """

    def __init__(
        self, weight: Tensor, *, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1, groups: int = 1
    ) -> None:
        self.weight = weight
        self.stride, self.padding, self.dilation = pair(stride), pair(padding), pair(dilation)
        self.groups = groups
        self._kept: dict[bool, tuple[tuple[int, int], Tensor]] = {}

    def for_forward(self) -> Tensor:
        """For `int8_conv2d` and its kind."""
        return self._packed(False)

    def for_grad_input(self) -> Tensor:
        """For `int8_conv2d_grad_input` and its kind."""
        return self._packed(True)

    def forget(self) -> None:
        """Gives the memory back; what is asked for next is packed anew."""
        self._kept.clear()

    def _packed(self, for_grad_input: bool) -> Tensor:
        version = -1 if self.weight.is_inference() else self.weight._version
        state = (version, self.weight.data_ptr())
        kept = self._kept.get(for_grad_input)
        if kept is None or kept[0] != state:
            packed = int8_pack_weight(
                self.weight, for_grad_input=for_grad_input, stride=self.stride, padding=self.padding,
                dilation=self.dilation, groups=self.groups,
            )  # fmt: skip
            self._kept[for_grad_input] = kept = (state, packed)
        return kept[1]


def _pack_plain(weight: Tensor, windows: Sequence[int], for_grad_input: bool) -> Tensor:
    name = "int8_pack_weight"
    plain.Geometry.of(name, windows)
    plain.check_int8(name, weight=weight)
    return torch.empty(0, dtype=torch.uint8)


def _pack_fake(weight: Tensor, windows: Sequence[int], for_grad_input: bool) -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size()
    return torch.empty(size, dtype=torch.uint8, device=weight.device)


register("int8_pack_weight", f"(Tensor weight, {WINDOWS}, bool for_grad_input) -> Tensor", _pack_plain, _pack_fake)

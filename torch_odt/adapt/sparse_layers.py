"""Convolutions and linear layers of whose weight only some input channels train.

J. Lin et al., "On-Device Training Under 256KB Memory", NeurIPS 2022, section 3.2: the gradient of a weight's slice
needs the same channels of the input and no others. The forward pass takes the whole weight, put together from what is
frozen and what trains; the backward pass computes the slice's gradient alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SPARSE_TYPES = (nn.Linear, *CONVOLUTIONS)


class SparseLayer(nn.Module):
    """What both kinds do with the slice of a whole weight that is a parameter of its own.

    A `state_dict` has what was trained under the name of the whole weight, too, and a state that has nothing but the
    whole weight is loaded into both: the layer that it stands for calls its own weight so.

    Attributes:
        dim: of the weight, along which the slice was cut.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    trained_weight: nn.Parameter
    kept: Tensor
    dim = 1

    def merge(self) -> None:
        """Write the trained slice into `weight`."""
        with torch.no_grad():
            # The forward pass reads nothing there, and autograd need not know of it.
            self.weight.data.index_copy_(self.dim, self.kept, self.trained_weight.to(self.weight.dtype))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.merge()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *options: Any) -> None:
        whole = state_dict.get(f"{prefix}weight")
        if f"{prefix}trained_weight" not in state_dict and whole is not None and whole.shape == self.weight.shape:
            state_dict[f"{prefix}trained_weight"] = whole.index_select(self.dim, self.kept.to(whole.device))
            state_dict |= {prefix + name: buffer for name, buffer in self._buffers.items()}
        super()._load_from_state_dict(state_dict, prefix, *options)


class SparseLinear(SparseLayer):
    """A linear layer of whose weight some columns train.

    Values are those of the layer that it stands for, whose tensors it shares. `merge` writes what has been trained into
    the shared weight.

    Args:
        layer: the layer whose place it takes.
        kept: indices of the input features whose weights train: ascending, int64.

    Attributes:
        weight: the whole weight, frozen; its kept columns are out of date until `merge` or `state_dict()`.
        trained_weight: the kept columns, `(out_features, len(kept))`.
        kept: as given; a part of the state, because another choice makes another layer of the same trained weight.

    Example:
        >>> layer = nn.Linear(4, 3)
        >>> sparse = SparseLinear(layer, torch.tensor([0, 2]))
        >>> x = torch.randn(5, 4)
        >>> torch.equal(sparse(x), layer(x))
        True
        >>> tuple(sparse.trained_weight.shape)
        (3, 2)
    """

    def __init__(self, layer: nn.Linear, kept: Tensor) -> None:
        super().__init__()
        self.register_parameter("weight", layer._parameters["weight"])
        self.register_parameter("bias", layer._parameters["bias"])
        self.register_buffer("kept", kept)
        self.trained_weight = nn.Parameter(layer.weight.detach().index_select(1, kept))

    def forward(self, x: Tensor) -> Tensor:
        x, weight, trained, bias = _autocast(x, self.weight, self.trained_weight, self.bias)
        return _SparseLinear.apply(x, weight, trained, bias, self.kept)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, trained input features: {len(self.kept)}"


class SparseConv(SparseLayer):
    """A convolution of any dimension of whose weight some input channels train.

    Values are those of the layer that it stands for, whose tensors it shares. In a depthwise convolution an input
    channel goes with the output channels that are made of it; in one of several groups, `kept` counts within a group
    and is the same for each. `merge` writes what has been trained into the shared weight.

    Args:
        layer: the convolution whose place it takes; its padding is of zeros and the same on both sides.
        kept: indices of the input channels whose weights train: ascending, int64.

    Attributes:
        weight: the whole weight, frozen; its kept channels are out of date until `merge` or `state_dict()`.
        trained_weight: the kept channels: a slice of `weight` along its second dimension, for a depthwise convolution
            along its first.
        kept, inputs: where this slice lies in `weight`, and which channels of the input it is for; parts of the state.

    Raises:
        ValueError: the padding is of another kind.

    Example:
        >>> layer = nn.Conv2d(8, 6, 3, padding=1)
        >>> sparse = SparseConv(layer, torch.tensor([1, 5]))
        >>> x = torch.randn(2, 8, 7, 7)
        >>> torch.equal(sparse(x), layer(x))
        True
        >>> tuple(sparse.trained_weight.shape)
        (6, 2, 3, 3)
    """

    inputs: Tensor

    def __init__(self, layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, kept: Tensor) -> None:
        super().__init__()
        self.stride, self.padding, self.dilation = layer.stride, padding_of(layer), layer.dilation
        self.in_channels, self.groups = layer.in_channels, layer.groups
        self.register_parameter("weight", layer._parameters["weight"])
        self.register_parameter("bias", layer._parameters["bias"])
        self.dim = channel_dim(layer)
        per_group = layer.weight.shape[1]
        if self.dim == 0:
            multiplier = layer.out_channels // layer.in_channels
            rows = (kept.unsqueeze(1) * multiplier + torch.arange(multiplier, device=kept.device)).flatten()
            inputs, self.kept_groups = kept, len(kept)
        else:
            first = torch.arange(layer.groups, device=kept.device).unsqueeze(1) * per_group
            rows, inputs, self.kept_groups = kept, (first + kept).flatten(), layer.groups
        self.register_buffer("kept", rows)
        self.register_buffer("inputs", inputs)
        self.trained_weight = nn.Parameter(layer.weight.detach().index_select(self.dim, rows))

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == len(self.stride) + 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        geometry = (list(self.stride), list(self.padding), list(self.dilation), self.groups, self.kept_groups, self.dim)
        x, weight, trained, bias = _autocast(x, self.weight, self.trained_weight, self.bias)
        return _SparseConv.apply(x, weight, trained, bias, self.kept, self.inputs, geometry)

    def extra_repr(self) -> str:
        return (
            f"weight={tuple(self.weight.shape)}, stride={self.stride}, groups={self.groups}, "
            f"trained input channels: {len(self.inputs)}"
        )


def channel_dim(layer: nn.Module) -> int:
    """The dimension of a layer's weight along which its input channels are: the first for a depthwise convolution."""
    return 0 if isinstance(layer, CONVOLUTIONS) and 1 < layer.groups == layer.in_channels else 1


def _autocast(
    x: Tensor, weight: Tensor, trained: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Under autocast, these in its type: autocast knows torch's operators, and not what is made of them here."""
    device_type = x.device.type
    if not torch.is_autocast_enabled(device_type) or x.dtype == torch.float64:
        return x, weight, trained, bias
    dtype = torch.get_autocast_dtype(device_type)
    return x.to(dtype), weight.to(dtype), trained.to(dtype), None if bias is None else bias.to(dtype)


def padding_of(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[int, ...]:
    """Rows or columns of zeros on either side, for each dimension; raises ValueError where it is another padding."""
    if layer.padding_mode != "zeros":
        raise ValueError(f"padding_mode={layer.padding_mode!r}: only convolutions padded with zeros train in part")
    if not isinstance(layer.padding, str):
        return tuple(layer.padding)
    if layer.padding == "valid":
        return (0,) * len(layer.kernel_size)
    whole = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    if any(n % 2 for n in whole):
        raise ValueError(
            f"padding='same' with a kernel of {tuple(layer.kernel_size)} is not the same on both sides; give numbers"
        )
    return tuple(n // 2 for n in whole)


class _SparseLinear(torch.autograd.Function):
    """Of torch's own operators alone, so that it is captured as these."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, trained: Tensor, bias: Tensor | None, kept: Tensor) -> Tensor:
        ctx.save_for_backward(x.index_select(-1, kept), weight, trained, kept)
        return nn.functional.linear(x, weight.index_copy(1, kept, trained), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept_input, weight, trained, kept = ctx.saved_tensors
        rows = gradients[0].flatten(0, -2) if gradients[0].dim() != 1 else gradients[0].unsqueeze(0)
        to_input, _, to_trained, to_bias, *_ = ctx.needs_input_grad
        return (
            gradients[0].matmul(weight.index_copy(1, kept, trained)) if to_input else None,
            None,
            rows.t().mm(kept_input.reshape(rows.shape[0], -1)) if to_trained else None,
            rows.sum(0) if to_bias else None,
            None,
        )


class _SparseConv(torch.autograd.Function):
    """Of torch's own operators alone, so that it is captured as these; the input is saved for its shape."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, trained: Tensor, bias: Tensor | None, kept: Tensor, inputs: Tensor,
        geometry: tuple[Any, ...],
    ) -> Tensor:  # fmt: skip
        stride, padding, dilation, groups, _, dim = geometry
        ctx.geometry = geometry
        ctx.save_for_backward(x, x.index_select(1, inputs), weight, trained, kept)
        whole = weight.index_copy(dim, kept, trained)
        return torch.convolution(x, whole, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, kept_input, weight, trained, kept = ctx.saved_tensors
        stride, padding, dilation, groups, kept_groups, dim = ctx.geometry
        (gradient,) = gradients
        to_input, _, to_trained, to_bias, *_ = ctx.needs_input_grad

        def backward(gradient: Tensor, x: Tensor, weight: Tensor, groups: int, mask: list[bool]) -> tuple[Tensor, ...]:
            return torch.ops.aten.convolution_backward(
                gradient, x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups, mask
            )

        grad_input = grad_trained = None
        if to_input:
            whole = weight.index_copy(dim, kept, trained)
            grad_input = backward(gradient, x, whole, groups, [True, False, False])[0]
        if to_trained:
            of_kept = gradient if dim == 1 else gradient.index_select(1, kept)
            grad_trained = backward(of_kept, kept_input, trained, kept_groups, [False, True, False])[1]
        grad_bias = gradient.sum([0, *range(2, gradient.dim())]) if to_bias else None
        return grad_input, None, grad_trained, grad_bias, None, None, None

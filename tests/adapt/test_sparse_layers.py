"""Layers of which some input channels train: values and gradients of the whole layer's, and what is saved for them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from torch_odt.adapt.channels import kept_channels
from torch_odt.adapt.sparse_layers import SparseConv, SparseLinear, channel_dim

CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@st.composite
def _convolutions(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    dims = draw(st.sampled_from([1, 2, 2, 3]))
    groups, per_group = draw(st.sampled_from([(1, 6), (1, 1), (2, 3), (5, 1), (4, 2)]))
    layer = CONVOLUTIONS[dims](
        groups * per_group,
        groups * draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 3])),
        stride=draw(st.integers(1, 2)),
        padding=draw(st.integers(0, 2)),
        dilation=draw(st.integers(1, 2)),
        groups=groups,
        bias=draw(st.booleans()),
    )
    return layer.double(), torch.randn(draw(st.integers(1, 3)), groups * per_group, *[7] * dims, dtype=torch.float64)


@given(_convolutions(), st.sampled_from([1 / 8, 1 / 4, 1 / 2, 1.0]), st.sampled_from(["largest", "smallest", "random"]))
@settings(max_examples=60, deadline=None)
def test_a_convolution_has_the_values_and_gradients_of_the_whole_layers(
    case: tuple[nn.Module, Tensor], ratio: float, choice: Any
) -> None:
    layer, x = case
    kept = kept_channels(layer, ratio, choice=choice)
    sparse = SparseConv(layer, kept)  # type: ignore[arg-type]
    _assert_gradients_of_slice(layer, sparse, x)


@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from([(), (3,), (2, 4)]),
    st.booleans(),
    st.sampled_from([0.25, 0.5]),
)
@settings(max_examples=30, deadline=None)
def test_a_linear_layer_has_the_values_and_gradients_of_the_whole_layers(
    features: int, outputs: int, batch: tuple[int, ...], bias: bool, ratio: float
) -> None:
    layer = nn.Linear(features, outputs, bias=bias).double()
    sparse = SparseLinear(layer, kept_channels(layer, ratio))
    _assert_gradients_of_slice(layer, sparse, torch.randn(*batch, features, dtype=torch.float64))


def _assert_gradients_of_slice(layer: nn.Module, sparse: SparseConv | SparseLinear, x: Tensor) -> None:
    """With trained values that differ from those of the shared weight."""
    with torch.no_grad():
        sparse.trained_weight.mul_(1.5)
    whole = copy.deepcopy(layer)
    with torch.no_grad():
        whole.weight.index_copy_(channel_dim(layer), sparse.kept, sparse.trained_weight)  # type: ignore[operator]
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = sparse(mine), whole(theirs)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    slice_gradient = whole.weight.grad.index_select(channel_dim(layer), sparse.kept)  # type: ignore[union-attr]
    torch.testing.assert_close(sparse.trained_weight.grad, slice_gradient)
    if whole.bias is not None:
        torch.testing.assert_close(sparse.bias.grad, whole.bias.grad)  # type: ignore[union-attr]
    sparse.merge()
    assert torch.equal(layer.weight, whole.weight)


@pytest.mark.parametrize(("layer", "shape"), [(nn.Linear(4, 3), (2, 4)), (nn.Conv2d(4, 3, 3), (2, 4, 5, 5))])
def test_a_second_derivative_is_refused(layer: Any, shape: tuple[int, ...]) -> None:
    kind = SparseLinear if isinstance(layer, nn.Linear) else SparseConv
    sparse, x = kind(layer, kept_channels(layer, 0.5)), torch.randn(shape, requires_grad=True)
    (gradient,) = torch.autograd.grad(sparse(x).square().sum(), [sparse.trained_weight], create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("layer", [nn.Linear(8, 6), nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8)])
def test_under_autocast_it_computes_as_the_layer_does(layer: Any) -> None:
    layer, kept = copy.deepcopy(layer), torch.tensor([1, 4])
    torch.manual_seed(0)
    layer.reset_parameters()
    sparse = SparseLinear(layer, kept) if isinstance(layer, nn.Linear) else SparseConv(layer, kept)
    x = torch.randn(4, 8)
    if not isinstance(layer, nn.Linear):
        x = x[:, :, None, None] * torch.ones(5, 5)
    results = []
    for module in (layer, sparse):
        own = x.clone().requires_grad_()
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = module(own)
            loss = output.float().square().sum()
        loss.backward()
        trained = sparse.trained_weight.grad
        if trained is None:
            trained = layer.weight.grad.index_select(channel_dim(layer), kept)
        results.append((output, own.grad, layer.bias.grad.clone(), trained))
    for wanted, found in zip(*results, strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2 * float(wanted.detach().abs().max()))
    assert results[1][0].dtype == torch.bfloat16


def test_a_named_padding_is_that_of_the_layer() -> None:
    for padding in ("same", "valid"):
        layer = nn.Conv2d(4, 4, 3, padding=padding, dilation=2)
        x = torch.randn(1, 4, 9, 9)
        torch.testing.assert_close(SparseConv(layer, torch.tensor([0]))(x), layer(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"padding_mode": "circular"}, "padded with zeros"), ({"padding": "same", "kernel_size": 2}, "give numbers")],
)
def test_a_padding_that_it_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    layer = nn.Conv2d(4, 4, **{"kernel_size": 3, "padding": 1} | options)
    with pytest.raises(ValueError, match=message):
        SparseConv(layer, torch.tensor([0]))


def test_channels_of_the_largest_norm_are_kept() -> None:
    layer = nn.Conv2d(4, 3, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, -4.0, 2.0, 3.0]).view(1, 4, 1, 1).expand(3, 4, 1, 1))
    assert kept_channels(layer, 1 / 2).tolist() == [1, 3]
    assert kept_channels(layer, 1 / 2, choice="smallest").tolist() == [0, 2]
    assert kept_channels(layer, 1 / 100).tolist() == [1]
    random = kept_channels(layer, 1 / 2, choice="random", seed=3)
    assert torch.equal(random, kept_channels(layer, 1 / 2, choice="random", seed=3))
    with pytest.raises(ValueError, match="channels='best'"):
        kept_channels(layer, 1 / 2, choice="best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="share of the input channels"):
        kept_channels(layer, 0)


def test_a_sample_without_batch_dimension_is_taken_as_the_layer_takes_it() -> None:
    layer, x = nn.Conv2d(4, 3, 3), torch.randn(4, 6, 6)
    torch.testing.assert_close(SparseConv(layer, torch.tensor([1, 2]))(x), layer(x))


@pytest.mark.parametrize("layer", [nn.Conv2d(4, 3, 3), nn.Conv2d(4, 8, 3, groups=4), nn.Linear(4, 3)], ids=str)
def test_states_of_it_and_of_the_ordinary_layer_are_loaded_into_each_other(layer: Any) -> None:
    def sparse_layer() -> SparseLinear | SparseConv:
        kind: Any = SparseLinear if isinstance(layer, nn.Linear) else SparseConv
        return kind(copy.deepcopy(layer), torch.tensor([1, 2]))

    sparse, again, whole = sparse_layer(), sparse_layer(), copy.deepcopy(layer)
    with torch.no_grad():
        sparse.trained_weight += 1
    state = sparse.state_dict()
    assert state["weight"].data_ptr() == sparse.weight.data_ptr(), "what is loaded in place arrives"
    assert not whole.load_state_dict(state, strict=False).missing_keys
    assert torch.equal(whole.weight, sparse.weight) and not torch.equal(whole.weight, layer.weight)
    again.load_state_dict(whole.state_dict())
    assert torch.equal(again.trained_weight, sparse.trained_weight)

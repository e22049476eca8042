"""Gradients that a step delivers lie in `.grad` as autograd lays them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torch_odt.capture.graph import Output
from torch_odt.execute.gradients import StepReceiver

LAST = torch.channels_last
SHAPE = (2, 3, 4, 5)


@pytest.mark.parametrize(
    "parameter",
    [
        lambda: torch.zeros(SHAPE),
        lambda: torch.zeros(SHAPE).contiguous(memory_format=LAST),
        lambda: torch.zeros(1).expand(SHAPE),
        lambda: torch.zeros(2, 1, 1, 1).expand(SHAPE),
        lambda: torch.zeros(2, 3, 4, 10)[..., ::2],
    ],
    ids=["contiguous", "channels_last", "one element", "some elements", "with gaps"],
)
@pytest.mark.parametrize(
    "gradient",
    [
        lambda: torch.randn(SHAPE),
        lambda: torch.randn(SHAPE).contiguous(memory_format=LAST),
        lambda: torch.randn(4, *SHAPE[1:])[:2],
        lambda: torch.randn(1).expand(SHAPE),
    ],
    ids=["contiguous", "channels_last", "a part", "expanded"],
)
def test_layouts_and_copies_are_autograds(parameter: Callable[[], Tensor], gradient: Callable[[], Tensor]) -> None:
    ours, theirs, delivered = nn.Parameter(parameter()), nn.Parameter(parameter()), gradient()
    StepReceiver({"weight": ours}, {}).deliver(Output(0, "gradient", "weight"), delivered)
    # Without a reference that the engine could see, as in a step: it may take the tensor itself.
    torch.autograd.backward([theirs], [gradient_like(delivered)])
    assert ours.grad is not None and theirs.grad is not None
    assert torch.equal(ours.grad, delivered)
    assert ours.grad.stride() == theirs.grad.stride()
    is_whole = delivered.untyped_storage().nbytes() == delivered.nbytes
    assert (ours.grad.data_ptr() == delivered.data_ptr()) == (is_whole and ours.grad.stride() == delivered.stride())


def gradient_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride()).copy_(tensor) if tensor.stride()[0] else tensor.clone()

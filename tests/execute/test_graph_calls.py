"""Calls of captured graphs as AOTAutograd makes them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from awkward import SeveralInputs, UsedTwice
from torch import nn

import torch_odt as odt
from torch_odt import _extensions

pytestmark = [
    # torch.compile itself warns of this and that.
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(_extensions.memory_module is None, reason="torch_odt._memory is not built"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("make", "inputs"), [(SeveralInputs, 2), (UsedTwice, 1)])
def test_the_first_call_allocates_as_planned_too(make: type[nn.Module], inputs: int) -> None:
    """AOTAutograd makes it inside a mode, where numbers become tensors."""
    model = odt.wrap(make(), budget=odt.Budget("1GiB", of="training"))
    before = odt.memory.stats().arena
    for _ in range(3):
        model(*(torch.randn(4, 16) for _ in range(inputs))).sum().backward()
    after = odt.memory.stats().arena
    assert before is not None and after is not None
    assert after.hits > before.hits
    assert after.misses == before.misses

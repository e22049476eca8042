"""Who holds the node by which autograd adds to a parameter's gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_odt._extensions import memory_module

if memory_module is None:
    pytest.skip("torch_odt._memory is not built", allow_module_level=True)


def holders(tensor: torch.Tensor) -> int:
    assert memory_module is not None
    return memory_module.accumulator_holders(tensor._cdata)


def test_every_use_in_a_graph_that_is_alive_counts() -> None:
    weight, bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    assert holders(weight) == 0
    product = weight * 2
    total = (product + bias).sum()
    assert (holders(weight), holders(bias)) == (1, 1)
    again = weight.view(3, 1) @ bias.detach().view(1, 3)
    assert (holders(weight), holders(bias)) == (2, 1)
    total.backward()
    assert holders(weight) == 2, "a graph stays after its backward pass"
    del again
    assert holders(weight) == 1
    del product, total
    assert (holders(weight), holders(bias)) == (0, 0)


def test_what_python_holds_counts() -> None:
    weight = nn.Parameter(torch.ones(3))
    product = weight * 2
    node = torch.autograd.graph.get_gradient_edge(weight).node
    assert holders(weight) == 2
    del node, product
    assert holders(weight) == 0


def test_what_is_no_leaf_has_none() -> None:
    weight = nn.Parameter(torch.ones(3))
    product = weight * 2
    assert holders(product) == 0 and holders(torch.ones(2)) == 0
    assert holders(weight) == 1

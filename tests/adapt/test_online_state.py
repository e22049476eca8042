"""The state of an online head belongs to the network that it was saved with."""

from __future__ import annotations

import copy

import pytest
from test_online_head import network, samples
from torch import nn

from torch_odt.adapt import online_head
from torch_odt.errors import OdtWarning


def test_a_state_of_a_network_with_other_weights_is_told() -> None:
    model, (x, labels) = network(), samples(10)
    head = online_head(model, x[:1])
    head.learn(x, labels)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    loaded = online_head(other, x[:1])
    loaded.load_state_dict(head.state_dict())
    with pytest.warns(OdtWarning, match="a network with other weights"):
        loaded.predict(x)
    # The classifier that the head replaces makes no difference, and weights may come after the state.
    loaded.load_state_dict(head.state_dict())
    other.load_state_dict(model.state_dict())
    nn.init.normal_(other[4].weight)
    assert loaded.predict(x) == head.predict(x)

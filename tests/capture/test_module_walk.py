"""The walk finds what nn.Module's own generators find, in their order."""

from __future__ import annotations

import pytest
from models import case_named
from torch import nn

from torch_odt.capture.module_walk import Walk, modules_of


def shared() -> nn.Module:
    """Shared modules and parameters, a place without a module, a parameter and a buffer that are None."""
    norm, one = nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
    model = nn.Sequential(one, norm, nn.Sequential(norm, nn.Linear(4, 4)), one)
    model[2][1].weight = one.weight
    model.register_module("absent", None)
    model.register_buffer("nothing", None)
    return model


@pytest.mark.parametrize("name", ["shared", "mobilenet_v2", "lstm"])
def test_finds_what_the_generators_find(name: str) -> None:
    model = shared() if name == "shared" else case_named(name).model()
    assert modules_of(model) == list(model.modules())
    assert list(map(id, Walk(model).parameters())) == list(map(id, model.parameters()))
    for walked, theirs in (
        (Walk(model).named_parameters(), model.named_parameters(remove_duplicate=False)),
        (Walk(model).named_buffers(), model.named_buffers(remove_duplicate=False)),
    ):
        assert [(name, id(tensor)) for name, tensor in walked.items()] == [(name, id(t)) for name, t in theirs]

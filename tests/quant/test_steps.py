"""Converted networks under `TrainStep` and `wrap`: the bits of a plain loop, with and without recomputation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantized_models import calibration, images, labels, trained_a_little
from torch import nn

import torch_odt as odt
from torch_odt.adapt.step_bytes import step_graph
from torch_odt.capture.batch_state import NotSeparable

ROOMY = odt.Budget("2GiB", of="training")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def converted(name: str, **options: Any) -> nn.Module:
    model = trained_a_little(name).train()
    odt.quant.convert_(model, calibration(), qas=True, **options)
    return model


def optimizer_of(model: nn.Module, masters: bool = False) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if not masters:
        odt.quant.train_int8_(model, optimizer)
    return optimizer


def plain_losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    torch.manual_seed(7)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images(8, step)), labels(8, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    one, other = ours.state_dict(), theirs.state_dict()
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize(("name", "masters"), [("residual", "none"), ("vgg", "fp32")])
def test_train_step_has_the_bits_of_a_plain_loop(name: str, masters: Any) -> None:
    model = converted(name, masters=masters)
    plain = copy.deepcopy(model)
    expected = plain_losses(plain, optimizer_of(plain, masters == "fp32"))
    step = odt.TrainStep(model, F.cross_entropy, optimizer_of(model, masters == "fp32"), budget=ROOMY)
    torch.manual_seed(7)
    assert [float(step(images(8, each), labels(8, each))) for each in range(3)] == expected
    assert_same_state(model, plain)
    assert step.plan.captured


def test_int8_operators_are_nodes_of_the_graph() -> None:
    model = converted("residual")
    batch = (images(8, 0), labels(8, 0))
    graph = step_graph(model, F.cross_entropy, batch, optimizer=optimizer_of(model))
    targets = [op.target for op in graph.ops]
    assert targets.count("torch_odt.int8_layer.default") == targets.count("torch_odt.int8_layer_backward.default") == 3
    layers = [op for op in graph.ops if op.target == "torch_odt.int8_layer.default"]
    # An eighth of a byte, and one byte, an element; the slot takes one number.
    elements = [math.prod(graph.values[op.writes[0]].shape) for op in layers]
    found = [[graph.values[value].nbytes for value in op.results] for op in layers]
    assert found == [[count, 4, count // 8] for count in elements]


def test_wrap_has_the_bits_of_a_plain_loop() -> None:
    model = converted("residual")
    plain = copy.deepcopy(model)
    expected = plain_losses(plain, optimizer_of(plain))
    optimizer = optimizer_of(model)
    wrapped = odt.wrap(model, budget=ROOMY)
    assert plain_losses(wrapped, optimizer) == expected
    assert_same_state(model, plain)


def call(step: odt.TrainStep, number: int) -> torch.Tensor:
    torch.manual_seed(number)
    return step(images(8, number), labels(8, number))


def refuse(*_: Any) -> None:
    raise RuntimeError("not now")


class OwnSGD(torch.optim.SGD):
    """No optimizer of torch's: all layers are float32 for a moment at once."""


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        lambda parameters: OwnSGD(parameters, lr=0.05, momentum=0.9),
    ],
    ids=["descent", "momentum", "own"],
)
def test_a_step_that_fails_puts_int8_weights_back(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    models, steps = [], []
    for _ in range(2):
        models.append(converted("residual"))
        optimizer = make(models[-1].parameters())
        odt.quant.train_int8_(models[-1], optimizer)
        options: Any = {"budget": ROOMY, "transactional": True}
        steps.append(odt.TrainStep(models[-1], F.cross_entropy, optimizer, **options))
    ours, theirs = steps
    assert torch.equal(call(ours, 0), call(theirs, 0))
    for register in (ours.optimizer.register_step_pre_hook, ours.optimizer.register_step_post_hook):
        handle = register(refuse)
        with pytest.raises(RuntimeError, match="not now"):
            call(ours, 1)
        handle.remove()
        assert_same_state(*models)
        slots = [layer.weight_slot for layer in odt.quant.qas.int8_layers(models[0]).values()]
        assert slots and all(slot.untyped_storage().nbytes() == 4 for slot in slots)
    assert torch.equal(call(ours, 1), call(theirs, 1))
    assert_same_state(*models)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"accumulation_steps": 2}, "gradients of 2 calls are accumulated"),
        ({"clip_grad_norm": 1.0}, "the norm of all gradients"),
        ({"transactional": True}, "a call that fails"),
    ],
)
def test_updates_in_the_backward_pass_are_refused_where_all_gradients_are_needed(options: Any, why: str) -> None:
    model = converted("residual")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    training = odt.quant.train_int8_(model, optimizer, in_backward=True)
    step = odt.TrainStep(model, F.cross_entropy, optimizer, budget=ROOMY, **options)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=f"weight_slot.* would be updated in the backward pass, but .*{why}"):
        call(step, 0)
    assert_same_state(model, before)
    training.stop()
    odt.quant.train_int8_(model, optimizer)
    call(step, 0)


def test_micro_batches_are_refused_with_the_reason() -> None:
    model = converted("residual")
    step = odt.TrainStep(model, F.cross_entropy, optimizer_of(model), budget=ROOMY, micro_batch=2)
    with pytest.raises(NotSeparable, match="rounded to the range of the whole batch"):
        call(step, 0)


def test_an_optimizer_that_is_no_longer_used_for_int8_forgets_the_weights() -> None:
    model = converted("residual")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = set(vars(optimizer))
    odt.quant.train_int8_(model, optimizer).stop()
    assert set(vars(optimizer)) == before

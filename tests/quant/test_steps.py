"""Converted networks under `TrainStep` and `wrap`: the bits of a plain loop, with and without recomputation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantized_models import calibration, images, labels, trained_a_little
from torch import nn

import torch_odt as odt
from torch_odt.adapt.step_bytes import step_graph
from torch_odt.capture.batch_state import NotSeparable
from torch_odt.capture.update_in_backward import FUSED_UPDATE, UPDATES
from torch_odt.execute.saved_contents import SavedContents

ROOMY = odt.Budget("2GiB", of="training")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def converted(name: str, **options: Any) -> nn.Module:
    model = trained_a_little(name).train()
    odt.quant.convert_(model, calibration(), **options)
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


def test_adam_and_clipping_have_the_bits_of_a_plain_loop() -> None:
    plain, model = (converted("residual") for _ in range(2))
    loop, optimizer = (torch.optim.AdamW(each.parameters(), lr=3e-3) for each in (plain, model))
    norms: list[float] = []
    clip = loop.register_step_pre_hook(
        lambda *_: norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
    )
    odt.quant.train_int8_(plain, loop)
    expected = plain_losses(plain, loop, 6)
    clip.remove()
    odt.quant.train_int8_(model, optimizer)
    step = odt.TrainStep(model, F.cross_entropy, optimizer, budget=ROOMY, clip_grad_norm=0.5)
    torch.manual_seed(7)
    assert [float(step(images(8, each), labels(8, each))) for each in range(6)] == expected
    assert max(norms) > 0.5
    assert_same_state(model, plain)


def test_int8_operators_are_nodes_of_the_graph() -> None:
    model = converted("residual")
    batch = (images(8, 0), labels(8, 0))
    graph = step_graph(model, F.cross_entropy, batch, optimizer=optimizer_of(model))
    targets = [op.target for op in graph.ops]
    assert targets.count("torch_odt.int8_layer.default") == targets.count("torch_odt.int8_layer_backward.default") == 3
    layers = [op for op in graph.ops if op.target == "torch_odt.int8_layer.default"]
    # An eighth of a byte, and one byte, an element; the slot takes one number. Of what is pooled a byte says whence.
    elements = [math.prod(graph.values[op.writes[0]].shape) for op in layers]
    found = [[graph.values[value].nbytes for value in op.results] for op in layers]
    is_pooled = [len(op.args[11]) > 7 for op in layers]
    assert found == [[n, 2, n // 8 + n * pooled] for n, pooled in zip(elements, is_pooled, strict=True)]
    assert is_pooled == [True, False, False] and not any("max_pool" in target for target in targets)


@pytest.mark.parametrize(("is_given", "in_backward"), [(False, False), (True, False), (True, True)])
def test_wrap_has_the_bits_of_a_plain_loop(is_given: bool, in_backward: bool) -> None:
    model = converted("residual")
    plain = copy.deepcopy(model)
    losses = []
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.05)
        odt.quant.train_int8_(each, optimizer, in_backward=in_backward and each is model)
        options: Any = {"optimizer": optimizer} if is_given else {}
        losses.append(plain_losses(each if each is plain else odt.wrap(each, budget=ROOMY, **options), optimizer))
    assert losses[0] == losses[1]
    assert_same_state(model, plain)


def call(step: odt.TrainStep, number: int) -> torch.Tensor:
    torch.manual_seed(number)
    return step(images(8, number), labels(8, number))


def updated_in_schedule(step: odt.TrainStep, targets: Collection[str] = UPDATES) -> set[str]:
    """The parameters whose updates stand in the step's graph, as ops of these targets."""
    assert step._current is not None and step._current.program is not None
    (part,) = step._current.program.parts.values()
    return {str(part.graph.values[op.reads[0]].target) for op in part.graph.ops if op.target in targets}


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("budget", ["roomy", "smallest"])
def test_int8_weights_are_updated_inside_of_the_schedule(in_backward: bool, budget: str) -> None:
    plain, model = (converted("residual") for _ in range(2))
    loop = torch.optim.SGD(plain.parameters(), lr=0.05, weight_decay=0.01)
    odt.quant.train_int8_(plain, loop)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.01)
    odt.quant.train_int8_(model, optimizer, in_backward=in_backward)
    step = odt.TrainStep(model, F.cross_entropy, optimizer, budget=ROOMY)
    if budget == "smallest":
        with pytest.raises(odt.InfeasibleBudget) as refused:
            odt.TrainStep(model, F.cross_entropy, optimizer, budget=odt.Budget(1, of="training"))(
                images(8, 0), labels(8, 0)
            )
        step = odt.TrainStep(
            model,
            F.cross_entropy,
            optimizer,
            budget=odt.Budget(refused.value.smallest_feasible_bytes + (1 << 20), of="training"),
        )
    torch.manual_seed(7)
    found = [float(step(images(8, each), labels(8, each))) for each in range(3)]
    assert found == plain_losses(plain, loop)
    assert_same_state(model, plain)
    slots = {name for name, _ in model.named_parameters() if name.endswith("weight_slot")}
    assert slots and slots == updated_in_schedule(step, {FUSED_UPDATE})
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_the_schedule_cannot_update_is_left_to_the_optimizer() -> None:
    plain, model = (converted("residual") for _ in range(2))
    loop, optimizer = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (plain, model))
    odt.quant.train_int8_(plain, loop)
    odt.quant.train_int8_(model, optimizer)
    step = odt.TrainStep(model, F.cross_entropy, optimizer, budget=ROOMY)
    slot = next(parameter for name, parameter in model.named_parameters() if name.endswith("weight_slot"))
    name = next(name for name, parameter in model.named_parameters() if parameter is slot)
    seen: list[torch.Tensor] = []

    def look(gradient: torch.Tensor) -> None:
        seen.append(gradient.clone())

    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: slot.register_hook(look),
        lambda: (optimizer.param_groups[0].update(momentum=0.9), loop.param_groups[0].update(momentum=0.9)),
    ]
    updated = []
    for number, change in enumerate(changes):
        change()
        assert float(call(step, number)) == plain_step(plain, loop, number)
        updated.append({each for each in updated_in_schedule(step) if each.endswith("weight_slot")})
        assert_same_state(model, plain)
    assert name in updated[0] and updated[1] == updated[0] - {name} and not updated[2]
    assert len(seen) == 2


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    torch.manual_seed(number)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images(8, number)), labels(8, number))
    loss.backward()
    optimizer.step()
    return loss.item()


def test_a_plan_that_updates_int8_weights_travels_in_a_file(tmp_path: Path) -> None:
    plain, model = (converted("residual") for _ in range(2))
    steps = []
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.05)
        odt.quant.train_int8_(each, optimizer)
        options: Any = {"plan": tmp_path / "plan.json"} if steps else {"budget": ROOMY}
        steps.append(odt.TrainStep(each, F.cross_entropy, optimizer, **options))
        losses = [float(call(steps[-1], number)) for number in range(2)]
        if len(steps) == 1:
            steps[0].plan.save(tmp_path / "plan.json")
            expected = losses
    assert losses == expected
    assert_same_state(model, plain)
    assert updated_in_schedule(steps[1]) == updated_in_schedule(steps[0])


@pytest.mark.parametrize("share", [lambda weight: weight, lambda weight: weight.view_as(weight)])
def test_an_int8_weight_in_shared_memory_waits_for_the_optimizer(
    share: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)).train()
        odt.quant.convert_(model, calibration())
        model[4].weight = share(model[2].weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        odt.quant.train_int8_(model, optimizer)
        return model, optimizer

    (plain, loop), (model, optimizer) = make(), make()
    step = odt.TrainStep(model, F.cross_entropy, optimizer, budget=ROOMY)
    for number in range(3):
        assert float(call(step, number)) == plain_step(plain, loop, number)
    assert_same_state(model, plain)
    slots = {name for name in updated_in_schedule(step) if name.endswith("weight_slot")}
    assert "0.weight_slot" in slots and slots.isdisjoint({"2.weight_slot", "4.weight_slot"})
    assert any("2 gradients are kept for the optimizer's step: other tensors lie" in n for n in step.plan.notes)


def test_rates_follow_schedulers_and_groups() -> None:
    plain, model = (converted("residual") for _ in range(2))
    pairs = []
    for each in (plain, model):
        slots = [p for name, p in each.named_parameters() if name.endswith("weight_slot")]
        others = [p for name, p in each.named_parameters() if not name.endswith("weight_slot")]
        groups = [{"params": slots[:1], "lr": 0.5}, {"params": slots[1:]}, {"params": others, "lr": 0.1}]
        optimizer = torch.optim.SGD(groups, lr=0.0)
        odt.quant.train_int8_(each, optimizer)
        pairs.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)))
    (loop, loop_rates), (optimizer, rates) = pairs
    step = odt.TrainStep(model, F.cross_entropy, optimizer, budget=ROOMY)

    def swap(each: torch.optim.Optimizer) -> None:
        first, second = each.param_groups[0]["params"], each.param_groups[1]["params"]
        first[0], second[0] = second[0], first[0]

    def decay(each: torch.optim.Optimizer) -> None:
        each.param_groups[0]["weight_decay"] = 0.1

    changes: list[Callable[[torch.optim.Optimizer], None]] = [lambda each: None, lambda each: None, swap, decay]
    for number, change in enumerate(changes):
        change(loop), change(optimizer)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert float(call(step, number)) == plain_step(plain, loop, number)
        loop_rates.step(), rates.step()
        assert_same_state(model, plain)
        weights = [name for name in before if f"{name}_slot" in before]
        moved = [name for name in weights if not torch.equal(before[name], model.state_dict()[name])]
        # Of the others the rate is 0.
        assert moved == weights[:1] if number < 2 else moved == weights[1:2]


def test_changes_by_compiled_code_are_noted_at_the_tensors() -> None:
    model = converted("residual")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    odt.quant.train_int8_(model, optimizer)
    step = odt.TrainStep(model, F.cross_entropy, optimizer, budget=ROOMY)
    call(step, 0)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    changed = {name for name in tensors if not name.endswith(("slot", "scale", "grid"))}
    versions = {name: tensors[name]._version for name in changed}
    loss = F.cross_entropy(model(images(8, 1)), labels(8, 1))
    contents = {name: tensors[name].clone() for name in changed}
    call(step, 1)
    moved = {name for name in changed if not torch.equal(contents[name], tensors[name])}
    assert moved and all(tensors[name]._version > versions[name] for name in moved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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


def test_only_what_changes_is_copied_before_a_step_and_failures_keep_nothing() -> None:
    model = converted("residual")
    frozen, *trained = odt.quant.qas.int8_layers(model).values()
    frozen.weight_slot.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    training = odt.quant.train_int8_(model, optimizer)
    step = odt.TrainStep(model, F.cross_entropy, optimizer, budget=ROOMY, transactional=True)
    call(step, 0)
    copied: list[int] = []
    look = SavedContents.__init__

    def counting(self: SavedContents, *arguments: Any) -> None:
        look(self, *arguments)
        copied.extend(id(tensor) for tensor, _ in self._tensors)

    handle = optimizer.register_step_post_hook(refuse)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedContents, "__init__", counting)
        for number in range(3):
            with pytest.raises(RuntimeError, match="not now"):
                call(step, number)
            assert not training._updates._gradients
    assert id(frozen.weight) not in copied and {id(layer.weight) for layer in trained} <= set(copied)
    handle.remove()
    call(step, 1)


def test_frozen_weights_need_no_gradients() -> None:
    model = converted("residual")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    odt.quant.train_int8_(model, optimizer, in_backward=True)
    for layer in odt.quant.qas.int8_layers(model).values():
        layer.weight_slot.requires_grad_(False)
    step = odt.TrainStep(model, F.cross_entropy, optimizer, budget=ROOMY, accumulation_steps=2)
    call(step, 0)


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

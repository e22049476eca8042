"""Weights that the backward pass changes itself: only where nobody else is to see their gradients, and no bit else."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from niti_cases import batches, bytes_of, small_net
from quantized_models import calibration, images, labels, trained_a_little
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_odt as odt
from torch_odt.quant import NitiSGD, PackedWeights, niti_, niti_cross_entropy, niti_sgd
from torch_odt.quant.in_backward import InBackward, use_of
from torch_odt.quant.modules import Int8Layer
from torch_odt.quant.qas import int8_layers


class Twice(nn.Module):
    """A layer that is used twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.again, self.head = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(self.again(F.relu(self.again(x))))
        found: Tensor = self.head(x.mean([2, 3]))
        return found


def converted(model: nn.Module, in_backward: bool) -> tuple[nn.Module, torch.optim.SGD]:
    odt.quant.convert_(model, calibration())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.01)
    odt.quant.train_int8_(model, optimizer, in_backward=in_backward)
    return model, optimizer


def residual(in_backward: bool = True) -> tuple[nn.Module, torch.optim.SGD]:
    return converted(trained_a_little("residual"), in_backward)


def loss_of(model: nn.Module, step: int) -> Tensor:
    return F.cross_entropy(model(images(8, step)), labels(8, step))


def weights_of(model: nn.Module) -> list[Tensor]:
    return [layer.weight.clone() for layer in int8_layers(model).values()]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def same_state(ours: nn.Module, theirs: nn.Module) -> bool:
    return same(list(ours.state_dict().values()), list(theirs.state_dict().values()))


def test_gradients_of_weights_are_never_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = residual()
    theirs, reference = residual(in_backward=False)
    for step in range(3):
        reference.zero_grad()
        loss_of(theirs, step).backward()
        reference.step()

    def refused(*_: Any) -> None:
        raise AssertionError("a gradient was stored")

    monkeypatch.setattr(Int8Layer, "descend_", refused)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        assert all(layer.weight_slot.grad is None for layer in int8_layers(model).values())
        optimizer.step()
    assert same_state(model, theirs)


def test_gradients_of_a_layer_that_is_used_twice_are_added_up_first() -> None:
    torch.manual_seed(0)
    base = Twice().eval()
    trained = []
    for in_backward in (True, False):
        model, optimizer = converted(copy.deepcopy(base), in_backward)
        for step in range(3):
            optimizer.zero_grad()
            # All of the model twice: `convert_` leaves single layers that are to float32.
            (loss_of(model.train(), step) + loss_of(model, step + 9)).backward()
            optimizer.step()
        trained.append(model)
    assert same_state(*trained)
    assert all(int(layer.rounding[1]) == 3 for layer in int8_layers(trained[0]).values())


def test_gradients_that_are_asked_for_change_nothing() -> None:
    model, _ = residual()
    before = weights_of(model)
    x = images(8, 0).requires_grad_()
    slots = [layer.weight_slot for layer in int8_layers(model).values()]
    torch.autograd.grad(F.cross_entropy(model(x), labels(8, 0)), x)
    F.cross_entropy(model(x), labels(8, 0)).backward(inputs=[x])
    found = torch.autograd.grad(F.cross_entropy(model(x), labels(8, 0)), slots)
    assert same(weights_of(model), before)
    plain, _ = residual(in_backward=False)
    loss_of(plain, 0).backward()
    assert same(list(found), [layer.weight_slot.grad for layer in int8_layers(plain).values()])  # type: ignore[misc]


def test_a_pass_that_accumulates_nothing_ends_no_use() -> None:
    models = []
    for in_backward in (True, False):
        model, optimizer = residual(in_backward)
        x = images(8, 0).requires_grad_()
        loss = F.cross_entropy(model(x), labels(8, 0)) + loss_of(model, 1)
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward(retain_graph=True, inputs=[x])
        loss.backward()
        optimizer.step()
        models.append(model)
    assert same_state(*models)


def test_hooks_see_gradients() -> None:
    model, optimizer = residual()
    plain, reference = residual(in_backward=False)
    seen: list[Tensor] = []
    layers = list(int8_layers(model).values())
    layers[0].weight_slot.register_hook(lambda gradient: seen.append(gradient.clone()))
    layers[1].weight_slot.register_hook(lambda gradient: seen.append(gradient.clone()))
    for trained, by in ((model, optimizer), (plain, reference)):
        loss_of(trained, 0).backward()
        by.step()
    assert len(seen) == 2 and all(gradient is not None and gradient.any() for gradient in seen)
    assert same_state(model, plain)


def test_copies_of_saved_tensors_are_not_updated_in_the_weights_place() -> None:
    plain, reference = residual(in_backward=False)
    loss_of(plain, 0).backward()
    reference.step()
    model, optimizer = residual()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        loss = loss_of(model, 0)
    loss.backward()
    optimizer.step()
    assert same_state(model, plain)


def test_updates_that_were_stopped_after_the_forward_pass_are_not_made() -> None:
    model = trained_a_little("residual")
    odt.quant.convert_(model, calibration())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    training = odt.quant.train_int8_(model, optimizer, in_backward=True)
    loss, before = loss_of(model, 0), weights_of(model)
    training.stop()
    loss.backward()
    assert same(weights_of(model), before)
    assert all(layer.weight_slot.grad is not None for layer in int8_layers(model).values())


def test_a_pass_that_led_nowhere_is_forgotten() -> None:
    model, optimizer = residual()
    plain, reference = residual(in_backward=False)
    unused = loss_of(model, 5)  # its graph lives on
    for trained, by in ((model, optimizer), (plain, reference)):
        for step in range(2):
            by.zero_grad()
            loss_of(trained, step).backward()
            by.step()
    assert same_state(model, plain)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        unused.backward()


def test_the_same_graph_is_not_passed_back_twice() -> None:
    model, _ = residual()
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_that_are_there_are_added_to() -> None:
    # From before the optimizer updates in the backward pass.
    models = []
    for in_backward in (True, False):
        model = trained_a_little("residual")
        odt.quant.convert_(model, calibration())
        loss_of(model, 1).backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        odt.quant.train_int8_(model, optimizer, in_backward=in_backward)
        loss_of(model, 0).backward()
        optimizer.step()
        models.append(model)
    assert same_state(*models)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("classifier", ["fp32", "int8"])
def test_checkpointed_layers_are_updated(use_reentrant: bool, classifier: Any) -> None:
    models = []
    for in_backward in (True, False):
        model = trained_a_little("residual")
        odt.quant.convert_(model, calibration(), classifier=classifier)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        odt.quant.train_int8_(model, optimizer, in_backward=in_backward)
        x = images(8, 0).requires_grad_()
        found = checkpoint(model, x, use_reentrant=use_reentrant) if in_backward else model(x)
        F.cross_entropy(found, labels(8, 0)).backward()
        optimizer.step()
        models.append(model)
    assert same_state(*models)


def test_a_model_is_saved_and_copied_without_its_optimizer() -> None:
    model, _ = residual()
    other = copy.deepcopy(model)
    for name, layer in int8_layers(model).items():
        file = io.BytesIO()
        torch.save(layer, file)
        assert b"optim" not in file.getvalue()
        file.seek(0)
        other.set_submodule(name, torch.load(file, weights_only=False))
    for each in (other, copy.deepcopy(model)):
        before = weights_of(each)
        loss_of(each, 0).backward()
        assert same(weights_of(each), before)
        assert all(layer.weight_slot.grad is not None for layer in int8_layers(each).values())
    file = io.BytesIO()
    torch.save(model.state_dict(keep_vars=True), file)
    file.seek(0)
    assert len(torch.load(file, weights_only=True)) == len(model.state_dict())
    loss_of(model, 0).backward()
    assert not same(weights_of(model), before)


def test_a_rate_beyond_all_numbers_is_refused_and_changes_no_weight() -> None:
    model, optimizer = residual()
    before = weights_of(model)
    optimizer.param_groups[0]["lr"] = 1e38
    with pytest.raises(RuntimeError, match="an update of int8 weights is not finite: the loss has diverged"):
        loss_of(model, 0).backward()
    assert same(weights_of(model), before)


def test_saturation_is_counted() -> None:
    counts = []
    for in_backward in (True, False):
        model = trained_a_little("residual")
        odt.quant.convert_(model, calibration())
        optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
        training = odt.quant.train_int8_(model, optimizer, in_backward=in_backward)
        loss_of(model, 0).backward()
        optimizer.step()
        counts.append(training.saturated)
    assert counts[0] == counts[1] and sum(counts[0].values()) > 0


@pytest.mark.parametrize("packs", [False, True])
def test_niti_gradients_of_weights_are_never_stored(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    data, models = batches(6), [small_net() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = []
    kept = [PackedWeights() if packs else None for _ in models]
    for model, in_backward, own in zip(models, (True, False), kept, strict=True):
        niti_(model, gradient_bits=-3, packs=own)
        optimizers.append(NitiSGD(model, in_backward=in_backward))
    stored: list[int] = []
    take_off = niti_sgd.int8_take_off_

    def noted(weight: Tensor, steps: Tensor) -> bool:
        stored.append(weight.dim())
        return take_off(weight, steps)

    for model, optimizer in zip(models, optimizers, strict=True):
        stored.clear()
        with monkeypatch.context() as patch:
            patch.setattr(niti_sgd, "int8_take_off_", noted)
            for x, y in data:
                optimizer.zero_grad()
                niti_cross_entropy(model(x), y).backward()
                optimizer.step()
        # Biases are, and the others' weights.
        assert set(stored) == ({1} if model is models[0] else {1, 2, 4})
    assert bytes_of(models[0]) == bytes_of(models[1])
    assert not packs or kept[0].reused_count == kept[1].reused_count > 0  # type: ignore[union-attr]


def test_niti_weights_in_another_order_of_memory_are_updated() -> None:
    data, models = batches(3), [small_net() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, in_backward in zip(models, (True, False), strict=True):
        niti_(model)
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        optimizer = NitiSGD(model, in_backward=in_backward)
        for x, y in data:
            optimizer.zero_grad()
            niti_cross_entropy(model(x), y).backward()
            optimizer.step()
    assert bytes_of(models[0]) == bytes_of(models[1])


def test_large_niti_weights_are_looked_at_without_being_stored() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(2048, 2200), nn.ReLU(), nn.Linear(2200, 4))
    models = [copy.deepcopy(base) for _ in range(2)]
    for model, in_backward in zip(models, (True, False), strict=True):
        niti_(model)
        optimizer = NitiSGD(model, in_backward=in_backward)
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(3, 2048, generator=torch.Generator().manual_seed(step))
            niti_cross_entropy(model(x), torch.tensor([0, 1, 2])).backward()
            optimizer.step()
    assert bytes_of(models[0]) == bytes_of(models[1])


def test_a_use_ends_with_its_graph() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    assert use_of(parameter) is None
    updates = InBackward(parameter, lambda: "update")
    first = use_of(parameter[None])  # of a view
    assert first is not None and first.update() is None  # outside a backward pass
    del first
    second, third = use_of(parameter), use_of(parameter)
    assert updates.is_shared and updates.open_uses == 2
    del second
    assert updates.is_shared
    del third
    assert not updates.is_shared and updates.open_uses == 0
    updates.stop()
    assert use_of(parameter) is None
    updates.stop()

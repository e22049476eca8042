"""What is wide in a frozen front exists some channels at a time: where, what it saves, and that results stay."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import mobilenet_v2

import torch_odt as odt
from tests.capture.test_rewrite import capture, execute, ops_named
from torch_odt.capture.direct_depthwise import FORWARD as DEPTHWISE
from torch_odt.capture.graph import TrainingGraph
from torch_odt.quant.activation import new_slot

NOTE = "wide activations are computed some channels at a time"


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Inverted(nn.Module):
    def __init__(self, wide: int = 48, *, stride: int = 2, groups: int = 0, act: nn.Module | None = None) -> None:
        super().__init__()
        self.expand = nn.Conv2d(8, wide, 1)
        self.act = act or nn.ReLU6()
        self.depthwise = nn.Conv2d(wide, wide, 3, stride, 1, groups=groups or wide, bias=False)
        self.project = nn.Conv2d(wide, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.act(self.depthwise(self.act(self.expand(x)))))


def network(block: nn.Module) -> nn.Module:
    """With a block whose weights are frozen, behind which a layer trains."""
    block.requires_grad_(False)
    return nn.Sequential(block, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3))


def images(size: int = 16, channels: int = 8, memory_format: torch.memory_format = torch.channels_last) -> Tensor:
    return torch.randn(2, channels, size, size).contiguous(memory_format=memory_format)


def check(model: nn.Module, x: Tensor, split: int) -> TrainingGraph:
    """Loss and gradients are plain PyTorch's within rounding, and so many tensors are computed in parts."""
    y = torch.randn_like(model(x))
    graph = capture(model, x, y)
    assert [note for note in graph.notes if NOTE in note] == ([f"{split} {NOTE} (split_expansions)"] if split else [])
    found = execute(graph, model, (x, y))
    plain = copy.deepcopy(model)
    loss = F.mse_loss(plain(x), y)
    loss.backward()
    torch.testing.assert_close(found["loss", 0], loss.detach())
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found["gradient", name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
    return graph


def widest(graph: TrainingGraph) -> int:
    """Of the activations, in channels."""
    return max(graph.values[op.results[0]].shape[1] for op in ops_named(graph, "aten.hardtanh.default"))


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_a_frozen_expansion_is_split(memory_format: torch.memory_format) -> None:
    model = network(Inverted()).to(memory_format=memory_format)
    graph = check(model, images(memory_format=memory_format), split=1)
    grouped = [op for op in ops_named(graph, "aten.convolution.default") if op.args[8] > 1]
    parts = grouped or ops_named(graph, DEPTHWISE)
    assert [graph.values[op.results[0]].shape[1] for op in parts] == [16] * 3
    assert len(ops_named(graph, "aten.cat.default")) == 1


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.SiLU(), nn.Hardswish(), nn.GELU(), nn.Identity()])
def test_whatever_is_element_wise_may_be_between(activation: nn.Module) -> None:
    check(network(Inverted(act=activation)), images(), split=1)


def test_what_is_kept_for_a_gradient_stays_whole() -> None:
    model = network(Inverted())
    model[0].expand.bias.requires_grad_(True)
    graph = check(model, images(), split=0)
    assert not ops_named(graph, "aten.cat.default")


@pytest.mark.parametrize(
    "block", [Inverted(stride=1), Inverted(groups=1), Inverted(groups=4), Inverted(wide=24), Inverted(wide=16)]
)
def test_other_blocks_stay_whole(block: nn.Module) -> None:
    check(network(block), images(), split=0)


def test_only_what_decides_what_every_plan_needs_is_split() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = Inverted(), Inverted()

        def forward(self, x: Tensor) -> Tensor:
            return self.small(self.large(x))

    graph = check(network(Two()), images(32), split=1)
    assert len(ops_named(graph, "aten.cat.default")) == 1
    model = nn.Sequential(nn.Conv2d(8, 96, 1), nn.ReLU(), nn.Conv2d(96, 8, 1), network(Two()))
    check(model, images(32), split=0)


def test_a_tensor_that_is_read_elsewhere_stays_whole() -> None:
    class Twice(Inverted):
        def forward(self, x: Tensor) -> Tensor:
            wide = self.act(self.expand(x))
            return self.project(self.depthwise(wide) + wide[..., ::2, ::2])

    check(network(Twice()), images(), split=0)


def test_a_network_trains_alike_in_less(tmp_path: Path) -> None:
    x, y = torch.randn(2, 3, 128, 128), torch.tensor([0, 1])
    found = {}
    for disabled in ((), ("split_expansions",)):
        torch.manual_seed(0)
        model = mobilenet_v2(width_mult=0.35, num_classes=3, dropout=0.0)
        adaptation = odt.adapt.tinytl_(model, mode="last")
        optimizer = torch.optim.SGD(adaptation.parameters(), lr=0.1)
        step = odt.TrainStep(
            model, F.cross_entropy, optimizer, budget="4GiB", disable_rewrites=disabled, planner="melon", cache=False
        )
        found[disabled] = ([step(x, y).item() for _ in range(3)], step.plan.arena_bytes)
        step.plan.save(tmp_path / "plan.json")
        following = odt.TrainStep(model, F.cross_entropy, optimizer, plan=tmp_path / "plan.json", cache=False)
        assert following(x, y).item() < found[disabled][0][-1]
    (losses, nbytes), (whole_losses, whole_nbytes) = found.values()
    assert losses == pytest.approx(whole_losses, rel=1e-5)
    assert nbytes < 0.8 * whole_nbytes


@pytest.mark.parametrize(
    ("trains_from", "shape"),
    [("classifier", (2, 3, 128, 128)), ("features.17", (2, 3, 128, 128)), ("features.17", (1, 3, 128, 128))],
)
def test_int8_layers_are_split_to_the_bit(trains_from: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    x, y = torch.randn(shape), torch.tensor([0, 1])[: shape[0]]
    torch.manual_seed(0)
    whole = mobilenet_v2(width_mult=0.35, num_classes=3, dropout=0.0).eval()
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(name.startswith((trains_from, "classifier")))
    odt.quant.convert_(whole, [x])
    found = {}
    for disabled in ((), ("split_expansions",)):
        model = copy.deepcopy(whole).train()
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05)
        if trains_from != "classifier":  # which stays in float32
            odt.quant.train_int8_(model, optimizer)
        step = odt.TrainStep(
            model, F.cross_entropy, optimizer, budget="4GiB", disable_rewrites=disabled, planner="melon", cache=False
        )
        losses = [step(x, y).item() for _ in range(3)]
        assert any(NOTE in note for note in step.plan.notes) == (not disabled)
        step.plan.save(tmp_path / "plan.json")
        following = odt.TrainStep(model, F.cross_entropy, optimizer, plan=tmp_path / "plan.json", cache=False)
        losses.append(following(x, y).item())
        found[disabled] = (losses, step.plan.arena_bytes, model.state_dict())
    (losses, nbytes, state), (whole_losses, whole_nbytes, whole_state) = found.values()
    assert losses == whole_losses and len(set(losses)) > 1
    assert not [name for name in state if not torch.equal(state[name], whole_state[name])]
    assert nbytes < 0.8 * whole_nbytes


@pytest.mark.parametrize("size", [(2, 2), (2, 32), (32, 2)])
def test_slots_of_single_rows_and_columns_are_described_as_they_are(size: tuple[int, int]) -> None:
    model, x, y = network(Inverted(wide=96)), torch.randn(2, 8, *size), torch.randn(2, 3)
    odt.quant.convert_(model, [x])
    graph = capture(model, x, y)
    assert any(NOTE in note for note in graph.notes)
    slots = [op.writes[1] for op in ops_named(graph, "torch_odt.int8_layer.default")]
    assert {graph.values[slot].nbytes for slot in slots if slot is not None} == {2}
    execute(graph, model, (x, y))


def test_a_pooled_int8_layer_counts_with_what_it_pools() -> None:
    stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 8, 1))
    stem.requires_grad_(False)
    for size, is_split in (((2, 3, 32, 32), False), ((2, 8, 32, 32), True)):
        block = network(Inverted(wide=96))
        model, x = block if is_split else nn.Sequential(stem, *block), torch.randn(size)
        odt.quant.convert_(model.eval(), [x])
        graph = capture(model, x, torch.randn(2, 3))
        assert any(NOTE in note for note in graph.notes) == is_split


def test_an_int8_layer_whose_slot_comes_from_elsewhere_stays_whole() -> None:
    model, x = network(Inverted()), images()
    odt.quant.convert_(model, [x])
    depthwise = model[0].depthwise
    forward = depthwise.forward
    depthwise.forward = lambda a: forward(a._replace(slot=new_slot(a.values.shape)))
    y = torch.randn_like(model(x))
    step = odt.TrainStep(
        model, F.mse_loss, torch.optim.SGD(model[3].parameters(), lr=0.1), budget="4GiB", planner="melon", cache=False
    )
    step(x, y)
    assert not any(NOTE in note for note in step.plan.notes)


def test_micro_batches_are_split_alike() -> None:
    torch.manual_seed(0)
    x, y = images().repeat(4, 1, 1, 1).contiguous(memory_format=torch.channels_last), torch.randint(3, (8,))
    model = network(Inverted()).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = odt.TrainStep(
        model, F.cross_entropy, optimizer, budget="4GiB", micro_batch=3, disable_rewrites=["update_in_backward"]
    )
    step(x, y)
    assert any(NOTE in note for note in step.plan.notes)
    F.cross_entropy(plain(x), y).backward()
    torch.testing.assert_close(model[3].weight.grad, plain[3].weight.grad)

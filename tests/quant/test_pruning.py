"""A pruned network is the network without those channels: in every family, whichever filters go."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from torch_odt.quant import kept_filters, load_pruned_, prune_
from torch_odt.quant.channel_ids import find_channel_ids


class _Residual(nn.Module):
    """A stem, two blocks with a depthwise convolution each whose outputs are added, and a linear classifier."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, 2 * width, 1, bias=False),
                nn.BatchNorm2d(2 * width),
                nn.ReLU6(),
                nn.Conv2d(2 * width, 4 * width, 3, padding=1, groups=2 * width),
                nn.Hardswish(),
                nn.Conv2d(4 * width, width, 1),
            )
            for _ in range(2)
        )
        self.fc = nn.Linear(width * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        x = F.adaptive_avg_pool2d(x, 2)
        y: Tensor = self.fc(x.view(x.size(0), -1))
        return y


class _Concatenated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 6, 3), nn.Conv2d(1, 4, 3)
        self.gate = nn.Conv2d(10, 10, 1)
        self.fc = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([torch.relu(self.left(x)), self.right(x).tanh()], 1)
        x = x * torch.sigmoid(self.gate(x.mean([2, 3], keepdim=True)))
        y: Tensor = self.fc(x.mean((2, 3)))
        return y


class _Shuffled(nn.Module):
    """Channels of one convolution are split in two by the code, those of the other are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 1), nn.Conv2d(8, 8, 1)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.second(torch.relu(self.first(x))).chunk(2, 1)
        y: Tensor = self.fc((a * b).mean((2, 3)))
        return y


class _Counting(nn.Module):
    """Divides by the number of channels, which the graph does not tell from any other number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = nn.Conv2d(1, 8, 1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = self.fc((x * x.shape[1]).mean((2, 3)))
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 7), nn.GELU(), nn.Linear(7, 3)
    ),
    "residual": _Residual,
    "concatenated": _Concatenated,
}


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8)
@given(ratio=st.floats(0.05, 0.95), seed=st.integers(0, 9), geometric=st.booleans())
def test_it_is_the_network_whose_layers_read_zeros(name: str, ratio: float, seed: int, geometric: bool) -> None:
    model = _made(name, seed).double()
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    masked, ids = copy.deepcopy(model), find_channel_ids(model, x)
    try:
        pruning = prune_(model, x, ratio=ratio, criterion="geometric_median" if geometric else "l1")
    except ValueError as error:
        # Nothing to remove from so few filters.
        assert "less than one" in str(error)
        return
    gone = {
        name: set(range(len(rows))) - set(pruning.kept.get(name, range(len(rows))))
        for name, rows in ids.outputs.items()
    }
    numbers = {int(ids.outputs[name][row]) for name, rows in gone.items() for row in rows}
    for layer, columns in ids.inputs.items():
        zeros = torch.tensor([int(each) in numbers for each in columns])
        masked.get_submodule(layer).weight.data[:, zeros] = 0
    torch.testing.assert_close(model(x), masked(x))
    assert pruning.after.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert pruning.after.parameters < pruning.before.parameters
    model(x).sum().backward()


@pytest.mark.parametrize("criterion", ["l1", "geometric_median"])
def test_it_is_the_network_whose_filters_are_zero(criterion: str) -> None:
    """Where zero stays zero behind the layer: no BatchNorm, and ReLU."""
    model = _made("sequential", 3)
    masked = copy.deepcopy(model)
    weight = model[0].weight
    pruning = prune_(model, torch.ones(1, 1, 8, 8), ratio=0.5, criterion=criterion, layers=["0"])
    kept = kept_filters(weight, 0.5, criterion)
    assert pruning.kept == {"0": tuple(kept.tolist())}
    gone = [row for row in range(6) if row not in kept]
    masked[0].weight.data[gone] = 0
    masked[0].bias.data[gone] = 0
    x = _x(4)
    torch.testing.assert_close(model(x), masked(x))
    assert model[4].weight.shape == (7, 27)


def test_channels_that_are_added_go_together_and_are_chosen_by_all_of_their_filters() -> None:
    model = _made("residual", 1)
    filters = torch.cat(
        [each.weight.detach().flatten(1) for each in (model.stem[0], model.blocks[0][5], model.blocks[1][5])], 1
    )
    kept = kept_filters(filters, 0.75, "geometric_median")
    pruning = prune_(model, torch.ones(1, 1, 8, 8), ratio=0.75, criterion="geometric_median")
    rows = {pruning.kept[name] for name in ("stem.0", "blocks.0.5", "blocks.1.5")}
    assert rows == {tuple(kept.tolist())}
    depthwise = model.blocks[0][3]
    assert (depthwise.in_channels, depthwise.groups, depthwise.out_channels) == (4, 4, 8)
    assert model.stem[1].num_features == len(model.stem[1].running_mean) == 2
    assert pruning.not_pruned == {"fc": "its channels are the model's output"}
    assert "stem.0: 2 filters stay" in str(pruning) and "not fc" in str(pruning)


def test_layers_that_are_not_named_keep_their_filters() -> None:
    model = _made("residual", 1)
    pruning = prune_(model, torch.ones(1, 1, 8, 8), ratio=0.5, layers=["blocks.0.0", "blocks.0.3", "blocks.0.5"])
    assert pruning.kept.keys() == {"blocks.0.0", "blocks.0.3"}
    assert pruning.not_pruned["blocks.0.5"] == "its channels belong to those of stem.0, which is not among the layers"
    assert pruning.not_pruned["blocks.1.0"] == "it is not among the layers"
    assert model.blocks[1][0].out_channels == 16


def test_what_is_not_known_stays_and_is_named() -> None:
    model = _Shuffled()
    pruning = prune_(model, torch.ones(2, 1, 4, 4), ratio=0.5)
    assert pruning.kept.keys() == {"first"}
    assert pruning.not_pruned["second"] == "its channels go through chunk"


def test_grouped_convolutions_and_group_norm_stay_and_are_named() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 1), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1),
        nn.Conv2d(8, 2, 1),
    )  # fmt: skip
    pruning = prune_(model, torch.ones(1, 1, 2, 2), ratio=0.5)
    assert pruning.kept.keys() == {"4"}
    assert pruning.not_pruned["0"] == "1 reads them in 2 groups"
    assert pruning.not_pruned["1"] == "1 reads its inputs in 2 groups"
    assert pruning.not_pruned["2"] == "its channels go through 3 (GroupNorm)"


def test_shared_weights_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 6), nn.Linear(6, 2))
    model[2].weight = model[0].weight
    pruning = prune_(model, torch.ones(1, 4), ratio=0.5)
    assert pruning.kept.keys() == {"4"}
    assert "has weights of" in pruning.not_pruned["0"] and "has weights of" in pruning.not_pruned["2"]


def test_code_that_counts_channels_is_found_out_and_the_model_left_as_it_was() -> None:
    model = _Counting()
    before = copy.deepcopy(model.state_dict())
    first = model.first.weight
    with pytest.raises(ValueError, match=r"_Counting with fewer channels does not compute.*name layers"):
        prune_(model, torch.ones(1, 1, 4, 4), ratio=0.5)
    assert model.first.weight is first and model.first.out_channels == model.fc.in_features == 8
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("training", [True, False])
def test_modes_and_what_may_train_stay(training: bool) -> None:
    model = _made("residual", 0).train(training)
    model.blocks[0][1].eval()
    model.fc.weight.requires_grad_(False)
    model.stem[0].bias.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    prune_(model, torch.ones(1, 1, 8, 8), ratio=0.5)
    assert [module.training for module in model.modules()] == modes
    assert not model.fc.weight.requires_grad and not model.stem[0].bias.requires_grad
    assert model.stem[0].weight.requires_grad


def test_a_pruned_network_comes_back_from_its_state_dict() -> None:
    model, x = _made("residual", 2), _x(2)
    prune_(model, x, ratio=0.6)
    model.train()(x)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = load_pruned_(_Residual(), torch.load(file, weights_only=True))
    assert torch.equal(fresh.eval()(x), model.eval()(x))
    assert repr(fresh) == repr(model)
    with pytest.raises(ValueError, match=r"the state_dict has no 'stem.0.weight'"):
        load_pruned_(_Residual(), {})
    with pytest.raises(ValueError, match=r"'stem.0.weight' is \(8, 1, 3, 3\).*\(4, 1, 3, 3\)"):
        load_pruned_(_Residual(4), _Residual(8).state_dict())


def test_bad_input_is_named() -> None:
    model, x = _made("sequential", 0), torch.ones(1, 1, 8, 8)
    before = model.state_dict()
    with pytest.raises(ValueError, match=r"ratio=1: it is the share"):
        prune_(model, x, ratio=1)
    with pytest.raises(ValueError, match=r"'9' is no convolution.*no such module.*there are 0, 4, 6"):
        prune_(model, x, ratio=0.5, layers=["0", "9"])
    with pytest.raises(ValueError, match=r"'1' is no convolution or linear layer that runs \(ReLU\)"):
        prune_(model, x, ratio=0.5, layers=["1"])
    with pytest.raises(ValueError, match=r"layers is empty"):
        prune_(model, x, ratio=0.5, layers=[])
    with pytest.raises(ValueError, match=r"no layer of Sequential can lose filters.*the model's output"):
        prune_(model, x, ratio=0.5, layers=["6"])
    with pytest.raises(ValueError, match=r"criterion='taylor'"):
        prune_(model, x, ratio=0.5, criterion="taylor")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Sequential.*does not take inputs of \(1, 3, 8, 8\)"):
        prune_(model, torch.ones(1, 3, 8, 8), ratio=0.5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18", "vgg11", "squeezenet1_1", "densenet121", "googlenet"])
@pytest.mark.slow
def test_networks_of_torchvision_shrink(name: str) -> None:
    """`prune_` itself compares each with the network whose layers read zeros."""
    models = pytest.importorskip("torchvision.models")
    model = models.get_model(name, **({"init_weights": False} if name == "googlenet" else {}))
    pruning = prune_(model, torch.ones(1, 3, 64, 64), ratio=0.5)
    assert pruning.after.parameters < 0.4 * pruning.before.parameters
    outputs = set(pruning.not_pruned.values())
    assert outputs <= {"its channels are the model's output", "its channels go through goog_le_net_outputs"}


def _x(samples: int) -> Tensor:
    return torch.randn(samples, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def _made(name: str, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[name]()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                nn.init.normal_(module.bias)
    return model.eval()

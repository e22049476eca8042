"""Narrow models as parts of wide ones: what they hold, what they compute, and what has no such parts."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.models import densenet, mobilenet_v2, resnet, shufflenet_v2_x0_5, shufflenet_v2_x1_0

import torch_odt as odt
from torch_odt.adapt import Mix, SubModel

IMAGE = torch.ones(1, 3, 32, 32)


def cnn(*widths: int, norm: bool = True) -> nn.Sequential:
    """Convolutions, a depthwise one among them, flattened features and a classifier."""
    layers: list[nn.Module] = []
    for given_channels, width in pairwise((3, *widths)):
        layers += [nn.Conv2d(given_channels, width, 3, padding=1), nn.BatchNorm2d(width) if norm else nn.Identity()]
        layers += [nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, groups=width), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * (8 >> len(widths)) ** 2, 4))


X = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@given(widths=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=3), seed=st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_a_sub_model_computes_what_its_channels_do_in_the_wide_model(widths: list[tuple[int, int]], seed: int) -> None:
    torch.manual_seed(seed)
    wide, narrow = cnn(*(n + more for n, more in widths)).eval(), cnn(*(n for n, _ in widths)).eval()
    part = SubModel.leading(wide, narrow, X[:1])
    state = wide.state_dict()
    narrow.load_state_dict(part.extract(state))
    alone = copy.deepcopy(wide)
    for name, value in alone.state_dict().items():
        held = torch.zeros_like(value)
        held[part.block(name)] = value[part.block(name)]
        value.copy_(held)
    torch.testing.assert_close(narrow(X), alone(X))
    if all(not more for _, more in widths):
        torch.testing.assert_close(narrow(X), wide(X), rtol=0, atol=0)


def test_the_whole_width_is_the_model_itself() -> None:
    wide = cnn(6, 4)
    part = SubModel.leading(wide, copy.deepcopy(wide), X)
    extracted = part.extract(wide.state_dict())
    assert list(extracted) == list(wide.state_dict())
    for name, value in wide.state_dict().items():
        assert torch.equal(extracted[name], value)
        assert extracted[name].data_ptr() != value.data_ptr()


def test_mobilenet_of_half_the_width_from_shapes_alone() -> None:
    wide, narrow = mobilenet_v2(num_classes=7), mobilenet_v2(num_classes=7, width_mult=0.5)
    before = copy.deepcopy([wide.state_dict(), narrow.state_dict()])
    part = SubModel.leading(wide, narrow, IMAGE)
    for model, state in zip((wide, narrow), before, strict=True):
        assert model.training
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    extracted = part.extract(wide.state_dict())
    assert torch.equal(extracted["features.0.0.weight"], wide.features[0][0].weight[:16])
    assert torch.equal(extracted["classifier.1.weight"], wide.classifier[1].weight)
    narrow.load_state_dict(extracted)


def test_bases_have_disjoint_channels_and_each_computes_its_own() -> None:
    torch.manual_seed(0)
    wide, narrow = cnn(6, 12).eval(), cnn(2, 4)
    bases = SubModel.split(wide, narrow, X[:1])
    assert [base.base for base in bases] == [0, 1, 2]
    held = torch.zeros(12, 6, 3, 3)
    for base in bases:
        held[base.block("6.weight")] += 1
    assert held.max() == 1 and held.sum() == 12 * 6 * 9 / 3
    models = []
    for base in bases:
        model = cnn(2, 4).eval()
        model.load_state_dict(base.extract(wide.state_dict()))
        models.append(model)
    assert torch.equal(models[2][0].bias, wide[0].bias[4:])
    assert torch.equal(models[1][-1].weight, wide[-1].weight[:, 4 * 4 : 8 * 4])
    torch.testing.assert_close(Mix(models)(X), sum(model(X) for model in models) / 3)


def test_only_whole_multiples_are_split_into_bases() -> None:
    with pytest.raises(ValueError, match=r"'6\.weight' of .* is 2 times .*, and '0\.weight' 3 times"):
        SubModel.split(cnn(6, 8), cnn(2, 4), X)
    with pytest.raises(ValueError, match=r"2\.5 times"):
        SubModel.split(cnn(5), cnn(2), X)


class Branches(nn.Module):
    """Two convolutions side by side, whose outputs are concatenated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = (nn.Conv2d(3, width, 1) for _ in range(2))
        self.last = nn.Conv2d(2 * width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.left(x), self.right(x)], 1))


def _dense(growth: int) -> nn.Module:
    return densenet.DenseNet(growth, (2, 2), 2 * growth, num_classes=3)


def _resnext(groups: int, width: int) -> nn.Module:
    return resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], groups=groups, width_per_group=width)


def _transformer(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.TransformerEncoderLayer(width, width // 4, width))


@pytest.mark.parametrize(
    ("wide", "narrow", "x", "named"),
    [
        (Branches(4), Branches(2), IMAGE, r"'last\.weight'"),
        (_dense(4), _dense(2), IMAGE, r"denselayer2\.norm1\.weight"),
        (_resnext(32, 8), _resnext(32, 4), IMAGE, r"'layer1\.0\.conv2\.weight', \(256, 8, 3, 3\)"),
        (shufflenet_v2_x1_0(), shufflenet_v2_x0_5(), IMAGE, r"stage2\.1"),
        (nn.LSTM(3, 8), nn.LSTM(3, 4), torch.ones(2, 1, 3), r"weight_ih_l0"),
        (_transformer(8), _transformer(4), torch.ones(2, 1, 3), r"in_proj_weight"),
    ],
    ids=["branches", "densenet", "resnext", "shufflenet", "lstm", "attention"],
)
def test_what_is_no_part_is_refused_by_name(wide: nn.Module, narrow: nn.Module, x: Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SubModel.leading(wide, narrow, x)


@pytest.mark.parametrize("norm", [nn.LayerNorm, lambda width: nn.GroupNorm(1, width)], ids=["layer", "group"])
def test_norms_over_channels_and_whole_groups_are_parts(norm: type[nn.Module]) -> None:
    def mlp(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), norm(width), nn.ReLU(), nn.Linear(width, 2))

    assert SubModel.leading(mlp(6), mlp(3), torch.ones(1, 4)).narrow["1.weight"] == (3,)
    SubModel.leading(_resnext(32, 4), _resnext(16, 4), IMAGE)


def test_other_architectures_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the narrow model has no tensor '0\.bias'"):
        SubModel.leading(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2, bias=False)), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"'0\.weight' of \(4, 2\) is no part of \(3, 2\)"):
        SubModel.leading(nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(2, 4)), torch.ones(1, 2))
    with pytest.raises(ValueError, match="batch of inputs"):
        SubModel.leading(cnn(2), cnn(1))
    with pytest.raises(ValueError, match="has no block 2"):
        SubModel({"a": (5,)}, {"a": (2,)}, base=2)
    part = SubModel.leading(cnn(4), cnn(2), X)
    with pytest.raises(
        ValueError, match=r"'0\.weight' is not that of the wide model: expected \(4, 3, 3, 3\), found \(3"
    ):
        part.extract(cnn(3).state_dict())


def test_it_travels_and_the_public_names_are_there() -> None:
    part = SubModel.leading(cnn(4), cnn(2), X)
    assert pickle.loads(pickle.dumps(part)) == part
    narrow, wide = (sum(value.numel() for value in cnn(width).state_dict().values()) for width in (2, 4))
    assert str(part) == f"{narrow:,} of a wide model's {wide:,} numbers, block 0"
    assert odt.adapt.SubModel is SubModel
    with pytest.raises(ValueError, match="one base model"):
        Mix([])


def test_outputs_of_other_widths_are_named() -> None:
    wide, narrow = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5)), nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"returns \(1, 5\), the narrow one \(1, 2\): give both as many classes"):
        SubModel.leading(wide, narrow, torch.ones(1, 4))
    with pytest.raises(TypeError, match="a state_dict is needed, not a Sequential"):
        SubModel.leading(wide, wide, torch.ones(1, 4)).extract(wide)  # type: ignore[arg-type]

"""A scheme travels as a file, and is checked against the model where it arrives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import swin_t

import torch_odt as odt
from torch_odt.adapt import Scheme
from torch_odt.adapt.scheme import body_biases, updatable_layers


def _model(width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, bias=False), nn.BatchNorm2d(width), nn.Conv2d(width, 6, 1), nn.Flatten(), nn.Linear(6, 4)
    )


def test_a_file_gives_the_scheme_back(tmp_path: Path) -> None:
    scheme = Scheme.for_model(_model(), biases=2, weights={"0": 1 / 3, "2": 1})
    scheme.save(tmp_path / "scheme.json")
    assert Scheme.load(tmp_path / "scheme.json") == scheme
    assert scheme.shapes["2"] == (6, 8, 1, 1)


def test_it_says_what_it_trains() -> None:
    scheme = Scheme(2, {"0": 1 / 4, "2": 1})
    assert str(scheme) == "the last 2 biases, weights of 0 (1/4), 2 (1), classifier"


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (Scheme(weights={"7": 1}), r"'7' is no linear layer.*the model has none of this name; it has 0, 2"),
        (Scheme(weights={"1": 1}), "it is a BatchNorm2d"),
        (Scheme(weights={"4": 1}), "'4' is the classifier"),
        (Scheme(weights={"2": 1}, shapes={"2": (6, 4, 1, 1)}), r"made for a '2' of \(6, 4, 1, 1\); here it has"),
        (Scheme(3), "trains the last 3 biases; the model has 2"),
    ],
)
def test_a_model_that_it_does_not_fit_is_refused(scheme: Scheme, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scheme.check(_model())


class Padding(nn.Conv2d):
    """As timm's Conv2dSame: more than a convolution."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, (1, 1, 1, 1)))


class OwnConv(nn.Conv2d):
    """No more than a convolution."""


def test_slices_of_layers_that_compute_more_are_refused() -> None:
    model = _model()
    model.insert(3, Padding(6, 6, 3))
    with pytest.raises(ValueError, match=r"'3' is a Padding.*trains as a whole \(ratio 1\)"):
        Scheme(weights={"3": 0.5}).check(model)
    assert Scheme(weights={"3": 1}).check(model) == {"3": model[3]}
    model[3] = OwnConv(6, 6, 3)
    assert list(Scheme(weights={"3": 0.5}).check(model)) == ["3"]
    attention = nn.ModuleList([nn.MultiheadAttention(8, 2), nn.Linear(8, 2)])
    with pytest.raises(ValueError, match=r"'0.out_proj' has a weight that is read by MultiheadAttention"):
        Scheme(weights={"0.out_proj": 0.5}).check(attention)


@pytest.mark.parametrize(
    ("arguments", "message"), [({"biases": -1}, "biases=-1"), ({"weights": {"a": 1.5}}, "the ratio of 'a' is 1.5")]
)
def test_values_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scheme(**arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no scheme"),
        ('{"format": "other"}', "does not say that it is"),
        ('{"format": "torch_odt.scheme", "version": 2}', "version 2; this release reads 1"),
        ('{"format": "torch_odt.scheme", "version": 1, "biases": 1}', "damaged scheme: KeyError"),
        (
            json.dumps({"format": "torch_odt.scheme", "version": 1, "biases": 1, "weights": {"a": {"ratio": "x"}}}),
            "damaged",
        ),
    ],
)
def test_a_file_that_is_no_scheme_is_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "scheme.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        Scheme.load(path)


def test_layers_that_are_read_and_not_called_are_no_slices_and_stay_in_32_bits() -> None:
    swin = swin_t(num_classes=3)
    model = nn.Sequential(nn.Linear(4, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 2))
    for each, name, reader in (
        (swin, "features.3.0.attn.qkv", "ShiftedWindowAttention"),
        (model, "1.linear1", "TransformerEncoderLayer"),
    ):
        with pytest.raises(ValueError, match=f"'{name}' has a weight that is read by {reader}"):
            odt.adapt.sparse_update_(each, Scheme(weights={name: 1 / 4}))
        adaptation = odt.adapt.sparse_update_(each, Scheme(), weight_bits=8)
        assert any(note.startswith(f"{name} has a weight that is read by {reader}") for note in adaptation.notes)
    with torch.no_grad():
        assert model.eval()(torch.randn(2, 5, 4)).isfinite().all()
        assert swin.eval()(torch.randn(1, 3, 64, 64)).isfinite().all()


def test_biases_of_auxiliary_classifiers_are_not_counted() -> None:
    class WithHelper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.aux1, self.fc = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    assert body_biases(WithHelper()) == ["body.bias"]


def test_a_weight_of_two_layers_is_no_slice() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    model[2].weight = model[0].weight
    with pytest.raises(ValueError, match="'0' has a weight that is read by 2, which shares it"):
        odt.adapt.sparse_update_(model, Scheme(weights={"0": 0.5}))


def test_layers_that_an_earlier_method_has_taken_are_told() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 2))
    odt.adapt.tinytl_(model, mode="bias", weight_bits=8)
    with pytest.raises(
        ValueError, match=r"it is a StoredConv2d; .*; tinytl \(bias\) has adapted the model: call merge\(\)"
    ):
        odt.adapt.sparse_update_(model, Scheme(weights={"0": 0.5}))


def test_a_parametrized_weight_is_no_part_of_a_scheme() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(layer, nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert updatable_layers(model) == ["1"]
    with pytest.raises(ValueError, match="'0' has a weight that is computed"):
        Scheme.for_model(model, weights={"0": 1})
    assert Scheme(1, {"1": 1}).key() == Scheme(1, {"1": 1.0}).key()

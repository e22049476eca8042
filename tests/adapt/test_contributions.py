"""Contribution analysis: every part on its own, from the same start, and only once."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torch_odt.adapt import Adaptation, FineTuning, Scheme, measure_contributions, search_scheme, sparse_update_
from torch_odt.adapt.contributions import accuracy
from torch_odt.errors import OdtWarning


class Counting:
    """The share of parameters that train, as if it were an accuracy; notes what it was asked for."""

    def __init__(self, fails_after: int = 1000) -> None:
        self.starts: list[torch.Tensor] = []
        self._fails_after = fails_after

    def __call__(self, model: nn.Module, adaptation: Adaptation) -> float:
        if len(self.starts) == self._fails_after:
            raise KeyboardInterrupt
        self.starts.append(model[-1].weight.detach().clone())  # type: ignore[index,union-attr]
        return adaptation.after.trained_parameters / 1000


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))


def test_gains_are_above_the_classifier_and_above_the_reference_biases() -> None:
    found = measure_contributions(_model(), Counting(), classes=5, ratios=iter([1 / 4, 1]), biases=[1, 2])
    assert found.classifier_accuracy == pytest.approx(0.065)
    assert found.bias_gains == pytest.approx({0: 0, 1: 0.012, 2: 0.028})
    assert found.reference_biases == 2
    assert found.weight_gains == pytest.approx(
        {("0", 0.25): 0.032, ("0", 1): 0.128, ("2", 0.25): 0.048, ("2", 1): 0.192}
    )
    assert found.gain(Scheme(1, {"0": 1 / 4, "2": 1})) == pytest.approx(0.012 + 0.032 + 0.192)


def test_every_run_starts_alike_and_leaves_the_model_as_it_was() -> None:
    model = _model()
    before = copy.deepcopy(model.state_dict())
    counting = Counting()
    measure_contributions(model, counting, classes=5, ratios=[1 / 2])
    assert all(torch.equal(start, counting.starts[0]) for start in counting.starts)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model[-1].out_features == 3


def test_an_interrupted_analysis_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "contributions.json"
    with pytest.raises(KeyboardInterrupt):
        measure_contributions(_model(), Counting(fails_after=3), ratios=[1], cache=path)
    rest = Counting()
    found = measure_contributions(_model(), rest, ratios=[1], cache=path)
    whole = Counting()
    assert found == measure_contributions(_model(), whole, ratios=[1])
    assert len(rest.starts) == len(whole.starts) - 3


def test_a_cache_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "contributions.json"
    measure_contributions(_model(), Counting(), ratios=[1], cache=path)
    with pytest.raises(ValueError, match="of another model, classifier, number of classes or seed"):
        measure_contributions(_model(), Counting(), ratios=[1], cache=path, classes=7)
    for content, message in (("{", "holds no contributions"), ("{}", "of version 2")):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            measure_contributions(_model(), Counting(), cache=path)


def test_a_cache_of_another_classifier_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "contributions.json", _model()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    measure_contributions(model, Counting(), ratios=[1], layers=[], cache=path, head=names[-1])
    rest = Counting()
    measure_contributions(model, rest, ratios=[1], layers=[], cache=path)
    assert not rest.starts
    with pytest.raises(ValueError, match="of another model, classifier"):
        measure_contributions(model, Counting(), ratios=[1], layers=[], cache=path, head=names[0])


def test_ratios_that_read_alike_are_measured_each(tmp_path: Path) -> None:
    counting, name = Counting(), next(iter(dict(_model().named_children())))
    measure_contributions(_model(), counting, ratios=[1 / 100, 1 / 101], layers=[name], biases=[0])
    assert str(Scheme(0, {name: 1 / 100})) == str(Scheme(0, {name: 1 / 101}))
    assert len(counting.starts) == 3


def test_a_layer_that_is_none_is_named_before_anything_trains() -> None:
    counting = Counting()
    with pytest.raises(ValueError, match="'1' is no linear layer"):
        measure_contributions(_model(), counting, layers=["0", "1"])
    assert not counting.starts
    with pytest.raises(TypeError, match="train_and_evaluate returned a NoneType"):
        measure_contributions(_model(), lambda model, adaptation: None)  # type: ignore[arg-type, return-value]


def test_a_scheme_that_was_found_knows_the_shapes_of_its_model() -> None:
    found = measure_contributions(_model(), Counting(), layers=["0", "2"])
    assert found.shapes == {"0": tuple(_model()[0].weight.shape), "2": tuple(_model()[2].weight.shape)}

    class OfLayers:
        def counted(self, scheme: Scheme) -> int:
            return 1 + len(scheme.weights)

        simulated = counted

    gains = {key: 1.0 for key in found.weight_gains}
    scheme = search_scheme(replace(found, weight_gains=gains), OfLayers(), budget=3).scheme
    assert scheme.shapes == {name: found.shapes[name] for name in scheme.weights} and scheme.weights
    scheme.check(_model())


def test_batches_that_are_used_up_are_named() -> None:
    batches = [(torch.randn(4, 8), torch.randint(2, (4,)))]
    for train, test, which in ((iter(batches), batches, "train"), (batches, iter(()), "test")):
        model = _model()
        with pytest.raises(ValueError, match=f"{which} yields no batches"):
            FineTuning(train, test, epochs=2)(model, sparse_update_(model, Scheme(1)))


def test_a_loss_that_is_not_finite_ends_it() -> None:
    model, x = _model(), torch.randn(4, 8)
    x[2, 3] = float("nan")
    batches = [(x, torch.randint(2, (4,)))]
    with pytest.raises(FloatingPointError, match="a loss of epoch 0 is not finite: look for NaN in train"):
        FineTuning(batches, batches, epochs=2)(model, sparse_update_(model, Scheme(1)))


def test_a_part_that_diverges_counts_as_nothing_and_the_others_are_measured(tmp_path: Path) -> None:
    def train(model: nn.Module, adaptation: Adaptation) -> float:
        if "2.trained_weight" in adaptation.trained:
            raise FloatingPointError("a loss is not finite")
        return 0.5

    with pytest.warns(OdtWarning, match="2.*counts as 0 %, because its training diverged: a loss is not finite"):
        found = measure_contributions(_model(), train, ratios=[1 / 2], cache=tmp_path / "found.json")
    assert found.weight_gains == {("0", 0.5): 0.0, ("2", 0.5): -0.5}
    assert measure_contributions(_model(), train, ratios=[1 / 2], cache=tmp_path / "found.json") == found

    def diverges(model: nn.Module, adaptation: Adaptation) -> float:
        raise FloatingPointError("NaN in train")

    with pytest.raises(FloatingPointError, match="NaN in train"):
        measure_contributions(_model(), diverges)


def test_fine_tuning_learns_what_can_be_learnt() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    batches = list(zip(x.split(16), (x[:, 0] > 0).long().split(16), strict=True))
    model = _model()
    before = accuracy(model, batches)
    adaptation = sparse_update_(model, Scheme(2, {"0": 1, "2": 1 / 2}))
    assert FineTuning(batches, batches, epochs=30, lr=0.1)(model, adaptation) > max(before, 0.9)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"biases": [1, 99]}, "99 biases"), ({"reference_biases": 99}, "99 biases"), ({"ratios": [0.5, 2.0]}, "2.0")],
)
def test_wrong_numbers_are_found_before_anything_trains(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_contributions(_model(), Counting(fails_after=0), **options)


def test_a_convolution_that_is_padded_otherwise_is_measured_as_a_whole() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.Flatten(), nn.Linear(36, 2))
    assert list(measure_contributions(model, lambda *_: 0.5).weight_gains) == [("0", 1.0)]

"""A head learns from a stream what plain SGD on standardised features does, with new classes, and nothing is stored."""

from __future__ import annotations

import copy
import gc
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MOBILENET_V2
from torch import Tensor, nn
from torch.nn import functional as F

import torch_odt as odt
from torch_odt.adapt import OnlineHead, PageHinkley, online_autoencoder, online_head
from torch_odt.runtime import Checkpointer

FEATURES = 12


def network(seed: int = 0) -> nn.Sequential:
    """BatchNorm and dropout behave differently in training mode, which it is left in."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        body = [nn.Linear(6, FEATURES), nn.BatchNorm1d(FEATURES), nn.ReLU(inplace=True), nn.Dropout(0.5)]
        return nn.Sequential(*body, nn.Linear(FEATURES, 3))


def samples(count: int, seed: int = 1) -> tuple[Tensor, list[str]]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=draw)
    return x, [("low", "middle", "high")[int(value > -0.4) + int(value > 0.4)] for value in x[:, 0].tolist()]


def features_of(model: nn.Sequential, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([copy.deepcopy(model[:4]).eval()(one[None]) for one in x])


@pytest.mark.parametrize("forgetting", [1.0, 0.9])
def test_every_update_is_that_of_autograd_and_sgd_bit_for_bit(forgetting: float) -> None:
    model, (x, labels) = network(), samples(40)
    head = online_head(model, x[:1], classes=["low", "middle", "high"], lr=0.05, forgetting=forgetting)
    plain = nn.Linear(FEATURES, 3)
    nn.init.zeros_(plain.weight)
    nn.init.zeros_(plain.bias)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    features = features_of(model, x)
    for number, label in enumerate(labels):
        [step] = head.learn(x[number : number + 1], [label])
        standardised = head.statistics.standardise(features[number : number + 1])
        loss = F.cross_entropy(plain(standardised), torch.tensor([head.classes.index(label)]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert step.loss == loss.item()
        assert torch.equal(head.layer.weight, plain.weight)
        assert torch.equal(head.layer.bias, plain.bias)


@given(st.integers(1, 60), st.sampled_from([1.0, 0.999, 0.9, 0.5]), st.floats(-1e4, 1e4))
def test_statistics_are_those_of_the_whole_stream(count: int, forgetting: float, offset: float) -> None:
    values = torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(count)) + offset
    statistics = odt.adapt.RunningStatistics(3, forgetting=forgetting)
    for value in values:
        statistics.update_(value)
    weights = forgetting ** np.arange(count - 1, -1, -1)
    mean = np.average(values.numpy(), axis=0, weights=weights)
    variance = np.average((values.numpy() - mean) ** 2, axis=0, weights=weights)
    np.testing.assert_allclose(statistics.mean, mean, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(statistics.variance, variance, rtol=1e-9, atol=1e-9)
    assert statistics.samples == count


def test_statistics_of_the_head_are_those_of_its_features() -> None:
    model, (x, labels) = network(), samples(50)
    head = online_head(model, x[:1])
    head.learn(x[:30], labels[:30])
    head.observe(x[30:])
    features = features_of(model, x).double().numpy()
    np.testing.assert_allclose(head.statistics.mean, features.mean(0), rtol=1e-12)
    np.testing.assert_allclose(head.statistics.variance, features.var(0), rtol=1e-9)
    assert torch.equal(head.features_of(x).double(), torch.from_numpy(features))


def test_predicts_before_it_learns() -> None:
    model, (x, labels) = network(), samples(60)
    head = online_head(model, x[:1], lr=0.1, fading=1.0)
    predicted: list[object] = [None]
    steps = head.learn(x[:1], labels[:1])
    for number in range(1, 60):
        predicted += head.predict(x[number : number + 1])
        steps += head.learn(x[number : number + 1], [labels[number]])
    assert [step.prediction for step in steps] == predicted
    assert [step.is_correct for step in steps] == [a == b for a, b in zip(predicted, labels, strict=True)]
    assert math.isclose(head.accuracy.value, sum(step.is_correct for step in steps) / 60)
    assert sum(step.is_correct for step in steps[30:]) >= 20


def test_an_unseen_label_becomes_a_row_and_leaves_the_others_alone() -> None:
    model, (x, labels) = network(), samples(20)
    head = online_head(model, x[:1])
    head.learn(x, labels)
    before, rows, known = head.scores(x), head.layer.weight.clone(), head.classes
    head._add_class(("a", 1))
    assert torch.equal(head.layer.weight[:3], rows)
    # A product with one column more may be added up in another order.
    torch.testing.assert_close(head.scores(x)[:, :3], before)
    assert bool((head.scores(x)[:, 3] == 0).all())
    [step] = head.learn(x[:1], [None])
    assert step.is_new_class and not step.is_correct
    assert head.classes == (*known, ("a", 1), None)
    assert head.layer.weight.shape == (5, FEATURES)
    [step] = head.learn(x[:1], [None])
    assert not step.is_new_class


def test_labels_may_be_numbers_of_any_library() -> None:
    model, (x, _) = network(), samples(5)
    head = online_head(model, x[:1])
    head.learn(x[:2], torch.tensor([7, 8]))
    head.learn(x[:2], [torch.tensor(7), np.int64(8)])
    head.learn(x[:2], np.array([8, 7]))
    assert head.classes == (7, 8)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_a_batch_is_its_samples_one_by_one(sizes: list[int]) -> None:
    model, (x, labels) = network(), samples(sum(sizes))
    singly, together = (online_head(model, x[:1], lr=0.1) for _ in range(2))
    steps = [step for number in range(len(x)) for step in singly.learn(x[number : number + 1], [labels[number]])]
    found, start = [], 0
    for size in sizes:
        found += together.learn(x[start : start + size], labels[start : start + size])
        start += size
    assert found == steps
    assert_same_state(singly, together)


def test_the_network_is_frozen_and_left_as_it_was() -> None:
    model, (x, labels) = network().train(), samples(30)
    before = copy.deepcopy(model.state_dict())
    head = online_head(model, x)
    head.learn(x, labels)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_learns_where_gradients_are_off(mode: type[torch.no_grad]) -> None:
    model, (x, labels) = network(), samples(20)
    head, other = (online_head(model, x[:1]) for _ in range(2))
    head.learn(x, labels)
    with mode():
        other.learn(x.clone(), labels)
        assert other.predict(x.clone()) == head.predict(x)
        online_head(model, x.clone()[:1])
    assert_same_state(head, other)


def test_what_lies_behind_the_layer_is_not_run() -> None:
    model, (x, labels) = network(), samples(4)
    head = online_head(model, x, attach="0")
    model[4].register_forward_hook(lambda *_: pytest.fail("the classifier ran"))
    head.learn(x, labels)


@pytest.mark.parametrize(
    "place",
    [{}, {"replace": "4"}, {"attach": "4"}, {"attach": "0"}, {"replace": "2"}, {"attach": ""}, {"replace": ""}],
    ids=str,
)
def test_the_module_has_the_same_outputs(place: dict[str, str]) -> None:
    model, (x, labels) = network(), samples(50)
    head = online_head(model, x[:1], lr=0.1, **place)
    head.learn(x, labels)
    module = head.to_module()
    assert not any(each.training for each in module.modules())
    torch.testing.assert_close(module(x), head.scores(x), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        head.layer.bias += 1
        model[0].weight.zero_()
    assert not torch.allclose(module(x), head.scores(x), atol=0.1)


def test_the_module_is_the_network_with_another_classifier() -> None:
    model, (x, labels) = network(), samples(50)
    head = online_head(model, x[:1])
    head.learn(x, labels)
    module = head.to_module()
    assert isinstance(module, nn.Sequential)
    assert list(module.state_dict()) == list(model.state_dict())
    torch.export.export(module, (x[:1],))


def test_a_layer_in_the_middle_of_a_real_network() -> None:
    model, x = MOBILENET_V2.model(), MOBILENET_V2.batches(1)[0][0][0]
    head = online_head(model, x, attach="features.18")
    head.learn(x, torch.arange(len(x)))
    module = head.to_module()
    torch.testing.assert_close(module(x), head.scores(x), rtol=1e-3, atol=1e-3)
    assert not hasattr(module[0], "classifier")


def test_what_changes_the_output_in_place_is_no_part_of_the_head() -> None:
    class Rectified(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu_(self.fc(x))

    x, labels = samples(30)
    head = online_head(Rectified(), x[:1])
    head.learn(x, labels)
    assert bool((head.scores(x) < 0).any())
    torch.testing.assert_close(head.to_module()(x), head.scores(x), rtol=1e-4, atol=1e-4)


def test_starts_from_the_classifier_that_it_replaces() -> None:
    model, (x, _) = network(), samples(80)
    head = online_head(model, x[:1])
    head.observe(x)
    head.start_from_replaced_layer(["a", "b", "c"])
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(x)
    torch.testing.assert_close(head.scores(x), expected, rtol=1e-4, atol=1e-4)
    [step] = head.learn(x[:1], ["d"])
    assert step.is_new_class and head.classes == ("a", "b", "c", "d")


def test_a_saved_head_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, (x, labels) = network(), samples(80)
    head = online_head(model, x[:1], lr=0.1, forgetting=0.99)
    head.learn(x[:40], [*labels[:38], ("new", 1), None])
    Checkpointer(tmp_path, others={"head": head}).save(40, place=40)
    expected = head.learn(x[40:], labels[40:])
    other = online_head(model, x[:1], lr=0.3, forgetting=0.99)
    other.learn(x[:3], ["x", "y", "z"])
    resumed = Checkpointer(tmp_path, others={"head": other}).resume()
    assert resumed is not None and resumed.values == {"place": 40}
    assert other.learn(x[40:], labels[40:]) == expected
    assert_same_state(head, other)


def test_a_loaded_state_is_a_copy() -> None:
    model, (x, labels) = network(), samples(40)
    head, other = online_head(model, x[:1]), online_head(model, x[:1])
    head.learn(x[:20], labels[:20])
    other.load_state_dict(head.state_dict())
    kept = online_head(model, x[:1])
    kept.load_state_dict(copy.deepcopy(head.state_dict()))
    head.learn(x[20:], labels[20:])
    assert_same_state(other, kept)


def test_memory_does_not_grow() -> None:
    if not odt.memory.install():
        pytest.skip("torch_odt._memory, which counts bytes, is not built")
    model, (x, labels) = network(), samples(300)
    head = online_head(model, x[:1])
    head.learn(x[:20], labels[:20])
    # Garbage of earlier tests would be collected in between.
    gc.collect()
    levels = []
    for start in range(20, 300, 20):
        head.learn(x[start : start + 20], labels[start : start + 20])
        levels.append(odt.memory.stats().allocated_bytes)
    assert len(set(levels)) == 1


def test_drift_is_noticed_and_recovered_from() -> None:
    model, (x, labels) = network(), samples(1600)
    head = online_head(model, x[:1], lr=0.05, forgetting=0.99, drift=PageHinkley(threshold=15))
    before = head.learn(x[:800], labels[:800])
    assert not any(step.is_drift for step in before)
    after = head.learn(-x[800:], labels[800:])
    assert any(step.is_drift for step in after[:300])
    share_before, share_at_once, share_later = (
        sum(step.is_correct for step in part) / len(part) for part in (before[-300:], after[:100], after[-300:])
    )
    assert share_at_once < share_before - 0.2
    assert share_later > share_before - 0.1


def test_the_test_for_drift_does_not_cry_wolf() -> None:
    errors = torch.rand(20_000, generator=torch.Generator().manual_seed(0)) < 0.15
    test = PageHinkley()
    assert not any(test.update(float(error)) for error in errors.tolist())
    rise = torch.rand(1000, generator=torch.Generator().manual_seed(1)) < 0.5
    at = [number for number, error in enumerate(rise.tolist()) if test.update(float(error))]
    assert len(at) == 1 and at[0] < 200


def test_the_fading_mean_is_a_weighted_one() -> None:
    values = [1.0, 0.0, 0.0, 1.0, 1.0]
    mean = odt.adapt.FadingMean(0.9)
    assert math.isnan(mean.value)
    for value in values:
        mean.update(value)
    assert math.isclose(mean.value, np.average(values, weights=0.9 ** np.arange(4, -1, -1)))


def test_a_bad_sample_in_a_batch_leaves_what_was_learnt_before_it() -> None:
    model, (x, labels) = network(), samples(10)
    head, other = (online_head(model, x[:1]) for _ in range(2))
    other.learn(x[:4], labels[:4])
    x[4, 2] = math.nan
    with pytest.raises(ValueError, match="features are not finite"):
        head.learn(x, labels)
    assert_same_state(head, other)


def test_a_rate_that_is_too_large_is_named() -> None:
    model, (x, labels) = network(), samples(200)
    head = online_head(model, x[:1], lr=1e38)
    with pytest.raises(ValueError, match=r"lr=1e\+38 is too large for 12 features"):
        head.learn(x, labels)
    assert bool(torch.isfinite(head.layer.weight).all())


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ("low", TypeError, r"write \[label\]"),
        (["low"], ValueError, r"1 labels for 2: .*samples are \(n, \.\.\.\)"),
        ([["low"], "high"], TypeError, "not a list"),
        ([math.nan, 1], ValueError, "NaN"),
        (torch.tensor([0.5, 1.0]), TypeError, "integers"),
        (torch.tensor([[0, 1]]), TypeError, r"\(1, 2\)"),
    ],
)
def test_labels_that_are_none_are_refused(labels: object, error: type[Exception], message: str) -> None:
    model, (x, _) = network(), samples(2)
    head = online_head(model, x)
    with pytest.raises(error, match=message):
        head.learn(x, labels)  # type: ignore[arg-type]
    assert head.samples == 0 and head.classes == ()


def test_places_that_are_none_are_refused() -> None:
    model, (x, _) = network(), samples(2)
    with pytest.raises(ValueError, match="there is no layer 'fc'; the model has 0, 1, 2, 3, 4"):
        online_head(model, x, attach="fc")
    with pytest.raises(ValueError, match="one place"):
        online_head(model, x, attach="0", replace="4")
    with pytest.raises(ValueError, match="runs 2 times"):
        online_head(nn.Sequential(layer := nn.Linear(6, 6), layer), x, attach="0")
    with pytest.raises(ValueError, match="no tensor but a tuple"):
        online_head(nn.Sequential(nn.LSTM(6, 4)), x, attach="0")
    with pytest.raises(ValueError, match=r"float16; features are"):
        online_head(nn.Sequential(nn.Identity()), x.half(), attach="0")
    with pytest.raises(ValueError, match="no linear layer or convolution"):
        online_head(nn.Sequential(nn.ReLU()), x)
    with pytest.raises(ValueError, match=r"sample\[None\]"):
        online_head(model, x[0])
    with pytest.raises(ValueError, match="empty"):
        online_head(model, x[:0])


def test_other_samples_than_the_first_are_refused() -> None:
    head = online_head(nn.Sequential(nn.ReLU()), torch.ones(1, 3, 4), attach="0")
    with pytest.raises(ValueError, match=r"a sample of \(3, 5\) has 15 features, and the first had 12"):
        head.learn(torch.ones(1, 3, 5), ["a"])
    with pytest.raises(ValueError, match="the batch is empty"):
        head.learn(torch.ones(0, 3, 4), [])
    with pytest.raises(TypeError, match="not a list"):
        head.observe([1.0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr=0.0"),
        ({"forgetting": 0.0}, "forgetting=0.0"),
        ({"forgetting": 1.1}, "forgetting=1.1"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"fading": -1.0}, "fading=-1.0"),
        ({"classes": [math.nan]}, "NaN"),
    ],
)
def test_options_out_of_their_range_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        online_head(network(), samples(1)[0], **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="threshold=0"):
        PageHinkley(threshold=0)


def test_a_single_text_is_no_list_of_classes() -> None:
    with pytest.raises(TypeError, match=r"classes='cat' is one label: .*\['cat'\]"):
        online_head(network(), samples(1)[0], classes="cat")


def test_what_cannot_be_done_yet_is_refused() -> None:
    model, (x, labels) = network(), samples(12)
    head = online_head(model, x)
    for early in (lambda: head.predict(x), head.to_module):
        with pytest.raises(ValueError, match="no class is known yet"):
            early()
    with pytest.raises(ValueError, match="observe some samples first"):
        head.start_from_replaced_layer(["a", "b", "c"])
    head.observe(x)
    with pytest.raises(ValueError, match="2 labels for 3"):
        head.start_from_replaced_layer(["a", "b"])
    with pytest.raises(ValueError, match="same label"):
        head.start_from_replaced_layer(["a", "b", "a"])
    head.learn(x, labels)
    with pytest.raises(ValueError, match="knows 3 classes already"):
        head.start_from_replaced_layer(["a", "b", "c"])
    attached = online_head(model, x, attach="0")
    attached.observe(x)
    with pytest.raises(ValueError, match="no linear layer that was replaced"):
        attached.start_from_replaced_layer(["a", "b", "c"])
    for state in ({}, online_autoencoder(model, x).state_dict()):
        with pytest.raises(ValueError, match=r"no state of an online head: it lacks .*classes"):
            head.load_state_dict(state)
    with pytest.raises(ValueError, match=r"no state of an online auto-encoder: it lacks scores"):
        online_autoencoder(model, x).load_state_dict(head.state_dict())
    with pytest.raises(ValueError, match="for 12 features; here there are 6"):
        online_head(network(), x, replace="0").load_state_dict(head.state_dict())


def test_a_network_that_cannot_be_cut_off_is_named() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)) if bool(x.sum() > -1e9) else x

    x, labels = samples(5)
    head = online_head(Branching(), x, attach="first")
    head.learn(x, labels)
    with pytest.raises(ValueError, match="cannot be traced"):
        head.to_module()


def test_the_summary_says_what_learns() -> None:
    model, (x, labels) = network(), samples(30)
    head = online_head(model, x[:1])
    assert "nan" not in str(head)
    head.learn(x, labels)
    text = str(head)
    assert "in place of '4' of Sequential" in text
    assert "39 parameters, 12 features to 3 classes" in text
    assert f"{head.accuracy.value:.1%}" in text


def test_the_verbs_are_not_hidden_by_their_files() -> None:
    assert callable(odt.adapt.online_head) and callable(odt.adapt.online_autoencoder)
    assert odt.adapt.online_head is odt.adapt.online_head


def assert_same_state(a: OnlineHead, b: OnlineHead) -> None:
    first, second = a.state_dict(), b.state_dict()
    for part in ("classes", "accuracy", "drift"):
        assert first[part] == second[part]
    for part in ("layer", "statistics"):
        torch.testing.assert_close(first[part], second[part], rtol=0, atol=0)


def test_a_number_of_classes_is_no_label() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.ones(1, 4)
    with pytest.raises(TypeError, match=r"classes=5: give the labels that are known to come"):
        online_head(model, x, classes=5)  # type: ignore[arg-type]


def test_a_rate_or_a_test_for_drift_that_is_none_is_named() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.ones(1, 4)
    with pytest.raises(TypeError, match="drift=3: give a PageHinkley"):
        online_head(model, x, drift=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lr='a': it is a number"):
        online_head(model, x, lr="a")  # type: ignore[arg-type]


def test_a_sample_that_is_refused_changes_nothing() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(9, 4)
    head = online_head(model, x[:1], lr=1e38)
    with pytest.raises(ValueError, match="it was not learnt from: lr=1e\\+38 is too large"):
        for number in range(9):
            before = copy.deepcopy(head.state_dict())
            head.learn(x[number : number + 1], [number])
    after = head.state_dict()
    assert after["classes"] == before["classes"] and after["accuracy"] == before["accuracy"]
    assert after["statistics"]["samples"] == before["statistics"]["samples"] and after["drift"] == before["drift"]

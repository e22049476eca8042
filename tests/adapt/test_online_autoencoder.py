"""A layer learns to reconstruct what is normal, by plain SGD, and gives what is not a higher score."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_odt.adapt import OnlineAutoencoder, online_autoencoder
from torch_odt.runtime import Checkpointer


def network() -> nn.Sequential:
    """An auto-encoder whose last layer returns the input."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8))


def normal(count: int, seed: int = 1) -> Tensor:
    """Samples of a plane."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, generator=draw) @ torch.randn(2, 8, generator=torch.Generator().manual_seed(7))


def watcher(**options: object) -> OnlineAutoencoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return online_autoencoder(network(), normal(1), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"reconstruct": "input"}, {"bottleneck": 2}, {"reconstruct": "input", "bottleneck": 3}]
)
def test_every_update_is_that_of_autograd_and_sgd_bit_for_bit(options: dict[str, object]) -> None:
    online, x = watcher(lr=0.05, clip_grad_norm=None, **options), normal(40)
    plain = copy.deepcopy(online.layer)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    body = network()[:2]
    for number in range(40):
        sample = x[number : number + 1]
        online.learn(sample)
        standardised = online.statistics.standardise(body(sample).detach())
        target = sample if options.get("reconstruct") == "input" else standardised
        optimizer.zero_grad()
        F.mse_loss(plain(standardised), target).backward()
        optimizer.step()
        assert all(map(torch.equal, online.layer.parameters(), plain.parameters()))


def test_a_step_is_no_longer_than_the_clipped_gradient() -> None:
    online, x = watcher(clip_grad_norm=0.1, bottleneck=2), normal(40)
    for number in range(40):
        before = copy.deepcopy(online.layer)
        online.learn(x[number : number + 1])
        moved = [(a - b).detach().norm() for a, b in zip(online.layer.parameters(), before.parameters(), strict=True)]
        assert float(torch.stack(moved).norm()) <= 0.05 * 0.1 * 1.001


def test_judges_before_it_learns() -> None:
    online, x = watcher(warm_up=10), normal(40)
    for number in range(40):
        sample = x[number : number + 1]
        expected, threshold = online.score(sample), online.threshold
        [step] = online.learn(sample)
        assert step.score == expected.item() and step.threshold == threshold
        assert step.is_anomaly == (step.score > threshold)
        assert math.isinf(threshold) == (number < 10)


@pytest.mark.parametrize("reconstruct", ["features", "input"])
def test_what_is_not_normal_has_a_higher_score(reconstruct: str) -> None:
    online = watcher(reconstruct=reconstruct, bottleneck=2, lr=0.1)
    online.learn(normal(800))
    odd = torch.randn(200, 8, generator=torch.Generator().manual_seed(3)) * 2
    assert float(online.score(odd).median()) > 3 * float(online.score(normal(200, 5)).median())
    assert sum(step.is_anomaly for step in online.learn(normal(200, 6))) < 20


def test_anomalies_may_be_left_unlearnt() -> None:
    options = {"attach": "0", "bottleneck": 2, "score_forgetting": 0.98}
    online, odd = watcher(learn_anomalies=False, **options), torch.full((1, 8), 50.0)
    online.learn(normal(500))
    before = copy.deepcopy(online.state_dict())
    steps = [step for _ in range(50) for step in online.learn(odd)]
    assert all(step.is_anomaly and not step.is_learnt for step in steps)
    assert any(step.is_drift for step in steps)
    for part in ("layer", "statistics", "scores"):
        torch.testing.assert_close(online.state_dict()[part], before[part], rtol=0, atol=0)
    online.learn_anomalies = True
    assert not [step for _ in range(50) for step in online.learn(odd)][-1].is_anomaly


def test_a_batch_is_its_samples_one_by_one() -> None:
    singly, together, x = watcher(), watcher(), normal(30)
    steps = [step for number in range(30) for step in singly.learn(x[number : number + 1])]
    assert together.learn(x[:11]) + together.learn(x[11:]) == steps
    torch.testing.assert_close(singly.state_dict(), together.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"reconstruct": "input"}, {"bottleneck": 2}, {"attach": "0"}], ids=str)
def test_the_module_has_the_same_outputs(options: dict[str, object]) -> None:
    online, x = watcher(**options), normal(200)
    online.learn(x)
    torch.testing.assert_close(online.to_module()(x), online.reconstruction(x), rtol=1e-4, atol=1e-4)


def test_starts_from_the_layer_that_it_replaces() -> None:
    online, x = watcher(reconstruct="input"), normal(100)
    with pytest.raises(ValueError, match="observe some samples first"):
        online.start_from_replaced_layer()
    online.observe(x)
    online.start_from_replaced_layer()
    torch.testing.assert_close(online.reconstruction(x), network()(x).detach(), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="bottleneck"):
        watcher().start_from_replaced_layer()


def test_a_saved_one_goes_on_bit_for_bit(tmp_path: Path) -> None:
    online, x = watcher(), normal(80)
    online.learn(x[:40])
    Checkpointer(tmp_path, others={"watcher": online}).save(40)
    other = online_autoencoder(network(), x[:1])
    Checkpointer(tmp_path, others={"watcher": other}).resume()
    assert other.learn(x[40:]) == online.learn(x[40:])
    torch.testing.assert_close(online.state_dict(), other.state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="here there are"):
        watcher(bottleneck=3).load_state_dict(online.state_dict())


def test_settings_that_may_be_changed_are_saved() -> None:
    online = watcher(warm_up=50, deviations=5.0, learn_anomalies=False, clip_grad_norm=None)
    online.drift.threshold = 7.0
    online.learn(normal(60))
    other = watcher()
    other.load_state_dict(online.state_dict())
    assert other.threshold == online.threshold < math.inf
    assert (other.warm_up, other.learn_anomalies, other.clip_grad_norm) == (50, False, None)
    assert other.drift.threshold == 7.0


def test_works_in_inference_mode() -> None:
    x = normal(20)
    expected = watcher(reconstruct="input").learn(x)
    with torch.inference_mode():
        assert watcher(reconstruct="input").learn(x.clone()) == expected


def test_the_first_scores_do_not_raise_the_threshold() -> None:
    online = watcher(lr=0.1, warm_up=100)
    steps = online.learn(normal(100))
    late = [step.score for step in steps[50:]]
    assert max(step.score for step in steps[:50]) > 10 * max(late)
    mean = sum(late) / 50
    assert math.isclose(float(online.scores.mean), mean, rel_tol=0.05)
    assert online.threshold < 20 * mean


def test_bad_options_are_named() -> None:
    for options, message in (
        ({"reconstruct": "output"}, "'features' or 'input'"),
        ({"bottleneck": 6}, "narrower than the 6 features"),
        ({"warm_up": 1}, "warm_up=1"),
        ({"deviations": 0.0}, "deviations=0.0"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm=0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            watcher(**options)


def test_the_summary_says_what_learns() -> None:
    online = watcher()
    online.learn(normal(120))
    text = str(online)
    assert "6 features to 1 to 6 outputs" in text
    assert f"anomalies above {online.threshold:.4g}" in text

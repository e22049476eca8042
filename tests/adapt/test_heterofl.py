"""How HeteroFL's clients train: scaled activations, BatchNorm that tracks nothing, and a loss over their classes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from adapted_steps import assert_trained_alike, train_both
from test_sub_model import X, cnn
from torch import nn

from torch_odt.adapt import FrozenBatchNorm, MaskedCrossEntropy, estimate_batch_norm_, heterofl_

Y = torch.tensor([0, 1, 1, 3, 0])


def test_hidden_layers_are_scaled_in_training_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    plain, x = copy.deepcopy(model), torch.randn(2, 4)
    adaptation = heterofl_(model, 0.25)
    assert list(model.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(model(x), plain[2](plain[0](x).relu() * 4))
    assert torch.equal(model.eval()(x), plain(x))
    assert adaptation.unload() is model
    assert torch.equal(model.train()(x), plain(x))
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU, nn.Linear]


def test_a_layer_that_is_used_twice_is_scaled_twice() -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, layer, nn.Linear(3, 2))
    x = torch.randn(2, 3)
    expected = model[2](layer(layer(x) * 2) * 2)
    heterofl_(model, 0.5)
    assert model[0] is model[1]
    torch.testing.assert_close(model(x), expected)


def test_scaled_layers_share_their_parameters_and_train_inside_a_step() -> None:
    model = cnn(4, 2)
    parameters = dict(model.named_parameters())
    heterofl_(model, 0.5)
    assert all(parameters[name] is value for name, value in model.named_parameters())
    assert_trained_alike(train_both(model, [(X, Y)] * 2, MaskedCrossEntropy([0, 1, 3], of=4), cache=False))


def test_static_batch_norm_tracks_nothing_until_it_is_estimated() -> None:
    model = cnn(4)
    before = copy.deepcopy(model.state_dict())
    adaptation = heterofl_(model, 0.5)
    model(X)
    buffers = [name for name, _ in model.named_buffers()]
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in buffers)
    adaptation.unload()
    model(X)
    assert model.state_dict()["1.num_batches_tracked"] == 1


def test_statistics_are_the_mean_over_all_batches_of_all_clients() -> None:
    norm = nn.BatchNorm1d(3)
    norm(torch.full((4, 3), 50.0))
    model = nn.Sequential(norm, nn.Dropout(0.9)).eval()
    batches = list(torch.randn(4, 8, 3))
    estimate_batch_norm_(model, batches[:3])
    estimate_batch_norm_(model, batches[3:], reset=False)
    torch.testing.assert_close(norm.running_mean, torch.stack(batches).mean((0, 1)))
    torch.testing.assert_close(norm.running_var, torch.stack([each.var(0) for each in batches]).mean(0))
    assert norm.momentum == 0.1 and norm.track_running_stats
    assert not model.training and not norm.training


def test_the_loss_of_absent_classes_is_masked() -> None:
    model = nn.Linear(4, 5)
    x, y = torch.randn(6, 4), torch.tensor([1, 3, 1, 1, 3, 3])
    logits = model(x)
    loss = MaskedCrossEntropy([1, 3], of=5)(logits, y)
    kept = torch.zeros(6, 5)
    kept[:, [1, 3]] = logits[:, [1, 3]].detach()
    torch.testing.assert_close(loss.detach(), F.cross_entropy(kept, y))
    loss.backward()
    assert model.weight.grad is not None
    assert model.weight.grad.abs().sum(1).nonzero()[:, 0].tolist() == [1, 3]
    whole = MaskedCrossEntropy(range(5), of=5)
    assert torch.equal(whole(logits, y), F.cross_entropy(logits, y))
    assert torch.equal(whole(logits[0], y[0]), F.cross_entropy(logits[0], y[0]))


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"rate=1\.5"):
        heterofl_(cnn(2), 1.5)
    transposed = nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 100, 2))
    layers = list(transposed)
    with pytest.raises(ValueError, match=r"'0' is a ConvTranspose2d"):
        heterofl_(transposed, 0.5)
    assert list(transposed) == layers
    with pytest.raises(ValueError, match="no BatchNorm"):
        estimate_batch_norm_(nn.Linear(2, 2), [torch.ones(1, 2)])
    with pytest.raises(ValueError, match=r"the logits are of \(2, 4\), not of \(samples, 3\)"):
        MaskedCrossEntropy([0], of=3)(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))
    norm = nn.BatchNorm1d(2)
    norm.running_mean.fill_(1)
    with pytest.raises(ValueError, match="no batches"):
        estimate_batch_norm_(norm, [])
    assert torch.equal(norm.running_mean, torch.ones(2))
    with pytest.raises(ValueError, match=r"those of an adapted model are estimated before, or after its merge"):
        estimate_batch_norm_(nn.Sequential(FrozenBatchNorm(nn.BatchNorm1d(2))), [torch.ones(2, 2)])
    with pytest.raises(ValueError, match="not finite"):
        estimate_batch_norm_(nn.BatchNorm1d(2), [torch.full((2, 2), float("nan"))])
    for classes in ([], [3]):
        with pytest.raises(ValueError, match="not some of 0 to 2"):
            MaskedCrossEntropy(classes, of=3)

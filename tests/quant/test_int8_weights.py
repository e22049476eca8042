"""Weights in 8 bits and back, and a pruned network read from its state_dict bit for bit."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn

from torch_odt.quant import load_int8_weights_, prune_, restore_float_weights_, store_int8_weights_
from torch_odt.quant.int8_weights import float_weights


def test_weights_are_within_half_a_step_and_take_a_quarter() -> None:
    model = _net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert store_int8_weights_(model) == ("0", "3", "6")
    assert model[0].codes.dtype == torch.int8 and not any(each.dim() > 1 for each in model.parameters())
    assert float_weights(model) == ()
    assert restore_float_weights_(model) == ("0", "3", "6")
    for name in ("0", "3", "6"):
        weight = before[f"{name}.weight"]
        largest = weight.abs().flatten(1).amax(1).view(-1, *[1] * (weight.dim() - 1))
        assert bool(((model.state_dict()[f"{name}.weight"] - weight).abs() <= largest / 254 * (1 + 1e-5)).all())
        assert torch.equal(model.state_dict()[f"{name}.bias"], before[f"{name}.bias"])
    assert (model[3].groups, model[3].stride, model[3].padding) == (8, (2, 2), (1, 1))


def test_codes_of_what_codes_stood_for_are_the_same() -> None:
    model, x = _net(), _x()
    store_int8_weights_(model)
    codes, y = model[3].codes.clone(), model(x)
    restore_float_weights_(model)
    torch.testing.assert_close(model(x), y)
    store_int8_weights_(model)
    assert torch.equal(model[3].codes, codes)


def test_a_pruned_network_in_8_bits_is_read_back_bit_for_bit() -> None:
    model, x = _net(), _x()
    prune_(model, x, ratio=0.5)
    store_int8_weights_(model, ["0", "3"])
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = load_int8_weights_(_net(), torch.load(file, weights_only=True))
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)
    assert torch.equal(fresh.eval()(x), model.eval()(x))
    assert repr(fresh) == repr(model)
    assert float_weights(fresh) == ("6",)


def test_layers_that_cannot_be_stored_are_named() -> None:
    shared = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"))
    shared[1].weight = shared[0].weight
    assert store_int8_weights_(shared) == ()
    assert float_weights(shared) == ("0", "1", "2")
    with pytest.raises(ValueError, match=r"'0' cannot be stored as int8; layers that can: none"):
        store_int8_weights_(shared, ["0"])
    with pytest.raises(ValueError, match=r"'1' cannot be stored as int8; layers that can: 0, 3, 6"):
        store_int8_weights_(_net(), ["1"])
    with pytest.raises(ValueError, match=r"'0' is not stored in 8 bits"):
        restore_float_weights_(_net(), ["0"])


def _x() -> Tensor:
    return torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def _net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=8),
            nn.ReLU(), nn.Flatten(), nn.Linear(144, 3),
        )  # fmt: skip

"""Merging: each element is the weighted mean over the clients that hold it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sub_model import X, cnn
from torch import nn

from torch_odt.adapt import ClientUpdate, SubModel, merge_sub_models

State = dict[str, Any]


def filled(model: nn.Module, value: float) -> State:
    return {name: torch.full_like(tensor, value) for name, tensor in model.state_dict().items()}


@given(widths=st.lists(st.integers(1, 6), min_size=1, max_size=4), weights=st.lists(st.floats(0.01, 500), min_size=4))
@settings(max_examples=20, deadline=None)
def test_untouched_sub_models_change_nothing(widths: list[int], weights: list[float]) -> None:
    wide = cnn(6)
    parts = [SubModel.leading(wide, cnn(width), X[:1]) for width in widths]
    state = wide.state_dict()
    updates = [ClientUpdate(part.extract(state), w, part) for part, w in zip(parts, weights, strict=False)]
    merged = merge_sub_models(state, updates)
    assert list(merged) == list(state)
    assert all(torch.equal(merged[name], value) for name, value in state.items())


def test_whole_clients_are_averaged_as_by_fedavg() -> None:
    models, weights = [cnn(4) for _ in range(3)], [450, 100, 20.5]
    states = [model.state_dict() for model in models]
    merged = merge_sub_models(cnn(4).state_dict(), [ClientUpdate(s, w) for s, w in zip(states, weights, strict=True)])
    for name, value in merged.items():
        expected = sum(w * s[name].double() for s, w in zip(states, weights, strict=True)) / sum(weights)
        torch.testing.assert_close(value, expected.to(value.dtype))
    alone = merge_sub_models(cnn(4).state_dict(), [ClientUpdate(states[0], 450)])
    assert all(torch.equal(value, states[0][name]) for name, value in alone.items())


def test_an_element_is_the_mean_over_those_that_hold_it_and_else_as_it_was() -> None:
    wide = cnn(6)
    two, four = (SubModel.leading(wide, cnn(width), X[:1]) for width in (2, 4))
    updates = [
        ClientUpdate(filled(cnn(2), 1.0), 1.0, two),
        ClientUpdate(filled(cnn(4), 5.0), 3.0, four),
    ]
    before = filled(wide, 9.0)
    merged = merge_sub_models(before, updates)
    assert merged["0.bias"].tolist() == [4.0, 4.0, 5.0, 5.0, 9.0, 9.0]
    # The input's channels are whole in all of them; depthwise kernels are.
    assert merged["0.weight"][:, :, 0, 0].tolist() == [[4.0] * 3] * 2 + [[5.0] * 3] * 2 + [[9.0] * 3] * 2
    assert merged["7.weight"][0].tolist() == [4.0] * 32 + [5.0] * 32 + [9.0] * 32
    assert merged["7.bias"].tolist() == [4.0] * 4
    assert merged["1.num_batches_tracked"].item() == 4
    assert all(bool((value == 9).all()) for value in before.values())


def test_bases_do_not_meet_but_in_what_is_as_wide_in_all() -> None:
    wide = cnn(6)
    bases = SubModel.split(wide, cnn(2), X[:1])
    updates = [ClientUpdate(filled(cnn(2), base.base), 1.0, base) for base in bases]
    merged = merge_sub_models(filled(wide, 9.0), updates)
    assert merged["0.bias"].tolist() == [0, 0, 1, 1, 2, 2]
    assert merged["7.bias"].tolist() == [1, 1, 1, 1]


def test_rows_of_absent_classes_are_not_held() -> None:
    wide = cnn(3)
    broken = filled(wide, 1.0)
    broken["7.weight"][2:] = float("nan")
    updates = [ClientUpdate(broken, 1.0, classes=(0, 1)), ClientUpdate(filled(wide, 4.0), 2.0, classes=[1, 2])]
    merged = merge_sub_models(filled(wide, 9.0), updates, head="7")
    assert merged["7.weight"][:, 0].tolist() == [1.0, 3.0, 4.0, 9.0]
    assert merged["7.bias"].tolist() == [1.0, 3.0, 4.0, 9.0]
    assert merged["0.bias"].tolist() == [3.0] * 3


def test_what_a_client_has_not_trained_it_need_not_send() -> None:
    wide = cnn(3)
    merged = merge_sub_models(filled(wide, 9.0), [ClientUpdate({"0.bias": torch.ones(3)})])
    assert merged["0.bias"].tolist() == [1.0] * 3
    assert bool((merged["0.weight"] == 9).all())
    unchanged = merge_sub_models(filled(wide, 9.0), [])
    assert all(bool((value == 9).all()) for value in unchanged.values())


def test_indices_that_differ_are_not_averaged() -> None:
    def trained(kept: list[int]) -> State:
        return {"w": torch.ones(2, 2), "kept": torch.tensor(kept), "count": torch.tensor(kept[0])}

    merged = merge_sub_models(trained([0, 4]), [ClientUpdate(trained([0, 4])), ClientUpdate(trained([0, 4]))])
    assert merged["kept"].tolist() == [0, 4]
    with pytest.raises(ValueError, match=r"kept holds whole numbers that differ between models.*merge\(\) or unload"):
        merge_sub_models(trained([0, 4]), [ClientUpdate(trained([0, 4])), ClientUpdate(trained([4, 5]))])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_stay_and_sums_are_not_made_in_few_bits(dtype: torch.dtype) -> None:
    states = [{"w": torch.full((2,), value, dtype=dtype)} for value in (1.0, 1.0, 1.5)]
    merged = merge_sub_models(states[0], [ClientUpdate(state, 40000.0) for state in states])
    assert merged["w"].dtype == dtype
    assert torch.equal(merged["w"], torch.full((2,), 3.5 / 3, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize(
    ("update", "head", "said"),
    [
        (ClientUpdate(filled(cnn(2), 1.0)), None, r"'0\.weight' is not that of update 0: expected \(3, 3, 3, 3\)"),
        (ClientUpdate({"other": torch.ones(1)}), None, "'other' is not that of update 0: expected none"),
        (ClientUpdate(filled(cnn(3), 1.0), 0.0), None, "weight 0.0; it is a positive number"),
        (ClientUpdate(filled(cnn(3), 1.0), float("nan")), None, "weight nan"),
        (ClientUpdate(filled(cnn(3), 1.0), classes=[0]), None, "name the classifier by head=.*7"),
        (ClientUpdate(filled(cnn(3), 1.0), classes=[0]), "nothing", "head='nothing' is no layer .* 7"),
        (ClientUpdate(filled(cnn(3), 1.0)), "nothing", "head='nothing' is no layer .* 7"),
        (ClientUpdate(filled(cnn(3), 1.0), classes=[4]), "7", r"the classes \[4\]; the classifier '7' has 0 to 3"),
        (ClientUpdate(filled(cnn(3), 1.0), classes=[]), "7", r"the classes \[\]"),
        (
            ClientUpdate(filled(cnn(3), 1.0) | {"0.weight": torch.full((3, 3, 3, 3), torch.nan)}),
            None,
            r"update 0 has numbers that are not finite in '0\.weight'",
        ),
    ],
)
def test_updates_that_do_not_fit_are_named(update: ClientUpdate, head: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        merge_sub_models(filled(cnn(3), 0.0), [update], head=head)


def test_an_update_of_another_wide_model_is_named() -> None:
    part = SubModel.leading(cnn(5), cnn(2), X[:1])
    update = ClientUpdate(filled(cnn(2), 1.0), 1.0, part)
    with pytest.raises(ValueError, match="the wide model of update 0"):
        merge_sub_models(filled(cnn(4), 0.0), [update])

"""Scores of filters: by definition, beside a search for the geometric median itself, and on ties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_odt.quant import filter_scores, kept_filters
from torch_odt.quant import filters as filters_module


@given(count=st.integers(1, 12), width=st.integers(1, 9), seed=st.integers(0, 99))
def test_the_distance_to_all_filters_is_summed(count: int, width: int, seed: int) -> None:
    filters = _drawn(count, width, seed=seed)
    expected = [sum(float(torch.linalg.vector_norm((a - b).double())) for b in filters) for a in filters]
    torch.testing.assert_close(filter_scores(filters, "geometric_median"), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("seed", range(5))
def test_the_first_to_go_is_the_filter_that_costs_least_of_the_geometric_median(seed: int) -> None:
    """Weiszfeld's iteration finds the median of R^d; no filter is below its sum of distances."""
    filters = _drawn(15, 4, seed=seed).double()
    median = filters.mean(0)
    for _ in range(2000):
        weights = 1 / (filters - median).norm(dim=1).clamp(min=1e-12)
        median = (weights[:, None] * filters).sum(0) / weights.sum()
    at_median = (filters - median).norm(dim=1).sum()
    sums = torch.stack([(filters - each).norm(dim=1).sum() for each in filters])
    assert bool((sums >= at_median - 1e-9).all())
    scores = filter_scores(filters, "geometric_median")
    assert int(scores.argmin()) == int(sums.argmin())
    torch.testing.assert_close(scores, sums)


def test_of_filters_that_are_alike_some_go_though_they_are_large() -> None:
    filters = torch.tensor([[10.0, 0.0], [10.1, 0.0], [10.0, 0.1], [0.1, 0.0], [0.0, -9.0]])
    assert 3 in kept_filters(filters, 0.2, "geometric_median") and 4 in kept_filters(filters, 0.2, "geometric_median")
    assert kept_filters(filters, 0.2, "l1").tolist() == [0, 1, 2, 4]


def test_by_matrix_products_scores_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    filters = torch.cat([_drawn(20, 30, seed=1), _drawn(20, 30, seed=1) + 1e-4])
    exact = filter_scores(filters, "geometric_median")
    monkeypatch.setattr(filters_module, "_MOST_PRODUCTS", 0)
    torch.testing.assert_close(filter_scores(filters, "geometric_median"), exact, rtol=1e-7, atol=0)


def test_the_largest_norms_are_kept_and_of_equal_filters_the_first() -> None:
    weight = torch.tensor([1.0, -3.0, 2.0, 3.0, 3.0]).view(5, 1, 1, 1)
    assert kept_filters(weight, 0.4).tolist() == [1, 3, 4]
    assert kept_filters(torch.ones(4, 2), 0.5).tolist() == [0, 1]
    assert kept_filters(torch.ones(4, 2), 0.99).tolist() == [0]


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.5, 1.5, float("nan")])
def test_ratios_outside_are_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"ratio=.*share of the filters that go"):
        kept_filters(torch.ones(4, 2), ratio)


def test_unknown_criteria_and_no_filters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"criterion='l2'.*'l1', 'geometric_median'"):
        filter_scores(torch.ones(4, 2), "l2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape \(0, 3\)"):
        filter_scores(torch.ones(0, 3))


def _drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

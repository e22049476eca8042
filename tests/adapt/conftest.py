"""Shared by the tests of adaptations: each draws from a seed of its own, whatever ran before it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """New layers are drawn; with this seed no activation lies so near to 0 that rounding decides its gradient."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield

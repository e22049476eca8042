"""Plans of earlier starts: what a start is left with differs a little each time, and the plan is found all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_steps import Net, make_batches, make_step

import torch_odt as odt
from torch_odt.execute.accounting import nearby, rounded
from torch_odt.execute.candidate import Candidate
from torch_odt.execute.candidates import Candidates

GIB = 2**30


@given(st.integers(1, 2**45))
def test_nearby_bytes_are_rounded_and_a_little_more_or_less(nbytes: int) -> None:
    found = list(nearby(nbytes))
    assert found[0] == rounded(nbytes) <= nbytes
    assert len(found) == len(set(found)) < 20
    assert all(n == rounded(n) for n in found)
    assert all(0.97 * nbytes <= n <= nbytes / 0.97 for n in found[1:])


@given(st.integers(2**20, 2**45), st.floats(0.98, 1.02))
def test_a_plan_for_a_little_more_or_less_is_looked_for(nbytes: int, share: float) -> None:
    assert rounded(int(nbytes * share)) in nearby(nbytes)


@pytest.mark.parametrize(
    ("first", "second", "plans_made"), [(1, 1, 1), (1, 1.015, 1), (1.015, 1, 1), (1, 1.2, 2), (1.2, 1, 2)]
)
def test_a_second_start_takes_the_plan_of_the_first(
    first: float, second: float, plans_made: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    make = Candidates.make

    def count(self: Candidates, sizes: tuple[int, ...], limit: int | None, **options: Any) -> Candidate:
        made.append(len(sizes))
        return make(self, sizes, limit, **options)

    monkeypatch.setattr(Candidates, "make", count)
    for share in (first, second):
        step = make_step(Net(), budget=odt.Budget(int(share * GIB), of="training"), cache=tmp_path)
        step(*make_batches(1)[0])
    assert len(made) == plans_made


def test_what_fits_as_it_is_needs_no_room_for_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = make_step(Net(), budget=odt.Budget(GIB, of="training"), cache=tmp_path / "one")
    roomy(*make_batches(1)[0])

    def search(self: Candidates, *options: Any) -> None:
        raise AssertionError("a plan is looked for")

    monkeypatch.setattr(Candidates, "fastest", search)
    close = odt.Budget(roomy.plan.peak_bytes + (3 << 20), of="training")
    step = make_step(Net(), budget=close, cache=tmp_path / "other")
    step(*make_batches(1)[0])
    assert step.plan.peak_bytes <= roomy.plan.peak_bytes + (3 << 20)

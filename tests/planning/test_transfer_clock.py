"""What transfers cost in joules: the storage's share always, the waiting device's only where ops wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torch_odt.capture.costs import TransferCosts
from torch_odt.planning.transfer_clock import TransferClock

ONE_SECOND = TransferCosts(1.0, 1e15, 1.0, 1e15, 1 << 40)


def joules_beside_an_op(costs: TransferCosts, op_seconds: float) -> float:
    clock = TransferClock(costs)
    clock.page_out(0, 4)
    clock.run(op_seconds, [1])
    clock.wait_for(0)
    return clock.transfer_joules


@pytest.mark.parametrize(("op_seconds", "joules"), [(2.0, 0.0), (0.75, 0.5)])
def test_hidden_transfers_draw_no_waiting_watts(op_seconds: float, joules: float) -> None:
    assert joules_beside_an_op(replace(ONE_SECOND, waiting_watts=2.0), op_seconds) == pytest.approx(joules)


def test_transfers_between_ops_are_waited_for() -> None:
    assert joules_beside_an_op(replace(ONE_SECOND, waiting_watts=2.0, overlaps=False), 2.0) == pytest.approx(2.0)


def test_a_storage_draws_its_own_watts_though_hidden() -> None:
    assert joules_beside_an_op(replace(ONE_SECOND, watts=2.0), 2.0) == pytest.approx(2.0)

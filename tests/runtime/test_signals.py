"""Signals that are kept until they may be handled."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from torch_odt.runtime.signals import SignalGate, SignalWatch


class Stop(Exception):
    """Raised by a handler."""


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What a handler of SIGTERM that does not raise has heard."""
    numbers: list[int] = []

    def hear(number: int, _: Any) -> None:
        numbers.append(number)

    before = signal.signal(signal.SIGTERM, hear)
    yield numbers
    assert signal.getsignal(signal.SIGTERM) is hear
    signal.signal(signal.SIGTERM, before)


def test_a_closed_gate_keeps_signals_and_an_open_one_does_not(heard: list[int]) -> None:
    with SignalGate() as gate:
        signal.raise_signal(signal.SIGTERM)
        assert not heard
        gate.open()
        assert len(heard) == 1
        signal.raise_signal(signal.SIGTERM)
        assert len(heard) == 2
        gate.close()
        signal.raise_signal(signal.SIGTERM)
        assert len(heard) == 2
    assert len(heard) == 3


def test_a_handler_that_raises_closes_it() -> None:
    undone = []
    with pytest.raises(KeyboardInterrupt), SignalGate() as gate:
        gate.open()
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            undone.append(True)
    assert undone and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_kept_is_raised_behind_the_block() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), SignalGate():
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done


def test_the_systems_own_handler_stays() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with SignalGate():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_is_set_inside_stays() -> None:
    def own(*_: Any) -> None:
        raise Stop

    before = signal.getsignal(signal.SIGINT)
    try:
        with SignalGate():
            signal.signal(signal.SIGINT, own)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_no_handlers() -> None:
    outcome = []

    def work() -> None:
        with SignalGate() as gate:
            gate.open()
            outcome.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert outcome == [signal.default_int_handler]


@pytest.mark.parametrize("kind", [SignalGate, SignalWatch])
def test_who_puts_its_handler_back_too_late_loses_no_signal(kind: type[SignalGate] | type[SignalWatch]) -> None:
    def own(*_: Any) -> None:
        raise Stop

    before = signal.signal(signal.SIGINT, own)
    try:
        with kind():
            inner = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, inner)
        for _ in range(2):
            with pytest.raises(Stop):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("make", [SignalGate, SignalWatch])
def test_a_handler_that_raises_as_soon_as_it_is_back(
    make: type[SignalGate] | type[SignalWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise Stop

    set_handler = signal.signal

    def set_and_raise(number: int, handler: Any) -> Any:
        before = set_handler(number, handler)
        if handler is stop:
            signal.raise_signal(number)
        return before

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with monkeypatch.context() as patch, pytest.raises(Stop):
            patch.setattr(signal, "signal", set_and_raise)
            with make():
                pass
        assert signal.getsignal(signal.SIGTERM) is stop
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "Ctrl-C still ends the program"
    finally:
        signal.signal(signal.SIGTERM, before)

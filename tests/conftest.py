"""Shared by all tests; pytest puts this folder on the module path, where `models` and `exactness` are found."""

from __future__ import annotations

import datetime
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# Threads that wait in a loop make tests many times slower as soon as anything else runs beside them. OpenMP reads this
# when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Two workers run the tests (see pyproject.toml), on machines that may have two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background ignores interrupts, and tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Steps are traced in forked children; what is imported here they need not import once more each.
importlib.import_module("torch._functorch.aot_autograd")
importlib.import_module("torch.fx.experimental.proxy_tensor")

# What an example takes says nothing on a machine that runs two workers. Each run tries the same examples, so that what
# fails in one fails in the next; `--hypothesis-profile=searching` tries others.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", _UNTIMED, derandomize=True)
settings.register_profile("searching", _UNTIMED, derandomize=False)
settings.load_profile("repeatable")

_MANY_MODULES = 50
_END = "TORCH_ODT_TESTS_END"
_NO_TIME = "no time was left for it (--seconds)"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seconds",
        type=float,
        help="begin no test later than this after the start, in an order that is another one each day, and name those "
        "that were left out",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder in which a run's tests keep traces, measurements and plans; xdist's workers inherit it."""
    if not hasattr(config, "workerinput"):
        os.environ["TORCH_ODT_TESTS_CACHE"] = tempfile.mkdtemp(prefix="torch_odt_tests_")
        if config.getoption("--seconds") is not None:
            os.environ[_END] = str(time.time() + config.getoption("--seconds"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--seconds") is not None:
        day = datetime.date.fromtimestamp(float(os.environ[_END]))
        items.sort(key=lambda item: zlib.crc32(f"{day} {_group(item)}".encode()))


def _group(item: pytest.Item) -> str:
    """Tests that share what they have measured keep their order."""
    mark = item.get_closest_marker("xdist_group")
    return item.nodeid if mark is None else str(mark.args[0])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    left_out = [report.nodeid for report in skipped if _NO_TIME in str(report.longrepr)]
    if left_out:
        terminalreporter.section(f"{len(left_out)} tests were NOT RUN: {_NO_TIME}")
        for name in sorted(left_out):
            terminalreporter.write_line(name)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["TORCH_ODT_TESTS_CACHE"], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that replaces anything has a cache of its own: the others must not find what came of that."""
    if time.time() > float(os.environ.get(_END, "inf")):
        pytest.skip(_NO_TIME)
    shared = os.environ["TORCH_ODT_TESTS_CACHE"]
    replaces = "monkeypatch" in getattr(item, "fixturenames", ())
    os.environ["TORCH_ODT_CACHE"] = tempfile.mkdtemp(dir=shared) if replaces else shared


def pytest_collection_finish() -> None:
    """What is imported by now stays; every start of a training step looks for garbage, and need not look there."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """The same for what a test is the first to import: dynamo and scikit-learn are tens of thousands of objects."""
    before = len(sys.modules)
    result = yield
    if len(sys.modules) > before + _MANY_MODULES:
        gc.collect()
        gc.freeze()
    return result


def pytest_sessionfinish() -> None:
    gc.unfreeze()

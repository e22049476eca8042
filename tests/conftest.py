"""Shared by all tests; pytest puts this folder on the module path, where `models` and `exactness` are found."""

from __future__ import annotations

import gc
import importlib
import os
import signal

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


def pytest_collection_finish() -> None:
    """What is imported by now stays; every start of a training step looks for garbage, and need not look there."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()

"""What the tests of the allocator share."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from torch_odt import _extensions


@pytest.fixture
def tracker() -> Iterator[ModuleType]:
    """The extension, installed for the length of a test."""
    module = _extensions.memory_module
    if module is None:
        pytest.skip(f"torch_odt._memory is {_extensions.status()['_memory'].reason}")
    gc.collect()
    module.install()
    module.reset_peak()
    yield module
    gc.collect()
    module.set_cap(-1)
    module.uninstall()


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script in a fresh interpreter: for what could end the process, or must come before an import."""

    def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", script, *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run

"""Every verb is defined where nothing was compiled, and says so where it matters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from torch_odt import _extensions

SCRIPT = """
import pytest, torch
from torch_odt import _extensions, memory
from torch_odt.errors import OdtWarning
from torch_odt.ops import batch_norm_normalize

assert _extensions.memory_module is None and not _extensions.has_kernels
assert {s.reason for s in _extensions.status().values()} == {"disabled by TORCH_ODT_DISABLE_EXTENSIONS"}
assert not memory.install() and not memory.uninstall() and not memory.is_tracking()
assert memory.stats() == memory.MemoryStats(tracking=False) and memory.stats().peak_bytes is None
memory.reset_peak()
with pytest.warns(OdtWarning, match="memory is not capped: torch_odt._memory is disabled"), memory.cap("1MiB"):
    torch.empty(2**20)
with memory.category("gradient"):
    block = torch.empty(10)
assert not memory.tag(block, "gradient")
with pytest.raises(ValueError):
    with memory.category("wrong"):
        pass
assert not memory.tune_malloc() and not memory.trim()
assert memory.process_bytes() > 0 and memory.available() > 0
torch.library.opcheck(torch.ops.torch_odt.batch_norm_normalize.default, (
    torch.randn(2, 3, 4, 4), torch.randn(3), torch.rand(3), torch.rand(3), None))
"""


def test_every_verb_works_without_the_extensions(run_python: Callable) -> None:
    result = run_python(SCRIPT, TORCH_ODT_DISABLE_EXTENSIONS="1")
    assert result.returncode == 0, result.stderr


def test_status_is_consistent() -> None:
    status = _extensions.status()
    assert set(status) == {"_C", "_memory"}
    assert status["_memory"].loaded == (_extensions.memory_module is not None)
    assert status["_C"].loaded == _extensions.has_kernels
    for entry in status.values():
        assert entry.loaded == (entry.reason is None)


def test_a_build_for_another_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_memory_2_11.cpython-311-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(_extensions.torch, "__version__", "9.9.0")
    module, status = _extensions._load("torch_odt._memory", "torch_odt._memory_9_9", tmp_path)
    assert module is None
    assert status.reason is not None
    assert status.reason.startswith("built for torch 2.11 while torch 9.9.0 is running")
    _, nothing_built = _extensions._load("torch_odt._memory", "torch_odt._memory_9_9", tmp_path / "absent")
    assert nothing_built.reason is not None and nothing_built.reason.startswith("not built")

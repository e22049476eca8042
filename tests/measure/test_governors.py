"""Governors on trees of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sensors import write

from torch_odt.measure.governors import current_governor, governor, governors
from torch_odt.measure.meter import Absent


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for core, names in enumerate(("performance powersave schedutil", "performance powersave")):
        folder = f"sys/devices/system/cpu/cpu{core}/cpufreq"
        write(tmp_path, {f"{folder}/scaling_available_governors": names, f"{folder}/scaling_governor": "powersave"})
    return tmp_path


def _now(root: Path) -> list[str]:
    return [path.read_text().strip() for path in sorted(root.glob("sys/devices/system/cpu/cpu*/cpufreq/*_governor"))]


def test_a_governor_holds_for_a_block(root: Path) -> None:
    assert governors(root) == ["performance", "powersave"]
    assert current_governor(root) == "powersave"
    with pytest.raises(KeyError), governor("performance", root=root) as refused:
        assert refused is None
        assert _now(root) == ["performance", "performance"]
        raise KeyError("work")
    assert _now(root) == ["powersave", "powersave"]


def test_what_there_is_not_is_told(root: Path, tmp_path: Path) -> None:
    with governor("schedutil", root=root) as refused:
        assert "no governor 'schedutil'" in str(refused)
    with governor("", root=root) as refused:
        assert refused is None and _now(root) == ["powersave", "powersave"]
    nowhere = tmp_path / "nowhere"
    assert isinstance(governors(nowhere), Absent) and isinstance(current_governor(nowhere), Absent)
    with governor("performance", root=nowhere) as refused:
        assert "cpufreq" in str(refused)


def test_no_permission_is_not_the_same_as_no_such_governor(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: Any, **__: Any) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_text", refuse)
    with governor("performance", root=root) as refused:
        assert "no permission to write" in str(refused)

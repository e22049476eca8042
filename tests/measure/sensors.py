"""Trees of files as the kernel shows sensors, whose values a test scripts."""

from __future__ import annotations

from pathlib import Path


def write(root: Path, files: dict[str, object]) -> Path:
    """Files by their path below a root, each with a value and a line end."""
    for name, value in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return root


def package(number: int, microjoules: int, *, range_microjoules: int = 10**9, name: str = "") -> dict[str, object]:
    folder = f"sys/class/powercap/intel-rapl:{number}"
    return {
        f"{folder}/name": name or f"package-{number}",
        f"{folder}/energy_uj": microjoules,
        f"{folder}/max_energy_range_uj": range_microjoules,
    }

"""The package installs with a compiler, without one when told so, and says one sentence otherwise."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from torch_odt import _extensions

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what a build reads, so that builds leave nothing in the tree."""
    copy = tmp_path / "source"
    copy.mkdir()
    skip = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in ("torch_odt", "csrc", "_build"):
        shutil.copytree(ROOT / name, copy / name, ignore=skip)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    if not (copy / "README.md").exists():
        (copy / "README.md").write_text("# torch_odt\n")
    (copy / "tests").mkdir()
    return copy


def build(source: Path, hook: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a hook of the build backend as pip would, without its isolation."""
    script = f"import sys; sys.path.insert(0, '_build'); import backend; print(backend.{hook}('dist'))"
    (source / "dist").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=source,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_without_extensions_the_wheel_is_pure(source: Path) -> None:
    result = build(source, "build_wheel", TORCH_ODT_NO_CPP="1", CXX="/bin/false")
    assert result.returncode == 0, result.stderr
    (wheel,) = (source / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "torch_odt/memory/__init__.py" in names
    assert "torch_odt/py.typed" in names
    assert {f"torch_odt/planning/page/page.{kind}" for kind in ("css", "js")} <= set(names)
    assert {"torch_odt/pages/base.css", "torch_odt/measure/report/report.css"} <= set(names)
    assert not [name for name in names if name.endswith(".so") or name.startswith(("tests", "csrc", "_build"))]


def test_without_a_compiler_the_build_says_one_sentence(source: Path) -> None:
    result = build(source, "build_wheel", TORCH_ODT_NO_CPP="", CXX="/bin/false")
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("torch_odt cannot be built because '/bin/false' does not compile C++20")
    assert "TORCH_ODT_NO_CPP=1" in last
    assert "Traceback" not in result.stderr


def test_the_sdist_needs_no_torch_and_has_all_sources(source: Path) -> None:
    result = build(source, "build_sdist", CXX="/bin/false")
    assert result.returncode == 0, result.stderr
    (archive,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as contents:
        names = {name.split("/", 1)[-1] for name in contents.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".h")}
    assert sources | {"_build/backend.py", "setup.py", "LICENSE"} <= names


@pytest.mark.slow
def test_the_wheel_has_both_extensions(source: Path) -> None:
    import torch

    result = build(source, "build_wheel", TORCH_ODT_NO_CPP="")
    assert result.returncode == 0, result.stderr
    assert "[-W" not in result.stdout + result.stderr, "the compiler warns"
    (wheel,) = (source / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    major, minor = torch.__version__.split(".")[:2]
    assert "torch_odt/_C.abi3.so" in names
    assert [name for name in names if name.startswith(f"torch_odt/_memory_{major}_{minor}.")]


def test_torch_is_a_build_requirement_only_where_it_is_absent(source: Path) -> None:
    script = """
import os, sys, sysconfig
sys.path.insert(0, "_build")
import backend
assert backend.get_requires_for_build_wheel() == []
sys.modules.pop("torch", None)
backend.importlib.util.find_spec = lambda name: None
assert backend.get_requires_for_build_editable() == [], "the torch of the target environment was not found"
sysconfig.get_path = lambda name: "/nowhere"
assert backend.get_requires_for_build_wheel() == ["torch>=2.13"]
os.environ["TORCH_ODT_NO_CPP"] = "1"
assert backend.get_requires_for_build_wheel() == []
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_version_is_the_same_everywhere() -> None:
    import torch_odt

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == torch_odt.__version__


def test_a_source_folder_says_that_it_hides_an_installed_package(tmp_path: Path) -> None:
    package = tmp_path / "torch_odt"
    package.mkdir()
    assert _extensions._why_absent("torch_odt._C", package) == "not built; reinstall torch_odt to build it"
    (tmp_path / "setup.py").touch()
    for name in ("torch_odt._C", "torch_odt._memory"):
        assert f"not built in {tmp_path}, the source folder" in _extensions._why_absent(name, package)

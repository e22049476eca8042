"""The examples of docstrings run as they stand."""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path

import pytest
import torch

import torch_odt

_ROOT = Path(torch_odt.__file__).parent
FILES = [path for path in sorted(_ROOT.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]


# How threads wait is the environment's choice; nobody trains here.
@pytest.mark.filterwarnings("ignore:beside other programs, torch's threads take their time by spinning")
@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(_ROOT))) for path in FILES])
def test_examples_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = ".".join(path.relative_to(_ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    known = vars(importlib.import_module(name))
    runner = doctest.DocTestRunner()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        # By the source: decorators may hide from whoever asks the module.
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            where = f"{name}.{getattr(node, 'name', '')}"
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                runner.run(doctest.DocTestParser().get_doctest(text, dict(known), where, str(path), 0))
    assert not runner.failures, capsys.readouterr().out

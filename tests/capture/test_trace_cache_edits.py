"""The user's source files are edited between two starts: what ran is traced anew, what did not is not."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

from tests.capture.described_steps import DescribedStep, remember

MODEL = """
    from torch import nn
    import {name}_helper as helper
    from {name}_helper import plus

    class Used(nn.Module):
        def forward(self, x):
            return x + 5

    class Idle(nn.Module):
        def forward(self, x):
            return x + 6

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.idle, self.used = Idle(), Used()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            x = self.used(x)
            return helper.scaled(plus(self.layer(x))) * 1.0
"""
HELPER = """
    FACTOR = 2.0
    UNUSED = 1

    def unused(x):
        return x

    def plus(x):
        return x + 1

    def scaled(x):
        return _twice(x) * FACTOR

    def _twice(x):
        return x + x
"""


class Sources:
    """Two modules of a user's, as files that can be edited and loaded again."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._write("", MODEL.format(name=name))
        self._write("_helper", HELPER)

    def _write(self, part: str, text: str) -> None:
        (self.folder / f"{self.name}{part}.py").write_text(textwrap.dedent(text))

    def edit(self, part: str, old: str, new: str) -> None:
        path = self.folder / f"{self.name}{part}.py"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def step(self) -> DescribedStep:
        """The step as a process that starts now has it."""
        for part in ("", "_helper"):
            sys.modules.pop(f"{self.name}{part}", None)
        importlib.invalidate_caches()
        return DescribedStep(model=importlib.import_module(self.name).Net(), loss_fn=F.mse_loss)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Sources:
    monkeypatch.syspath_prepend(tmp_path)
    # A cached compilation is trusted when the file's size and the second of its last change are the same.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return Sources(tmp_path, f"users_model_{abs(hash(request.node.name))}")


@pytest.mark.parametrize(
    ("part", "old", "new"),
    [
        ("", "* 1.0", "* 3.0"),
        ("", "helper.scaled(plus(", "plus(helper.scaled("),
        ("_helper", "x + 1", "x + 2"),
        ("_helper", "x + x", "x - x"),
        ("_helper", "FACTOR = 2.0", "FACTOR = 4.0"),
    ],
)
def test_an_edit_is_noticed(sources: Sources, part: str, old: str, new: str) -> None:
    remembered = remember(sources.step())
    assert sources.step().find(remembered) is not None
    sources.edit(part, old, new)
    assert sources.step().find(remembered) is None
    assert sources.step().key() == remembered[0], "the old entry would not be overwritten"


def test_an_edit_of_what_did_not_run_is_none(sources: Sources) -> None:
    remembered = remember(sources.step())
    sources.edit("_helper", "UNUSED = 1", "UNUSED = 2")
    sources.edit("_helper", "return x\n", "return -x\n")
    sources.edit("", "def forward", "# the step\n    def forward")
    assert sources.step().find(remembered) is not None


def test_code_that_runs_in_another_place_is_noticed(sources: Sources) -> None:
    remembered = remember(sources.step())
    for old, new in (("x + 5", "x + 7"), ("x + 6", "x + 5"), ("x + 7", "x + 6")):
        sources.edit("", old, new)
    assert sources.step().find(remembered) is None


TRAINING = """
    import json, os, sys, warnings
    import torch
    import torch.nn.functional as F
    import torch_odt as odt
    import net

    forks = 0
    fork = os.fork

    def counted():
        global forks
        forks += 1
        return fork()

    os.fork = counted

    def train(cache):
        torch.manual_seed(3)
        model = net.Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        budget = odt.Budget("1GiB", of="training")
        step = odt.TrainStep(model, F.mse_loss, optimizer, budget=budget, cache=cache)
        before = set(sys.modules)
        losses = [step(torch.full((3, 4), 0.1 * i), torch.zeros(3, 4)).item().hex() for i in range(3)]
        weights = [p.detach().flatten().tolist() for p in model.parameters()]
        return [losses, weights], [m for m in set(sys.modules) - before if m.startswith(("torch._dyn", "torch._func"))]

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", odt.OdtWarning)
        trained, imported = train("cache")
    first_forks = forks
    print(json.dumps({
        "forks": first_forks,
        "imported": imported,
        "exact": train(False)[0] == trained,
        "warned": [str(w.message) for w in warned],
    }))
"""
NET = """
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))

        def forward(self, x):
            return self.layers(x) * 2.0
"""


def run_training(folder: Path) -> dict[str, Any]:
    """What a fresh process reports of a training with the cache in `folder`, and of one without."""
    script = [sys.executable, "-c", textwrap.dedent(TRAINING)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
def test_a_fresh_process_trains_from_the_cache_until_the_source_is_edited(tmp_path: Path) -> None:
    source = tmp_path / "net.py"
    source.write_text(textwrap.dedent(NET))
    first = run_training(tmp_path)
    assert first == {"forks": 1, "imported": first["imported"], "exact": True, "warned": []}
    second = run_training(tmp_path)
    assert second == {"forks": 0, "imported": [], "exact": True, "warned": []}

    source.write_text(source.read_text().replace("* 2.0", "* 3.0"))
    edited = run_training(tmp_path)
    assert edited["forks"] == 1 and edited["exact"]

"""What the recipe judges, and the recipe from end to end on a few digits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from recipes import octo_int8
from recipes.common.transfer_task import Samples, TransferTask
from torch_odt.quant.octo_layers import OctoConv2d, OctoLinear


def _rows(**means: float) -> dict[str, octo_int8.Row]:
    names = {"full": octo_int8.FLOAT32, "plain": octo_int8.PLAIN, "octo": octo_int8.OCTO}
    return {names[name]: octo_int8.Row(1, {}, 0.01, [value]) for name, value in means.items()}


def test_what_is_missed_is_named() -> None:
    assert octo_int8._missed(_rows(full=0.86, plain=0.85, octo=0.855)) == []
    assert octo_int8._missed(_rows(full=0.86, plain=0.84, octo=0.845)) == ["Octo reaches 84.50%, float32 86.00%"]
    assert octo_int8._missed(_rows(full=0.86, plain=0.86, octo=0.86)) == ["Octo reaches 86.00%, plain int8 86.00%"]


def test_ways_differ_in_what_they_say() -> None:
    samples = Samples(torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 0]))
    task = TransferTask(samples, samples, samples, samples)
    options = octo_int8._options(["--quick"])
    model = octo_int8.SmallResNet(5, width=2)
    layers = {}
    for way in (*octo_int8.JUDGED, *octo_int8.PARTS):
        adapted, optimizer = octo_int8._prepared(options, model, task, way, 0.1, 0)
        layers[way] = [each for each in adapted.modules() if isinstance(each, OctoConv2d | OctoLinear)]
        trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
        assert trained == {id(each) for each in adapted.parameters() if each.requires_grad}
        assert isinstance(adapted.get_submodule("classifier"), nn.Linear)
        assert adapted(samples.images).shape == (4, 3)
    assert not layers[octo_int8.FLOAT32]
    has = {way: {(each.mu is not None, each.clips) for each in found} for way, found in layers.items() if found}
    assert has == {
        octo_int8.PLAIN: {(False, False)},
        octo_int8.OCTO: {(True, True)},
        octo_int8.PARTS[0]: {(True, False)},
        octo_int8.PARTS[1]: {(False, True)},
    }


@pytest.mark.slow
def test_ways_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    small = {"image-size": 16, "width": 8, "source-samples": 64, "samples": 64, "test-samples": 32, "batch": 16}
    small |= {"pretrain-epochs": 1, "epochs": 1, "rates": 0.01, "seeds": 1}
    arguments = [f"--{name}={value}" for name, value in small.items()]
    code = octo_int8.main([*arguments, "--cache", str(tmp_path / "cache"), "--out", str(tmp_path)])
    report = json.loads((tmp_path / "octo_int8_small_resnet_digits.json").read_text())
    assert list(report["rows"]) == list(octo_int8.JUDGED)
    rows = {name: row["bytes"] for name, row in report["rows"].items()}
    assert rows[octo_int8.PLAIN] < rows[octo_int8.FLOAT32]
    assert code == (1 if report["missed"] else 0)
    assert ("missed:" in capsys.readouterr().out) == bool(report["missed"])

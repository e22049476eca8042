"""The recipe from end to end on a few sentences of its own."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from recipes import bert_bias_only
from recipes.common.process_bytes import Training, TrainingBytes
from recipes.common.small_bert import CLS, PAD, SEP, make_tokenizer, token_ids

WORDS = ["card", "cash", "rate", "fee", "loan", "pin"]


@pytest.mark.slow
def test_ways_to_train_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bert_bias_only, "training_bytes", _counted)
    _write_queries(tmp_path / "banking77")
    small = {"layers": 1, "width": 32, "length": 8, "vocabulary": 60, "pretrain-steps": 2, "steps": 2, "batch": 4}
    arguments = [f"--{name}={value}" for name, value in (small | {"seeds": 1}).items()]
    arguments += ["--data-dir", str(tmp_path), "--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]
    with torch.random.fork_rng(devices=[]):
        code = bert_bias_only.main(arguments)
    rows = json.loads((tmp_path / "bert_bias_only.json").read_text())["rows"]
    trained = {method: row["roomy"]["trained_parameters"] for method, row in rows.items()}
    assert trained["classifier"] < trained["biases"] < trained["full"]
    # Three intents are new; every layer of 32 has biases besides.
    assert trained["classifier"] == 3 * 32 + 3
    assert all(0 <= row["accuracies"][0] <= 1 for row in rows.values())
    printed = capsys.readouterr().out
    assert code == (1 if "missed:" in printed else 0)
    assert ("not installed" in printed) == (importlib.util.find_spec("peft") is None)


def test_without_data_it_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--data-dir", str(tmp_path)]):
        with pytest.raises(SystemExit) as ended:
            bert_bias_only.main(arguments)
        assert ended.value.code == 2
        assert "banking77/train.csv and banking77/test.csv" in capsys.readouterr().err


def test_word_pieces_have_one_length_and_know_no_unknown_word() -> None:
    tokenizer = make_tokenizer(["the card is lost", "the cash rate"], vocabulary=40, length=6)
    ids = token_ids(tokenizer, ["The card", "cards the cash rate is lost the card"])
    assert ids.shape == (2, 6)
    assert ids[0, 0] == ids[1, 0] == CLS
    assert ids[1, -1] == SEP
    assert ids[0].tolist().count(PAD) > 0


def test_steps_see_the_same_samples_in_each_way() -> None:
    orders = bert_bias_only._orders(10, 4, 5, seed=3)
    assert [len(rows) for rows in orders] == [4] * 5
    assert len(set(torch.cat(orders[:2]).tolist())) == 8
    assert all(map(torch.equal, orders, bert_bias_only._orders(10, 4, 5, seed=3)))


def test_too_few_samples_for_a_batch_are_refused() -> None:
    with pytest.raises(SystemExit, match="3 queries do not fill a batch of 4"):
        bert_bias_only._orders(3, 4, 5, seed=3)


def test_what_is_missed_is_named() -> None:
    plain, planned = TrainingBytes(150, None, 10), TrainingBytes(100, 90, 10)
    rows = {
        name: bert_bias_only.Row([accuracy], 1e-3, plain, planned, planned)
        for name, accuracy in (("full", 0.9), ("biases", 0.84), ("classifier", 0.8))
    }
    assert bert_bias_only._missed(rows) == [
        "biases reach 84.0%, the classifier alone 80.0%",
        "biases reach 84.0%, full fine-tuning 90.0%",
        "full fine-tuning takes 1.5 times the bytes, not 2",
    ]


def _write_queries(folder: Path) -> None:
    folder.mkdir()
    for name, count in (("train", 8), ("test", 2)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "category"])
            for word in WORDS:
                writer.writerows([f"my {word}, number {number}", f"{word}_question"] for number in range(count))


def _counted(make_training: Callable[..., Training], *arguments: Any) -> TrainingBytes:
    """In the place of a process that trains and is measured, which takes long: what would train in it."""
    trained = make_training(*arguments).optimizer.param_groups[0]["params"]
    return TrainingBytes(100, None, sum(parameter.numel() for parameter in trained))

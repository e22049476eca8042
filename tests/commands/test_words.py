"""Words on the command line, and how commands end that cannot do what they say."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from terminals import Terminal

from torch_odt import __version__
from torch_odt.commands import options
from torch_odt.commands.errors import UserError


@pytest.mark.parametrize("command", ["demo", "train", "plan", "profile", "doctor", "watch"])
def test_every_command_explains_itself_and_takes_json(terminal: Terminal, command: str) -> None:
    outcome = terminal(command, "--help")
    assert outcome.code == 0
    assert "--json" in outcome.out


def test_version(terminal: Terminal) -> None:
    assert __version__ in terminal("--version").out


def test_a_command_is_needed(terminal: Terminal) -> None:
    assert terminal().code == 2


def test_an_unknown_option_shows_the_usage_of_its_command(terminal: Terminal) -> None:
    outcome = terminal("watch", "--colour", "red")
    assert outcome.code == 2
    assert "usage: torch-odt watch" in outcome.err
    assert "unrecognized arguments: --colour red" in outcome.err


def test_module_can_be_run() -> None:
    command = [sys.executable, "-m", "torch_odt", "--version"]
    assert __version__ in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_shape_is_read() -> None:
    assert options.shape("16x3x224X224") == (16, 3, 224, 224)


@pytest.mark.parametrize("text", ["", "16x", "16x-3", "axb", "16x0"])
def test_bad_shape_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a shape"):
        options.shape(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many"])
def test_bad_count_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        options.positive_int(text)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "fast"])
def test_bad_rate_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        options.positive_float(text)


def test_budget_is_read() -> None:
    assert options.make_budget("1MiB", "training").resolve(5).growth_bytes == 1 << 20


def test_bad_budget_is_refused() -> None:
    with pytest.raises(UserError, match="--budget: 'lots' is not a number of bytes"):
        options.make_budget("lots", "process")


def test_json_has_no_numbers_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    options.print_json({"loss": math.nan, "steps": (1, math.inf), "where": Path("x"), 3: None})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "steps": [1, None], "where": "x", "3": None}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("plan", "--model", "resnet19"), "did you mean resnet1"),
        (("plan", "--model", "resnet18", "--planner", "oracle"), "there are auto"),
        (("plan", "--model", "resnet18", "--disable-rewrite", "fuse"), "there is no rewrite 'fuse'"),
        (("plan", "--model", "resnet18", "--budget", "lots"), "'lots' is not a number of bytes"),
        (("plan", "--model", "resnet18", "--costs", "absent.json"), "--costs absent.json"),
        (("plan", "--model", "absent.py:make"), "there is no file absent.py"),
        (("train", "--model", "resnet18", "--data", "absent"), "neither a folder nor one of digits"),
        (("train", "--model", "resnet18", "--data", "cifar10"), "needs --data-dir"),
        (("train", "--model", "resnet18", "--data", "digits", "--save", "no/such/folder.st"), "there is no folder"),
        (("profile", "--model", "resnet18", "--out", "no/such/costs.json"), "there is no folder"),
        (("demo", "--budget", "lots"), "'lots' is not a number of bytes"),
        (("demo", "--steps", "0"), "is not a whole number above 0"),
    ],
)
def test_what_the_user_can_put_right_is_one_line_and_code_2(
    terminal: Terminal, words: tuple[str, ...], text: str
) -> None:
    outcome = terminal(*words)
    assert outcome.code == 2
    assert outcome.out == ""
    assert text in outcome.err
    assert "Traceback" not in outcome.err


def test_debug_shows_where(terminal: Terminal) -> None:
    with pytest.raises(UserError):
        terminal("plan", "--model", "resnet19", "--debug")

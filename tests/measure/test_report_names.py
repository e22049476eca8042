"""Networks from a user's files have short names where people read them, and keep what was given elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from html_page import Page
from sample_records import sample_cells, sample_machine

from torch_odt.measure.record import Cell, Record
from torch_odt.measure.report import compare, page, table
from torch_odt.measure.report.names import short_names

STEP = next(cell for cell in sample_cells() if cell.model == "lenet" and cell.mode == "training")


def record(*cells: Cell, cores: int = 4) -> Record:
    return Record(replace(sample_machine(), cores=cores), list(cells))


@pytest.mark.parametrize(
    ("model", "short"),
    [
        ("/home/me/mynet.py:make", "mynet.py:make"),
        ("models/mynet.py:make", "mynet.py:make"),
        ("C:\\me\\mynet.py:make", "mynet.py:make"),
        ("mynet.py:make", "mynet.py:make"),
        ("package.module:make", "package.module:make"),
        ("a/b", "a/b"),
        ("lenet", "lenet"),
    ],
)
def test_folders_are_left_out(model: str, short: str) -> None:
    assert short_names([model, model]) == {model: short}


def test_names_that_would_be_alike_are_whole() -> None:
    alike = {"/a/net.py:make": "/a/net.py:make", "/b/net.py:make": "/b/net.py:make"}
    assert short_names([*alike, "/b/net.py:other"]) == {**alike, "/b/net.py:other": "net.py:other"}
    assert short_names(["/a/net.py:make", "net.py:make"])["/a/net.py:make"] == "/a/net.py:make"


def test_the_page_and_the_table_have_short_names_and_the_record_does_not() -> None:
    mine = record(replace(STEP, model="/home/me/mynet.py:make"))
    for text in (page(mine), table(mine)):
        assert "mynet.py:make" in text and "/home" not in text
    assert Page(page(mine)).texts_in("h3")[0] == "mynet.py:make, 3x224x224"
    assert mine.cells[0].model == "/home/me/mynet.py:make"


def test_a_network_that_lies_in_another_folder_is_the_same() -> None:
    first, second = (
        replace(STEP, model=f"/home/{who}/net.py:make", step_seconds=[s]) for who, s in (("a", 1), ("b", 2))
    )
    found = compare(record(first), record(second))
    (pair,) = found.pairs
    assert (pair.first, pair.second) == (first, second) and not found.only_first and not found.only_second
    for text in (str(found), found.page()):
        assert "net.py:make, 3x224x224" in text and "/home" not in text and "2.00×" in text
    assert {row["model"] for row in found.to_dict()["rows"]} == {"/home/a/net.py:make"}
    on_all = replace(first, threads=4), replace(second, threads=8)
    assert len(compare(record(on_all[0]), record(on_all[1], cores=8)).pairs) == 1


def test_what_is_the_same_as_given_comes_before_what_has_the_short_name() -> None:
    two = [replace(STEP, model=f"/{folder}/net.py:make") for folder in ("a", "b")]
    found = compare(record(*two), record(two[1]))
    assert [pair.first for pair in found.pairs] == [two[1]] and found.only_first == [two[0]]
    assert "/a/net.py:make" in str(found) and "/b/net.py:make" in str(found)

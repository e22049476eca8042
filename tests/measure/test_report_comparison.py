"""Two records against each other."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from html_page import Page
from sample_records import sample_cells, sample_machine, sample_record, write_sample

from torch_odt.measure.record import Cell, Record
from torch_odt.measure.report import compare

CELL = Cell(suite="s", model="net", batch_size=8, mode="training", engine="torch", threads=1, step_seconds=[0.5],
            base_bytes=0, peak_bytes=1 << 20)  # fmt: skip


def record(*cells: Cell, name: str = "board", cores: int = 4) -> Record:
    return Record(replace(sample_machine(name), cores=cores), cells)


def test_every_cell_of_both_is_compared(tmp_path: Path) -> None:
    comparison = compare(
        Record.read(write_sample(tmp_path / "old.jsonl", "old")),
        Record.read(write_sample(tmp_path / "new.jsonl", "new", faster=2.0)),
    )
    assert comparison.names == ("old", "new")
    assert [pair.first.key for pair in comparison.pairs] == [cell.key for cell in sample_cells()]
    assert not comparison.only_first and not comparison.only_second
    line = next(line for line in str(comparison).splitlines() if "googlenet, 3x224x224, batch 64" in line)
    assert line.split()[-6:] == ["out", "of", "memory", "out", "of", "memory"]


def test_ratios_are_the_seconds_numbers_in_the_firsts() -> None:
    slower = replace(CELL, step_seconds=[0.75], peak_bytes=1 << 19)
    text = str(compare(record(CELL, name="a"), record(slower, name="b")))
    assert "b against a; ratios are b / a" in text
    lines = [line.split() for line in text.splitlines() if line.startswith("  net")]
    assert [line[-1] for line in lines] == ["1.50×", "0.50×"]
    assert lines[0][-5:-1] == ["500", "ms", "750", "ms"]
    assert lines[1][-5:-1] == ["1.0", "MiB", "512.0", "KiB"]


def test_what_only_one_ran_out_of_memory_for_has_no_ratio() -> None:
    refused = replace(CELL, outcome="out of memory", step_seconds=[], peak_bytes=None)
    text = str(compare(record(CELL, name="a"), record(refused, name="b")))
    (line,) = [line for line in text.splitlines() if "500 ms" in line]
    assert line.endswith("out of memory")


def test_a_program_reads_a_row_for_each_cell_and_quantity() -> None:
    slower = replace(CELL, step_seconds=[0.75], peak_bytes=1 << 19)
    other = replace(CELL, model="another", outcome="failed", step_seconds=[], peak_bytes=None)
    comparison = compare(record(CELL, other, name="a"), record(slower, replace(CELL, batch_size=9), name="b"))
    found = json.loads(json.dumps(comparison.to_dict()))
    assert found["names"] == ["a", "b"] and [machine["name"] for machine in found["machines"]] == ["a", "b"]
    rows = {row["quantity"]: row for row in found["rows"]}
    assert list(rows) == ["step_seconds", "training_bytes"]
    seconds = rows["step_seconds"]
    assert (seconds["first"], seconds["second"], seconds["ratio"], seconds["unit"]) == (0.5, 0.75, 1.5, "seconds")
    assert (seconds["model"], seconds["batch_size"], seconds["engine"]) == ("net", 8, "torch")
    assert (
        seconds["outcomes"] == ["ok", "ok"] and seconds["threads"] == [1, 1] and seconds["at_least"] == [False, False]
    )
    assert rows["training_bytes"]["ratio"] == 0.5
    assert [cell["model"] for cell in found["only_first"]] == ["another"]
    assert [cell["batch_size"] for cell in found["only_second"]] == [9]


def test_every_number_of_the_text_is_in_a_row() -> None:
    comparison = compare(sample_record("old"), sample_record("new", faster=2.0))
    rows = comparison.to_dict()["rows"]
    lines = [line for line in str(comparison).splitlines() if line.startswith("  ")]
    # Each block of the text begins with its header.
    assert len(rows) == len(lines) - len({row["quantity"] for row in rows})
    keys = [
        (json.dumps({name: row[name] for name in comparison.pairs[0].first.identity}), row["quantity"]) for row in rows
    ]
    assert len(set(keys)) == len(keys)
    refused = [row for row in rows if row["outcomes"] == ["out of memory"] * 2]
    assert refused and all(row["first"] is row["second"] is row["ratio"] is None for row in refused)


def test_a_bound_and_energy_of_two_sources_have_no_ratio() -> None:
    note = "the search was ended after 30 s: a larger batch may fit"
    found = [replace(CELL, experiment="largest batch", results={"largest_batch": batch}, notes=notes, step_seconds=[])
             for batch, notes in ((8, []), (32, [note]))]  # fmt: skip
    row = compare(record(found[0], name="a"), record(found[1], name="b")).to_dict()["rows"][-1]
    assert (row["first"], row["second"], row["ratio"], row["at_least"]) == (8, 32, None, [False, True])

    def drawing(source: str, name: str) -> Cell:
        clock = {"clock": {"wall_seconds": 1.0}}
        return replace(
            CELL, window_steps=1, quantities={**clock, source: {name: 9.0}}, idle={**clock, source: {name: 1.0}}
        )

    rapl, model = drawing("rapl", "package_energy_joules"), drawing("model", "modelled_energy_joules")
    comparison = compare(record(rapl, name="a"), record(model, name="b"))
    (row,) = [row for row in comparison.to_dict()["rows"] if row["quantity"] == "step_joules"]
    assert row["sources"] == ["rapl", "model"] and row["first"] == 8.0 and row["ratio"] is None
    assert "8.00 J (rapl)  8.00 J (model)" in str(comparison)
    assert "sources" in compare(record(rapl), record(rapl)).to_dict()["rows"][-1]


def test_cells_that_only_one_has_are_listed() -> None:
    other = replace(CELL, model="another")
    comparison = compare(record(CELL, other, name="a"), record(other, replace(CELL, batch_size=9), name="b"))
    assert [cell.model for cell in comparison.only_first] == ["net"]
    assert [cell.batch_size for cell in comparison.only_second] == [9]
    assert "Only in a\n  net, batch 8" in str(comparison) and "Only in b\n  net, batch 9" in str(comparison)
    page = Page(comparison.page())
    assert {"Only in a", "Only in b"} <= set(page.texts_in("h2"))
    assert "net, batch 9, plain PyTorch, training, 1 thread" in page.texts_in("td")


def test_all_cores_of_two_machines_are_compared() -> None:
    small = record(replace(CELL, threads=1), replace(CELL, threads=4), name="small", cores=4)
    large = record(replace(CELL, threads=1), replace(CELL, threads=8), name="large", cores=8)
    comparison = compare(small, large)
    assert [(pair.first.threads, pair.second.threads) for pair in comparison.pairs] == [(1, 1), (4, 8)]
    assert comparison.pairs[1].name.endswith("4 against 8 threads (all cores)")
    assert not comparison.only_first and not comparison.only_second


def test_all_cores_do_not_take_what_is_the_same() -> None:
    small = record(replace(CELL, threads=4), name="small", cores=4)
    large = record(replace(CELL, threads=4), replace(CELL, threads=8), name="large", cores=8)
    comparison = compare(small, large)
    assert [(pair.first.threads, pair.second.threads) for pair in comparison.pairs] == [(4, 4)]
    assert [cell.threads for cell in comparison.only_second] == [8]


@pytest.mark.parametrize(("first", "second"), [("x", "x"), ("", "y")])
def test_machines_of_one_name_are_a_and_b(first: str, second: str) -> None:
    assert compare(record(CELL, name=first), record(CELL, name=second)).names == ("A", "B")
    assert compare(record(CELL), record(CELL), names=("v1", "v2")).names == ("v1", "v2")


def test_the_page_has_both_machines_and_a_figure_for_each_number(tmp_path: Path) -> None:
    comparison = compare(sample_record("old"), sample_record("new", faster=2.0))
    comparison.write_page(tmp_path / "page.html", title="<two>")
    text = (tmp_path / "page.html").read_text("utf-8")
    found = Page(text)
    assert found.texts_in("h1") == ["<two>"]
    assert {"old", "new", "Seconds of a step: new against old", "Joules of a step: new against old"} <= set(
        found.texts_in("h2")
    )
    for key in ("seconds", "bytes", "joules", "largest-batch", "p99-seconds"):
        (figure,) = re.findall(rf'<figure id="{key}".*?</figure>', text, re.DOTALL)
        legend = re.findall(r'<li><i class="swatch [^"]*"></i>(.*?)</li>', figure)
        assert legend == ["old", "new"] and figure.count('data-axis="x"') == figure.count("<svg ")
    assert "346 ms" in found.texts_in("td") and "173 ms" in found.texts_in("td") and "0.50×" in found.texts_in("td")


def test_records_with_nothing_in_common_say_so() -> None:
    comparison = compare(record(CELL), record())
    assert not comparison.pairs and len(comparison.only_first) == 1
    assert "No configuration has this number in both records." in Page(comparison.page()).texts_in("li")
    assert "Nothing: the other record has all of its configurations." in comparison.page()

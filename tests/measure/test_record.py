"""The record of measurements: through JSON and back, and files that are cut off, damaged or of another kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sample_records import sample_cells, sample_machine, sample_record, write_sample

from torch_odt.errors import OdtWarning
from torch_odt.measure.record import Cell, Record, append_line


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    read, made = Record.read(write_sample(tmp_path / "run.jsonl")), sample_record()
    assert json.dumps(read.machine.to_dict()) == json.dumps(made.machine.to_dict())
    assert [json.dumps(cell.to_dict()) for cell in read.cells] == [json.dumps(cell.to_dict()) for cell in made.cells]
    assert [cell.key for cell in read.cells] == [cell.key for cell in made.cells]


def test_shapes_can_be_told_apart_by_sets() -> None:
    read = Record.of_lines([sample_machine().to_dict(), json.loads(json.dumps(sample_cells()[0].to_dict()))])
    assert {cell.input_shape for cell in read.cells} == {(3, 224, 224)}


def test_keys_tell_cells_apart() -> None:
    cells = sample_cells()
    assert len({cell.key for cell in cells}) == len(cells)
    cell = cells[0]
    assert replace(cell, step_seconds=[1.0], outcome="failed").key == cell.key
    assert replace(cell, factors={"width": 1}).key != cell.key


def test_of_two_cells_that_are_the_same_the_later_one_counts(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "run.jsonl")
    again = replace(sample_cells()[0], step_seconds=[7.0])
    append_line(path, again)
    found = Record.read(path).cells
    assert len(found) == len(sample_cells())
    assert found[-1].step_seconds == [7.0]


def test_a_line_that_was_cut_off_is_left_out_and_written_over(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "run.jsonl")
    path.write_text(path.read_text()[:-20])
    with pytest.warns(OdtWarning, match="its last line was cut off"):
        assert len(Record.read(path).cells) == len(sample_cells()) - 1
    append_line(path, sample_cells()[-1])
    assert len(Record.read(path).cells) == len(sample_cells())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no line describes the machine"),
        ('{"kind": "plan"}', "kind 'plan'"),
        ("not json", "line 1: this is no JSON"),
        ("[1]", "line 1: this is no line"),
        ('{"kind": "machine", "name": "a", "processor": "b", "version": 99}', "has version 99"),
        ('{"kind": "cell", "suite": "x"}', "is no record"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        Record.read(path)


def test_what_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_bytes(b"\xaf\xfe")
    with pytest.raises(ValueError, match=r"other\.jsonl is no record of measurements"):
        Record.read(path)


def test_fields_of_later_versions_are_passed_over() -> None:
    data = {**sample_machine().to_dict(), "colour": "red"}
    cell = {**sample_cells()[0].to_dict(), "colour": "red"}
    assert len(Record.of_lines([data, cell]).cells) == 1


def test_energy_is_above_the_idle_level() -> None:
    cell = Cell(
        suite="ubiquitous", model="lenet", batch_size=1, mode="training", engine="torch", threads=1, window_steps=4,
        quantities={"clock": {"wall_seconds": 2.0}, "rapl": {"package_energy_joules": 30.0},
                    "model": {"modelled_energy_joules": 9.0}},
        idle={"clock": {"wall_seconds": 1.0}, "rapl": {"package_energy_joules": 5.0}},
    )  # fmt: skip
    assert cell.joules_per_step() == ((30 - 5 * 2) / 4, "rapl")
    assert replace(cell, idle={}).joules_per_step() is None
    closed = {**cell.quantities, "rapl": {"package_energy_joules": {"absent": "no permission"}}}
    assert replace(cell, quantities=closed).joules_per_step() is None
    assert closed["rapl"] and replace(cell, quantities=closed).reading("rapl", "package_energy_joules") is None


def test_a_card_that_did_not_compute_is_not_the_cells_energy() -> None:
    quantities = {"clock": {"wall_seconds": 1.0}, "nvml": {"gpu_energy_joules": 50.0}}
    cell = Cell(suite="ubiquitous", model="lenet", batch_size=1, mode="training", engine="torch", threads=1,
                window_steps=1, quantities=quantities, idle=quantities)  # fmt: skip
    assert cell.joules_per_step() is None
    assert replace(cell, device="cuda").joules_per_step() == (0.0, "nvml")

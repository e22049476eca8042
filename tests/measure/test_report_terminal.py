"""A record as text for a terminal, as a Chrome trace and for TensorBoard."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sample_records import sample_cells, sample_machine, sample_record
from tensorboard_writer import Written

from torch_odt.integrations.tensorboard import log_record
from torch_odt.measure.record import Cell, Machine, Record
from torch_odt.measure.report import compare, page, table, write_chrome_trace


def lines_of(*cells: Cell) -> list[str]:
    """Of a record that was written and read."""
    lines = [line.to_dict() for line in (sample_machine(), *cells)]
    return table(Record.of_lines(json.loads(json.dumps(lines)))).splitlines()


def make(engine: Any, **more: Any) -> Cell:
    return Cell(suite="s", model="net", batch_size=8, mode="training", engine=engine, threads=2, **more)


def test_plain_pytorch_stands_beside_torch_odt() -> None:
    plain = make("torch", step_seconds=[0.2], base_bytes=0, peak_bytes=4 << 20)
    ours = [
        make("torch_odt", budget=budget, step_seconds=[seconds], base_bytes=0, peak_bytes=nbytes << 20)
        for budget, seconds, nbytes in (("50%", 0.1, 2), ("25%", 0.3, 1))
    ]
    lines = lines_of(plain, *ours)
    header = "network batch threads step budget seconds, plain torch_odt memory, plain torch_odt"
    assert lines[3].split() == header.split()
    assert " ".join(lines[4].split()) == "net 8 2 training 50% 200 ms 100 ms 0.50× 4.0 MiB 2.0 MiB 0.50×"
    assert " ".join(lines[5].split()) == "net 8 2 training 25% 200 ms 300 ms 1.50× 4.0 MiB 1.0 MiB 0.25×"


def test_optimizers_are_told_apart() -> None:
    cells = [make(engine, optimizer=optimizer, step_seconds=[seconds])
             for optimizer, faster in (("sgd", 1.0), ("adam", 0.5))
             for engine, seconds in (("torch", 0.2 / faster), ("torch_odt", 0.1 / faster))]  # fmt: skip
    inference = replace(cells[0], mode="inference", step_seconds=[0.05])
    rows = [line.split() for line in lines_of(inference, *cells)[3:7]]
    assert rows[0][4] == "optimizer"
    assert rows[1] == ["net", "8", "2", "inference", "50", "ms", "–"]
    assert rows[2] == ["net", "8", "2", "training", "sgd", "200", "ms", "100", "ms", "0.50×"]
    assert rows[3] == ["net", "8", "2", "training", "adam", "400", "ms", "200", "ms", "0.50×"]
    assert "optimizer" not in "".join(lines_of(*cells[:2]))


def test_what_was_not_measured_says_why() -> None:
    refused = make("torch", outcome="out of memory", reason="more than 1 GiB")
    lines = lines_of(refused, make("torch_odt", step_seconds=[0.1]))
    assert " ".join(lines[4].split()) == "net 8 2 training out of memory 100 ms"
    assert "  net, batch 8, plain PyTorch, training, 2 threads: out of memory (more than 1 GiB)" in lines
    assert "  rapl: no counter of packages in /sys/class/powercap" in lines


def test_shapes_are_told_where_a_network_has_several() -> None:
    small, large = (make("torch", step_seconds=[0.1], input_shape=(1, size)) for size in (8, 16))
    assert [line.split()[0] for line in lines_of(small)[4:5]] == ["net"]
    assert [line.split()[1] for line in lines_of(small, large)[4:6]] == ["1x8", "1x16"]


def test_a_breakdown_is_not_compared_with_another_suite() -> None:
    cells = [make("torch", step_seconds=[0.2]), replace(make("torch_odt", step_seconds=[0.1]), suite="breakdown")]
    assert not any("×" in line for line in lines_of(*cells))


def test_long_runs_and_neighbours_are_told_in_a_row() -> None:
    cells = [cell for cell in sample_cells() if cell.experiment in ("long run", "neighbour")]
    run = replace(cells[-1], step_seconds=[0.5] * 10 + [9.0] * 80 + [0.7] * 10)
    lines = [" ".join(line.split()) for line in lines_of(*cells[:-1], run)]
    start = lines.index("Long run")
    assert lines[start + 1] == "network batch threads way a step at first in the end hottest slowest core"
    assert lines[start + 2] == "mobilenet_v2 16 4 plain PyTorch 500 ms 500 ms 70.0 °C 1.20 GHz"
    assert lines[start + 3] == "mobilenet_v2 16 4 torch_odt (50%) 500 ms 700 ms 63.0 °C 1.80 GHz"
    start = lines.index("Neighbour")
    assert lines[start + 2] == "mentee 32 4 training none 100/s 10 ms 20 ms 1 M/s 4.66 GiB/s – –"
    assert lines[start + 3].startswith("mentee 32 4 training foreground plain PyTorch 52.63/s 19 ms 38 ms")
    assert lines[start + 6].startswith("mentee 32 4 training background torch_odt (50%) 92.59/s")


def test_cells_of_one_reason_stand_on_one_line() -> None:
    cells = [replace(make("torch"), batch_size=batch, outcome="skipped", reason="no card") for batch in range(1, 9)]
    lines = lines_of(*cells, replace(cells[0], batch_size=99, reason="another"))
    names = "; ".join(f"net, batch {batch}, plain PyTorch, training, 2 threads" for batch in range(1, 5))
    start = lines.index("Not measured")
    assert lines[start + 1] == f"  {names}; and 4 others: skipped (no card)"
    assert lines[start + 2].endswith("batch 99, plain PyTorch, training, 2 threads: skipped (another)")


def test_notes_stand_below_the_tables_once() -> None:
    note = "50% is 214 KiB, which is too small: the smallest budget was taken, 11.6 MiB"
    lines = lines_of(*(make("torch_odt", budget=each, step_seconds=[0.1], notes=[note]) for each in ("50%", "25%")))
    names = "; ".join(f"net, batch 8, torch_odt ({each}), training, 2 threads" for each in ("50%", "25%"))
    assert lines[lines.index("Notes") + 1] == f"  {note}: {names}"


@pytest.mark.parametrize(
    "note", ["the search was ended after 30 s: a larger batch may fit", "no more than 1024 samples were tried"]
)
def test_a_largest_batch_that_was_not_shut_in_is_the_least_it_may_be(note: str) -> None:
    plain = make("torch", experiment="largest batch", results={"largest_batch": 8})
    ours = make("torch_odt", experiment="largest batch", results={"largest_batch": 32}, notes=[note])
    rows = [" ".join(line.split()) for line in lines_of(plain, ours)[2:6]]
    assert rows == [
        "Largest batch", "network batch threads way largest batch",
        "net 8 2 plain PyTorch 8", "net 8 2 torch_odt at least 32",
    ]  # fmt: skip
    record = Record(sample_machine(), [plain, ours])
    text = page(record)
    assert ">at least 32<" in text and f"{note}</li>" in text and "4× plain" not in text
    assert "4× plain" in page(Record(sample_machine(), [plain, replace(ours, notes=[])]))
    compared = compare(record, record)
    assert "at least 32  at least 32" in str(compared)


def test_every_experiment_is_there() -> None:
    text = "\n".join(lines_of(*sample_cells()))
    assert text == table(sample_record())
    for part in ("Largest batch\n", "torch_odt (512MiB)", "Neighbour\n", "p99 seconds", "Not measured\n"):
        assert part in text
    assert table(Record(Machine(name="a", processor="b"), [])) == "a: b"


def events_of(folder: Path, record: Record) -> list[dict[str, Any]]:
    write_chrome_trace(record, folder / "trace.json")
    return json.loads((folder / "trace.json").read_text("utf-8"))["traceEvents"]


def test_a_trace_holds_steps_operators_and_counters(tmp_path: Path) -> None:
    cell = next(cell for cell in sample_cells() if cell.prediction is not None)
    events = events_of(tmp_path, Record(sample_machine(), [cell]))
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    seconds: dict[str, float] = defaultdict(float)
    ends: dict[int, float] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] == pytest.approx(ends.get(event["tid"], 0.0))
            ends[event["tid"]] = event["ts"] + event["dur"]
            seconds[threads[event["tid"]]] += event["dur"] / 1e6
    assert seconds["steps"] == pytest.approx(sum(cell.step_seconds))
    operators = [row for name, row in seconds.items() if name.startswith("operators")]
    assert sum(operators) == pytest.approx(sum(each.seconds for each in cell.operators))
    counters = [event for event in events if event["ph"] == "C"]
    assert len(counters) == sum(len(trace.values) for trace in cell.traces) + 5 * len(cell.prediction.at_seconds)
    assert {"memory (bytes): activations", "predicted memory (bytes): kept"} <= {each["name"] for each in counters}


def test_a_trace_has_a_process_for_each_cell(tmp_path: Path) -> None:
    record = sample_record()
    names = [each["args"]["name"] for each in events_of(tmp_path, record) if each["name"] == "process_name"]
    assert len(set(names)) == len(record.cells)


def test_scalars_for_tensorboard() -> None:
    writer, record = Written(), sample_record()
    log_record(record, writer)
    assert not writer.is_closed
    tag = "measure/ubiquitous/lenet/step/training/4_threads/torch_odt_50%"
    cell = next(
        cell
        for cell in record.cells
        if (cell.model, cell.engine, cell.threads, cell.batch_size) == ("lenet", "torch_odt", 4, 16)
    )
    assert writer.scalars[f"{tag}/step_seconds", 16] == cell.median_seconds
    assert writer.scalars[f"{tag}/training_bytes", 16] == cell.training_bytes
    heat = "measure/ubiquitous/mobilenet_v2/long_run/training/4_threads/torch/temperature/cpu_thermal_celsius"
    assert writer.scalars[heat, 60_000_000] == 46.0
    adam = replace(cell, optimizer="adam", step_seconds=[9.0])
    log_record(Record(record.machine, [adam]), writer)
    assert writer.scalars[f"{tag}_adam/step_seconds", 16] == 9.0 != writer.scalars[f"{tag}/step_seconds", 16]
    refused = "measure/ubiquitous/googlenet/step/training/4_threads/torch"
    assert (refused, "out of memory: more than 900 MiB", 64) in writer.texts

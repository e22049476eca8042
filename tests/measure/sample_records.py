"""A small record with every kind of line, as plausible as a made-up one can be; for tests of what reads records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_odt.measure.record import (
    Cell,
    LayerMemory,
    Machine,
    OperatorTime,
    Prediction,
    Record,
    Trace,
    append_line,
)

MIB = 1 << 20
NETWORKS = {"lenet": 0.002, "alexnet": 0.20, "mobilenet_v2": 0.12, "squeezenet1_1": 0.08, "googlenet": 0.16}


def sample_machine(name: str = "sample") -> Machine:
    return Machine(
        name=name,
        processor="Cortex-A72",
        instruction_sets=("asimd", "asimddp"),
        cores=4,
        memory_bytes=4096 * MIB,
        governor="ondemand",
        system="Linux 6.6",
        versions={"python": "3.13.1", "torch": "2.15.0", "torch_odt": "0.1.0"},
        started="2026-11-24T17:00:00+00:00",
        absent={"rapl": "no counter of packages in /sys/class/powercap"},
    )


def sample_cells(*, faster: float = 1.0) -> list[Cell]:
    """Every experiment, engine and outcome, and two budgets; `faster` divides all seconds."""
    cells = [
        _step(name, seconds / faster, batch, threads, mode, engine)
        for name, seconds in NETWORKS.items()
        for batch in (1, 16)
        for threads in (1, 4)
        for mode in ("inference", "training")
        for engine in ("torch", "torch_odt")
        if (mode, engine) != ("inference", "torch_odt")
    ]
    cells += [_step(name, 1.4 * seconds / faster, 16, 4, "training", "torch_odt", budget="30%")
              for name, seconds in NETWORKS.items()]  # fmt: skip
    ways = (("inference", "torch"), ("training", "torch"), ("training", "torch_odt"))
    cells += [_sweep(kind, width, depth, *way) for kind in ("fully connected", "convolution", "separable")
              for width in (64, 128) for depth in (1, 2) for way in ways]  # fmt: skip
    cells += [_on_card(mode, batch) for batch in (1, 16) for mode in ("inference", "training")]
    cells += [_largest(name, engine) for name in ("alexnet", "mobilenet_v2") for engine in ("torch", "torch_odt")]
    cells += [_neighbour(what) for what in ("none", "foreground", "background")]
    cells += [_neighbour(what, "torch_odt") for what in ("foreground", "background")]
    cells += [_breakdown(), _long_run("torch"), _long_run("torch_odt")]
    cells.append(_bare("googlenet", 64, outcome="out of memory", reason="more than 900 MiB", limit_bytes=900 * MIB))
    cells.append(_bare("vit_b_16", 1, outcome="failed", reason="RuntimeError: it does not take samples of 3x32x32"))
    cells.append(_bare("lenet", 4, governor="powersave", outcome="skipped", reason="no permission to set governors"))
    return cells


def sample_record(name: str = "sample", *, faster: float = 1.0) -> Record:
    return Record(sample_machine(name), sample_cells(faster=faster))


def write_sample(path: Path, name: str = "sample", *, faster: float = 1.0) -> Path:
    """The same as a file."""
    append_line(path, sample_machine(name))
    for cell in sample_cells(faster=faster):
        append_line(path, cell)
    return path


def _bare(model: str, batch: int, **more: Any) -> Cell:
    return Cell(suite="ubiquitous", model=model, batch_size=batch, input_shape=(3, 224, 224),
                **{"threads": 4, "mode": "training", "engine": "torch", **more})  # fmt: skip


def _step(name: str, seconds: float, batch: int, threads: int, mode: Any, engine: Any, *, budget: str = "50%") -> Cell:
    per_step = seconds * (0.3 + 0.7 * batch / 16) / (1 + 0.4 * (threads > 1)) * (3 if mode == "training" else 1)
    tensors = {"weights": 14 * MIB, "gradients": 14 * MIB, "optimizer": 14 * MIB,
               "activations": 22 * MIB * batch, "workspace": 3 * MIB, "other": batch * MIB}  # fmt: skip
    if mode == "inference":
        tensors |= {"gradients": 0, "optimizer": 0, "activations": 0}
    if engine == "torch_odt":
        tensors["activations"] = tensors["activations"] * int(budget.removesuffix("%")) // 100
    rise = sum(tensors.values()) - tensors["weights"]
    window = per_step * 5
    return _bare(
        name,
        batch,
        threads=threads,
        mode=mode,
        engine=engine,
        budget=_budget(engine, budget),
        step_seconds=[per_step * factor for factor in (1.0, 1.02, 0.99, 1.05, 1.01)],
        first_seconds=per_step * (30 if engine == "torch_odt" else 1.5),
        window_steps=5,
        quantities={
            "clock": {"wall_seconds": window, "user_seconds": window * threads * 0.9, "system_seconds": window * 0.1},
            "proc": {"begin_bytes": 200 * MIB, "peak_bytes": 200 * MIB + rise},
            "allocator": {"peak_allocated_bytes": sum(tensors.values())},
            "psutil": {f"core{core}_busy_share": 0.95 if core < threads else 0.05 for core in range(4)},
            "cpufreq": {f"core{core}_frequency_hertz": 1.5e9 for core in range(4)},
            "thermal": {"highest_celsius": 61.0},
            "rapl": {"package_energy_joules": {"absent": "no counter of packages in /sys/class/powercap"}},
            "model": {"modelled_energy_joules": window * (1 + 2 * threads)},
        },
        idle={"clock": {"wall_seconds": 1.0}, "model": {"modelled_energy_joules": 1.0}},
        base_bytes=200 * MIB,
        peak_bytes=200 * MIB + rise,
        whole_peak_bytes=210 * MIB + rise,
        parameters=3_500_000,
        flops=batch * 600_000_000 * (3 if mode == "training" else 1),
        categories=tensors,
        operators=_operators(per_step, mode),
        profiled_seconds=per_step * 1.01,
        unprofiled_seconds=per_step,
        traces=_memory_traces(per_step, tensors) if mode == "training" else (),
        prediction=_prediction(per_step, rise) if engine == "torch_odt" else None,
    )


def _on_card(mode: Any, batch: int) -> Cell:
    cell = _step("mobilenet_v2", 0.01, batch, 4, mode, "torch")
    peak_bytes = (30 + batch * (20 if mode == "training" else 2)) * MIB
    quantities = {
        **cell.quantities,
        "device": {"allocated_bytes": 30 * MIB, "peak_allocated_bytes": peak_bytes, "peak_reserved_bytes": 900 * MIB},
        "nvml": {"gpu_energy_joules": 9.0, "card0_energy_joules": 9.0},
    }
    idle = {"clock": {"wall_seconds": 1.0}, "nvml": {"gpu_energy_joules": 5.0}}
    return replace(cell, device="cuda", quantities=quantities, idle=idle, operators=(), categories={}, traces=())


def _operators(seconds: float, mode: str) -> list[OperatorTime]:
    shares = [("convolution", "forward", 0.2), ("native_batch_norm", "forward", 0.1),
              ("convolution_backward", "backward", 0.4), ("native_batch_norm_backward", "backward", 0.2),
              ("_fused_sgd_", "optimizer", 0.05), ("outside operators", "outside", 0.05)]  # fmt: skip
    kept = shares if mode == "training" else shares[:2]
    whole = sum(share for _, _, share in kept)
    rows: list[Any] = [(op, direction, share / whole * seconds) for op, direction, share in kept]
    return [OperatorTime(op=op, direction=direction, seconds=each, calls=52) for op, direction, each in rows]


def _memory_traces(seconds: float, tensors: dict[str, int]) -> list[Trace]:
    times = [seconds * point / 10 for point in range(11)]
    rise = [0.1, 0.3, 0.6, 1.0, 0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.0]
    levels: dict[str, Sequence[int]] = {
        "weights": [tensors["weights"]] * 11,
        "gradients": [int(tensors["gradients"] * point / 10) for point in range(11)],
        "optimizer": [tensors["optimizer"]] * 11,
        "activations": [int(tensors["activations"] * share) for share in rise],
        "workspace": [tensors["workspace"] * (point % 2) for point in range(11)],
        "other": [tensors["other"]] * 11,
    }
    held_before = tensors["weights"] + tensors["other"]
    totals = [sum(sizes) for sizes in zip(*levels.values(), strict=True)]
    levels["process"] = [max(totals[: point + 1]) - held_before + 6 * MIB for point in range(11)]
    return [Trace(quantity="memory", label=name, unit="bytes", at_seconds=times, values=values)
            for name, values in levels.items()]  # fmt: skip


def _prediction(seconds: float, rise: int) -> Prediction:
    return Prediction(
        peak_bytes=rise + 4 * MIB,
        step_seconds=seconds * 1.1,
        at_seconds=[0.0, seconds * 0.3, seconds * 0.5, seconds * 0.9],
        bytes={
            "kept": [rise // 8, rise // 2, rise // 2, rise // 9],
            "recomputed": [0, 0, rise // 6, 0],
            "returned": [0, 0, 0, 0],
            "moving": [0, 0, 0, 0],
            "workspace": [rise // 20] * 4,
        },
        resident_bytes=28 * MIB,
        planner="auto",
        recomputed_seconds=seconds * 0.1,
    )


def _budget(engine: str, budget: str = "50%") -> str:
    return budget if engine == "torch_odt" else ""


def _sweep(kind: str, width: int, depth: int, mode: Any, engine: Any) -> Cell:
    cost = {"fully connected": 0.0005, "convolution": 0.05, "separable": 0.02}[kind] * width / 64 * depth
    seconds = cost * (3 if mode == "training" else 1) * (0.8 if engine == "torch_odt" else 1)
    return Cell(
        suite="architectures", model=f"{kind} {width}x{depth}", batch_size=128, input_shape=(3, 32, 32), mode=mode,
        engine=engine, budget=_budget(engine), threads=4, factors={"layer": kind, "width": width, "depth": depth},
        step_seconds=[seconds] * 3, base_bytes=200 * MIB, peak_bytes=260 * MIB, parameters=width * width * depth,
        flops=int(1e9 * cost), operators=_operators(seconds, mode), profiled_seconds=seconds,
        unprofiled_seconds=seconds,
    )  # fmt: skip


def _largest(name: str, engine: Any) -> Cell:
    batch = 8 if engine == "torch" else 31
    return _bare(name, 0, engine=engine, experiment="largest batch", limit_bytes=512 * MIB,
                 budget=_budget(engine, "512MiB"), results={"largest_batch": batch})  # fmt: skip


def _neighbour(what: str, engine: Any = "torch") -> Cell:
    slower = {"none": 1.0, "foreground": 1.9, "background": 1.2}[what] * (0.9 if engine == "torch_odt" else 1.0)
    return Cell(
        suite="architectures", model="mentee", batch_size=32, input_shape=(3, 32, 32), mode="training", engine=engine,
        budget=_budget(engine), threads=4, experiment="neighbour", factors={"training": what},
        step_seconds=[] if what == "none" else [0.4] * 3,
        results={"requests_per_second": 100 / slower, "p50_seconds": 0.01 * slower, "p99_seconds": 0.02 * slower,
                 "processor_operations_per_second": 1e6 / slower, "memory_bytes_per_second": 5e9 / slower},
    )  # fmt: skip


def _breakdown() -> Cell:
    layers = [LayerMemory(layer=f"features.{index}", kind="Conv2d", weights_bytes=index * MIB,
                          gradients_bytes=index * MIB, optimizer_bytes=index * MIB,
                          activations_bytes=(9 - index) * 3 * MIB) for index in range(1, 9)]  # fmt: skip
    tensors = {"weights": 36 * MIB, "gradients": 36 * MIB, "optimizer": 36 * MIB, "activations": 108 * MIB,
               "workspace": 9 * MIB, "other": 9 * MIB}  # fmt: skip
    return Cell(
        suite="breakdown", model="alexnet", batch_size=16, input_shape=(3, 224, 224), mode="training", engine="torch",
        threads=4, step_seconds=[0.5] * 3, categories=tensors, layers=layers, traces=_memory_traces(0.5, tensors),
        base_bytes=200 * MIB, peak_bytes=390 * MIB,
    )  # fmt: skip


def _long_run(engine: Any) -> Cell:
    times = [float(second) for second in range(0, 600, 30)]
    heat = [min(70.0 if engine == "torch" else 63.0, 40 + second / 10) for second in times]
    traces = [Trace(quantity="temperature", label="cpu_thermal", unit="celsius", at_seconds=times, values=heat)]
    traces += [Trace(quantity="frequency", label=f"core{core}", unit="hertz", at_seconds=times,
                     values=[1.8e9 if celsius < 65 else 1.2e9 for celsius in heat]) for core in range(4)]  # fmt: skip
    traces.append(Trace(quantity="step", label="training", unit="seconds", at_seconds=times,
                        values=[0.5 if celsius < 65 else 0.7 for celsius in heat]))  # fmt: skip
    return _bare("mobilenet_v2", 16, engine=engine, budget=_budget(engine), experiment="long run", traces=traces,
                 step_seconds=[0.5] * 20)  # fmt: skip

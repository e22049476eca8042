"""What a measurement leaves: one line of JSON for the machine, one for each cell.

A cell is one configuration that was measured in a process of its own: a network, a batch, a number of threads, training
or inference, plain PyTorch or torch_odt. A file may hold several runs of one machine: each begins with a line for the
machine, and of two cells that are the same the later one counts.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any, Literal

from torch_odt.errors import OdtWarning

VERSION = 1
Number = int | float
Reading = Number | Mapping[str, str]
"""A number, or `{"absent": reason}`."""
Quantities = Mapping[str, Mapping[str, Reading]]
"""By source and name, as `Window.record` gives them."""

Mode = Literal["inference", "training"]
Engine = Literal["torch", "torch_odt", "executorch"]
Outcome = Literal["ok", "out of memory", "failed", "skipped"]
Direction = Literal["forward", "backward", "optimizer", "outside"]
DEFAULT_OPTIMIZER = "sgd"
CATEGORIES = ("weights", "gradients", "optimizer", "activations", "workspace", "other")
"""Of tensors: "workspace" are gradients of activations and what operators hold until they end, "other" the batch."""

ENERGY = (
    ("nvml", "gpu_energy_joules"),
    ("rapl", "package_energy_joules"),
    ("ina", "board_energy_joules"),
    ("battery", "battery_energy_joules"),
    ("model", "modelled_energy_joules"),
)
"""Where a cell's energy is looked for: sensors first, a card's only where the cell ran on it."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where cells were measured, and with what.

    Attributes:
        name: what the user calls it.
        processor: the CPU's model.
        instruction_sets: that matter to torch and to this package's kernels.
        cores: that this process may use.
        memory_bytes: of the machine, or of the tightest control group.
        governor: of the processors' frequencies as it was found; empty where there is none.
        accelerator: graphics cards' names; empty where torch sees none.
        system: the kernel.
        versions: of python, torch, torch_odt, torchvision and timm, as far as they are there.
        started: date and time, ISO 8601, UTC.
        absent: sensors that this machine lacks or that are closed to this user, with the reason.
    """

    name: str
    processor: str
    instruction_sets: Sequence[str] = ()
    cores: int = 0
    memory_bytes: int = 0
    governor: str = ""
    accelerator: str = ""
    system: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    started: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)
    version: int = VERSION

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "machine", **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Machine:
        return cls(**_known(cls, data))


@dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """All calls of one operator in one step.

    Attributes:
        op: its name ("convolution"); "outside operators" for what a step takes besides.
        direction: "backward" is also what is computed again there; "outside" is Python, autograd and the allocator.
        seconds: of all calls in a step.
        calls: in a step.
    """

    op: str
    direction: Direction
    seconds: float
    calls: float


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """What one layer takes of the memory of a training step.

    Attributes:
        layer: the module's name; "" for what the network itself or the loss makes.
        kind: the module's class.
        weights_bytes: of its parameters and buffers.
        gradients_bytes: of its parameters' gradients.
        optimizer_bytes: of their optimizer state.
        activations_bytes: what its forward pass leaves for the backward pass.
    """

    layer: str
    kind: str
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Something over time.

    Attributes:
        quantity: "memory", "temperature", "frequency" or "step".
        label: which one of them: one of `CATEGORIES`, "process" (what it held above `base_bytes`), a sensor, a core.
        unit: "bytes", "celsius", "hertz" or "seconds".
        at_seconds: when it was read, from the start of the step or of the run.
        values: what was read then; what lies between holds until the next reading.
    """

    quantity: str
    label: str
    unit: str
    at_seconds: Sequence[float]
    values: Sequence[Number]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What torch_odt's plan says of the memory of a step; beside the cell's traces of memory.

    Attributes:
        peak_bytes: of the whole plan, above the level before the step was made.
        step_seconds: that it predicts.
        at_seconds: from the start of one pass through the schedule (one micro-batch).
        bytes: what is in the arena from then on, by "kept", "recomputed", "returned", "moving", "workspace".
        resident_bytes: what the plan counts beside the arena: optimizer state, gradients, reserves.
        passes: through the schedule in a step.
        planner: who made it.
        recomputed_seconds: of a pass.
    """

    peak_bytes: int
    step_seconds: float
    at_seconds: Sequence[float] = ()
    bytes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    resident_bytes: int = 0
    passes: int = 1
    planner: str = ""
    recomputed_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One configuration, and what was measured of it.

    What identifies it:

    Attributes:
        suite: "ubiquitous", "architectures" or "breakdown".
        experiment: "step" (time, memory, energy of steps), "largest batch", "long run" or "neighbour".
        model: the network's name.
        batch_size: samples of a step; 0 where the experiment looks for it.
        input_shape: of one sample.
        mode: "inference" or "training".
        engine: "torch" (plain PyTorch), "torch_odt" or "executorch".
        threads: that compute.
        governor: that was set; empty where the machine's was left.
        device: as torch names it.
        budget: what torch_odt was given, as it was written; empty for the others.
        optimizer: by name; inference, which has none, has the first one's.
        factors: what else was varied: {"layer": "convolution", "width": 64, "depth": 2}, {"neighbour": "training"}.

    What happened:

    Attributes:
        outcome: "ok", "out of memory", "failed" or "skipped".
        reason: why it is not "ok".
        limit_bytes: what the cell's process was allowed to hold; 0 for no limit.
        measuring_seconds: that all of it took, processes that were started and planning included.

    What was measured:

    Attributes:
        step_seconds: of each repetition, after the warm-up.
        first_seconds: of the first step; for torch_odt it captures, measures and plans.
        window_steps: steps inside the window that `quantities` are of.
        quantities: what the meters said over the repetitions, by source.
        idle: what they said of the same process while nothing ran, just before.
        base_bytes: what the process held before the step was made, with model and batch in memory.
        peak_bytes: the most that it held in the repetitions.
        whole_peak_bytes: the most from the making of the step on, planning included.
        parameters: of the model.
        flops: of one step, in floating-point operations, what is computed again included; 0 where they are not known.
        categories: bytes by `CATEGORIES` at the moment of the step at which tensors take most.
        operators: where the seconds of a step go; of steps that were profiled, what is no operator's included.
        profiled_seconds: of the same steps by the clock, with which the operators' sum is to agree.
        unprofiled_seconds: of steps between them whose operators were not counted.
        layers: memory of a step by layer.
        traces: over a step, or over a long run.
        prediction: of the plan; None for plain PyTorch.
        results: of experiments: {"largest_batch": 24}, {"requests_per_second": 9.0, "p99_seconds": 0.21}.
        notes: what is to be known beside the numbers.
    """

    suite: str
    model: str
    batch_size: int
    mode: Mode
    engine: Engine
    threads: int
    experiment: str = "step"
    input_shape: tuple[int, ...] = ()
    governor: str = ""
    device: str = "cpu"
    budget: str = ""
    optimizer: str = DEFAULT_OPTIMIZER
    factors: Mapping[str, Number | str] = field(default_factory=dict)

    outcome: Outcome = "ok"
    reason: str = ""
    limit_bytes: int = 0
    measuring_seconds: float | None = None

    step_seconds: Sequence[float] = ()
    first_seconds: float | None = None
    window_steps: int = 0
    quantities: Quantities = field(default_factory=dict)
    idle: Quantities = field(default_factory=dict)
    base_bytes: int | None = None
    peak_bytes: int | None = None
    whole_peak_bytes: int | None = None
    parameters: int = 0
    flops: int = 0
    categories: Mapping[str, int] = field(default_factory=dict)
    operators: Sequence[OperatorTime] = ()
    profiled_seconds: float | None = None
    unprofiled_seconds: float | None = None
    layers: Sequence[LayerMemory] = ()
    traces: Sequence[Trace] = ()
    prediction: Prediction | None = None
    results: Mapping[str, Number] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def key(self) -> str:
        """What identifies it, as one text."""
        return json.dumps(self.identity, sort_keys=True)

    @property
    def identity(self) -> dict[str, Any]:
        """What identifies it, as JSON has it."""
        parts = {name: getattr(self, name) for name in _IDENTITY}
        return {**parts, "input_shape": list(self.input_shape), "factors": dict(self.factors)}

    @property
    def median_seconds(self) -> float | None:
        """A typical step."""
        return median(self.step_seconds) if self.step_seconds else None

    @property
    def training_bytes(self) -> int | None:
        """The most that steps held above the level before the step was made."""
        if self.peak_bytes is None or self.base_bytes is None:
            return None
        return max(0, self.peak_bytes - self.base_bytes)

    @property
    def device_bytes(self) -> Number | None:
        """The most that tensors took of the memory of a device that has its own; of what was reserved where that is
        not counted; None on the CPU."""
        allocated = self.reading("device", "peak_allocated_bytes")
        return self.reading("device", "peak_reserved_bytes") if allocated is None else allocated

    def reading(self, source: str, name: str) -> Number | None:
        """What a meter said, or None where it was absent."""
        return _number(self.quantities, source, name)

    def joules_per_step(self) -> tuple[float, str] | None:
        """Energy of a step above what the machine draws while nothing runs, and its source; None where there is none.

        As Cai et al. counts it: the watts above the idle level, times the time of a step.
        """
        wall, idle_wall = self.reading("clock", "wall_seconds"), _number(self.idle, "clock", "wall_seconds")
        if not wall or not idle_wall or not self.window_steps:
            return None
        for source, name in ENERGY:
            used, idle = self.reading(source, name), _number(self.idle, source, name)
            if used is None or idle is None or (source == "nvml" and self.device == "cpu"):
                continue
            return (used - idle / idle_wall * wall) / self.window_steps, source
        return None

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "cell", **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cell:
        known = _known(cls, data)
        known["input_shape"] = tuple(data.get("input_shape", ()))
        known["operators"] = [OperatorTime(**_known(OperatorTime, row)) for row in data.get("operators", ())]
        known["layers"] = [LayerMemory(**_known(LayerMemory, row)) for row in data.get("layers", ())]
        known["traces"] = [Trace(**_known(Trace, row)) for row in data.get("traces", ())]
        prediction = data.get("prediction")
        known["prediction"] = Prediction(**_known(Prediction, prediction)) if prediction else None
        return cls(**known)


_IDENTITY = (
    "suite", "experiment", "model", "batch_size", "input_shape", "mode", "engine", "threads", "governor", "device",
    "budget", "optimizer",
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """All of a file: the machine of its last run, and every cell once, in the order in which they were measured."""

    machine: Machine
    cells: Sequence[Cell]

    @classmethod
    def read(cls, path: Path) -> Record:
        """What a file holds.

        A last line that was cut off, as when the machine lost power, is left out, with a warning.

        Raises:
            ValueError: the file is no record, or of a later version.
            OSError: it cannot be read.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no record of measurements: {error}") from None
        return cls.of_lines([data for data in _parsed(lines, path)], str(path))

    @classmethod
    def of_lines(cls, lines: Iterable[Mapping[str, Any]], name: str = "the record") -> Record:
        """From the dictionaries of its lines.

        Raises:
            ValueError: no line is a machine's, or a line is of another kind or version.
        """
        machine: Machine | None = None
        cells: dict[str, Cell] = {}
        for data in lines:
            kind = data.get("kind")
            try:
                if kind == "machine":
                    if data.get("version") != VERSION:
                        raise ValueError(f"{name} has version {data.get('version')}: this torch_odt reads {VERSION}")
                    machine = Machine.from_dict(data)
                elif kind == "cell":
                    cell = Cell.from_dict(data)
                    cells.pop(cell.key, None)
                    cells[cell.key] = cell
                else:
                    raise ValueError(f"{name} is no record of measurements: it has a line of kind {kind!r}")
            except TypeError as error:
                raise ValueError(f"{name} is no record of measurements: {error}") from None
        if machine is None:
            raise ValueError(f"{name} is no record of measurements: no line describes the machine")
        return cls(machine, list(cells.values()))


def append_line(path: Path, line: Machine | Cell) -> None:
    """Adds a line to a file, which is there whole or not at all after a crash of this process."""
    text = json.dumps(line.to_dict(), allow_nan=False) + "\n"
    if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _parsed(lines: Sequence[str], path: Path) -> list[dict[str, Any]]:
    parsed: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except ValueError:
            if number == len(lines) - 1 and parsed:
                warnings.warn(f"{path}: its last line was cut off, and is left out", OdtWarning, stacklevel=4)
                break
            raise ValueError(f"{path}, line {number + 1}: this is no JSON") from None
        if not isinstance(data, dict):
            raise ValueError(f"{path}, line {number + 1}: this is no line of a record")
        parsed.append(data)
    return parsed


def _known(kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that this version knows: later ones may add some."""
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in data.items() if name in names}


def _number(quantities: Quantities, source: str, name: str) -> Number | None:
    reading = quantities.get(source, {}).get(name)
    return reading if isinstance(reading, (int, float)) else None

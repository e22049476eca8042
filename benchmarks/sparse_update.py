"""Sparse updates beside full ones: bytes of all that is not weights, and seconds of a step, at batch 1.

    python benchmarks/sparse_update.py --out results            # three networks, bytes and seconds
    python benchmarks/sparse_update.py --turns 0                # bytes alone, which other load does not change
    python benchmarks/sparse_update.py --models mcunet --scheme FILE    # a scheme that a search has found and saved

A process per configuration: plain PyTorch training everything, and a plain loop over the adapted model (plain PyTorch
itself has no slices of weights that train), each with its optimizer's update after the backward pass; torch_odt with
the update there, inside the schedule, and so with frozen weights in 8 bits; and the same selection in int8 with QAS
(whole layers in place of shares of their channels), as a loop that updates in the backward pass and as a planned step.
BatchNorm has its running statistics everywhere, and is a part of frozen convolutions in torch_odt's.

| bytes | what is in them |
|---|---|
| counted | tensors and scratch memory of torch's operators at their most in a step, as the allocator counts them |
| process | all that the process holds at its most in a step and the kernel cannot take back, as the kernel counts it |
| objects | of these, what is there before the first operator runs: the plan, its graph, Python's objects |
| others | of these, the rest: kernels that oneDNN compiles and keeps, what malloc keeps of what was freed |
| weights | parameters and buffers of the model, which are in none of the others |
| less, all | plain full's counted bytes and weights over these |

All are above the level with model and batch in memory, behind steps of a tiny network in the same way, which import
what is imported. Seconds are those of turns in one process with plain full steps: a ratio is of two neighbouring
turns, the reported one their median. Where other programs run, the processor's seconds say more than the clock's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from process_memory import anonymous, reset_high_water_mark, settle, status
from torch import Tensor, nn

import torch_odt as odt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

FULL, PLAIN_SPARSE = "plain full", "plain sparse"
IN_SCHEDULE, IN_8_BITS = "sparse, update in schedule", "sparse, update in schedule, 8 bits"
INT8_LOOP, INT8_STEP = "int8 with QAS, sparse, loop", "int8 with QAS, sparse, update in schedule"
IN_INT8 = (INT8_LOOP, INT8_STEP)
CONFIGURATIONS = (FULL, PLAIN_SPARSE, "sparse", IN_SCHEDULE, IN_8_BITS, *IN_INT8)
MODELS = ("mobilenet_v2", "proxyless", "mcunet")
CLASSES, IMAGE_SIZE = 10, 128
WARM_UP_STEPS, MEMORY_STEPS = 2, 3
ROOMY = odt.Budget("256MiB", of="training")
# What is promised: bytes of a full update over those of a sparse one, and seconds.
TIMES_LESS = {"sparse": 8.0, IN_SCHEDULE: 12.0, IN_8_BITS: 12.0}
INT8_TIMES_LESS = 20.0  # weights included
TIMES_FASTER = 3.0
# As published for networks of this kind: the last 22 biases, six pointwise convolutions, most of them whole.
RATIOS = (1.0, 1.0, 1.0, 1.0, 1 / 8, 1 / 4)
BIASES = 22


def main() -> None:
    options = _parser().parse_args()
    if options.worker:
        print(json.dumps(_run(options)))
        return
    if options.scheme is not None and len(options.models) != 1:
        raise SystemExit("--scheme is of one network: name it by --models")
    load = os.getloadavg()[0]
    found = {model: {name: _in_process(model, name, options) for name in CONFIGURATIONS} for model in options.models}
    for model, rows in found.items():
        _print_table(model, rows)
    missed = [text for model, rows in found.items() for text in _missed(model, rows)]
    print("\n".join(missed) if missed else "all targets are met")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        described = {
            "torch": torch.__version__,
            "threads": options.threads,
            "optimizer": f"SGD {options.momentum}",
            "load_average": [load, os.getloadavg()[0]],
        }
        if options.scheme is not None:
            described["scheme"] = str(odt.adapt.Scheme.load(options.scheme))
        name = "sparse_update" if options.scheme is None else f"sparse_update_{options.scheme.stem}"
        name += f"_momentum_{options.momentum:g}" if options.momentum else ""
        (options.out / f"{name}.json").write_text(json.dumps(described | {"models": found}, indent=1) + "\n")
    sys.exit(bool(missed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--turns", type=int, default=9, help="pairs of turns of --steps timed steps; 0 times nothing")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--scheme", type=Path, help="a scheme's file, in place of the published scheme's kind")
    parser.add_argument("--out", type=Path, help="folder for sparse_update.json, or sparse_update_SCHEME.json")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "CONFIGURATION"), help=argparse.SUPPRESS)
    return parser


def _in_process(model: str, configuration: str, options: argparse.Namespace) -> dict[str, Any]:
    passed = [f"--{name}={getattr(options, name)}" for name in ("turns", "steps", "threads", "momentum")]
    passed += [] if options.scheme is None else [f"--scheme={options.scheme}"]
    command = [sys.executable, __file__, *passed, "--worker", model, configuration]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found


def _run(options: argparse.Namespace) -> dict[str, Any]:
    """One configuration in this process."""
    name, configuration = options.worker
    torch.set_num_threads(options.threads)
    odt.memory.install()
    _step_of_a_tiny_network()
    torch.manual_seed(0)
    model = make_model(name).to(memory_format=torch.channels_last).train()
    images = torch.randn(1, 3, IMAGE_SIZE, IMAGE_SIZE)
    batch = (images.contiguous(memory_format=torch.channels_last), torch.randint(CLASSES, (1,)))
    del images
    parameters = _select(model, configuration, batch[0], options.scheme)
    settle()
    level, counted_level = anonymous(), odt.memory.stats().allocated_bytes
    ready: list[int] = []
    step = _make_step(model, parameters, configuration, options.momentum, lambda: ready.append(anonymous()))
    for _ in range(WARM_UP_STEPS):
        step(*batch)
    settle()
    reset_high_water_mark()
    odt.memory.reset_peak()
    for _ in range(MEMORY_STEPS):
        step(*batch)
    after = status()
    # What takes the gradient of a weight in int8 is large by its shape alone.
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    weights = {storage.data_ptr(): storage.nbytes() for storage in storages}
    found = {
        "counted_bytes": odt.memory.stats().peak_bytes - counted_level,
        "process_bytes": after["VmHWM"] - after["RssFile"] - level,
        "objects_bytes": ready[0] - level if ready else 0,
        "weights_bytes": sum(weights.values()),
        "level_bytes": level,
        "trained_parameters": sum(parameter.numel() for parameter in parameters),
    }
    return found | (_seconds(step, name, batch, options) if options.turns else {})


def _step_of_a_tiny_network() -> None:
    """Of both ways, so that what is imported and touched once is there before the level is taken."""
    import torchvision  # noqa: F401

    net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU6(), nn.Flatten(), nn.Linear(288, 2))
    batch = torch.ones(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    nn.functional.cross_entropy(net(batch[0]), batch[1]).backward()
    optimizer.step()
    odt.TrainStep(net, nn.functional.cross_entropy, optimizer, budget=ROOMY, cache=False)(*batch)


def _seconds(
    step: Callable[..., Any], name: str, batch: tuple[Tensor, Tensor], options: argparse.Namespace
) -> dict[str, Any]:
    """Of turns beside plain full steps."""
    model = make_model(name).to(memory_format=torch.channels_last).train()
    full = _make_step(model, _select(model, FULL, batch[0], None), FULL, options.momentum)
    clocks = {"wall": time.perf_counter, "processor": time.process_time}
    turns: dict[str, list[tuple[float, float]]] = {clock: [] for clock in clocks}
    for _ in range(1 + options.turns):
        one, other = (_turn(each, batch, options.steps, clocks) for each in (full, step))
        for clock in clocks:
            turns[clock].append((one[clock], other[clock]))
    found: dict[str, Any] = {}
    for clock, pairs in turns.items():
        ratios = [theirs / ours for theirs, ours in pairs[1:]]
        found[f"{clock}_seconds"] = statistics.median(ours for _, ours in pairs[1:])
        found[f"{clock}_times_faster"] = [min(ratios), statistics.median(ratios), max(ratios)]
    return found


def _turn(
    step: Callable[..., Any], batch: tuple[Tensor, Tensor], steps: int, clocks: dict[str, Callable[[], float]]
) -> dict[str, float]:
    start = {name: clock() for name, clock in clocks.items()}
    for _ in range(steps):
        step(*batch)
    return {name: (clock() - start[name]) / steps for name, clock in clocks.items()}


def make_model(name: str) -> nn.Module:
    """A network with a classifier for few classes."""
    if name == "mcunet":
        from recipes.common.mcunet import MCUNetLike

        return MCUNetLike(CLASSES)
    if name == "proxyless":
        from recipes.common.proxyless_mobile import ProxylessMobile

        return ProxylessMobile(CLASSES, width=0.3)
    from torchvision.models import mobilenet_v2

    return mobilenet_v2(width_mult=0.35, num_classes=CLASSES)


def scheme_of(model: nn.Module, file: Path | None) -> odt.adapt.Scheme:
    """From a file; by default the published scheme's kind: six expansions among the last biases' layers."""
    if file is not None:
        return odt.adapt.Scheme.load(file)
    expansions = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.out_channels > module.in_channels
    ]
    expansions = [name for name in expansions if "conv" in name][-len(RATIOS) :]
    return odt.adapt.Scheme.for_model(model, biases=BIASES, weights=dict(zip(expansions, RATIOS, strict=True)))


def _select(model: nn.Module, configuration: str, images: Tensor, scheme: Path | None) -> list[nn.Parameter]:
    """Adapt the model as the configuration says; what trains."""
    if configuration in IN_INT8:
        return _select_in_int8(model, images, scheme_of(model, scheme))
    if configuration == FULL:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.train = lambda mode=True, module=module: module  # type: ignore[method-assign,assignment]
                module.training = False
        return list(model.parameters())
    bits = 8 if configuration == IN_8_BITS else 32
    # A plain loop would keep the input of each convolution whose bias trains.
    norm: Literal["frozen", "folded"] = "frozen" if configuration == PLAIN_SPARSE else "folded"
    return odt.adapt.sparse_update_(model, scheme_of(model, scheme), norm=norm, weight_bits=bits).parameters()


def _select_in_int8(model: nn.Module, images: Tensor, scheme: odt.adapt.Scheme) -> list[nn.Parameter]:
    scheme.check(model)
    layers = odt.quant.convert_(model.eval(), [images]).layers
    model.train().requires_grad_(False)
    for name in layers[len(layers) - scheme.biases :]:
        model.get_submodule(name).bias.requires_grad_(True)
    for name in scheme.weights:
        model.get_submodule(name).weight_slot.requires_grad_(True)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.requires_grad_(True)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _make_step(
    model: nn.Module,
    parameters: list[nn.Parameter],
    configuration: str,
    momentum: float,
    note_ready: Callable[[], None] | None = None,
) -> Callable[[Tensor, Tensor], Any]:
    """A step; `note_ready` is called when its first operator is about to run, where it is planned."""
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=momentum)
    loss_fn = nn.CrossEntropyLoss()
    if configuration in IN_INT8:
        odt.quant.train_int8_(model, optimizer, in_backward=configuration == INT8_LOOP)
    if configuration.startswith("sparse") or configuration == INT8_STEP:
        later = () if "schedule" in configuration else ("update_in_backward",)
        planned = odt.TrainStep(model, loss_fn, optimizer, budget=ROOMY, disable_rewrites=later)
        return planned if note_ready is None else _noted(planned, note_ready)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _noted(step: odt.TrainStep, note_ready: Callable[[], None]) -> odt.TrainStep:
    """The step, with a look at its first call at what is held once it is planned."""
    from torch_odt.execute.prepared import Prepared

    run = Prepared.run

    def run_noted(*args: Any, **kwargs: Any) -> Any:
        Prepared.run = run  # type: ignore[method-assign]
        settle()
        note_ready()
        return run(*args, **kwargs)

    Prepared.run = run_noted  # type: ignore[method-assign,assignment]
    return step


def _print_table(model: str, rows: dict[str, dict[str, Any]]) -> None:
    full = rows[FULL]
    print(f"\n{model}, batch 1, {IMAGE_SIZE}x{IMAGE_SIZE}; KiB")
    heads = (
        "counted",
        "less",
        "process",
        "less",
        "objects",
        "others",
        "weights",
        "less, all",
        "ms",
        "CPU ms",
        "faster",
        "CPU",
    )
    print(f"{'':42}" + "".join(f"{head:>9}" for head in heads))
    for name, row in rows.items():
        others = row["process_bytes"] - row["objects_bytes"] - row["counted_bytes"]
        cells = []
        for kind in ("counted", "process"):
            nbytes = row[f"{kind}_bytes"]
            cells += [f"{nbytes / 1024:9.0f}", f"{full[f'{kind}_bytes'] / max(1, nbytes):8.1f}x"]
        cells += [f"{nbytes / 1024:9.0f}" for nbytes in (row["objects_bytes"], others, row["weights_bytes"])]
        cells.append(f"{with_weights(full) / with_weights(row):9.1f}x")
        if "wall_seconds" in row:
            cells += [f"{row[f'{clock}_seconds'] * 1e3:9.2f}" for clock in ("wall", "processor")]
            cells += [f"{row[f'{clock}_times_faster'][1]:8.2f}x" for clock in ("wall", "processor")]
        print(f"{name:42}" + "".join(cells))


def with_weights(row: dict[str, Any]) -> int:
    """Counted bytes and weights."""
    return int(row["counted_bytes"] + row["weights_bytes"])


def _missed(model: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    full, found = rows[FULL], []
    for name, wanted in TIMES_LESS.items():
        for kind in ("counted", "process"):
            less = full[f"{kind}_bytes"] / rows[name][f"{kind}_bytes"]
            if less < wanted:
                found.append(f"{model}: {name} takes {less:.1f}x less ({kind}), not {wanted:.0f}x")
    for name in IN_INT8:
        less = with_weights(full) / with_weights(rows[name])
        if less < INT8_TIMES_LESS:
            found.append(f"{model}: {name} takes {less:.1f}x less, weights included, not {INT8_TIMES_LESS:.0f}x")
    for name in TIMES_LESS:
        faster = rows[name].get("processor_times_faster")
        if faster is not None and faster[1] < TIMES_FASTER:
            found.append(f"{model}: a step of {name} is {faster[1]:.1f}x faster, not {TIMES_FASTER:.0f}x")
    return found


if __name__ == "__main__":
    main()

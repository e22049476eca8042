"""Sparse updates beside full ones: bytes of all that is not weights, and seconds of a step, at batch 1.

    python benchmarks/sparse_update.py --out results        # MobileNetV2-w0.35 and an MCUNet-like network

A process per configuration: plain PyTorch training everything and the same selection as the scheme, each with its
optimizer's update after the backward pass; torch_odt with the update there, and inside the schedule. BatchNorm has its
running statistics everywhere. The allocator counts all tensors and scratch memory of torch's operators; beside it
stands what the process holds (VmHWM), libraries' code and the plan included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from process_memory import reset_high_water_mark, settle, status
from torch import Tensor, nn

import torch_odt as odt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CONFIGURATIONS = ("plain full", "plain sparse", "sparse", "sparse, update in schedule")
MODELS = ("mobilenet_v2", "mcunet")
CLASSES, IMAGE_SIZE = 10, 128
WARM_UP_STEPS, MEMORY_STEPS = 2, 3
# What is promised: bytes of a full update over those of a sparse one, and seconds.
TIMES_LESS = {"sparse": 8.0, "sparse, update in schedule": 12.0}
TIMES_FASTER = 3.0
# As published for networks of this kind: the last 22 biases, six pointwise convolutions, most of them whole.
RATIOS = (1.0, 1.0, 1.0, 1.0, 1 / 8, 1 / 4)
BIASES = 22


def main() -> None:
    options = _parser().parse_args()
    if options.worker:
        print(json.dumps(_run(options)))
        return
    found = {model: {name: _in_process(model, name, options) for name in CONFIGURATIONS} for model in options.models}
    for model, rows in found.items():
        _print_table(model, rows)
    missed = [text for model, rows in found.items() for text in _missed(model, rows)]
    print("\n".join(missed) if missed else "all targets are met")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        described = {"torch": torch.__version__, "threads": options.threads, "optimizer": f"SGD {options.momentum}"}
        (options.out / "sparse_update.json").write_text(json.dumps(described | {"models": found}, indent=1) + "\n")
    sys.exit(bool(missed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--turns", type=int, default=7, help="turns of --steps timed steps; the median turn counts")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--out", type=Path, help="folder for sparse_update.json")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "CONFIGURATION"), help=argparse.SUPPRESS)
    return parser


def _in_process(model: str, configuration: str, options: argparse.Namespace) -> dict[str, Any]:
    passed = [f"--{name}={getattr(options, name)}" for name in ("turns", "steps", "threads", "momentum")]
    command = [sys.executable, __file__, *passed, "--worker", model, configuration]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found


def _run(options: argparse.Namespace) -> dict[str, Any]:
    """One configuration in this process."""
    name, configuration = options.worker
    torch.set_num_threads(options.threads)
    odt.memory.install()
    torch.manual_seed(0)
    model = make_model(name).to(memory_format=torch.channels_last).train()
    batch = (
        torch.randn(1, 3, IMAGE_SIZE, IMAGE_SIZE).contiguous(memory_format=torch.channels_last),
        torch.randint(CLASSES, (1,)),
    )
    parameters = _select(model, configuration)
    _touch_libraries()
    settle()
    level, counted_level = status(), odt.memory.stats().allocated_bytes
    step = _make_step(model, parameters, configuration, options.momentum)
    for _ in range(WARM_UP_STEPS):
        step(*batch)
    settle()
    reset_high_water_mark()
    odt.memory.reset_peak()
    for _ in range(MEMORY_STEPS):
        step(*batch)
    counted, resident = odt.memory.stats().peak_bytes - counted_level, status()["VmHWM"] - level["VmRSS"]
    turns = [_turn(step, batch, options.steps) for _ in range(options.turns)]
    return {
        "counted_bytes": counted,
        "resident_bytes": resident,
        "level_bytes": level["VmRSS"],
        "step_seconds": statistics.median(turns),
        "fastest_seconds": min(turns),
        "slowest_seconds": max(turns),
        "trained_parameters": sum(parameter.numel() for parameter in parameters),
    }


def _touch_libraries() -> None:
    """Trains a tiny network, so that the code of torch's libraries is resident before the level is taken."""
    import torchvision  # noqa: F401

    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    nn.functional.cross_entropy(net(torch.ones(2, 3, 8, 8)), torch.zeros(2, dtype=torch.long)).backward()
    optimizer.step()


def make_model(name: str) -> nn.Module:
    """A network with a classifier for few classes."""
    if name == "mcunet":
        from recipes.common.mcunet import MCUNetLike

        return MCUNetLike(CLASSES)
    from torchvision.models import mobilenet_v2

    return mobilenet_v2(width_mult=0.35, num_classes=CLASSES)


def scheme_of(model: nn.Module) -> odt.adapt.Scheme:
    """The published scheme's kind for this model: six of the expansions that are among the last biases' layers."""
    expansions = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.out_channels > module.in_channels
    ]
    expansions = [name for name in expansions if "conv" in name][-len(RATIOS) :]
    return odt.adapt.Scheme.for_model(model, biases=BIASES, weights=dict(zip(expansions, RATIOS, strict=True)))


def _select(model: nn.Module, configuration: str) -> list[nn.Parameter]:
    """Adapt the model as the configuration says; what trains."""
    if configuration == "plain full":
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.train = lambda mode=True, module=module: module  # type: ignore[method-assign,assignment]
                module.training = False
        return list(model.parameters())
    return odt.adapt.sparse_update_(model, scheme_of(model)).parameters()


def _make_step(
    model: nn.Module, parameters: list[nn.Parameter], configuration: str, momentum: float
) -> Callable[[Tensor, Tensor], Any]:
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=momentum)
    loss_fn = nn.CrossEntropyLoss()
    if configuration.startswith("sparse"):
        later = () if "schedule" in configuration else ("update_in_backward",)
        return odt.TrainStep(
            model,
            loss_fn,
            optimizer,
            budget=odt.Budget("256MiB", of="training"),
            disable_rewrites=later,
        )

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _turn(step: Callable[..., Any], batch: tuple[Tensor, Tensor], steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step(*batch)
    return (time.perf_counter() - start) / steps


def _print_table(model: str, rows: dict[str, dict[str, Any]]) -> None:
    full = rows["plain full"]
    print(f"\n{model}, batch 1, {IMAGE_SIZE}x{IMAGE_SIZE}")
    print(f"{'':28}{'counted KiB':>12}{'less':>8}{'process KiB':>13}{'less':>8}{'ms':>8}{'faster':>8}{'trained':>10}")
    for name, row in rows.items():
        less = full["counted_bytes"] / row["counted_bytes"]
        resident = full["resident_bytes"] / max(1, row["resident_bytes"])
        faster = full["step_seconds"] / row["step_seconds"]
        print(
            f"{name:28}{row['counted_bytes'] / 1024:12.0f}{less:7.1f}x{row['resident_bytes'] / 1024:13.0f}"
            f"{resident:7.1f}x{row['step_seconds'] * 1e3:8.2f}{faster:7.1f}x{row['trained_parameters']:10,}"
        )


def _missed(model: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    full, found = rows["plain full"], []
    for name, wanted in TIMES_LESS.items():
        less = full["counted_bytes"] / rows[name]["counted_bytes"]
        if less < wanted:
            found.append(f"{model}: {name} takes {less:.1f}x less, not {wanted:.0f}x")
        faster = full["step_seconds"] / rows[name]["step_seconds"]
        if faster < TIMES_FASTER:
            found.append(f"{model}: a step of {name} is {faster:.1f}x faster, not {TIMES_FASTER:.0f}x")
    return found


if __name__ == "__main__":
    main()

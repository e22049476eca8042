"""What training in blocks (FeDepth) takes of the process, beside its largest block alone and the whole model.

    python benchmarks/blockwise_memory.py --out results

MobileNetV2, batch 8, 224x224, SGD with momentum, no recomputation. Each row is a process of its own: all blocks in
turn, each block by itself, and the whole model at once, by torch_odt and by plain PyTorch. Bytes are the most that a
process holds above its level before there was a model, with everything counted. `blocks in turn` is to take at most
1.15 times what the largest of its blocks does; the command ends with code 1 where it takes more.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from frontier import describe_machine
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.models import mobilenet_v2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_odt as odt
from recipes.common.process_bytes import ROOMY, Training, TrainingBytes, training_bytes

CLASSES = 10
PLANNER = "keep-all"
OVER_LARGEST = 1.15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--out", type=Path, help="folder for the results")
    options = parser.parse_args()
    sizes = (options.batch, options.size)
    makers: dict[str, tuple[Any, ...]] = {
        "plain PyTorch, the whole model": (whole, "plain", *sizes),
        "the whole model": (whole, "torch_odt", *sizes),
        "blocks in turn": (in_blocks, options.blocks, None, *sizes),
    }
    makers |= {
        f"block {number + 1} alone": (in_blocks, options.blocks, number, *sizes) for number in range(options.blocks)
    }
    rows: dict[str, TrainingBytes] = {}
    for name, (make, *arguments) in makers.items():
        rows[name] = training_bytes(make, *arguments)
        print(f"{name:32}{rows[name].process_bytes / 2**20:8.1f} MiB", flush=True)
    largest = max(row.process_bytes for name, row in rows.items() if name.endswith("alone"))
    ratio = rows["blocks in turn"].process_bytes / largest
    print(f"in turn, blocks take {ratio:.2f} times what the largest does; {OVER_LARGEST} are allowed")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        told = {name: asdict(row) for name, row in rows.items()}
        result = {"machine": describe_machine(options), "rows": told, "over_largest": ratio}
        (options.out / "blockwise_memory.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0 if ratio <= OVER_LARGEST else 1


def whole(way: str, batch: int, size: int) -> Training:
    """Steps of the whole model."""
    model, optimizer, (x, y) = _made(batch, size)
    if way == "torch_odt":
        return Training(
            odt.TrainStep(model, cross_entropy, optimizer, budget=ROOMY, planner=PLANNER), optimizer, (x, y)
        )

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return Training(step, optimizer, (x, y))


def in_blocks(blocks: int, only: int | None, batch: int, size: int) -> Training:
    """Steps of all blocks in turn, or of one; what a block is given is computed each time."""
    model, optimizer, (x, y) = _made(batch, size)
    make_optimizer = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    cut = odt.adapt.blockwise(model, cross_entropy, (x, y), blocks=blocks, optimizer=make_optimizer, planner=PLANNER)
    stages = [stage for number, stage in enumerate(cut) if only in (None, number)]
    steps = [
        odt.TrainStep(stage.module, cross_entropy, make_optimizer(stage.parameters()), budget=ROOMY, planner=PLANNER)
        for stage in stages
    ]

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for stage, of_block in zip(stages, steps, strict=True):
            of_block(stage.inputs(x), y)
            of_block.release()

    return Training(step, optimizer, (x, y))


def _made(batch: int, size: int) -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    model = mobilenet_v2(num_classes=CLASSES).to(memory_format=torch.channels_last).train()
    x = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return model, optimizer, (x, torch.randint(CLASSES, (batch,)))


if __name__ == "__main__":
    sys.exit(main())

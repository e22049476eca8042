"""Two processes of one control group, for `test_balloon.py`: one trains, one takes memory and gives it back.

The trainer prints a line of JSON at its level, one after each step and one at the end. The balloon reads how many bytes
to hold, a line each; it takes no more at once than the group has to spare.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import select
import sys
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20
CHUNK_BYTES = 4 * MIB
# What the balloon leaves of the group, and what the trainer does.
SPARE_BYTES = 16 * MIB
RESERVE_BYTES = 48 * MIB
BATCH_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", type=Path)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--budget", help="fixed, above the level; otherwise what the group has to spare")
    parser.add_argument("--cache", type=Path)
    options = parser.parse_args()
    if options.group is not None:
        hold(options.group)
    else:
        train(options)


def hold(group: Path) -> None:
    """The balloon."""
    from torch_odt.memory._control_group import control_groups

    held: list[mmap.mmap] = []
    target = 0
    say(ready=True)
    while True:
        if select.select([sys.stdin], [], [], 0.005)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            target = int(line)
        while len(held) * CHUNK_BYTES > target:
            held.pop().close()
        (level,) = [level for found in control_groups() for level in found.levels if level.folder == group]
        if (len(held) + 1) * CHUNK_BYTES <= target and (level.headroom_bytes or 0) > SPARE_BYTES + CHUNK_BYTES:
            chunk = mmap.mmap(-1, CHUNK_BYTES)
            chunk.write(b"x" * CHUNK_BYTES)
            held.append(chunk)


def train(options: argparse.Namespace) -> None:
    import torch
    import torchvision

    import torch_odt as odt
    from torch_odt.capture.rewrite import inexact_rewrites
    from torch_odt.runtime import ControlGroupHeadroom, Controller

    torch.manual_seed(0)
    model = torchvision.models.mobilenet_v2(weights=None, num_classes=10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    say(level_bytes=odt.memory.process_bytes())
    sys.stdin.readline()
    controller = Controller(ControlGroupHeadroom(reserve=RESERVE_BYTES), grow_after_seconds=1.0)
    step = odt.TrainStep(
        model,
        torch.nn.functional.cross_entropy,
        optimizer,
        budget=odt.Budget(options.budget, of="training") if options.budget else controller,
        disable_rewrites=inexact_rewrites(),
        micro_batch=BATCH_SIZE,
        cache=options.cache,
    )
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    for _ in range(options.steps):
        images = torch.randn(BATCH_SIZE, 3, options.image_size, options.image_size, generator=generator)
        labels = torch.randint(10, (BATCH_SIZE,), generator=generator)
        begin = time.perf_counter()
        try:
            loss = step(images.contiguous(memory_format=torch.channels_last), labels).item()
        except odt.InfeasibleBudget as refusal:
            say(smallest_bytes=refusal.smallest_feasible_bytes)
            return
        say(loss=loss, seconds=time.perf_counter() - begin, plan_bytes=step.plan.peak_bytes)
    total = sum(parameter.double().abs().sum().item() for parameter in model.parameters())
    say(decisions=[decision.to_dict() for decision in controller.decisions], parameters=total)


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()

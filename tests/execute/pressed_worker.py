"""The two processes of `test_pressed.py`: one trains, one takes memory and gives it back.

The trainer makes a step for each line that it reads, and prints the loss and what its plan takes; at the end it prints
what was decided. The neighbour reads how many bytes to hold; it takes no more at once than their group has to spare.
"""

from __future__ import annotations

import json
import mmap
import select
import sys
from pathlib import Path
from typing import Any

CHUNK_BYTES = 4 << 20
SPARE_BYTES = 16 << 20


def hold(group: Path) -> None:
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
        is_free = (level.headroom_bytes or 0) > SPARE_BYTES + CHUNK_BYTES
        if is_free and (len(held) + 1) * CHUNK_BYTES <= target:
            held.append(mmap.mmap(-1, CHUNK_BYTES))
            held[-1].write(b"x" * CHUNK_BYTES)


def train(steps: int) -> None:
    import torch
    import torch.nn.functional as F
    from scripted_budgets import BATCH, make_batches, make_net

    import torch_odt as odt
    from torch_odt.capture.rewrite import inexact_rewrites
    from torch_odt.runtime import ControlGroupHeadroom, Controller, ShareOfAvailable, Smallest

    # Of the two, the system is to end this one.
    Path("/proc/self/oom_score_adj").write_text("1000")
    torch.set_num_threads(1)
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    controller = Controller(Smallest(ControlGroupHeadroom(), ShareOfAvailable()), grow_after_seconds=0.5)
    step = odt.TrainStep(
        model, F.cross_entropy, optimizer, budget=controller, micro_batch=BATCH, disable_rewrites=inexact_rewrites()
    )
    batches = make_batches(steps)
    say(ready=True)
    torch.manual_seed(3)
    for _ in range(steps):
        sys.stdin.readline()
        say(loss=step(*next(batches)).item(), plan_bytes=step.plan.peak_bytes)
    say(actions=[decision.action for decision in controller.decisions])


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(Path(sys.argv[2]))
    else:
        train(int(sys.argv[2]))

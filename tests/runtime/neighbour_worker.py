"""Training in the background, at first alone and then beside processes that compute on every core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import torch

from torch_odt.runtime import Background, BackgroundRun
from torch_odt.runtime.neighbours import Neighbours

QUIET_SECONDS, BESIDE_SECONDS = 8.0, 40.0


def train(background: BackgroundRun, seconds: float, *, until_choices: int | None = None) -> int:
    """Steps for so long, or until there have been so many choices; how many there have been."""
    factor = torch.ones(300, 300)
    end = time.monotonic() + seconds
    choices = background._chooser.choices
    while time.monotonic() < end and (until_choices is None or len(choices) < until_choices):
        background.before_step()
        for _ in range(10):
            torch.mm(factor, factor)
        background.after_step()
    return len(choices)


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    before = Neighbours()
    before.look()
    time.sleep(2.0)
    load = before.look()
    with Background(nice=0, scheduling="normal", idle_storage=False).applied() as background:
        alone = train(background, QUIET_SECONDS)
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
        try:
            beside = train(background, BESIDE_SECONDS, until_choices=alone + 1)
        finally:
            for process in busy:
                process.kill()
                process.wait()
    told = {"cores": cores, "others_cores": load.others_cores, "choices_before": alone, "choices_beside": beside}
    print(json.dumps(told))


if __name__ == "__main__":
    main()

"""One process of `test_real_limit.py`: trains MobileNetV2 for some steps, plainly or through torch_odt.

Everything is in memory and idle first; what the group holds then is the level that limits are reckoned from. One line
of JSON at the level, one after each step, one at the end; losses, parameters and buffers go to a file.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torchvision
from image_data import load_images, upscale
from torch import nn

BATCH_SIZE = 16


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    model = torchvision.models.mobilenet_v2(weights=None, num_classes=10).to(memory_format=torch.channels_last)
    images, labels = load_images(options.data_dir, BATCH_SIZE * options.steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    if options.budget:
        import torch_odt
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    say(torch=torch.__version__, anonymous_bytes=anonymous_bytes())
    wait_for_go()

    if options.budget:
        step = torch_odt.TrainStep(
            model,
            loss_fn,
            optimizer,
            budget=torch_odt.Budget(options.budget, of="training"),
            planner=options.planner,
            page_to=options.page_to,
            disable_rewrites=options.disable_rewrite,
            cache=False,
        )
    else:
        step = plain_step(model, loss_fn, optimizer)
    torch.manual_seed(1)
    highest = Highest()
    highest.start()
    losses = []
    for index in range(options.steps):
        rows = slice(index * BATCH_SIZE, (index + 1) * BATCH_SIZE)
        batch = upscale(images[rows]).to(memory_format=torch.channels_last)
        losses.append(float(step(batch, labels[rows])))
        say(loss=losses[-1])
    say(highest_anonymous_bytes=highest.bytes)
    if options.page_to is not None:
        say(written_bytes=step._request.page_file.pager.stats()["written_bytes"])
    save(options.out, model, losses)


def plain_step(
    model: nn.Module, loss_fn: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def step(inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def save(path: Path, model: nn.Module, losses: list[float]) -> None:
    arrays = {f"losses/{index}": np.array(loss) for index, loss in enumerate(losses)}
    arrays |= {f"parameters/{name}": parameter.detach().numpy() for name, parameter in model.named_parameters()}
    arrays |= {f"buffers/{name}": buffer.numpy() for name, buffer in model.named_buffers()}
    np.savez(path, **arrays)


def anonymous_bytes() -> int:
    """RssAnon + RssShmem: what the kernel cannot take back."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(words[1]) * 1024 for words in lines if words[0] in ("RssAnon:", "RssShmem:"))


class Highest(threading.Thread):
    """Samples `anonymous_bytes` every five milliseconds and keeps the highest."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0

    def run(self) -> None:
        while True:
            self.bytes = max(self.bytes, anonymous_bytes())
            time.sleep(0.005)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--budget", type=int, default=0, help="bytes above the level; 0 for plain PyTorch")
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--page-to", type=Path, help="a folder")
    parser.add_argument("--disable-rewrite", action="append", default=[])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="of what training has changed")
    return parser.parse_args()


def say(**message: object) -> None:
    print(json.dumps(message), flush=True)


def wait_for_go() -> None:
    """The test takes the level now."""
    if not sys.stdin.readline():
        os._exit(3)


if __name__ == "__main__":
    main()

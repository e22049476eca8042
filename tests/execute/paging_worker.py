"""One process of `test_paging_killed.py`: trains by a plan that pages, from its last checkpoint on.

It may kill itself while a page is on its way: after so many transfers have begun, and a little later than that.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.execute.paging import Page

BUDGET = odt.Budget("1GiB", of="training")


class Deep(nn.Module):
    """Convolutions, BatchNorm and dropout; some megabytes for each."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index in range(depth):
            layers += [nn.Conv2d(3 if index == 0 else 16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
            layers += [nn.Dropout(0.1)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


def make_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer as they are before the first step, and random numbers from there on."""
    torch.manual_seed(5)
    model = Deep()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def make_batch(index: int) -> tuple[Tensor, Tensor]:
    """The batch of a step."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(16, 3, 64, 64, generator=generator), torch.randint(5, (16,), generator=generator)


def train(options: argparse.Namespace) -> None:
    """All steps that the checkpoint lacks, with a checkpoint after each."""
    model, optimizer = make_training()
    step = odt.TrainStep(model, F.cross_entropy, optimizer, plan=options.plan, budget=BUDGET, page_to=options.page_to)
    done = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint)
        done = saved["steps"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random_state"])
    for index in range(done, options.steps):
        step(*make_batch(index))
        assert step._request.page_file is not None
        assert step._request.page_file.pager.stats()["written_bytes"] > 0, "the plan does not page"
        save(options.checkpoint, index + 1, model, optimizer)


def save(path: Path, steps: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The checkpoint is the old or the new one, whenever the process ends."""
    state = {"steps": steps, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    unfinished = path.with_suffix(".unfinished")
    torch.save({**state, "random_state": torch.get_rng_state()}, unfinished)
    unfinished.replace(path)


def kill_at(transfer: int, seconds_later: float) -> None:
    """Kill this process so long after so many transfers have begun."""
    begun = 0

    def counting(begin: Callable[..., Any]) -> Callable[..., Any]:
        def begin_and_count(*args: Any, **options: Any) -> Any:
            nonlocal begun
            result = begin(*args, **options)
            begun += 1
            if begun == transfer:
                time.sleep(seconds_later)
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return begin_and_count

    Page.__init__ = counting(Page.__init__)  # type: ignore[method-assign]
    Page.bring_back = counting(Page.bring_back)  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--page-to", type=Path, required=True, help="a folder")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--kill-at", type=int, default=0, help="a transfer, counted from 1; 0 for none")
    parser.add_argument("--kill-later", type=float, default=0.0, help="seconds after that")
    options = parser.parse_args()
    if options.kill_at:
        kill_at(options.kill_at, options.kill_later)
    train(options)


if __name__ == "__main__":
    main()

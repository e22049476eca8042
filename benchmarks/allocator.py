"""What counting costs: plain training of MobileNetV2 with and without the tracking allocator, step by step in turn.

    python benchmarks/allocator.py

Both sides run in one process, a step of each in turn, so that what disturbs the machine disturbs both. Steps vary by
more than counting adds to them, so the addition is also measured by itself: seconds of one allocation, times the
allocations of a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from workloads import make_workload

from torch_odt import memory

MANY = 20_000


def main() -> None:
    options = parse_options()
    workload = make_workload("mobilenet_v2", 16, image_size=options.image_size, channels_last=True)
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(workload.batches[0]).backward()
        optimizer.step()

    for _ in range(2):
        step()
    allocations = count_allocations(step)
    pairs = [timed_pair(step) for _ in range(options.pairs)]
    plain = statistics.median(pair[0] for pair in pairs)
    ratios = sorted(with_counts / without for without, with_counts in pairs)
    each = statistics.median(
        with_counts - without for without, with_counts in (timed_pair(allocate) for _ in range(21))
    )
    each /= MANY
    print(f"a step: {plain:.3f} s, {allocations} allocations")
    low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
    print(
        f"counted over plain, {len(pairs)} pairs: {statistics.median(ratios):.4f} (half of them {low:.4f}..{high:.4f})"
    )
    print(f"one allocation: {each * 1e9:.0f} ns more, {each * allocations / plain:.3%} of a step")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--image-size", type=int, default=224)
    return parser.parse_args()


def count_allocations(step: Callable[[], None]) -> int:
    memory.install()
    before = memory.stats().allocation_count or 0
    step()
    count = (memory.stats().allocation_count or 0) - before
    memory.uninstall()
    return count


def timed_pair(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds without and with the tracking allocator."""
    without = timed(run)
    memory.install()
    with_counts = timed(run)
    memory.uninstall()
    return without, with_counts


def timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def allocate() -> None:
    """Allocates and frees a small tensor many times."""
    empty = torch.empty
    for _ in range(MANY):
        empty(64)


if __name__ == "__main__":
    main()

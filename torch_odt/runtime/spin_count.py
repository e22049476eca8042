"""How long OpenMP's threads should spin on this machine: tried in child processes, once, and remembered.

A quiet step is fastest where threads spin at each barrier until the last one comes; beside other programs each spin
takes the time of the one that is waited for. So the fewest spins are chosen with which a quiet step is nearly as fast
as with any.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

from torch_odt.cache import Cache, CacheOption
from torch_odt.capture.machine import machine_name

COUNTS = (0, 1_000, 10_000, 30_000, 100_000)
_ROUNDS = 3
_AS_FAST = 1.03
_TIMEOUT_SECONDS = 120.0
# Where one round takes so long, it has to do.
_LONG_SECONDS = 40.0
# Many short operators on all cores, as in a step of a small network: what is waited for shows in its time.
_STEPS = """
import time, torch
from torch import nn
layers = []
for _ in range(8):
    layers += [nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.Conv2d(32, 32, 1), nn.ReLU()]
net = nn.Sequential(*layers).to(memory_format=torch.channels_last)
x = torch.randn(4, 32, 24, 24).to(memory_format=torch.channels_last)
seconds = []
for _ in range(60):
    began = time.perf_counter()
    net(x).sum().backward()
    seconds.append(time.perf_counter() - began)
print(sorted(seconds[10:])[25])
"""


def explored_spin_count(
    *,
    measure: Callable[[int], float] | None = None,
    counts: tuple[int, ...] = COUNTS,
    cache: CacheOption = None,
) -> int:
    """The spin count for this machine; the first call takes some 20 to 60 seconds, more on a slow one, later ones none.

    Choose it where a device trains for long: `reexecute_with_wait_policy` otherwise takes a count that was good on the
    machines that we have tried. What else runs meanwhile disturbs the choice less than it seems: the counts take turns.

    Args:
        measure: seconds of a step with a count; None makes steps in child processes.
        counts: to choose from.
        cache: where the choice is remembered.

    Returns:
        A value for GOMP_SPINCOUNT.

    Raises:
        RuntimeError: a child process failed; the text says how.
    """
    kept = Cache.of_value(cache)
    key = f"spin count; {machine_name()}; {counts}"
    known = kept.load_profile(key).get("spin_count")
    if isinstance(known, int) and known in counts:
        return known
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    began = time.monotonic()
    for _ in range(_ROUNDS):
        for count in counts:
            seconds[count].append((measure or _step_seconds)(count))
        if time.monotonic() - began > _LONG_SECONDS:
            break
    chosen = fewest_that_are_fast({count: median(found) for count, found in seconds.items()})
    kept.save_profile(key, {"spin_count": chosen})
    return chosen


def fewest_that_are_fast(seconds: dict[int, float]) -> int:
    """The least count with which a step takes hardly longer than with the best one.

    Example:
        >>> fewest_that_are_fast({0: 0.20, 1000: 0.151, 100_000: 0.150})
        1000
    """
    best = min(seconds.values())
    return min(count for count, taken in seconds.items() if taken <= _AS_FAST * best)


def _step_seconds(count: int) -> float:
    """Of a step in a process of its own: the count is read when torch is loaded."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    try:
        outcome = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _STEPS],
            env=environment | {"GOMP_SPINCOUNT": str(count)},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"steps with GOMP_SPINCOUNT={count} took more than {_TIMEOUT_SECONDS:.0f} s") from error
    if outcome.returncode != 0:
        raise RuntimeError(f"steps with GOMP_SPINCOUNT={count} failed: {outcome.stderr.strip()[-500:]}")
    return float(outcome.stdout)

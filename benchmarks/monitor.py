"""What a reading of `odt.runtime.Monitor` takes of a processor, at its usual interval and at a short one.

    python benchmarks/monitor.py                   # target: less than 0.5 % of a core at one reading a second
    python benchmarks/monitor.py --readings 60

Between two readings a second apart the processor's caches forget, so that one takes longer there than in a loop; and
where control groups limit memory, the kernel adds up their counters first, which takes longer while others run.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import threading
import time

import torch_odt as odt
from torch_odt.runtime.monitor import INTERVAL_SECONDS

SHARE = 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readings", type=int, default=20)
    options = parser.parse_args()
    if options.readings < 1:
        parser.error("--readings is at least 1")
    print(f"{'interval':>10}{'least':>10}{'median':>10}{'most':>10}{'of a core':>12}")
    shares = [_share(interval_seconds, options.readings) for interval_seconds in (0.02, INTERVAL_SECONDS)]
    if (share := shares[-1]) >= SHARE:
        sys.exit(f"a reading a second takes {share:.2%} of a core, not less than {SHARE:.1%}")


def _share(interval_seconds: float, count: int) -> float:
    """Of a core, at one reading in each interval; printed with what a reading takes."""
    found = seconds_of_readings(interval_seconds, count)
    share = statistics.median(found) / interval_seconds
    cells = (min(found), statistics.median(found), max(found))
    print(f"{interval_seconds:8.2f} s" + "".join(f"{1e3 * each:7.2f} ms" for each in cells) + f"{share:11.2%}")
    return share


def seconds_of_readings(interval_seconds: float, count: int) -> list[float]:
    """What the monitor's thread takes of the processor from one reading to the next, the waking up included."""
    seconds: list[float] = []
    enough = threading.Event()

    def note(_: odt.runtime.Reading) -> None:
        if threading.current_thread() is not threading.main_thread():
            seconds.append(time.thread_time())
            if len(seconds) > count:
                enough.set()

    with odt.runtime.Monitor(interval_seconds, on_reading=note):
        if not enough.wait(10 + 2 * count * interval_seconds):
            sys.exit(f"{len(seconds)} readings of {count} came in time")
    return [later - earlier for earlier, later in itertools.pairwise(seconds)][:count]


if __name__ == "__main__":
    main()

"""One process of the benchmark: one configuration, memory first, then timed steps whenever it is asked.

It reads requests from stdin, one to a line ("steps N", "observe N", "finish"), and answers each with one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gradients import compare, write_reference
from peers import Configuration, Step, find_smallest, make_step
from process_memory import Sampler, anonymous, reset_high_water_mark, settle, status
from step_profile import attribute, observe
from workloads import Workload, make_workload

WARM_UP_STEPS = 2
MEMORY_STEPS = 3


def main() -> None:
    request = json.loads(sys.argv[1])
    configuration = Configuration(request["method"], request["value"])
    torch.set_num_threads(request["threads"])
    workload = make_workload(**_workload_options(request))
    if configuration.method == "float64":
        _answer(write_reference(workload, Path(request["gradients"])))
        return
    _touch_libraries()
    settle()
    if configuration.method == "find smallest":
        _answer({"smallest_feasible_bytes": find_smallest(workload, request)})
        return
    before = status()
    sampler = Sampler()
    sampler.start()
    step = make_step(configuration, workload, request)
    allocator_level = _allocator_level()
    memory, first_call_seconds = _measure_memory(step, workload, before, sampler)
    described = _describe_plan(step, allocator_level)
    _answer({"memory": memory, "first_call_seconds": first_call_seconds, "torch": torch.__version__, **described})
    _serve(step, workload)
    _answer({"highest_resident_bytes": status()["VmHWM"]} | _check(step, request, workload))


def _workload_options(request: dict[str, Any]) -> dict[str, Any]:
    data_dir = request.get("data_dir")
    extra = {"memory_efficient": True} if request["method"] == "memory_efficient=True" else {}
    return {
        "name": request["model"],
        "batch_size": request["batch_size"],
        "image_size": request["image_size"],
        "channels_last": request["channels_last"],
        "data_dir": Path(data_dir) if data_dir else None,
        **extra,
    }


def _touch_libraries() -> None:
    """Trains a tiny network, so that the code of torch's libraries is resident before the level is taken."""
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 2)
    )
    torch.nn.functional.cross_entropy(net(torch.ones(2, 3, 8, 8)), torch.zeros(2, dtype=torch.long)).backward()


def _measure_memory(
    step: Step, workload: Workload, before: dict[str, int], sampler: Sampler
) -> tuple[dict[str, Any], float]:
    start = time.perf_counter()
    step(workload.batches[0])
    first_call_seconds = time.perf_counter() - start
    for index in range(1, WARM_UP_STEPS):
        step(workload.batches[index % 2])
    highest_before = sampler.reset()
    resident_before = status()["VmHWM"]
    _reset_allocator_peak()
    reset_high_water_mark()
    for index in range(MEMORY_STEPS):
        step(workload.batches[index % 2])
    highest = sampler.finish()
    after = status()
    level_anonymous = before["RssAnon"] + before["RssShmem"]
    return {
        "level_bytes": before["VmRSS"],
        "level_anonymous_bytes": level_anonymous,
        "peak_bytes": after["VmHWM"] - before["VmRSS"],
        "peak_anonymous_bytes": highest - level_anonymous,
        "absolute_peak_bytes": after["VmHWM"],
        "highest_from_start_bytes": max(resident_before, after["VmHWM"]),
        "highest_anonymous_from_start_bytes": max(highest_before, highest),
        "between_steps_anonymous_bytes": anonymous() - level_anonymous,
    }, first_call_seconds


def _allocator_level() -> int:
    odt = sys.modules.get("torch_odt")
    return odt.memory.stats().allocated_bytes if odt is not None and odt.memory.is_tracking() else 0


def _reset_allocator_peak() -> None:
    odt = sys.modules.get("torch_odt")
    if odt is not None and odt.memory.is_tracking():
        odt.memory.reset_peak()


def _describe_plan(step: Step, allocator_level: int) -> dict[str, Any]:
    """What the plan says and what the allocator counted; nothing for the peers."""
    train_step = getattr(step, "train_step", None)
    if train_step is None:
        return {}
    from torch_odt import memory

    plan = train_step.plan
    tracking = memory.is_tracking()
    return {
        "plan": {
            "peak_bytes": plan.peak_bytes,
            "budget_bytes": plan.budget.total_bytes,
            "planner": plan.planner,
            "micro_batch": plan.micro_batch,
            "captured": plan.captured,
            "notes": [str(note) for note in plan.notes],
            "lines": {line.label: line.nbytes for line in plan.lines},
            "tensor_bytes": plan.tensor_peak_bytes,
            "counted_bytes": memory.stats().peak_bytes - allocator_level if tracking else None,
            "planning_seconds": plan.planning_seconds,
            "text": str(plan),
        },
        "allocator": str(memory.stats()) if tracking else "absent",
    }


def _serve(step: Step, workload: Workload) -> None:
    """Answers "steps N" with the seconds of each of N steps and "observe N" with their causes, until "finish"."""
    for line in sys.stdin:
        words = line.split()
        if words[0] == "finish":
            return
        if words[0] == "observe":
            attribution = attribute()
            causes = observe(step, workload.batches, int(words[1]), attribution)
            _answer({"causes": asdict(causes), "attribution": asdict(attribution)})
            continue
        seconds = []
        for index in range(int(words[1])):
            start = time.perf_counter()
            step(workload.batches[index % 2])
            seconds.append(time.perf_counter() - start)
        _answer({"seconds": seconds})


def _check(step: Step, request: dict[str, Any], workload: Workload) -> dict[str, Any]:
    """The gradients and buffers of a first step against the float64 reference."""
    fresh = make_workload(**_workload_options(request))
    with torch.no_grad():
        for name, tensor in workload.model.state_dict().items():
            tensor.copy_(fresh.model.state_dict()[name])
    return compare(step, workload, Path(request["gradients"]))


def _answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), file=_channel, flush=True)


if __name__ == "__main__":
    # What libraries print must not mix with the answers.
    _channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()

"""What two measurement papers found on phones and boards: is it so on this machine?

    python recipes/measure_findings.py                                   # measures what it needs, some minutes
    python recipes/measure_findings.py --record run.jsonl                # what `torch-odt measure` left; may be several
    python recipes/measure_findings.py --quick --keep run.jsonl          # smaller, and the record stays

Cai et al. is "Towards Ubiquitous Learning" (EMDL 2021); Chen et al. is "Exploring the
Capabilities of Mobile Devices in Supporting Deep Learning" (SEC 2019). Their findings are about other libraries and
other processors: one that is not confirmed is a result, not a failure. The recipe ends with code 1 where a record
lacks the cells that a finding is about.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

from torch_odt import cli
from torch_odt.measure.record import DEFAULT_OPTIMIZER, Cell, Machine, Record

SUITES = ("ubiquitous", "architectures")
CAI, CHEN, SURVEY = "Cai et al.", "Chen et al.", "the survey of on-device training"


@dataclass(frozen=True)
class Finding:
    """One finding of a paper, and what this machine says.

    Attributes:
        paper, claim: whose, and what.
        confirmed: None where the record does not tell.
        numbers: what was measured, in words.
    """

    paper: str
    claim: str
    confirmed: bool | None
    numbers: str


def look(cells: Sequence[Cell]) -> list[Finding]:
    """All findings, of steps with the usual optimizer on the processor."""
    usual = [c for c in cells if c.outcome == "ok" and c.device == "cpu" and c.optimizer == DEFAULT_OPTIMIZER]
    return [rule(usual) for rule in RULES]


def training_takes_longer_than_its_flops(cells: Sequence[Cell]) -> Finding:
    claim = "training takes more times inference's time than its floating-point operations (about 3): up to 17.8 times"
    pairs = [(t, i) for t, i in _training_and_inference(cells) if t.flops and i.flops]
    if not pairs:
        return _unknown(CAI, claim)
    times = [_seconds(t) / _seconds(i) for t, i in pairs]
    flops = [t.flops / i.flops for t, i in pairs]
    above = sum(time > flop for time, flop in zip(times, flops, strict=True))
    return Finding(CAI, claim, above > len(pairs) / 2, f"times {min(times):.1f} to {max(times):.1f}, operations "
                   f"{min(flops):.1f} to {max(flops):.1f}; above in {above} of {len(pairs)} cells")  # fmt: skip


def training_takes_far_more_memory(cells: Sequence[Cell]) -> Finding:
    claim = "training takes 4 to 103 times the memory of inference"
    ratios = {}
    for training, inference in _training_and_inference(cells):
        if (taken := _tensor_bytes(training)) and (least := _tensor_bytes(inference)):
            ratios[f"{training.model} at {training.batch_size}"] = taken / least
    if not ratios:
        return _unknown(SURVEY, claim)
    low, high = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    inside = sum(ratio >= 4 for ratio in ratios.values())
    numbers = f"{ratios[low]:.1f} ({low}) to {ratios[high]:.1f} ({high}); 4 or more in {inside} of {len(ratios)}"
    return Finding(SURVEY, claim, inside > len(ratios) / 2, numbers)


def small_batches_cost_more_for_each_sample(cells: Sequence[Cell]) -> Finding:
    claim = "a sample costs less in a larger batch"
    ratios = {}
    for group in _groups(_plain_training(cells), lambda c: (c.suite, c.model, c.threads, c.governor)):
        small, large = min(group, key=_batch), max(group, key=_batch)
        if small.batch_size < large.batch_size:
            name = f"{large.model} at {large.threads}"
            ratios[name] = (_seconds(small) / small.batch_size) / (_seconds(large) / large.batch_size)
    if not ratios:
        return _unknown(CAI, claim)
    texts = ", ".join(f"{model} {ratio:.1f}" for model, ratio in ratios.items())
    numbers = f"smallest batch's seconds for a sample in the largest's, by network and threads: {texts}"
    return Finding(CAI, claim, all(ratio > 1 for ratio in ratios.values()), numbers)


def more_threads_are_not_always_faster(cells: Sequence[Cell]) -> Finding:
    claim = "more threads are not always faster: LeNet's training is fastest with one, at some size of the batch"
    speedups = {}
    for group in _groups(_plain_training(cells), lambda c: (c.suite, c.model, c.batch_size, c.governor)):
        one, most = min(group, key=lambda c: c.threads), max(group, key=lambda c: c.threads)
        if one.threads < most.threads:
            speedups[f"{one.model} at {one.batch_size}"] = _seconds(one) / _seconds(most)
    of_lenet = [speedup for name, speedup in speedups.items() if name.startswith("lenet at")]
    if not of_lenet:
        return _unknown(CAI, claim)
    texts = ", ".join(f"{name} {speedup:.2f}" for name, speedup in speedups.items())
    return Finding(CAI, claim, any(speedup <= 1 for speedup in of_lenet), f"speedup by threads: {texts}")


def convolutions_are_far_slower(cells: Sequence[Cell]) -> Finding:
    claim = "networks of convolutions are two orders of magnitude slower than fully connected ones of the same size"
    ratios = [
        _seconds(convolution) / _seconds(connected)
        for convolution in _swept(cells, "convolution")
        for connected in _swept(cells, "fully connected")
        if _size(convolution) == _size(connected)
    ]
    if not ratios:
        return _unknown(CHEN, claim)
    return Finding(CHEN, claim, mean(ratios) >= 30, f"{mean(ratios):.0f} times in the mean, {min(ratios):.0f} to "
                   f"{max(ratios):.0f}; 30 counts as confirmed")  # fmt: skip


def connected_layers_are_sensitive_to_width(cells: Sequence[Cell]) -> Finding:
    claim = "fully connected networks are more sensitive to width than to depth"
    return _sensitivity(cells, "fully connected", claim, lambda width, depth: width > depth)


def convolutions_are_sensitive_to_depth(cells: Sequence[Cell]) -> Finding:
    claim = "networks of convolutions are more sensitive to depth than to width"
    return _sensitivity(cells, "convolution", claim, lambda width, depth: depth > width)


def separable_convolutions_are_faster(cells: Sequence[Cell]) -> Finding:
    claim = "a depthwise-separable convolution trains faster than a standard one (there: in a third of the time)"
    pairs = {
        int(separable.factors["width"]): _seconds(separable) / _seconds(standard)
        for separable in _swept(cells, "separable")
        for standard in _swept(cells, "convolution")
        if _size(separable) == _size(standard)
    }
    if not pairs:
        return _unknown(CHEN, claim)
    texts = ", ".join(f"{ratio:.2f} at width {width}" for width, ratio in pairs.items())
    return Finding(CHEN, claim, pairs[max(pairs)] < 1, f"share of the standard one's time: {texts}")


def gradients_dominate_the_backward_pass(cells: Sequence[Cell]) -> Finding:
    claim = "convolutions' gradients are most of the backward pass and of the step (there: 91 % and 65 %)"
    deep = [cell for cell in _swept(cells, "convolution") if int(cell.factors["depth"]) > 1 and cell.operators]
    if not deep:
        return _unknown(CHEN, claim)
    of_backward, of_step = [], []
    for cell in deep:
        gradients = sum(row.seconds for row in cell.operators if row.op == "convolution_backward")
        of_backward.append(gradients / sum(row.seconds for row in cell.operators if row.direction == "backward"))
        of_step.append(gradients / sum(row.seconds for row in cell.operators))
    shares = mean(of_backward), mean(of_step)
    return Finding(CHEN, claim, min(shares) > 0.5, f"{shares[0]:.0%} of the backward pass and {shares[1]:.0%} of the "
                   f"step, in the mean of {len(deep)} networks")  # fmt: skip


def training_slows_other_programs(cells: Sequence[Cell]) -> Finding:
    claim = "training in the background takes up to 30 % of another program's speed"
    found = {(str(c.factors["training"]), c.engine): c.results for c in cells if c.experiment == "neighbour"}
    alone = found.pop(("none", "torch"), None)
    if alone is None or not {("foreground", "torch"), ("background", "torch")} <= found.keys():
        return _unknown(CHEN, claim)
    speed, p50 = "processor_operations_per_second", "p50_seconds"
    lost = {which: 1 - results[speed] / alone[speed] for which, results in found.items()}
    texts = ", ".join(
        f"{how}{'' if engine == 'torch' else f' by {engine}'}: {share:.0%} slower, "
        f"requests {found[how, engine][p50] / alone[p50]:.1f} times as long"
        for (how, engine), share in lost.items()
    )
    return Finding(CHEN, claim, lost["background", "torch"] <= 0.3, texts)


def operators_add_up(cells: Sequence[Cell]) -> Finding:
    claim = "operators and what is outside of them add up to the same steps by the clock, within 5 % (a check)"
    profiled = [cell for cell in cells if cell.operators and cell.profiled_seconds and cell.unprofiled_seconds]
    if not profiled:
        return _unknown("check", claim)
    sums = [sum(row.seconds for row in cell.operators) for cell in profiled]
    apart = [abs(total / (cell.profiled_seconds or total) - 1) for total, cell in zip(sums, profiled, strict=True)]
    longer = [total / (cell.unprofiled_seconds or total) - 1 for total, cell in zip(sums, profiled, strict=True)]
    return Finding("check", claim, max(apart) <= 0.05, f"{max(apart):.1%} apart at most in {len(profiled)} cells; "
                   f"to count operators makes a step {median(longer):.1%} longer in the median")  # fmt: skip


RULES: Sequence[Callable[[Sequence[Cell]], Finding]] = (
    training_takes_longer_than_its_flops,
    training_takes_far_more_memory,
    small_batches_cost_more_for_each_sample,
    more_threads_are_not_always_faster,
    convolutions_are_far_slower,
    connected_layers_are_sensitive_to_width,
    convolutions_are_sensitive_to_depth,
    separable_convolutions_are_faster,
    gradients_dominate_the_backward_pass,
    training_slows_other_programs,
    operators_add_up,
)


def _sensitivity(cells: Sequence[Cell], layer: str, claim: str, is_so: Callable[[float, float], bool]) -> Finding:
    """How much longer a step takes when the width grows at the least depth, and the depth at the least width."""
    swept = {_size(cell): _seconds(cell) for cell in _swept(cells, layer)}
    widths, depths = sorted({width for width, _ in swept}), sorted({depth for _, depth in swept})
    if len(widths) < 2 or len(depths) < 2:
        return _unknown(CHEN, claim)
    corners = [(widths[0], depths[0]), (widths[-1], depths[0]), (widths[0], depths[-1])]
    if not all(corner in swept for corner in corners):
        return _unknown(CHEN, claim)
    wide, deep = swept[corners[1]] / swept[corners[0]], swept[corners[2]] / swept[corners[0]]
    # The sides of the sweep grow by different factors: what counts is what a doubling costs.
    for_width = wide ** (1 / _doublings(widths))
    for_depth = deep ** (1 / _doublings(depths))
    numbers = (
        f"a doubling takes {for_width:.2f} times the time for the width ({widths[0]} to {widths[-1]}), "
        f"{for_depth:.2f} for the depth ({depths[0]} to {depths[-1]})"
    )
    return Finding(CHEN, claim, is_so(for_width, for_depth), numbers)


def _doublings(sizes: Sequence[int]) -> int:
    return (sizes[-1] // sizes[0]).bit_length() - 1


def _plain_training(cells: Sequence[Cell]) -> list[Cell]:
    return [
        c for c in cells if c.experiment == "step" and c.engine == "torch" and c.mode == "training" and not c.factors
    ]


def _training_and_inference(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Cell]]:
    inference = {_place(cell): cell for cell in cells if cell.mode == "inference" and not cell.factors}
    for cell in _plain_training(cells):
        if (twin := inference.get(_place(cell))) is not None:
            yield cell, twin


def _place(cell: Cell) -> tuple[object, ...]:
    return cell.suite, cell.model, cell.batch_size, cell.threads, cell.governor


def _groups(cells: Sequence[Cell], key: Callable[[Cell], object]) -> list[list[Cell]]:
    groups: dict[object, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return list(groups.values())


def _swept(cells: Sequence[Cell], layer: str) -> list[Cell]:
    """Plain PyTorch's training of the networks of one kind of layer."""
    return [c for c in cells if c.factors.get("layer") == layer and c.mode == "training" and c.engine == "torch"]


def _size(cell: Cell) -> tuple[int, int]:
    return int(cell.factors["width"]), int(cell.factors["depth"])


def _seconds(cell: Cell) -> float:
    """The fastest repetition: what others took from this machine meanwhile is not the network's."""
    return min(cell.step_seconds)


def _batch(cell: Cell) -> int:
    return cell.batch_size


def _tensor_bytes(cell: Cell) -> int:
    """What tensors took at the peak, weights included, without the batch."""
    return sum(count for name, count in cell.categories.items() if name != "other")


def _described(machine: Machine) -> dict[str, object]:
    """What numbers are of; not what the machine is called."""
    names = ("processor", "instruction_sets", "cores", "memory_bytes", "governor", "accelerator", "versions")
    return {name: getattr(machine, name) for name in names}


def _unknown(paper: str, claim: str) -> Finding:
    return Finding(paper, claim, None, "the record has no cells for it")


def _measured(arguments: argparse.Namespace) -> list[Record]:
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.keep or Path(folder) / "run.jsonl"
        for suite in SUITES:
            words = ["measure", "--suite", suite, "--out", str(path), *(["--quick"] if arguments.quick else [])]
            code = cli.main(words)
            if code == 130:
                raise KeyboardInterrupt
            if code == 2:
                sys.exit(code)
        return [Record.read(path)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", nargs="+", type=Path, help="of both suites; nothing is measured then")
    parser.add_argument("--quick", action="store_true", help="measure the quick suites")
    parser.add_argument("--keep", type=Path, help="the record; what is in it is not measured again")
    parser.add_argument("--out", type=Path, help="write the findings there as JSON, with the machines that they are of")
    arguments = parser.parse_args()
    if arguments.record:
        records = [Record.read(path) for path in arguments.record]
    else:
        records = _measured(arguments)
    findings = look([cell for record in records for cell in record.cells])
    words = {True: "confirmed", False: "not confirmed", None: "not known"}
    for finding in findings:
        print(f"\n{words[finding.confirmed]}: {finding.claim} ({finding.paper})\n    {finding.numbers}")
    if arguments.out is not None:
        machines = [_described(record.machine) for record in records]
        found = {"machines": machines, "findings": [asdict(finding) for finding in findings]}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(finding.confirmed is None for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())

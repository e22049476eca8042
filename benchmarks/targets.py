"""What the project promises, read off a benchmark's result: each promise with the number that was measured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from report import Row, exactness, masks_only, read_results, usable

MIB = 2**20
# The pages of code that a method touches for the first time are resident, but the kernel can take them back.
_SHARE_TOLERANCE = 0.005
# At most so many times eager's seconds, at shares of eager's peak.
_DEEP_NETWORK = {1.0: 1.0, 0.5: 0.95, 0.25: 1.1}
_HIGHEST_RATIO = {
    "mobilenet_v2": {1.0: 0.7, 0.5: 0.75, 0.3: 1.25, 0.25: 0.9},
    "resnet50": _DEEP_NETWORK,
    "densenet121": _DEEP_NETWORK,
    "googlenet": _DEEP_NETWORK,
    "resnet18": {1.0: 1.0, 0.5: 1.0, 0.4: 1.0},
    "squeezenet1_1": {1.0: 1.0, 0.5: 1.0, 0.4: 1.0, 0.25: 1.1},
    "bert_small": {1.0: 1.0, 0.5: 1.0, 0.25: 1.1},
}
Verdict = tuple[str, bool | None, str]


def print_targets(result: dict[str, Any]) -> None:
    """One line per promise: passed, failed, or not measured."""
    print("\ntargets")
    for model in result["models"]:
        for name, passed, number in model_targets(model):
            word = "  --" if passed is None else "pass" if passed else "FAIL"
            print(f"  {word}  {model['model']:14s} {name:58s} {number}")


def model_targets(model: dict[str, Any]) -> Iterator[Verdict]:
    """All promises about one model."""
    yield from _speed(model)
    yield _smallest(model)
    yield from _predictions(model)
    if model["model"] == "mobilenet_v2":
        yield from _seconds(model)


def _speed(model: dict[str, Any]) -> Iterator[Verdict]:
    for share, limit in _HIGHEST_RATIO[model["model"]].items():
        yield _ratio(model, share, limit)
    if masks_only(model):
        yield _against_micro_batches(model)


def _ratio(model: dict[str, Any], share: float, limit: float) -> Verdict:
    name = f"{share:.0%} of eager's peak: at most {limit:.2f}x eager"
    row = _ours(model, share)
    eager = _eager(model)
    if row is None or eager is None:
        return name, None, "not measured"
    middle, spread = row["ratio"], f"{min(row['ratios']):.2f}..{max(row['ratios']):.2f}, {len(row['ratios'])} pairs"
    resident, anonymous = (
        row["memory"][peak] / eager["memory"]["peak_bytes"] for peak in ("peak_bytes", "peak_anonymous_bytes")
    )
    kind = exactness(row)
    passed = middle <= limit and anonymous <= share + _SHARE_TOLERANCE and kind == "exact"
    return name, passed, f"{middle:.3f}x ({spread}); peak {resident:.0%}, anonymous {anonymous:.0%}; {kind}"


def _against_micro_batches(model: dict[str, Any]) -> Verdict:
    name = "25%: no slower than plain micro-batches in the same bytes"
    row = _ours(model, 0.25)
    if row is None:
        return name, None, "not measured"
    room = row["memory"]["peak_bytes"]
    rivals = [r for r in usable(model) if r["method"] == "micro-batches" and r["memory"]["peak_bytes"] <= room]
    if not rivals:
        return name, None, f"none of them fits into {room / MIB:.0f} MiB"
    best = min(rivals, key=lambda r: r["ratio"])
    return name, row["ratio"] <= best["ratio"], f"{row['ratio']:.3f}x against {best['ratio']:.3f}x ({best['label']})"


def _smallest(model: dict[str, Any]) -> Verdict:
    name = "smallest feasible below every exact peer's smallest peak"
    row = _ours(model, 0.0)
    good = ("exact", "buffers differ", "other masks")
    peers = [r for r in usable(model) if r["method"] != "torch_odt" and exactness(r, masks_only(model)) in good]
    if row is None or not peers:
        return name, None, "not measured"
    best = min(peers, key=lambda r: r["memory"]["peak_bytes"])
    mine, theirs = row["memory"]["peak_bytes"] / MIB, best["memory"]["peak_bytes"] / MIB
    number = f"{mine:.0f} MiB against {theirs:.0f} MiB ({best['label']}); {exactness(row)}"
    return name, mine < theirs and exactness(row) == "exact", number


def _predictions(model: dict[str, Any]) -> Iterator[Verdict]:
    rows = [r for r in usable(model) if r["method"] == "torch_odt" and "plan" in r]
    counted = [(r, r["plan"]["counted_bytes"]) for r in rows if r["plan"]["counted_bytes"]]
    name = "predicted against counted peak within 2%"
    if counted:
        worst = max(counted, key=lambda pair: abs(pair[1] / pair[0]["plan"]["tensor_bytes"] - 1))
        off = worst[1] / worst[0]["plan"]["tensor_bytes"] - 1
        yield name, abs(off) <= 0.02, f"{off:+.1%} at the worst ({worst[0]['label']})"
    else:
        yield name, None, "not measured"
    name = "anonymous peak within the budget, from import to exit"
    if rows:
        over = {r["label"]: _beyond_budget(r) for r in rows}
        label = max(over, key=lambda key: over[key])
        yield name, over[label] <= 0, f"{over[label] / 1e6:+.1f} MB at the worst ({label})"
    else:
        yield name, None, "not measured"
    name = "anonymous peak within the plan + 30 MB"
    if rows:
        over = {r["label"]: r["memory"]["peak_anonymous_bytes"] - r["plan"]["peak_bytes"] for r in rows}
        label = max(over, key=lambda key: over[key])
        yield name, over[label] <= 30e6, f"{over[label] / 1e6:+.0f} MB at the worst ({label})"
    else:
        yield name, None, "not measured"


def _beyond_budget(row: Row) -> int:
    return int(row["memory"]["highest_anonymous_from_start_bytes"] - row["plan"]["budget_bytes"])


def _seconds(model: dict[str, Any]) -> Iterator[Verdict]:
    first = _ours(model, 0.5)
    second = next((r for r in model["rows"] if r.get("second_start")), None)
    for row, name, limit in (
        (first, "first start (capture, profile, plan) below 30 s", 30.0),
        (second, "second start, from the cache, below 2 s", 2.0),
    ):
        if row is None or first is None:
            yield name, None, "not measured"
        else:
            seconds = row["first_call_seconds"] - first["seconds"]
            yield name, seconds < limit, f"{seconds:.1f} s beyond a step"
    planning = [r["plan"]["planning_seconds"] for r in usable(model) if r.get("plan", {}).get("planning_seconds")]
    name = "planning alone below 2 s, at every budget"
    yield (name, max(planning) < 2, f"{max(planning):.2f} s") if planning else (name, None, "not measured")


def _ours(model: dict[str, Any], share: float) -> Row | None:
    return next((r for r in usable(model) if r["method"] == "torch_odt" and r["value"] == share), None)


def _eager(model: dict[str, Any]) -> Row | None:
    return next((r for r in usable(model) if r["method"] == "eager"), None)


if __name__ == "__main__":
    print_targets(read_results(sys.argv[1:]))

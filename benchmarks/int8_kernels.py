"""int8 convolutions and linear layers beside torch's fp32 and bf16, layer by layer, for each instruction set.

    python benchmarks/int8_kernels.py --out results                  # all sets that this processor has
    python benchmarks/int8_kernels.py --layers listed --threads 1    # a look

A process for each set and number of threads, in which torch is kept to the same set (ATEN_CPU_CAPABILITY,
ONEDNN_MAX_CPU_ISA, MKL_ENABLE_INSTRUCTIONS). Batch 8 and channels_last throughout. What is compared is the backward
pass: the gradients of input, weight and bias; int8's are the input's in int8 with stochastic rounding, weights packed
anew, and the weight's in fp32. Beside it the forward pass: fp32, bf16, oneDNN's int8 where it is exact (VNNI), and int8
with packed weights. A layer's time is the least of several rounds in which all methods take turns; no method gives
memory back to the system, because page faults are no kernel's. Promised are geometric means over the layers of a group,
see PROMISES; exits with 1 where one is not kept.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from frontier import describe_machine
from instruction_sets import SETS, environment_of, require_set, sets_here
from torch import Tensor

BATCH = 8
# Geometric means of fp32's seconds over int8's, for the backward pass; by set and kind of layer.
PROMISES = {
    ("avx2", "convolutions"): 1.5,
    ("avx512_vnni", "convolutions"): 3.5,
    ("avx512_vnni", "pointwise"): 3.5,
    ("avx512_vnni", "spatial"): 3.5,
    ("avx512_vnni", "depthwise"): 2.5,
    ("amx", "convolutions"): 6.0,
    ("avx2", "linear, batch 8"): 1.0,
    ("avx512_vnni", "linear, batch 8"): 1.0,
    ("amx", "linear, batch 8"): 1.0,
}
PROMISE_OVER_BF16 = 1.5
PROMISE_BESIDE_ONEDNN = 1.0  # its int8, pointwise and spatial


@dataclass(frozen=True)
class Layer:
    """A convolution, or a linear layer as one of a single pixel.

    Attributes:
        name: of the first layer of this kind.
        batch, inputs, outputs, size, kernel, stride, groups: its shape; images are square.
    """

    name: str
    inputs: int
    outputs: int
    size: int
    kernel: int = 1
    stride: int = 1
    groups: int = 1
    batch: int = BATCH

    @property
    def kind(self) -> str:
        if self.size == 1 and self.kernel == 1:
            return "linear, batch 8" if self.batch == BATCH else "linear"
        if self.groups == self.inputs > 1:
            return "depthwise"
        return "pointwise" if self.kernel == 1 else "spatial"

    @property
    def output_size(self) -> int:
        return (self.size + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1

    @property
    def operations(self) -> int:
        """Of the forward pass; each gradient takes as many."""
        pixels = self.batch * self.output_size**2
        return 2 * pixels * self.outputs * self.kernel**2 * self.inputs // self.groups


LISTED = (
    Layer("stem 3->32 s2 @224", 3, 32, 224, 3, 2),
    Layer("pw 96->24 @56", 96, 24, 56),
    Layer("pw 24->144 @56", 24, 144, 56),
    Layer("pw 384->96 @14", 384, 96, 14),
    Layer("pw 96->576 @14", 96, 576, 14),
    Layer("pw 960->320 @7", 960, 320, 7),
    Layer("pw 320->1280 @7", 320, 1280, 7),
    Layer("dw3x3 144 @56", 144, 144, 56, 3, 1, 144),
    Layer("dw3x3s2 144 @56", 144, 144, 56, 3, 2, 144),
    Layer("dw3x3 384 @14", 384, 384, 14, 3, 1, 384),
    Layer("dw3x3 960 @7", 960, 960, 7, 3, 1, 960),
    Layer("c3x3 64 @56", 64, 64, 56, 3),
    Layer("c3x3 128 @28", 128, 128, 28, 3),
    Layer("c3x3 256 @14", 256, 256, 14, 3),
    Layer("linear 1280x1000 b8", 1280, 1000, 1),
    Layer("linear 1280x1000 b64", 1280, 1000, 1, batch=64),
    Layer("linear 768x3072 b512", 768, 3072, 1, batch=512),
)
NETWORKS = ("mobilenet_v2", "resnet18", "resnet50")


def layers_of(network: str) -> Iterator[Layer]:
    """The convolutions and linear layers of one of torchvision's networks at 224 x 224, each shape once."""
    import torchvision

    model = torchvision.models.get_model(network, weights=None).eval()
    found: dict[Layer, None] = {}

    def note(name: str) -> Callable[[torch.nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: torch.nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
            if isinstance(module, torch.nn.Conv2d):
                channels, size = inputs[0].shape[1:3]
                shape = (channels, module.out_channels, size, module.kernel_size[0], module.stride[0], module.groups)
            else:
                shape = (module.in_features, module.out_features, 1, 1, 1, 1)
            found.setdefault(Layer(f"{network}.{name}", *shape))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            module.register_forward_hook(note(name))
    with torch.no_grad():
        model(torch.zeros(1, 3, 224, 224))
    yield from found


def layers_named(groups: list[str]) -> list[Layer]:
    """All layers of these groups, each shape once."""
    by_shape: dict[tuple[Any, ...], Layer] = {}
    for group in groups:
        for layer in LISTED if group == "listed" else layers_of(group):
            shape = tuple(value for key, value in asdict(layer).items() if key != "name")
            by_shape.setdefault(shape, layer)
    return list(by_shape.values())


class Methods:
    """One layer's computations, each without arguments.

    Attributes:
        passes: the method and the pass, and what runs it.
    """

    def __init__(self, layer: Layer, exact_onednn: bool) -> None:
        torch.manual_seed(0)
        size = (layer.batch, layer.inputs, layer.size, layer.size)
        out = (layer.batch, layer.outputs, layer.output_size, layer.output_size)
        kernel = (layer.outputs, layer.inputs // layer.groups, layer.kernel, layer.kernel)
        x, gradient, weight = (self._bytes(shape) for shape in (size, out, kernel))
        pad = layer.kernel // 2
        windows = (layer.stride, layer.stride, pad, pad, 1, 1, layer.groups)
        ops = torch.ops.torch_odt
        # Spreads sums of random bytes over int8, as training chooses its scales.
        scale = torch.tensor([2.0**-11])
        packed = ops.int8_pack_weight(weight, windows, False)
        self.passes: dict[tuple[str, str], Callable[[], object]] = {}

        def of_int8() -> None:
            ops.int8_conv2d_backward.default(gradient, x, weight, None, scale, scale, 0, 1, 7, windows)

        def forward_int8() -> None:
            ops.int8_conv2d_quantized.default(x, weight, packed, None, scale, 0, 0, -128, 127, 0, 0, windows)

        self.passes["int8", "backward"] = of_int8
        self.passes["int8", "forward"] = forward_int8
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            self._add_torch(name, layer, *(t.to(dtype) for t in (x, gradient, weight)))
        if exact_onednn and layer.size > 1:
            self._add_onednn(layer, x, weight)

    @staticmethod
    def _bytes(shape: tuple[int, ...]) -> Tensor:
        values = torch.randint(-127, 128, shape, dtype=torch.int8)
        return values.contiguous(memory_format=torch.channels_last)

    def _add_torch(self, name: str, layer: Layer, x: Tensor, gradient: Tensor, weight: Tensor) -> None:
        pad, stride = (layer.kernel // 2,) * 2, (layer.stride,) * 2
        if layer.size == 1:
            rows, out, matrix = x.flatten(1), gradient.flatten(1), weight.flatten(1)
            bias = torch.zeros(layer.outputs, dtype=x.dtype)
            self.passes[name, "backward"] = lambda: (out @ matrix, out.t() @ rows, out.sum(0))
            self.passes[name, "forward"] = lambda: torch.nn.functional.linear(rows, matrix, bias)
            return
        bias = torch.zeros(layer.outputs, dtype=x.dtype)
        self.passes[name, "backward"] = lambda: torch.ops.aten.convolution_backward.default(
            gradient, x, weight, [layer.outputs], stride, pad, (1, 1), False, (0, 0), layer.groups, (True, True, True)
        )
        self.passes[name, "forward"] = lambda: torch.nn.functional.conv2d(
            x, weight, bias, stride, pad, (1, 1), layer.groups
        )

    def _add_onednn(self, layer: Layer, x: Tensor, weight: Tensor) -> None:
        pad, stride = [layer.kernel // 2] * 2, [layer.stride] * 2
        unsigned = (x.to(torch.int16) + 128).to(torch.uint8)
        scales, zeros = torch.full((layer.outputs,), 2.0**-8), torch.zeros(layer.outputs, dtype=torch.int64)
        packed = torch.ops.onednn.qconv_prepack(
            weight, scales, 1.0, 128, stride, pad, [1, 1], layer.groups, list(x.shape)
        )
        self.passes["onednn int8", "forward"] = lambda: torch.ops.onednn.qconv2d_pointwise.default(
            unsigned, 1.0, 128, packed, scales, zeros, None, stride, pad, [1, 1], layer.groups, 1.0, 128, torch.uint8,
            "none", [], ""
        )  # fmt: skip


def measure(layer: Layer, rounds_seconds: float, exact_onednn: bool) -> dict[str, Any]:
    """The least seconds of every method and pass."""
    methods = Methods(layer, exact_onednn)
    least: dict[tuple[str, str], float] = {}
    spent = dict.fromkeys(methods.passes, 0.0)
    for round_ in range(200):
        for which, run in methods.passes.items():
            # The first call is no measurement; a slow method has few others.
            if spent[which] > rounds_seconds and round_ > 1:
                continue
            begin = time.perf_counter()
            run()
            seconds = time.perf_counter() - begin
            spent[which] += seconds
            if round_:
                least[which] = min(seconds, least.get(which, seconds))
    row: dict[str, Any] = {
        "layer": layer.name,
        "kind": layer.kind,
        "operations": layer.operations,
        "batch": layer.batch,
    }
    for (method, step), seconds in least.items():
        row[f"{method} {step} seconds"] = seconds
    return row


def work(arguments: argparse.Namespace) -> None:
    """In a process of its own: one set, one number of threads; a row a line."""
    torch.set_num_threads(arguments.threads[0])
    require_set(arguments.worker)
    exact = arguments.worker in ("avx512_vnni", "amx")
    with torch.no_grad():
        for layer in layers_named(arguments.layers):
            print(json.dumps(measure(layer, arguments.seconds, exact)), flush=True)


def rows_of(used: str, threads: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one set and number of threads."""
    kept = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    environment = environment_of(used, threads) | kept
    command = [
        sys.executable,
        __file__,
        "--worker",
        used,
        "--threads",
        str(threads),
        "--seconds",
        str(arguments.seconds),
    ]
    command += ["--layers", *arguments.layers]
    rows = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            rows.append({"set": used, "threads": threads, **json.loads(line)})
            print_row(rows[-1])
    if process.returncode:
        raise SystemExit(f"the process for {used} ended with {process.returncode}")
    return rows


def print_header() -> None:
    print(f"{'layer':38s}{'fp32':>9s}{'bf16':>9s}{'int8':>9s}{'x fp32':>8s}{'x bf16':>8s}{'G/s':>7s}", end="")
    print(f" |{'fp32':>9s}{'bf16':>9s}{'oneDNN':>9s}{'int8':>9s}{'x fp32':>8s}{'x oneDNN':>9s}")


def print_row(row: dict[str, Any]) -> None:
    """Milliseconds of both passes, and ratios."""

    def text(method: str, step: str) -> str:
        seconds = row.get(f"{method} {step} seconds")
        return f"{seconds * 1e3:9.3f}" if seconds is not None else f"{'-':>9s}"

    def ratio(method: str, step: str, width: int = 8) -> str:
        value = ratio_of(row, method, step)
        return f"{value:{width}.2f}" if value is not None else f"{'-':>{width}s}"

    speed = 2 * row["operations"] / row["int8 backward seconds"] / 1e9
    print(f"{row['layer']:38s}" + "".join(text(m, "backward") for m in ("fp32", "bf16", "int8")), end="")
    print(f"{ratio('fp32', 'backward')}{ratio('bf16', 'backward')}{speed:7.0f} |", end="")
    print("".join(text(m, "forward") for m in ("fp32", "bf16", "onednn int8", "int8")), end="")
    print(f"{ratio('fp32', 'forward')}{ratio('onednn int8', 'forward', 9)}", flush=True)


def ratio_of(row: dict[str, Any], method: str, step: str) -> float | None:
    """A method's seconds over int8's."""
    seconds = row.get(f"{method} {step} seconds")
    return None if seconds is None else seconds / row[f"int8 {step} seconds"]


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summaries(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Geometric means by set, threads and kind of layer, beside what was promised."""
    for used, threads in dict.fromkeys((row["set"], row["threads"]) for row in rows):
        mine = [row for row in rows if (row["set"], row["threads"]) == (used, threads)]
        for kind in ("convolutions", "pointwise", "spatial", "depthwise", "linear, batch 8", "linear"):
            some = [r for r in mine if r["kind"] == kind or (kind == "convolutions" and "linear" not in r["kind"])]
            if not some:
                continue
            summary: dict[str, Any] = {"set": used, "threads": threads, "kind": kind, "layers": len(some)}
            for method, step in (
                ("fp32", "backward"), ("bf16", "backward"), ("fp32", "forward"), ("bf16", "forward"),
                ("onednn int8", "forward"),
            ):  # fmt: skip
                ratios = [value for row in some if (value := ratio_of(row, method, step)) is not None]
                if ratios:
                    summary[f"x {method} {step}"] = geometric_mean(ratios)
            summary["promised"] = PROMISES.get((used, kind))
            yield summary


def keeps(summary: dict[str, Any]) -> bool:
    """Whether a summary is at least what was promised."""
    if summary["promised"] is not None and summary["x fp32 backward"] < summary["promised"]:
        return False
    beside_onednn = summary.get("x onednn int8 forward") if summary["kind"] in ("pointwise", "spatial") else None
    if beside_onednn is not None and beside_onednn < PROMISE_BESIDE_ONEDNN:
        return False
    over_bf16 = summary["set"] == "amx" and summary["kind"] == "convolutions"
    return not over_bf16 or summary["x bf16 backward"] >= PROMISE_OVER_BF16


def print_summary(summary: dict[str, Any]) -> None:
    means = ", ".join(f"{value:.2f} {key}" for key, value in summary.items() if key.startswith("x "))
    promised = "" if summary["promised"] is None else f"; promised {summary['promised']}"
    if summary["kind"] in ("pointwise", "spatial") and any("onednn" in key for key in summary):
        promised += f"; promised beside oneDNN's int8 {PROMISE_BESIDE_ONEDNN}"
    verdict = "" if keeps(summary) else "  MISSED"
    print(f"{summary['set']:12s} {summary['threads']} threads, {summary['layers']:3d} {summary['kind']:16s}", end="")
    print(f"{means}{promised}{verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, help="default: all that the processor has")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--layers", nargs="+", choices=("listed", *NETWORKS), default=["listed", *NETWORKS])
    parser.add_argument("--seconds", type=float, default=0.3, help="for each method, pass and layer")
    parser.add_argument("--out", type=Path, help="a folder for int8_kernels.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return 0
    sets = arguments.sets or sets_here()
    rows = []
    for threads in arguments.threads:
        for used in sets:
            print(f"\n{used}, {threads} threads: backward | forward, milliseconds")
            print_header()
            rows += rows_of(used, threads, arguments)
    print()
    means = list(summaries(rows))
    for summary in means:
        print_summary(summary)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        result = {"machine": describe_machine(arguments), "batch": BATCH, "rows": rows, "summaries": means}
        (arguments.out / "int8_kernels.json").write_text(json.dumps(result, indent=1))
    return 0 if all(map(keeps, means)) else 1


if __name__ == "__main__":
    sys.exit(main())

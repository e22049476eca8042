"""Tracing: the graph is the same everywhere, costs no memory, runs nothing, and says why where there is none."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_odt.capture.child import ChildFailed, run_in_child
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.rewrite import rewrite
from torch_odt.capture.trace import TracedStep, trace_step
from torch_odt.errors import CaptureError, LossError
from torch_odt.execute.loss import make_compute

TESTS = Path(__file__).parents[1]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def make_net() -> nn.Module:
    net = Net()
    net(torch.randn(2, 3, 8, 8))
    return net


def trace(model: nn.Module, *args: Any, loss_fn: Any = F.cross_entropy, **kwargs: Any) -> TracedStep:
    return trace_step(model, loss_fn, make_compute(loss_fn), (args, kwargs))


def trace_net(size: int = 2) -> TrainingGraph:
    return trace(make_net(), torch.randn(size, 3, 8, 8), torch.zeros(size, dtype=torch.long)).graph


def in_process(code: str, **environment: str) -> str:
    """What a fresh process prints."""
    paths = [str(TESTS), str(TESTS / "capture"), str(TESTS.parent)]
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_fingerprint_is_the_same_in_every_process_and_differs_with_the_shape() -> None:
    ours = rewrite(trace_net()).fingerprint
    assert rewrite(trace_net()).fingerprint == ours
    assert rewrite(trace_net(3)).fingerprint != ours
    code = """
        from test_trace import rewrite, trace_net
        print(rewrite(trace_net()).fingerprint)
    """
    assert in_process(code, PYTHONHASHSEED="123") == ours


def test_a_child_takes_the_tracers_memory_along() -> None:
    code = """
        import sys
        import torch
        from test_trace import make_net, trace
        from torch_odt.capture.child import run_in_child
        from torch_odt import memory

        with torch.no_grad():
            net = make_net()
        batch = torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)
        before = memory.process_bytes()
        traced = run_in_child(lambda: trace(net, *batch))
        assert len(traced.graph.ops) > 10
        heavy = [m for m in sys.modules if m.startswith(("torch._dynamo", "torch._functorch.aot_autograd"))]
        print(memory.process_bytes() - before, *heavy)
    """
    grown, *heavy = in_process(code).split()
    assert heavy == []
    assert int(grown) < 10 << 20


def test_after_a_backward_pass_a_step_is_captured_whether_or_not_a_child_can_trace_it() -> None:
    code = """
        import torch
        import torch_odt as odt
        from test_trace import F, make_net, run_in_child, trace, ChildFailed

        net = make_net()
        batch = torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)
        F.cross_entropy(net(batch[0]), batch[1]).backward()
        try:
            run_in_child(lambda: trace(net, *batch))
            print("child")
        except ChildFailed:
            print("refused")
        budget = odt.Budget("1GiB", of="training")
        step = odt.TrainStep(net, F.cross_entropy, torch.optim.SGD(net.parameters()), budget=budget, cache=False)
        step(*batch)
        print(step.plan.captured)
    """
    first, captured = in_process(code).split()
    assert first in ("child", "refused") and captured == "True"


def test_what_a_child_raises_is_raised_here() -> None:
    def refuse() -> None:
        raise CaptureError("for a reason")

    with pytest.raises(CaptureError, match="for a reason"):
        run_in_child(refuse)
    with pytest.raises(ChildFailed):
        run_in_child(lambda: lambda: None)
    with pytest.raises(ChildFailed, match="without a result"):
        run_in_child(lambda: os._exit(3))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: dict[str, Any], more: list[Tensor] | None = None) -> dict[str, Any]:
        hidden = inputs["x"] + inputs["pair"][0] * inputs["factor"] + (more[0] if more else 0)
        return {"logits": [self.layer(hidden)], "constant": "text", "sum": hidden.sum(1)}


def test_nested_batches_and_outputs() -> None:
    inputs = {"x": torch.randn(2, 4), "pair": (torch.randn(2, 4), None), "factor": 0.5}
    target = torch.zeros(2, dtype=torch.long)
    traced = trace(Nested(), inputs, target, loss_fn=lambda o, t: F.cross_entropy(o["logits"][0], t))
    graph = traced.graph
    assert {graph.values[i].target for i in graph.inputs if graph.values[i].kind == "input"} == {0, 1, 4}
    results = list(graph.outputs_of("result"))
    assert len(results) == 2
    rebuilt = traced.rebuild_results([torch.ones(2, 3), torch.zeros(2)])
    assert list(rebuilt) == ["logits", "constant", "sum"]
    assert rebuilt["constant"] == "text" and rebuilt["logits"][0].shape == (2, 3)


def test_what_every_input_and_output_is() -> None:
    graph = trace_net()
    names = set(make_net().state_dict())
    kinds = {
        kind: {graph.values[i].target for i in graph.inputs if graph.values[i].kind == kind}
        for kind in ("parameter", "buffer", "input", "tangent")
    }
    assert kinds["parameter"] | kinds["buffer"] <= names
    assert kinds["input"] == {0, 1} and len(kinds["tangent"]) == 1
    assert {o.target for o in graph.outputs_of("gradient")} == kinds["parameter"]
    assert {str(o.target).rpartition(".")[2] for o in graph.outputs_of("mutation")} == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }
    assert len(list(graph.outputs_of("loss"))) == 1
    assert 0 < graph.boundary < graph.program_length


class Branch(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 3), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.how == "item":
            return y if y.sum().item() > 0 else -y
        if self.how == "bool":
            return y if y.sum() > 0 else -y
        if self.how == "shape":
            return y[y[:, 0] > 0]
        return torch.from_numpy(y.detach().numpy()) + y


@pytest.mark.parametrize(
    ("how", "reason"),
    [("item", "branches on the data"), ("bool", "branches on the data"), ("shape", "depends on data"), ("numpy", ".")],
)
def test_a_step_that_depends_on_data_has_no_graph(how: str, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        trace(Branch(how), torch.randn(2, 4), torch.zeros(2, 3), loss_fn=F.mse_loss)


def test_a_loss_that_is_none_is_named() -> None:
    with pytest.raises(LossError, match="shape"):
        trace(nn.Linear(4, 3), torch.randn(2, 4), torch.zeros(2, 3), loss_fn=lambda o, t: o - t)


def test_nothing_is_computed_however_large_the_batch() -> None:
    """The activations of this step would take some 50 GB."""
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(8)), nn.Flatten(1))
    x = torch.empty(1).expand(2000, 3, 512, 512)
    graph = trace(model, x, torch.empty(1).expand(2000, 3 * 512 * 512), loss_fn=F.mse_loss).graph
    assert sum(v.nbytes for v in graph.values if v.kind == "computed" and not v.is_view) > 50e9


def test_tracing_changes_neither_model_nor_random_state() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random_state = torch.get_rng_state()
    trace(model, torch.randn(3, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(3, 4), loss_fn=F.mse_loss)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None for p in model.parameters())


class Enlarged(nn.Module):
    """Its input, filtered, then enlarged."""

    def __init__(self, dimensions: int, **options: Any) -> None:
        super().__init__()
        self.filter = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1](2, 3, 3, padding=1)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.filter(x), **self.options)


@pytest.mark.parametrize(
    ("dimensions", "options"),
    [
        (1, {"scale_factor": 2, "mode": "linear"}),
        (2, {"scale_factor": 2, "mode": "nearest"}),
        (2, {"size": (7, 9), "mode": "bilinear", "align_corners": False}),
        (2, {"scale_factor": 1.5, "mode": "bicubic", "align_corners": True}),
        (2, {"size": (3, 2), "mode": "bilinear", "antialias": True}),
        (3, {"scale_factor": 2, "mode": "trilinear"}),
    ],
)
def test_upsampling_stays_one_operator(dimensions: int, options: dict[str, Any]) -> None:
    x = torch.randn(2, 2, *(4,) * dimensions)
    graph = trace(Enlarged(dimensions, **options), x, torch.zeros(()), loss_fn=lambda y, _: y.square().mean()).graph
    assert [op.target.count("backward") for op in graph.program if "upsample" in op.target] == [0, 1]


def test_after_a_trace_torch_decomposes_again() -> None:
    bilinear = torch.ops.aten.upsample_bilinear2d.vec
    before = dict(bilinear.py_kernels)
    assert before
    trace_net()
    assert bilinear.py_kernels == before


def test_a_batch_that_an_operator_refuses_is_told_once() -> None:
    model, batch, told = nn.Linear(4, 3), ((torch.ones(2, 4), torch.rand(2)), {}), []
    handler = logging.Handler()
    handler.emit = told.append  # type: ignore[method-assign]
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    try:
        with pytest.raises(CaptureError, match="dtype"):
            trace_step(model, F.cross_entropy, make_compute(F.cross_entropy), batch)
    finally:
        log.removeHandler(handler)
    assert not told

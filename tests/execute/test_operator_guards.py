"""Graphs from files: what torch's kernels do not check is refused before they run. Each of these would end the process
or read what belongs to somebody else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_odt.capture.graph import Op, Ref, TrainingGraph
from torch_odt.capture.operators import of_torch
from torch_odt.errors import PlanError
from torch_odt.execute.operator_guards import guards_of

IMAGE, WIDE, CHANNELS = torch.ones(2, 8, 4, 4), torch.ones(2, 800, 4, 4), torch.ones(8)
QUERY, SHORT = torch.ones(2, 2, 8, 4), torch.ones(2, 2, 1, 4)
ONE = torch.ones(1)
MASK = [True, True, True]


@dataclass(frozen=True)
class Forgery:
    """A call that is right, and what of it is forged: argument position -> another one."""

    target: str
    args: tuple[Any, ...]
    forged: dict[int, Any]

    def op(self) -> Op:
        return Op(3, f"aten.{self.target}", self.args, {}, (), (), ())


def attention(*, out: Tensor = QUERY) -> tuple[Any, ...]:
    return (QUERY, QUERY, QUERY, QUERY, out, torch.ones(2, 2, 8), 0.0, False)


def lstm(units: int = 4) -> tuple[Any, ...]:
    weights = (torch.ones(16, 3), torch.ones(16, 4), torch.ones(16), torch.ones(16))
    state = torch.ones(1, 2, 4)
    return (torch.ones(5, 2, 3), *weights, state, state, False, [], 2, units, 1, True, False, False, True)


def batch_norm(trains: bool) -> tuple[Any, ...]:
    return (IMAGE, IMAGE, CHANNELS, CHANNELS, CHANNELS, CHANNELS, CHANNELS, trains, 1e-5, MASK)


POOL = (torch.ones(1, 1, 2, 2), torch.ones(1, 1, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False)
INDICES = torch.zeros(1, 1, 2, 2, dtype=torch.int64)
THREE = torch.ones(1, 3, 2, 2)
LEARNED = (IMAGE, ONE, torch.zeros(1), -128, 127, 1.0)
EMBEDDING = (torch.ones(2, 4), torch.tensor([0, 3]), 4, -1, True)
LAYER_NORM = (torch.ones(8, 4), torch.ones(8, 4), [4], torch.ones(8, 1), torch.ones(8, 1), torch.ones(4), torch.ones(4))

FORGERIES = {
    "a short mean": Forgery("native_batch_norm_backward.default", batch_norm(True), {5: ONE}),
    "no mean": Forgery("native_batch_norm_backward.default", batch_norm(True), {5: None}),
    "a short running mean": Forgery("native_batch_norm_backward.default", batch_norm(False), {3: ONE}),
    "a short weight": Forgery("native_batch_norm_backward.default", batch_norm(True), {2: ONE}),
    "a small gradient": Forgery("native_batch_norm_backward.default", batch_norm(True), {0: torch.ones(1, 1, 1, 1)}),
    "a wide input": Forgery(
        "_native_batch_norm_legit_functional.default",
        (IMAGE, CHANNELS, CHANNELS, CHANNELS, CHANNELS, True, 0.1, 1e-5),
        {0: WIDE},
    ),
    "a wide input, frozen": Forgery(
        "_native_batch_norm_legit_no_training.default", (IMAGE, None, None, CHANNELS, CHANNELS, 0.1, 1e-5), {0: WIDE}
    ),
    "few rows": Forgery("native_layer_norm_backward.default", (*LAYER_NORM, MASK), {3: torch.ones(1, 1)}),
    "few gradients": Forgery("native_layer_norm_backward.default", (*LAYER_NORM, MASK), {0: torch.ones(1, 4)}),
    "a small softmax": Forgery(
        "_log_softmax_backward_data.default", (torch.ones(8, 9), torch.ones(8, 9), 1, torch.float32), {1: ONE}
    ),
    "few keys": Forgery(
        "_scaled_dot_product_flash_attention_for_cpu.default", (QUERY, QUERY, QUERY), {1: torch.ones(1, 1, 8, 4)}
    ),
    "few values": Forgery("_scaled_dot_product_flash_attention_for_cpu.default", (QUERY, QUERY, QUERY), {2: SHORT}),
    "a small output": Forgery("_scaled_dot_product_flash_attention_for_cpu_backward.default", attention(), {4: SHORT}),
    "few sums": Forgery(
        "_scaled_dot_product_flash_attention_for_cpu_backward.default", attention(), {5: torch.ones(1, 1, 1)}
    ),
    "few averages": Forgery(
        "_adaptive_avg_pool2d_backward.default", (torch.ones(2, 8, 2, 2), IMAGE), {0: torch.ones(2, 1, 2, 2)}
    ),
    "averages of no pixels": Forgery(
        "_adaptive_avg_pool2d_backward.default", (torch.ones(2, 8, 2, 2), IMAGE), {1: torch.ones(2, 8, 4, 0)}
    ),
    "averages of more images": Forgery(
        "avg_pool2d_backward.default",
        (torch.ones(2, 8, 2, 2), IMAGE, [2, 2], [2, 2], [0, 0], False, True, None),
        {0: torch.ones(8, 8, 2, 2)},
    ),
    "no scale": Forgery(
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default",
        (IMAGE, ONE, torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int64), -128, 127),
        {1: ONE[:0]},
    ),
    "a far index": Forgery(
        "max_pool2d_with_indices_backward.default", (*POOL, INDICES), {7: torch.full((1, 1, 2, 2), 1 << 34)}
    ),
    "a negative index": Forgery(
        "max_pool2d_with_indices_backward.default", (*POOL, INDICES), {7: torch.full((1, 1, 2, 2), -1)}
    ),
    "maxima of more images": Forgery(
        "max_pool2d_with_indices_backward.default", (*POOL, INDICES), {0: torch.ones(2, 1, 2, 2)}
    ),
    "indices of no image": Forgery("max_pool2d_with_indices_backward.default", (*POOL, INDICES), {7: INDICES[:0]}),
    "another shape": Forgery("gelu_backward.default", (IMAGE, IMAGE), {1: IMAGE[None]}),
    "a far class": Forgery(
        "nll_loss_backward.default",
        (torch.ones(2), torch.ones(2, 3), torch.tensor([0, -100]), None, 0, -100, torch.tensor(1.0)),
        {2: torch.tensor([0, 1 << 40])},
    ),
    "a wide pad": Forgery(
        "reflection_pad2d_backward.default", (torch.ones(2, 8, 6, 6), IMAGE, [1, 1, 1, 1]), {1: WIDE}
    ),
    "few pads": Forgery(
        "replication_pad2d_backward.default",
        (torch.ones(2, 8, 6, 6), IMAGE, [1, 1, 1, 1]),
        {0: torch.ones(1, 8, 6, 6)},
    ),
    "another type of scale": Forgery(
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default",
        (IMAGE, ONE, torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int64), -128, 127),
        {1: ONE.bool()},
    ),
    "two scales": Forgery("_fake_quantize_learnable_per_tensor_affine.default", LEARNED, {1: torch.ones(2)}),
    "a gradient of one": Forgery(
        "_fake_quantize_learnable_per_tensor_affine_backward.default", (IMAGE, *LEARNED), {0: ONE}
    ),
    "a scale too few": Forgery(
        "_fake_quantize_learnable_per_channel_affine_backward.default",
        (THREE, THREE, torch.ones(3), torch.zeros(3), 1, -127, 127, 1.0),
        {2: torch.ones(2)},
    ),
    "another axis": Forgery(
        "_fake_quantize_learnable_per_channel_affine.default",
        (THREE, torch.ones(3), torch.zeros(3), 1, -127, 127, 1.0),
        {3: 4},
    ),
    "a far row": Forgery("embedding_dense_backward.default", EMBEDDING, {1: torch.tensor([0, 1 << 34])}),
    "many units": Forgery("mkldnn_rnn_layer.default", lstm(), {10: 1 << 16}),
    "a small weight": Forgery("mkldnn_rnn_layer.default", lstm(), {2: torch.ones(1, 1)}),
    "a small state": Forgery("mkldnn_rnn_layer.default", lstm(), {5: torch.ones(1, 1, 1)}),
    "a number in the place of a tensor": Forgery("native_batch_norm_backward.default", batch_norm(True), {1: -1}),
    "another kind of layer": Forgery("mkldnn_rnn_layer.default", lstm(), {9: 0}),
}


def guarded(op: Op) -> Any:
    graph = TrainingGraph(ops=[op], values=[], inputs=[], outputs=[], boundary=1, program_length=1)
    return guards_of(graph)[op.index]


@pytest.mark.parametrize("name", FORGERIES)
def test_what_a_kernel_would_follow_blindly_is_refused(name: str) -> None:
    forgery = FORGERIES[name]
    call = guarded(forgery.op())
    call(*forgery.args)
    forged = [forgery.forged.get(position, argument) for position, argument in enumerate(forgery.args)]
    with pytest.raises(PlanError, match=rf"op 3 of the graph, aten\.{forgery.target}.*forged"):
        call(*forged)


def test_the_smallest_integer_is_not_divided() -> None:
    op = Op(3, "aten.div.Tensor_mode", (Ref(0), Ref(1)), {"rounding_mode": "trunc"}, (0, 1), (), (2,))
    assert torch.equal(guarded(op)(IMAGE, 2 * IMAGE, rounding_mode="trunc"), torch.zeros_like(IMAGE))
    with pytest.raises(PlanError, match="op 3 of the graph"):
        guarded(op)(torch.tensor([-(2**63)]), torch.tensor([-1]), rounding_mode="trunc")


def test_ordinary_operators_are_called_as_they_are() -> None:
    op = Op(0, "aten.mm.default", (Ref(0), Ref(1)), {}, (0, 1), (), (2,))
    graph = TrainingGraph(ops=[op], values=[], inputs=[], outputs=[], boundary=1, program_length=1)
    assert guards_of(graph) == {}


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_convolution_in_groups_reads_shapes_alone_with_its_real_types(position: int) -> None:
    """With another type than the graph states, ATen copies parts of what has no memory."""
    settings = (None, [2, 2], [1, 1], [1, 1], False, [0, 0], 8, [True, False, False])
    tensors = [torch.ones(2, 8, 2, 2), IMAGE, torch.ones(8, 1, 3, 3)]
    op = Op(
        3, "aten.convolution_backward.default", (Ref(0), Ref(1), Ref(2), *settings), {}, (0, 2), (1,), (3, None, None)
    )
    if torch.backends.mkldnn.is_available():
        found = guarded(op)(*tensors, *settings)[0]
        wanted = of_torch(op.target)(*tensors, *settings)[0]
        assert torch.equal(found, wanted)
    tensors[position] = tensors[position].double()
    with pytest.raises(PlanError, match="without memory"):
        guarded(op)(*tensors, *settings)
    plain = replace(op, shape_reads=(), reads=(0, 1, 2))
    assert guards_of(TrainingGraph([plain], [], [], [], 1, 1)) == {}

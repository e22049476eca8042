"""Later micro-batches add to the gradients that are there, without a tensor of the weight's size in between."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from small_steps import make_step, train_both
from torch import Tensor, nn

from torch_odt.capture.accumulate import accumulating
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.rewrite import rewrite
from torch_odt.capture.trace import trace_step
from torch_odt.execute.candidates import SizedGraph
from torch_odt.execute.executor import Executor
from torch_odt.execute.loss import make_compute
from torch_odt.planning.schedule import Run
from torch_odt.runtime.budget import Budget

WORDS, WIDTH, LENGTH = 5000, 16, 6


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Language(nn.Module):
    """Embedding with padding, a hidden layer, and scores by the embedding's own weight or by another one."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=1)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.scores = nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.scores.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.scores(torch.tanh(self.hidden(self.embedding(words))))


def loss_fn(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def make_words(count: int, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randint(40, (size, LENGTH)), torch.randint(40, (size, LENGTH))) for _ in range(count)]


def graph_of(model: nn.Module) -> TrainingGraph:
    return rewrite(trace_step(model, loss_fn, make_compute(loss_fn), (make_words(1)[0], {})).graph, drop=("result",))


def targets(graph: TrainingGraph) -> set[str]:
    return {op.target for op in graph.ops}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_cut_batches_train_as_whole_ones(tied: bool, accumulation_steps: int) -> None:
    if accumulation_steps == 1:
        step = train_both(Language(tied), make_words(4), loss_fn=loss_fn, micro_batch=4, exact=False)
    else:
        model = Language(tied)
        step = make_step(model, loss_fn, micro_batch=4, accumulation_steps=2)
        plain = Language(tied)
        plain.load_state_dict(model.state_dict())
        batches = make_words(2)
        loss = sum(loss_fn(plain(words), target) / 2 for words, target in batches)
        assert isinstance(loss, Tensor)
        loss.backward()
        for batch in batches:
            step(*batch)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert step.plan.micro_batch == 4


def test_what_adds_in_place() -> None:
    for tied in (False, True):
        added = accumulating(graph_of(Language(tied)))
        assert added is not None
        assert {"odt.accumulate_mm", "odt.accumulate_embedding"} <= targets(added)
        assert "aten.embedding_dense_backward.default" not in targets(added)


def test_nothing_to_add_to() -> None:
    model = nn.Sequential(nn.Conv1d(LENGTH, 3, 3), nn.Flatten())
    words = torch.randn(2, LENGTH, 5)
    traced = trace_step(model, F.mse_loss, make_compute(F.mse_loss), ((words, torch.randn(2, 9)), {}))
    assert accumulating(rewrite(traced.graph, drop=("result",))) is None


class Twice(nn.Module):
    """Its weight is used twice, and in one variant in a third way whose gradient is no product."""

    def __init__(self, summed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.summed = summed

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight) @ self.weight.t()
        return y * self.weight.sum() if self.summed else y


@pytest.mark.parametrize("summed", [False, True])
def test_a_weight_that_is_used_several_times(summed: bool) -> None:
    batches = [(torch.randn(6, WIDTH), torch.randn(6, WIDTH)) for _ in range(3)]
    step = train_both(Twice(summed), batches, loss_fn=F.mse_loss, micro_batch=2, exact=False)
    later = next(iter(step._current.program.parts.values())).later.graph  # type: ignore[union-attr]
    assert ("odt.first_of" in targets(later)) is not summed


class Recurrent(nn.Module):
    """One layer, used so often that its gradient is a long chain of sums."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


def test_a_long_chain_of_sums() -> None:
    graph = TrainingGraph(ops=[], values=[], inputs=[], outputs=[], boundary=0, program_length=0)
    assert accumulating(graph) is None
    batches = [(torch.randn(6, WIDTH), torch.randn(6, WIDTH)) for _ in range(2)]
    step = train_both(Recurrent(40), batches, loss_fn=F.mse_loss, micro_batch=3, exact=False)
    later = next(iter(step._current.program.parts.values())).later.graph  # type: ignore[union-attr]
    assert sum(op.target == "odt.accumulate_mm" for op in later.ops) == 40


def ignoring_loss(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=-100)


@pytest.mark.parametrize("ignored", [slice(0, 2), slice(2, 4), slice(4, 6)])
def test_a_micro_batch_without_valid_targets(ignored: slice) -> None:
    batches = make_words(2)
    for _, target in batches:
        target[ignored] = -100
    step = train_both(Language(False), batches, loss_fn=ignoring_loss, micro_batch=2, exact=False)
    assert step.plan.micro_batch == 2


@pytest.mark.filterwarnings("ignore:the optimizer holds:torch_odt.OdtWarning")
def test_gradients_that_lie_otherwise() -> None:
    """What the optimizer does not reset may have any strides."""
    model, outside = Language(False), nn.Parameter(torch.zeros(1))
    step = make_step(model, loss_fn, micro_batch=2, optimizer=torch.optim.SGD([model.hidden.weight, outside], lr=0.0))
    batch = make_words(1)[0]
    step(*batch)
    once = model.embedding.weight.grad.clone()  # type: ignore[union-attr]
    model.embedding.weight.grad = once.t().contiguous().t()
    model.scores.weight.grad = None
    step(*batch)
    torch.testing.assert_close(model.embedding.weight.grad, 2 * once)


def test_an_op_that_a_schedule_repeats_does_not_add() -> None:
    """It would add twice."""
    step = make_step(Language(True), loss_fn, micro_batch=3)
    step(*make_words(1)[0])
    assert step.plan.schedule is not None
    part = next(iter(step._current.program.parts.values()))  # type: ignore[union-attr]
    whole, added = part.graph, part.later.graph
    changed = [i for i, (a, b) in enumerate(zip(whole.ops, added.ops, strict=True)) if a is not b]
    repeated = next(i for i in changed if added.ops[i].target == "odt.accumulate_mm")

    class Repeating:
        instructions = (*part.first.schedule.instructions, Run(repeated))

    partial = accumulating(whole, without={repeated})
    assert partial is not None and partial.ops[repeated] is whole.ops[repeated]
    costs = _costs(added)
    graph, _ = SizedGraph(whole, _costs(whole), adding=(added, costs)).later(Repeating())  # type: ignore[arg-type]
    assert graph.ops[repeated].target == whole.ops[repeated].target
    assert targets(graph) != targets(whole)


def _costs(graph: TrainingGraph):  # type: ignore[no-untyped-def]
    from torch_odt.capture.profile import profile

    return profile(graph, repeats=1, min_seconds=0.0)


def test_the_vocabulary_is_not_allocated_again() -> None:
    """The dense gradient of the embedding is larger than everything else together."""
    step = make_step(Language(True), loss_fn, micro_batch=1, budget=Budget("64MiB", of="training"))
    step(*make_words(1)[0])
    layout = step.plan.later_layout
    assert layout is not None
    weight_bytes = WORDS * WIDTH * 4
    assert all(nbytes < weight_bytes for row in layout.table for _, nbytes in row)
    assert any(nbytes >= weight_bytes for row in step.plan.layout.table for _, nbytes in row)  # type: ignore[union-attr]


def test_executors_of_both_graphs_follow_one_schedule() -> None:
    step = make_step(Language(False), loss_fn, micro_batch=2)
    step(*make_words(1)[0])
    part = next(iter(step._current.program.parts.values()))  # type: ignore[union-attr]
    assert isinstance(part.later, Executor)
    assert part.later.schedule is part.first.schedule and part.later.graph is not part.first.graph

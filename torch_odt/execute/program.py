"""A prepared training step: the executors of its micro-batches, and how a batch is cut for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torch_odt.capture.draws import Draw
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.separation import Separation, valid_targets
from torch_odt.execute.executor import Executor
from torch_odt.execute.gradients import ResultsOnly, StepReceiver

if TYPE_CHECKING:
    # Where budgets do not change, a step does without.
    from torch_odt.execute.pressure import Pressure
    from torch_odt.planning.rest import Checked


@dataclass
class Part:
    """What runs for one micro-batch size.

    Attributes:
        graph: the step at that size.
        first: the executor while `.grad` is empty; what it delivers becomes `.grad`.
        later: the executor that adds to gradients which are there already.
        first_checked, later_checked: what the two execute.
        draws: the random tensors of the whole batch that the graph takes as inputs.
        separation: why the step may be cut; None when the part is the whole batch.
    """

    graph: TrainingGraph
    first: Executor
    later: Executor
    first_checked: Checked
    later_checked: Checked
    draws: Sequence[Draw] = ()
    separation: Separation | None = None

    def inputs_of(self, leaves: Sequence[Any], start: int, size: int) -> dict[int, torch.Tensor]:
        """The batch's own inputs of one micro-batch, by value."""
        found = {}
        for value in self.graph.unnamed_inputs:
            if value.kind == "input" and isinstance(value.target, int):
                index, leaf = value.index, leaves[value.target]
                found[index] = leaf if self.separation is None else self.separation.take(self.graph, index, leaf, start)
        return found

    def new_table(
        self,
        executor: Executor,
        leaves: Sequence[Any],
        tensors: Mapping[str, torch.Tensor],
        receiver: StepReceiver,
        drawn: Sequence[torch.Tensor],
        start: int,
        size: int,
        weight: float,
    ) -> list[torch.Tensor | None]:
        """A table with everything in it that an executor's graph takes."""
        table, graph = executor.new_table(), executor.graph
        for index, kind, target in graph.named_inputs:
            table[index] = receiver.gradient(target) if kind == "gradient" else tensors[target]
        for value in graph.unnamed_inputs:
            if value.kind == "tangent":
                table[value.index] = torch.full(value.shape, weight, dtype=getattr(torch, value.dtype))
        for index, tensor in self.inputs_of(leaves, start, size).items():
            table[index] = tensor
        for draw, tensor in zip(self.draws, drawn, strict=True):
            table[draw.value] = draw.slice(tensor, start, start + size)
        return table


@dataclass
class StepProgram:
    """Runs forward and backward of one batch.

    Attributes:
        parts: by micro-batch size.
        sizes: the micro-batches of a batch, in order; their sum is the batch.
    """

    parts: Mapping[int, Part]
    sizes: Sequence[int]

    @property
    def changed_buffers(self) -> frozenset[str]:
        """The names of the buffers that a step changes."""
        return frozenset(str(output.target) for output in self.parts[self.sizes[0]].graph.outputs_of("mutation"))

    def run(
        self,
        leaves: Sequence[Any],
        tensors: Mapping[str, torch.Tensor],
        receiver: StepReceiver,
        *,
        gradients_exist: bool,
        gradient_scale: float,
        pressure: Pressure | None = None,
    ) -> None:
        """Forward and backward; everything that leaves the step goes to `receiver`.

        Args:
            leaves: the flattened arguments of the step.
            tensors: parameters, buffers and the optimizer's state, by the names that the graph uses.
            gradients_exist: gradients are there already, and are added to.
            gradient_scale: what the gradients are multiplied with on top of a micro-batch's share.
            pressure: runs the micro-batches, where they may have to do with less than was planned.
        """
        drawn = [draw.draw() for draw in self.parts[self.sizes[0]].draws]
        start = 0
        weights = self._weights(leaves)
        for size, weight in zip(self.sizes, weights, strict=True):
            part = self.parts[size]
            executor = part.later if gradients_exist and weight != 0.0 else part.first
            table = part.new_table(executor, leaves, tensors, receiver, drawn, start, size, weight * gradient_scale)
            try:
                if weight == 0.0:
                    # Without a valid target it adds nothing, and its own mean is not a number; its outputs are wanted.
                    executor.run_forward(table, ResultsOnly(receiver))
                else:
                    receiver.loss_weight = weight
                    receiver.adopts_gradients = not gradients_exist
                    if pressure is None:
                        executor.run(table, receiver)
                    else:
                        checked = part.later_checked if gradients_exist else part.first_checked
                        pressure.run(executor, checked, table, receiver)
                    gradients_exist = True
            finally:
                # It holds this micro-batch's masks, beside which the next one's would have to lie, and after an error
                # everything that there was then, for as long as somebody looks at the traceback.
                table.clear()
            start += size

    def _weights(self, leaves: Sequence[Any]) -> list[float]:
        """The share of each micro-batch in the loss of the batch."""
        separation = self.parts[self.sizes[0]].separation
        if separation is None or separation.loss_kind == "sum":
            return [1.0] * len(self.sizes)
        counts = list(self.sizes)
        if separation.count_value is not None:
            counts, start = [], 0
            for size in self.sizes:
                part = self.parts[size]
                assert part.separation is not None
                counts.append(valid_targets(part.graph, part.separation, part.inputs_of(leaves, start, size)))
                start += size
        total = sum(counts)
        return [count / total for count in counts] if total else [float("nan")] * len(counts)

"""A step as one process remembers it and another one looks for it; both played in this one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torch_odt.capture.describe_step import describe_step
from torch_odt.capture.trace import TracedStep, trace_step
from torch_odt.capture.trace_cache import RecordedTrace, describe, make_entry, restore, trace_recorded
from torch_odt.execute.loss import make_compute


@dataclass
class DescribedStep:
    """What is described: the model, the loss and the batch."""

    model: nn.Module
    loss_fn: Any
    batch: tuple[Any, ...] = field(default_factory=lambda: (torch.ones(3, 4), torch.zeros(3, 4)))

    def trace(self) -> TracedStep:
        return trace_step(self.model, self.loss_fn, make_compute(self.loss_fn), (self.batch, {}))

    def record(self) -> RecordedTrace:
        return trace_recorded(self.model, self.loss_fn, make_compute(self.loss_fn), (self.batch, {}))

    def key(self) -> str:
        return describe_step(self.model, self.loss_fn, (self.batch, {})).data.hexdigest()

    def remember(self) -> tuple[str, Any] | None:
        """Key and entry as a later process reads them; None when the step is not kept."""
        description = describe(self.model, self.loss_fn, (self.batch, {}))
        entry = make_entry(self.record(), description)
        return None if entry is None or description is None else (description.data.hexdigest(), through_json(entry))

    def find(self, remembered: tuple[str, Any]) -> TracedStep | None:
        description = describe(self.model, self.loss_fn, (self.batch, {}))
        if description is None or description.data.hexdigest() != remembered[0]:
            return None
        return restore(remembered[1], description)


def through_json(data: Any) -> Any:
    return json.loads(json.dumps(data))


def remember(step: DescribedStep) -> tuple[str, Any]:
    remembered = step.remember()
    assert remembered is not None
    return remembered

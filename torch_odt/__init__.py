"""Train a torch model inside a number of bytes, with the gradients of plain PyTorch.

The two doors are `TrainStep` (one object that takes a batch) and `wrap` (the loop stays as it is).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_odt import memory
from torch_odt.errors import (
    CaptureError,
    CheckpointError,
    InfeasibleBudget,
    LossError,
    NonFiniteLossWarning,
    OdtWarning,
    PagingError,
    PlanError,
    ScheduleError,
    StoredOutputsError,
)
from torch_odt.runtime.budget import Budget

if TYPE_CHECKING:
    from torch_odt import adapt, quant
    from torch_odt.execute.dry_run import plan, profile
    from torch_odt.execute.frontier import Frontier, frontier
    from torch_odt.execute.page_file import PageFile
    from torch_odt.execute.step import TrainStep
    from torch_odt.execute.wrap import plan_of, set_budget, unwrap, wrap
    from torch_odt.planning.plan import Plan, load_plan

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "CaptureError",
    "CheckpointError",
    "Frontier",
    "InfeasibleBudget",
    "LossError",
    "NonFiniteLossWarning",
    "OdtWarning",
    "PageFile",
    "PagingError",
    "Plan",
    "PlanError",
    "ScheduleError",
    "StoredOutputsError",
    "TrainStep",
    "adapt",
    "frontier",
    "load_plan",
    "memory",
    "plan",
    "plan_of",
    "profile",
    "quant",
    "set_budget",
    "unwrap",
    "wrap",
]

# Loaded when first used, so that `import torch_odt` costs little more than `import torch`.
_LAZY = {
    "TrainStep": "torch_odt.execute.step",
    "wrap": "torch_odt.execute.wrap",
    "plan_of": "torch_odt.execute.wrap",
    "set_budget": "torch_odt.execute.wrap",
    "unwrap": "torch_odt.execute.wrap",
    "plan": "torch_odt.execute.dry_run",
    "profile": "torch_odt.execute.dry_run",
    "PageFile": "torch_odt.execute.page_file",
    "frontier": "torch_odt.execute.frontier",
    "Frontier": "torch_odt.execute.frontier",
    "Plan": "torch_odt.planning.plan",
    "load_plan": "torch_odt.planning.plan",
}
_ROOMS = ("adapt", "quant")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"torch_odt.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_ROOMS})

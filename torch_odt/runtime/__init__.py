"""Budgets, and keeping to them while training runs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_odt.runtime.budget import Budget, ResolvedBudget, format_bytes, parse_bytes

if TYPE_CHECKING:
    from torch_odt.runtime.background import Background, BackgroundRun
    from torch_odt.runtime.controller import Controller, Decision
    from torch_odt.runtime.monitor import Monitor, Reading, read_system
    from torch_odt.runtime.persistence import Checkpointer, Resumed
    from torch_odt.runtime.policies import ControlGroupHeadroom, Fixed, Policy, ShareOfAvailable, Smallest
    from torch_odt.runtime.spin_count import explored_spin_count
    from torch_odt.runtime.wait_policy import reexecute_with_wait_policy

__all__ = [
    "Background",
    "BackgroundRun",
    "Budget",
    "Checkpointer",
    "ControlGroupHeadroom",
    "Controller",
    "Decision",
    "Fixed",
    "Monitor",
    "Policy",
    "Reading",
    "ResolvedBudget",
    "Resumed",
    "ShareOfAvailable",
    "Smallest",
    "explored_spin_count",
    "format_bytes",
    "parse_bytes",
    "read_system",
    "reexecute_with_wait_policy",
]

# Loaded when first used: a start from a plan does without.
_LAZY = {
    "Background": "torch_odt.runtime.background",
    "BackgroundRun": "torch_odt.runtime.background",
    "Checkpointer": "torch_odt.runtime.persistence",
    "Controller": "torch_odt.runtime.controller",
    "Decision": "torch_odt.runtime.controller",
    "ControlGroupHeadroom": "torch_odt.runtime.policies",
    "Fixed": "torch_odt.runtime.policies",
    "Policy": "torch_odt.runtime.policies",
    "ShareOfAvailable": "torch_odt.runtime.policies",
    "Smallest": "torch_odt.runtime.policies",
    "Resumed": "torch_odt.runtime.persistence",
    "Monitor": "torch_odt.runtime.monitor",
    "Reading": "torch_odt.runtime.monitor",
    "read_system": "torch_odt.runtime.monitor",
    "explored_spin_count": "torch_odt.runtime.spin_count",
    "reexecute_with_wait_policy": "torch_odt.runtime.wait_policy",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)

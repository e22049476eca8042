"""Budgets, and keeping to them while training runs."""

from __future__ import annotations

from torch_odt.runtime.budget import Budget, ResolvedBudget, format_bytes, parse_bytes

__all__ = ["Budget", "ResolvedBudget", "format_bytes", "parse_bytes"]

"""The cache of tests of planning: whatever they ask for is planned, and need not be traced and measured again."""

from __future__ import annotations

import os
from typing import Any

from torch_odt.cache import Cache


class FreshPlans(Cache):
    """Traces and measurements that all tests share, and no plans."""

    def __init__(self) -> None:
        super().__init__(os.environ["TORCH_ODT_TESTS_CACHE"])

    def load_plan(self, key: str) -> Any | None:
        return None

    def save_plan(self, key: str, data: Any) -> None:
        pass

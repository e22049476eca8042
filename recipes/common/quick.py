"""`--quick`: fewer of everything, for a look."""

from __future__ import annotations

import argparse
from typing import Any


def set_quick(parser: argparse.ArgumentParser, options: argparse.Namespace, values: dict[str, Any]) -> None:
    """Set options to smaller values; those that were given on the command line stay."""
    for name, value in values.items():
        if getattr(options, name) == parser.get_default(name):
            setattr(options, name, value)

"""The state of the random number generators that a training step may draw from."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class PythonRandomState:
    """The generators of Python and, where it is imported, of numpy. torch's own is not among them."""

    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> PythonRandomState:
        numpy = sys.modules.get("numpy")
        return cls(random.getstate(), None if numpy is None else numpy.random.get_state())

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


@dataclass(frozen=True, slots=True)
class RandomState:
    """All generators of a step on the CPU: torch's default generator, Python's and numpy's."""

    torch: torch.Tensor
    python: PythonRandomState

    @classmethod
    def capture(cls) -> RandomState:
        return cls(torch.get_rng_state(), PythonRandomState.capture())

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        self.python.restore()

"""What a step of a wrapped model has changed, to be put back when a transfer fails."""

from __future__ import annotations

from torch import nn

from torch_odt.execute.randomness import RandomState
from torch_odt.execute.saved_contents import SavedModules


class StepUndo:
    """Buffers, plain attributes and random generators as they were before a step's first graph.

    Gradients are not among them: autograd adds those of a graph when all of it has been done.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._saved: tuple[SavedModules, RandomState] | None = None

    def begin(self) -> None:
        """A step begins; the copies of the one before are no longer needed."""
        self._saved = None
        self._saved = SavedModules(self._model, None), RandomState.capture()

    def undo(self) -> None:
        """Put everything back."""
        if self._saved is not None:
            for saved in self._saved:
                saved.restore()
            self._saved = None

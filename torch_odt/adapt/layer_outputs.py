"""What a model computes on the way: outputs of its layers, taken while it runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Tap:
    """Takes the output of one layer in each pass of its model.

    It takes the place of the layer's `forward`, so that names of parameters stay as they are. A hook would do the
    same, but steps with hooks are not captured, since hooks may be any Python code.

    Args:
        model: has the layer.
        name: the layer's name, as `model.named_modules()` has it.

    Raises:
        ValueError: there is no such layer, or its `forward` has been replaced already.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        layer = dict(model.named_modules()).get(name)
        if layer is None or not name:
            known = ", ".join([known for known, _ in model.named_modules() if known][:20])
            raise ValueError(f"the model has no layer {name!r}; it has {known or 'none'}")
        if "forward" in vars(layer):
            raise ValueError(f"something has replaced the forward of {name!r} already: unload it first")
        self.name = name
        self.layer = layer
        self._is_open = False
        self._taken: Any = None
        layer.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own."""
        output = type(self.layer).forward(self.layer, *args, **kwargs)
        if self._is_open:
            if self._taken is not None:
                raise ValueError(f"layer {self.name!r} runs more than once in a pass: choose one that runs once")
            self._taken = output
        return output

    def open(self) -> None:
        """From now on, the output is taken."""
        self._is_open = True

    def close(self) -> None:
        """Nothing is taken any more, and nothing kept."""
        self._is_open = False
        self._taken = None

    def output(self) -> Tensor:
        """What was taken since it was opened.

        Raises:
            TypeError: it is no tensor.
            ValueError: the layer did not run.
        """
        if self._taken is None:
            raise ValueError(f"layer {self.name!r} did not run: choose one that every pass of the model goes through")
        if not isinstance(self._taken, Tensor):
            kind = type(self._taken).__name__
            raise TypeError(f"layer {self.name!r} returns a {kind}: choose one inside of it that returns a tensor")
        return self._taken

    def remove(self) -> None:
        """Give the layer its own `forward` back."""
        if "forward" in vars(self.layer):
            del self.layer.forward


def logits_of(outputs: Any) -> Tensor:
    """A model's logits: what it returns, if that is a tensor, or else its `logits` (transformers).

    Raises:
        TypeError: it has none.
    """
    found = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if not isinstance(found, Tensor):
        raise TypeError(f"the model returns a {type(outputs).__name__}: it must be a tensor, or have logits")
    return found

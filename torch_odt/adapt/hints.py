"""A mentee that tells what its intermediate layers compute, in the shape of its mentor's hints.

A. Romero et al., "FitNets: Hints for Thin Deep Nets", ICLR 2015, section 2.2: the mentee's guided layer goes through a
regressor, which is trained with it and needed for nothing afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_odt.adapt.layer_outputs import Tap, logits_of
from torch_odt.adapt.layers import evaluating


class WithHints(nn.Module):
    """Returns `(logits, *hints)` of a model: outputs of named layers beside its own, for `DistillationLoss`.

    The model is the same object as before, as `.model`, with the names of its parameters; `.regressors` are what fits
    shapes: a linear layer or a 1x1 convolution, and average pooling to the mentor's height and width where they differ.
    Both belong to `parameters()`: give these to the optimizer. Use `.model` for what needs no hints; after training,
    `unload()` makes it plain again.

    Args:
        model: the mentee.
        layers: for each layer of the mentor whose output was stored, the name of the mentee's that is to follow it.
        shapes: of the mentor's outputs, without the batch: `StoredOutputs.hint_shapes`. Hints come in its order.
        example: an input, or a tuple of the inputs, of one sample or more. The model is run once, in evaluation mode,
            to see what shape its layers have.

    Raises:
        TypeError: a layer's output is no tensor.
        ValueError: a layer is missing on either side, does not run exactly once in a pass, or cannot be brought to its
            shape.

    Example:
        >>> mentee = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 2))
        >>> hinted = WithHints(mentee, {"layer3": "0"}, {"layer3": (16, 4, 4)}, torch.ones(1, 3, 8, 8))
        >>> [tuple(output.shape) for output in hinted(torch.ones(5, 3, 8, 8))]
        [(5, 2), (5, 16, 4, 4)]
        >>> list(hinted.unload().state_dict())
        ['0.weight', '0.bias', '2.weight', '2.bias']
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, str],
        shapes: Mapping[str, Sequence[int]],
        example: Tensor | tuple[Tensor, ...],
    ) -> None:
        super().__init__()
        if not shapes or set(layers) != set(shapes):
            stored = ", ".join(map(repr, shapes)) or "none"
            raise ValueError(f"the mentor's stored layers are {stored}; layers= names {', '.join(map(repr, layers))}")
        names = [layers[name] for name in shapes]
        if len(set(names)) < len(names):
            raise ValueError(f"a layer of the mentee follows one of the mentor's, not several: {', '.join(names)}")
        self.model = model
        # In a list of objects that are no modules: a layer is not to be registered twice.
        self._taps: list[Tap] = []
        try:
            for name in names:
                self._taps.append(Tap(model, name))
            with evaluating(model), torch.no_grad():
                _, *outputs = self._run(example if isinstance(example, tuple) else (example,), {})
            self.regressors = nn.ModuleList(
                _regressor(output[0], tuple(shape), f"{tap.name!r} to follow {mentor!r}")
                for tap, output, (mentor, shape) in zip(self._taps, outputs, shapes.items(), strict=True)
            )
        except BaseException:
            self.unload()
            raise

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """`(logits, *hints)`; the arguments are the model's."""
        logits, *outputs = self._run(args, kwargs)
        hints = [regressor(output) for regressor, output in zip(self.regressors, outputs, strict=True)]
        return (logits, *hints)

    def unload(self) -> nn.Module:
        """The model, plain again, with what it has learnt. A second call does nothing."""
        for tap in self._taps:
            tap.remove()
        return self.model

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        for tap in self._taps:
            tap.open()
        try:
            logits = logits_of(self.model(*args, **kwargs))
            return [logits, *[tap.output() for tap in self._taps]]
        finally:
            for tap in self._taps:
                tap.close()


def _regressor(ours: Tensor, theirs: tuple[int, ...], what: str) -> nn.Module:
    """From one sample's output of the mentee's layer to the mentor's shape."""
    shape = tuple(ours.shape)
    factory: dict[str, Any] = {"device": ours.device, "dtype": ours.dtype}
    if len(shape) != len(theirs) or not 1 <= len(shape) <= 3 or (len(shape) == 2 and shape[0] != theirs[0]):
        raise ValueError(
            f"{what} would have to turn {shape} into {theirs} (without the batch): only (channels), (tokens, channels) "
            "with as many tokens, and (channels, height, width) can be fitted"
        )
    if len(shape) < 3:
        return nn.Linear(shape[-1], theirs[-1], **factory)
    convolution = nn.Conv2d(shape[0], theirs[0], 1, **factory)
    if shape[1:] == theirs[1:]:
        return convolution
    pool = nn.AdaptiveAvgPool2d((theirs[1], theirs[2]))
    # They commute: the convolution goes where there are fewer pixels.
    is_smaller = theirs[1] * theirs[2] < shape[1] * shape[2]
    return nn.Sequential(pool, convolution) if is_smaller else nn.Sequential(convolution, pool)

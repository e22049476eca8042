"""A frozen network up to one of its layers: what that layer is given, or what it returns, one sample at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from torch_odt.adapt.adaptation import swap_module
from torch_odt.adapt.chain import trace
from torch_odt.adapt.layers import evaluating
from torch_odt.adapt.weights_digest import weights_digest

_DTYPES = (torch.float32, torch.float64)


class FrozenFeatures:
    """What a network computes up to a layer; what lies behind it is not run.

    Args:
        model: takes one tensor, samples first. It is left as it is: it runs in evaluation mode and without gradients,
            and is in its own mode afterwards.
        sample: one sample or more, `(n, ...)`, as they will come.
        layer: a module by its name in `model.named_modules()`; "" is the model itself.
        is_replaced: the features are what the layer is given; otherwise what it returns.

    Attributes:
        model, layer, is_replaced: as given.
        count: how many features a sample has, all its dimensions flattened into one.
        dtype, device: of the features.

    Raises:
        ValueError: there is no such layer, it does not run once for a sample, or it has no features of float32 or
            float64 with one row for each sample.
    """

    def __init__(self, model: nn.Module, sample: Tensor, *, layer: str, is_replaced: bool) -> None:
        names = dict(model.named_modules())
        if layer not in names:
            raise ValueError(f"there is no layer {layer!r}; the model has {', '.join(filter(None, names))}")
        check_samples(sample)
        if not len(sample):
            raise ValueError("the sample is an empty batch: give at least one")
        self.model = model
        self.layer = layer
        self.is_replaced = is_replaced
        seen = self._seen_in_a_whole_run(sample[:1])
        self.count = seen[0].numel()
        self.dtype, self.device = seen.dtype, seen.device
        self._is_flat = seen.dim() == 2

    def digest(self) -> int:
        """The same for the same weights of the network; those of a layer that is replaced make no difference."""
        # A number of less than 64 bits is what every way to save and to compare states takes.
        return int(weights_digest(self.model, but=self.layer if self.is_replaced else None)[:15], 16)

    @contextmanager
    def running(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """For as long as the `with` block lasts: a function from one sample, `(1, ...)`, to its features, `(1, count)`.

        It raises ValueError where a sample has other features than the first one, or such as are not finite.
        """
        layer = self.model.get_submodule(self.layer)
        with _stopped(layer, is_replaced=self.is_replaced), evaluating(self.model):
            yield self._of_one

    def with_end(self, end: nn.Module) -> nn.Module:
        """A module of its own: a copy of the network, `end` on its features, and nothing behind.

        Where the network returns what the layer does, it is a copy of the network with `end` in the layer's place or
        behind the layer; otherwise what runs up to the layer, as `torch.fx` traces it. Where the network returns that
        among others and cannot be traced, its copy runs each time up to the layer and no further.

        Raises:
            ValueError: something runs behind the layer, and the network cannot be traced to leave it out.
        """
        if not self._is_flat:
            end = nn.Sequential(nn.Flatten(), end)
        if self.layer == "" and self.is_replaced:
            return end.eval()
        model = copy.deepcopy(self.model).eval()
        if self.layer == "":
            return nn.Sequential(model, end).eval()
        if not self._is_last:
            try:
                return nn.Sequential(self._traced_to_the_layer(model), end).eval()
            except ValueError:
                if self._is_a_result:
                    return _UpToLayer(model, self.layer, end, is_replaced=self.is_replaced).eval()
                raise
        layer = model.get_submodule(self.layer)
        swap_module(model, layer, end if self.is_replaced else nn.Sequential(layer, end))
        return model.eval()

    def _of_one(self, sample: Tensor) -> Tensor:
        try:
            with torch.no_grad():
                self.model(sample)
        except _Reached as reached:
            features = reached.value
        else:
            raise ValueError(f"{self.layer!r} did not run for this sample: what runs must not depend on the sample")
        features = features.flatten(1)
        if features.shape != (1, self.count):
            found = tuple(sample.shape[1:])
            raise ValueError(
                f"a sample of {found} has {features.numel()} features, and the first had {self.count}: samples are "
                "(n, ...), each like the one that was given when this was made"
            )
        if not bool(torch.isfinite(features).all()):
            raise ValueError("a sample's features are not finite: it was not learnt from; look at the sample")
        return features

    def _seen_in_a_whole_run(self, sample: Tensor) -> Tensor:
        seen: list[tuple[Any, Any, int]] = []

        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            seen.append((args[0] if args else None, output, _version(output)))

        handle = self.model.get_submodule(self.layer).register_forward_hook(note)
        try:
            # What is made in inference mode does not tell whether it was changed in place.
            with evaluating(self.model), torch.inference_mode(False), torch.no_grad():
                result = self.model(sample)
        finally:
            handle.remove()
        if len(seen) != 1:
            raise ValueError(f"{self.layer!r} runs {len(seen)} times for a sample: name a layer that runs once")
        given, output, version = seen[0]
        # What changes the output in place returns the same object.
        is_unchanged = _version(output) == version
        self._is_last = result is output and is_unchanged
        # Among several tensors, or in an object, as networks of transformers return.
        leaves = pytree.tree_leaves(result) if is_unchanged else []
        self._is_a_result = any(leaf is output for leaf in leaves)
        features = given if self.is_replaced else output
        what = "is given" if self.is_replaced else "returns"
        if not isinstance(features, Tensor):
            raise ValueError(f"{self.layer!r} {what} no tensor but a {type(features).__name__}: name another layer")
        if features.dtype not in _DTYPES:
            raise ValueError(f"{self.layer!r} {what} {features.dtype}; features are float32 or float64")
        if features.dim() < 2 or len(features) != 1 or not features.numel():
            raise ValueError(f"{self.layer!r} {what} {tuple(features.shape)} for one sample, not (1, features, ...)")
        return features

    def _traced_to_the_layer(self, model: nn.Module) -> nn.Module:
        traced = trace(model, whole=frozenset({self.layer}))
        nodes = list(traced.graph.nodes)
        found = [place for place, node in enumerate(nodes) if node.op == "call_module" and node.target == self.layer]
        if len(found) != 1:
            raise ValueError(
                f"{self.layer!r} lies inside a part of the model that cannot be traced: name a layer outside"
            )
        last = nodes[found[0]]
        value = last.args[0] if self.is_replaced else last
        for node in reversed(nodes[found[0] + (not self.is_replaced) :]):
            traced.graph.erase_node(node)
        traced.graph.output(value)
        traced.delete_all_unused_submodules()
        traced.recompile()
        return traced


def check_samples(x: Tensor) -> None:
    """Raises TypeError or ValueError unless it is a batch of samples."""
    if not isinstance(x, Tensor):
        raise TypeError(f"samples are a tensor (n, ...), not a {type(x).__name__}")
    if x.dim() < 2:
        raise ValueError(f"samples of {tuple(x.shape)}: the first dimension counts them; give one as sample[None]")


class _UpToLayer(nn.Module):
    """A network up to a layer, and `end` on what that is given or returns; what lies behind is not run."""

    def __init__(self, model: nn.Module, layer: str, end: nn.Module, *, is_replaced: bool) -> None:
        super().__init__()
        self.model = model
        self.end = end
        self._layer = layer
        self._is_replaced = is_replaced

    def forward(self, x: Tensor) -> Tensor:
        with _stopped(self.model.get_submodule(self._layer), is_replaced=self._is_replaced):
            try:
                self.model(x)
            except _Reached as reached:
                scores: Tensor = self.end(reached.value)
                return scores
        raise ValueError(f"{self._layer!r} did not run for this input")


@contextmanager
def _stopped(layer: nn.Module, *, is_replaced: bool) -> Iterator[None]:
    """Inside, a forward pass ends at a layer: in front of it, or behind it."""

    def stop_before(module: nn.Module, args: tuple[Any, ...]) -> None:
        raise _Reached(args[0])

    def stop_behind(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        raise _Reached(output)

    handle = layer.register_forward_pre_hook(stop_before) if is_replaced else layer.register_forward_hook(stop_behind)
    try:
        yield
    finally:
        handle.remove()


class _Reached(BaseException):
    """Leaves a forward pass with what was looked for; no Exception, which a model may catch."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0

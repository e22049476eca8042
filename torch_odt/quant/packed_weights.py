"""Weights as the int8 kernels read them, kept from one call to the next within a number of bytes (Mandheling).

D. Xu et al., MobiCom 2022: what was prepared for a layer is used again in the next step, and where memory is short,
what was used most recently is released. A training step asks for its layers in the same order each time, so the most
recent one is that whose next use lies furthest ahead.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_Key = tuple[Any, ...]


def _packed(weight: Tensor, windows: Sequence[int], for_grad_input: bool) -> Tensor:
    packed: Tensor = torch.ops.torch_odt.int8_pack_weight.default(weight.view(torch.int8), windows, for_grad_input)
    return packed


class PackedWeights:
    """Packed weights of all layers of a model.

    When to choose it: where weights are used more than once before they change: in accumulation, in evaluation, and
    where an update was nothing but zeros. Where they change in every step nothing is gained, and layers of few rows,
    whose weights are packed on the way otherwise, lose time. Changes are told by the weight's version counter, which
    writing through `.data` does not move: call `release()` then.

    Args:
        limit_bytes: of what is kept; None sets no limit, and 0 keeps nothing.

    Attributes:
        number: by which operators know it.
        packed_count, reused_count, released_count: how often something was packed, found and released.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.packed_count = self.reused_count = self.released_count = 0
        self.number = next(_numbers)
        # In the order of their use, the latest last.
        self._kept: dict[_Key, tuple[StorageWeakRef, tuple[Any, ...], Tensor]] = {}
        _known[self.number] = self

    def __reduce__(self) -> tuple[type[PackedWeights], tuple[int | None]]:
        """A copy keeps its own."""
        return type(self), (self.limit_bytes,)

    @property
    def kept_bytes(self) -> int:
        """What is held now."""
        return sum(packed.nbytes for _, _, packed in self._kept.values())

    def packed(self, weight: Tensor, windows: Sequence[int], *, for_grad_input: bool) -> Tensor:
        """What `int8_pack_weight` makes of a weight, from the last time where the weight is the same.

        Args:
            weight: of one byte an element, as the layer has it: it is known by its memory and its shape, and not to be
                given as `.data`, which counts no changes.
            windows: stride, padding, dilation and groups, see `windows_of`.
            for_grad_input: see `int8_pack_weight`.
        """
        if weight.is_inference():
            return _packed(weight, windows, for_grad_input)
        # A planned step hands on another tensor of the same memory in each call.
        storage = StorageWeakRef(weight.untyped_storage())
        key = (storage.cdata, weight.storage_offset(), tuple(weight.shape), for_grad_input, tuple(windows))
        state = (weight._version, weight.data_ptr(), weight.stride())
        kept = self._kept.pop(key, None)
        if kept is not None and kept[1] == state:
            self._kept[key] = kept
            self.reused_count += 1
            return kept[2]
        packed = _packed(weight, windows, for_grad_input)
        self.packed_count += 1
        if kept is None:
            self._forget_dead()
        self._make_room(packed.nbytes)
        if self.limit_bytes is None or packed.nbytes <= self.limit_bytes:
            self._kept[key] = (storage, state, packed)
        return packed

    def release(self) -> None:
        """Give everything back."""
        self._kept.clear()

    def _forget_dead(self) -> None:
        for key in [key for key, (storage, _, _) in self._kept.items() if storage.expired()]:
            del self._kept[key]

    def _make_room(self, nbytes: int) -> None:
        while self.limit_bytes is not None and self._kept and self.kept_bytes + nbytes > self.limit_bytes:
            self._kept.popitem()
            self.released_count += 1


class _PackedForEachCall(PackedWeights):
    """Keeps nothing."""

    def packed(self, weight: Tensor, windows: Sequence[int], *, for_grad_input: bool) -> Tensor:
        return _packed(weight, windows, for_grad_input)


# Operators take tensors and numbers; this is how one of the objects is found by its number.
_numbers = itertools.count()
_known: weakref.WeakValueDictionary[int, PackedWeights] = weakref.WeakValueDictionary()
_FOR_EACH_CALL = _PackedForEachCall()


def packs_of(number: int) -> PackedWeights:
    """The object of that number; one that keeps nothing for 0, and where it is gone."""
    return _known.get(number, _FOR_EACH_CALL)

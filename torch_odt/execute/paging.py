"""Paging, executed: what a schedule's page-outs and page-ins do to the values of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import torch

from torch_odt import memory
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.schedule import PageIn, PageOut, Run, Schedule

Call = Callable[[list[Any]], None]


class HeldPage(Protocol):
    """A page in the file. What is being read or written is kept by it, and by the pager where the device hangs."""

    def page_in(self, address: int, owner: object, is_last: bool) -> None: ...
    def wait(self) -> None: ...


class Pager(Protocol):
    """The part of the compiled pager that a step needs."""

    def page_out(self, address: int, bytes: int, owner: object) -> HeldPage: ...
    def settle(self) -> None: ...


class Page:
    """A tensor's storage on its way to the file, in it, or on its way back; forgotten there when nobody holds this."""

    def __init__(self, pager: Pager, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._geometry = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._dtype = tensor.dtype
        self._nbytes = storage.nbytes()
        self._page = pager.page_out(storage.data_ptr(), self._nbytes, storage) if self._nbytes else None

    def wait(self) -> None:
        """Until nothing is under way.

        Raises:
            PagingError: the transfer failed.
        """
        try:
            if self._page is not None:
                self._page.wait()
        except BaseException:
            # Whoever keeps the exception keeps this, but is not to keep its memory.
            self._page = None
            raise

    def bring_back(self, *, is_last: bool) -> torch.Tensor:
        """A new tensor, which must not be touched before `wait`; `is_last`: its place in the file is free then."""
        storage = torch.empty(self._nbytes, dtype=torch.uint8).untyped_storage()
        tensor = torch.empty(0, dtype=self._dtype).set_(storage, *self._geometry)
        memory.tag(tensor, "activation")
        if self._page is not None:
            self._page.page_in(storage.data_ptr(), storage, is_last)
        return tensor


class PageCode:
    """What the instructions of one schedule do beyond running ops. Pages lie in the table behind the graph's values.

    Attributes:
        count: of storages that are paged.
    """

    def __init__(self, graph: TrainingGraph, schedule: Schedule, pager: Pager | None) -> None:
        paged = dict.fromkeys(i.value for i in schedule.instructions if isinstance(i, PageOut))
        self._slots = {value: len(graph.values) + position for position, value in enumerate(paged)}
        if paged and pager is None:
            raise ValueError("the schedule pages, and there is no pager")
        self._pager = pager
        self._last_page_in = {i.value: at for at, i in enumerate(schedule.instructions) if isinstance(i, PageIn)}
        self._waits = _waits(graph, schedule)

    @property
    def count(self) -> int:
        return len(self._slots)

    def begin(self) -> None:
        """Before the first instruction: an earlier step's transfers end, whose memory is needed now.

        Raises:
            PagingError: the device did not answer then, and does not now.
        """
        if self._slots and self._pager is not None:
            self._pager.settle()

    def paging_out(self, value: int) -> Call:
        pager, slot = self._pager, self._slots[value]
        assert pager is not None

        def page_out(table: list[Any]) -> None:
            table[slot] = Page(pager, table[value])

        return page_out

    def paging_in(self, position: int, value: int) -> Call:
        slot, is_last = self._slots[value], self._last_page_in[value] == position

        def page_in(table: list[Any]) -> None:
            table[value] = table[slot].bring_back(is_last=is_last)

        return page_in

    def freeing(self, value: int) -> Call | None:
        """None where nothing may be under way."""
        slot = self._slots.get(value)
        if slot is None:
            return None

        def free(table: list[Any]) -> None:
            if table[slot] is not None:
                table[slot].wait()
            table[value] = None

        return free

    def waiting(self, position: int, call: Call) -> Call:
        """An op's call, after what it touches has arrived."""
        arriving = [(self._slots[value], is_last) for value, is_last in self._waits.get(position, ())]
        if not arriving:
            return call

        def wait_and_call(table: list[Any]) -> None:
            for slot, is_last in arriving:
                table[slot].wait()
                if is_last:
                    table[slot] = None
            call(table)

        return wait_and_call


def _waits(graph: TrainingGraph, schedule: Schedule) -> dict[int, list[tuple[int, bool]]]:
    """For the position of an op: the values whose page-in it is the first to touch, and whether that is their last."""
    found: dict[int, list[tuple[int, bool]]] = {}
    arriving: set[int] = set()
    left = Counter(i.value for i in schedule.instructions if isinstance(i, PageIn))
    for position, instruction in enumerate(schedule.instructions):
        if isinstance(instruction, PageIn):
            arriving.add(instruction.value)
            left[instruction.value] -= 1
        elif isinstance(instruction, Run) and arriving:
            touched = arriving.intersection(graph.values[v].base for v in graph.ops[instruction.op].reads)
            if touched and not graph.ops[instruction.op].is_view:
                found[position] = [(value, left[value] == 0) for value in sorted(touched)]
                arriving -= touched
    return found

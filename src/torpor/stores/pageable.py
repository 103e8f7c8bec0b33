"""Host memory, exact size, given back to the system as soon as no slot of a region is in use."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Sequence

import torch

from torpor.errors import ClosedError, StoreFullError, UsageError
from torpor.memory import kernel
from torpor.stores.base import AddressableStore, Slot
from torpor.stores.slots import FreeList, up

#: Slots begin at cache lines.
_ALIGNMENT_BYTES = 64


class PageableStore(AddressableStore):
    """Anonymous memory in regions, one for each `reserve` that needed more room.

    Args:
        budget_bytes: the most this store may hold; None for what the kernel says is available.
    """

    name = "pageable"

    def __init__(self, budget_bytes: int | None = None) -> None:
        if budget_bytes is not None and budget_bytes < 1:
            raise UsageError(f"budget_bytes={budget_bytes}: must be at least 1, or None for no limit but the machine's")
        self._budget_bytes = budget_bytes
        self._free = FreeList(_ALIGNMENT_BYTES)
        self._regions: dict[int, torch.Tensor] = {}
        self._end = 0
        self._closed = False

    def reserve(self, sizes_bytes: Sequence[int]) -> list[Slot]:
        self._require_open()
        slots = self._free.take(sizes_bytes)
        if slots is None:
            self._grow(sum(self._free.length(nbytes) for nbytes in sizes_bytes))
            slots = self._free.take(sizes_bytes)
        if slots is None:
            raise ValueError("a region of the size asked for does not hold its slots")
        return slots

    def release(self, slots: Sequence[Slot]) -> None:
        self._free.give(slots)
        whole = {begin: begin + region.numel() for begin, region in self._regions.items()}
        for begin, end in self._free.extents:
            if whole.get(begin) == end:
                del self._regions[begin]
        self._free = self._only_in_regions()

    def tensor(self, slot: Slot) -> torch.Tensor:
        self._require_open()
        begins = sorted(self._regions)
        begin = begins[bisect_right(begins, slot.offset) - 1]
        return self._regions[begin][slot.offset - begin : slot.offset - begin + slot.nbytes]

    @property
    def reserved_bytes(self) -> int:
        return sum(region.numel() for region in self._regions.values())

    @property
    def host_bytes(self) -> int:
        return self.reserved_bytes

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        return list(self._regions.values())

    def close(self) -> None:
        self._regions.clear()
        self._free = FreeList(_ALIGNMENT_BYTES)
        self._closed = True

    def describe(self) -> str:
        limit = "no budget" if self._budget_bytes is None else f"budget {self._budget_bytes} bytes"
        return f"pageable host memory ({limit})"

    def _grow(self, nbytes: int) -> None:
        """One more region of exactly `nbytes`; a gap behind it keeps the free space of regions apart."""
        room = kernel.available_bytes() if self._budget_bytes is None else self._budget_bytes - self.reserved_bytes
        if nbytes > room:
            raise StoreFullError(
                nbytes,
                max(0, room),
                self.describe(),
                "Raise budget_bytes, sleep fewer components, or use store='file'.",
            )
        try:
            memory = mmap.mmap(-1, nbytes)
        except OSError as error:
            raise StoreFullError(nbytes, room, self.describe(), f"The kernel refused: {error}.") from error
        self._regions[self._end] = torch.frombuffer(memory, dtype=torch.uint8)
        self._free.add(self._end, self._end + nbytes)
        self._end += up(nbytes, _ALIGNMENT_BYTES) + _ALIGNMENT_BYTES

    def _only_in_regions(self) -> FreeList:
        """The free list without the extents whose regions are gone."""
        spans = sorted((begin, begin + region.numel()) for begin, region in self._regions.items())
        kept = FreeList(_ALIGNMENT_BYTES)
        begins = [begin for begin, _ in spans]
        for begin, end in self._free.extents:
            position = bisect_right(begins, begin) - 1
            if position >= 0 and end <= spans[position][1]:
                kept.add(begin, end)
        return kept

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this store was closed; make a new one")

"""Host memory, exact size, given back to the system as soon as no slot of a region is in use."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Sequence

import torch

from torpor.errors import ClosedError, StoreFullError, UsageError
from torpor.memory import kernel
from torpor.stores.base import AddressableStore, Slot
from torpor.stores.slots import FreeList

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
        return self._free.take_or_grow(sizes_bytes, self._grow)

    def release(self, slots: Sequence[Slot]) -> None:
        self._require_open()
        self._free.give(slots)
        for begin, end in list(self._free.extents):
            if begin in self._regions and begin + self._regions[begin].numel() == end:
                del self._regions[begin]
                self._free.remove(begin, end)

    def tensor(self, slot: Slot) -> torch.Tensor:
        self._require_open()
        if slot.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        begins = list(self._regions)  # in order: each region lies behind those before it
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
            region = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
            kernel.populate(region.data_ptr(), nbytes)
        except OSError as error:
            raise StoreFullError(nbytes, room, self.describe(), f"The kernel refused: {error}.") from error
        self._regions[self._end] = region
        self._free.add(self._end, self._end + nbytes)
        self._end += nbytes + _ALIGNMENT_BYTES

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this store was closed; make a new one")

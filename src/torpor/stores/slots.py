"""Which stretches of an address space are free: first fit, neighbours joined. Holds no bytes itself."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from torpor.stores.base import Slot


def up(nbytes: int, multiple: int) -> int:
    """`nbytes` rounded up to a multiple."""
    return -(-nbytes // multiple) * multiple


class FreeList:
    """Free extents of one address space, sorted `(begin, end)`; slots begin at multiples of the alignment."""

    def __init__(self, alignment_bytes: int) -> None:
        self._alignment_bytes = alignment_bytes
        self._extents: list[tuple[int, int]] = []

    @property
    def extents(self) -> Sequence[tuple[int, int]]:
        """The free extents, in order."""
        return self._extents

    def length(self, nbytes: int) -> int:
        """Bytes a slot takes, padding included."""
        return up(nbytes, self._alignment_bytes)

    def add(self, begin: int, end: int) -> None:
        """New free space.

        Raises:
            ValueError: some of it is free already.
        """
        if end > begin:
            insort(self._extents, (begin, end))
            self._join()

    def remove(self, begin: int, end: int) -> None:
        """Take free space out of the list; it must lie inside one extent."""
        for i, (first, last) in enumerate(self._extents):
            if first <= begin and end <= last:
                rest = [(first, begin), (end, last)]
                self._extents[i : i + 1] = [(low, high) for low, high in rest if low < high]
                return
        raise ValueError(f"bytes {begin} to {end} are not free")

    def take_or_grow(self, sizes_bytes: Sequence[int], grow: Callable[[int], None]) -> list[Slot]:
        """Slots; where they do not fit, `grow` adds free space of so many bytes first, or raises."""
        slots = self.take(sizes_bytes)
        if slots is None:
            grow(sum(self.length(nbytes) for nbytes in sizes_bytes))
            slots = self.take(sizes_bytes)
        if slots is None:
            raise ValueError("free space of the size asked for does not hold its slots")
        return slots

    def take(self, sizes_bytes: Sequence[int]) -> list[Slot] | None:
        """Slots side by side where one extent holds them all, else each where it fits; None if they do not fit."""
        lengths = [self.length(nbytes) for nbytes in sizes_bytes]
        begin = self._take_one(sum(lengths))
        if begin is not None:
            begins = accumulate(lengths, initial=begin)
            return [Slot(offset, nbytes) for offset, nbytes in zip(begins, sizes_bytes, strict=False)]
        before = list(self._extents)
        slots = []
        for length, nbytes in zip(lengths, sizes_bytes, strict=True):
            begin = self._take_one(length)
            if begin is None:
                self._extents = before
                return None
            slots.append(Slot(begin, nbytes))
        return slots

    def give(self, slots: Iterable[Slot]) -> None:
        """Slots back into the list.

        Raises:
            ValueError: one of them is free already: it would be handed out twice.
        """
        self._extents += [(s.offset, s.offset + self.length(s.nbytes)) for s in slots if s.nbytes]
        self._extents.sort()
        self._join()

    def _take_one(self, length: int) -> int | None:
        if length == 0:
            return 0
        for i, (begin, end) in enumerate(self._extents):
            if end - begin >= length:
                self._extents[i : i + 1] = [(begin + length, end)] if end - begin > length else []
                return begin
        return None

    def _join(self) -> None:
        joined: list[tuple[int, int]] = []
        for begin, end in self._extents:
            if joined and joined[-1][1] > begin:
                raise ValueError(f"bytes {begin} to {min(end, joined[-1][1])} are free already")
            if joined and joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((begin, end))
        self._extents = joined

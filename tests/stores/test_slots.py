"""The list of free space: no overlap, all or nothing, neighbours joined, and the total is conserved."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from torpor.stores.base import Slot
from torpor.stores.slots import FreeList, up

_ALIGNMENT = 64


class FreeListModel(RuleBasedStateMachine):
    """Random takes and gives against the sum and the set of what is out."""

    slots = Bundle("slots")

    @initialize(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3))
    def extents_with_gaps(self, sizes: list[int]) -> None:
        self.free = FreeList(_ALIGNMENT)
        self.out: list[Slot] = []
        self.spans: list[tuple[int, int]] = []
        begin = 0
        for size in sizes:
            self.spans.append((begin, begin + size * _ALIGNMENT))
            self.free.add(*self.spans[-1])
            begin += (size + 1) * _ALIGNMENT
        self.total = sum(end - begin for begin, end in self.spans)

    @rule(target=slots, sizes=st.lists(st.integers(0, 300), max_size=6))
    def take(self, sizes: list[int]):
        before = list(self.free.extents)
        slots = self.free.take(sizes)
        if slots is None:
            assert list(self.free.extents) == before
            return multiple()
        assert [slot.nbytes for slot in slots] == sizes
        self.out += [slot for slot in slots if slot.nbytes]
        return multiple(*slots)

    @rule(size=st.integers(1, 5000))
    def one_that_fits_is_never_refused(self, size: int) -> None:
        fits = any(end - begin >= up(size, _ALIGNMENT) for begin, end in self.free.extents)
        slots = self.free.take([size])
        assert (slots is not None) == fits
        self.free.give(slots or [])

    @rule(slots=st.lists(consumes(slots), max_size=4))
    def give(self, slots: list[Slot]) -> None:
        self.free.give(slots)
        self.out = [slot for slot in self.out if slot not in slots]

    @invariant()
    def nothing_overlaps_and_nothing_is_lost(self) -> None:
        taken = [(slot.offset, slot.offset + up(slot.nbytes, _ALIGNMENT)) for slot in self.out]
        spans = sorted([*taken, *self.free.extents])
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert sum(end - begin for begin, end in spans) == self.total
        assert all(any(b <= begin and end <= e for b, e in self.spans) for begin, end in spans)

    @invariant()
    def free_neighbours_are_one(self) -> None:
        assert all(end < begin for (_, end), (begin, _) in pairwise(self.free.extents))


TestFreeList = FreeListModel.TestCase


@given(st.lists(st.integers(0, 500), max_size=20))
def test_slots_lie_side_by_side_where_one_extent_holds_them(sizes: list[int]) -> None:
    free = FreeList(_ALIGNMENT)
    total = sum(map(free.length, sizes))
    free.add(0, 64)
    free.add(128, 128 + total)
    slots = [slot for slot in free.take(sizes) or [] if slot.nbytes]
    assert len(slots) == sum(size > 0 for size in sizes)
    if total > 64:
        assert slots[0].offset == 128
    assert all(b.offset == a.offset + free.length(a.nbytes) for a, b in pairwise(slots))


def test_space_that_is_free_cannot_be_freed_again() -> None:
    free = FreeList(_ALIGNMENT)
    free.add(0, 640)
    slots = free.take([64, 64, 64]) or []
    free.give(slots[1:2])
    with pytest.raises(ValueError, match="bytes 64 to 128 are free already"):
        free.give(slots[1:2])
    with pytest.raises(ValueError, match="free already"):
        FreeList.add(_with(0, 640), 576, 700)


def test_only_what_is_free_can_be_removed() -> None:
    free = FreeList(64)
    free.add(0, 640)
    free.remove(128, 256)
    assert list(free.extents) == [(0, 128), (256, 640)]
    for begin, end in ((64, 192), (128, 256), (600, 704)):
        with pytest.raises(ValueError, match="not free"):
            free.remove(begin, end)
    free.remove(0, 128)
    free.remove(512, 640)
    assert list(free.extents) == [(256, 512)]


def _with(begin: int, end: int) -> FreeList:
    free = FreeList(_ALIGNMENT)
    free.add(begin, end)
    return free

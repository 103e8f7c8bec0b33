"""The pageable store: exact size, really there, and gone as soon as nobody uses a region."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from contracts.store_contract import MIB, StoreContract, fetch, keep, same
from torpor.errors import StoreFullError, UsageError
from torpor.memory import kernel
from torpor.stores import pageable
from torpor.stores.pageable import PageableStore


class TestPageableStore(StoreContract):
    def make_store(self, directory: Path) -> PageableStore:
        return PageableStore()

    @contextmanager
    def room_for(self, nbytes: int, directory: Path) -> Iterator[PageableStore]:
        store = PageableStore(budget_bytes=nbytes)
        yield store
        store.close()


def test_reserved_memory_is_there_and_goes_with_its_last_slot() -> None:
    store = PageableStore()
    first = store.reserve([4 * MIB, 4 * MIB])
    second = store.reserve([2 * MIB])
    address = store.tensor(first[0]).data_ptr()
    assert kernel.resident_bytes(address, 8 * MIB) == 8 * MIB
    store.release(first[:1])
    assert store.host_bytes == 10 * MIB
    store.release(first[1:])
    assert store.host_bytes == 2 * MIB
    contents = keep(store, second)
    assert same(fetch(store, second), contents)
    assert store.reserve([1 * MIB])[0].offset > second[0].offset, "no slot in a region that is gone"
    store.close()


def test_slots_of_different_regions_never_join() -> None:
    store = PageableStore()
    left, right = store.reserve([MIB, 64]), store.reserve([MIB, 64])
    store.release([left[1], right[0]])
    wide = store.reserve([MIB + 64])
    contents = keep(store, [left[0], right[1], *wide])
    assert same(fetch(store, [left[0], right[1], *wide]), contents)
    store.close()


def test_more_than_the_machine_has_is_refused_with_both_numbers() -> None:
    store = PageableStore()
    with pytest.raises(StoreFullError, match="use store='file'") as caught:
        store.reserve([1 << 50])
    assert caught.value.needed_bytes == 1 << 50
    assert 0 < caught.value.free_bytes < 1 << 50
    assert store.reserved_bytes == 0
    store.close()


@pytest.mark.parametrize("culprit", ["mmap", "populate"])
def test_what_the_kernel_refuses_is_no_room(monkeypatch: pytest.MonkeyPatch, culprit: str) -> None:
    def refuse(*_: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(*{"mmap": (pageable.mmap, "mmap"), "populate": (kernel, "populate")}[culprit], refuse)
    store = PageableStore()
    with pytest.raises(StoreFullError, match="Cannot allocate memory"):
        store.reserve([4096])
    monkeypatch.undo()
    assert store.reserved_bytes == 0
    assert len(store.reserve([4096])) == 1
    store.close()


def test_a_budget_must_be_one() -> None:
    with pytest.raises(UsageError, match="budget_bytes=0"):
        PageableStore(budget_bytes=0)

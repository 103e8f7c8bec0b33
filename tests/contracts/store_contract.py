"""What every store must do. Inherit `StoreContract` in the test of a new store and say how to make one."""

from __future__ import annotations

import errno
import os
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torpor.errors import ClosedError, StoreFullError
from torpor.stores.base import AddressableStore, BlockStore, Slot, Store
from torpor.transfer import Piece, load, read, save

KIB = 1024
MIB = 1024**2
#: Around every boundary that a store may have: nothing, a cache line, a page, a block of the ring.
SIZES = (1, 63, 64, 65, 0, 4095, 4096, 4097, 100_003, 1 * MIB, 7)
#: More than a slot is ever padded by.
_PADDING_BYTES = 4 * KIB
#: A property that several classes inherit, each example with a store of its own in one directory.
_INHERITED = (HealthCheck.function_scoped_fixture, HealthCheck.differing_executors)


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Random bytes, the same ones for the same seed."""
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(nbytes) or b"\0"), dtype=torch.uint8)[:nbytes]


def keep(store: Store, slots: list[Slot], first_seed: int = 0) -> list[torch.Tensor]:
    """Save noise into each slot; the noise."""
    contents = [noise(slot.nbytes, first_seed + i) for i, slot in enumerate(slots)]
    save([Piece(content, slot) for content, slot in zip(contents, slots, strict=True)], store)
    return contents


def fetch(store: Store, slots: list[Slot]) -> list[torch.Tensor]:
    """What the slots hold."""
    homes = [torch.full((slot.nbytes,), 85, dtype=torch.uint8) for slot in slots]
    load([Piece(home, slot) for home, slot in zip(homes, slots, strict=True)], store)
    return homes


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def open_files() -> set[str]:
    """The descriptors of this process, by number and target; the one that lists them aside."""
    targets = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the one that listed them
            continue
    return {f"{fd} {target}" for fd, target in targets.items()}


class StoreContract(ABC):
    """The promises of `torpor.stores.base`."""

    @abstractmethod
    def make_store(self, directory: Path) -> Store:
        """A new store."""

    @abstractmethod
    def room_for(self, nbytes: int, directory: Path) -> AbstractContextManager[Store]:
        """A new store that has room for `nbytes` bytes, a multiple of 1 MiB, and no more."""

    @pytest.fixture
    def store(self, tmp_path: Path):
        store = self.make_store(tmp_path)
        yield store
        store.close()

    def test_it_is_of_one_of_the_two_kinds(self, store: Store) -> None:
        assert isinstance(store, AddressableStore) != isinstance(store, BlockStore)
        assert store.name
        assert store.describe()

    def test_slots_are_exact_in_order_and_side_by_side(self, store: Store) -> None:
        slots = store.reserve(SIZES)
        assert [slot.nbytes for slot in slots] == list(SIZES)
        used = [slot for slot in slots if slot.nbytes]
        assert all(0 <= b.offset - (a.offset + a.nbytes) < _PADDING_BYTES for a, b in pairwise(used))
        assert store.reserved_bytes >= sum(SIZES)

    def test_bytes_come_back(self, store: Store) -> None:
        slots = store.reserve(SIZES)
        contents = keep(store, slots)
        assert same(fetch(store, slots), contents)
        assert same(fetch(store, slots[::-1]), contents[::-1])

    def test_saving_one_slot_leaves_its_neighbours(self, store: Store) -> None:
        slots = store.reserve([100] * 9)
        contents = keep(store, slots)
        contents[4:5] = keep(store, slots[4:5], first_seed=99)
        assert same(fetch(store, slots), contents)

    def test_loading_one_slot_touches_nothing_else(self, store: Store) -> None:
        slots = store.reserve([5000, 5000, 5000])
        contents = keep(store, slots)
        around = torch.full((9000,), 7, dtype=torch.uint8)
        load([Piece(around[1000:6000], slots[1])], store)
        assert torch.equal(around[1000:6000], contents[1])
        assert bool((around[:1000] == 7).all() and (around[6000:] == 7).all())

    def test_any_part_can_be_read(self, store: Store) -> None:
        slots = store.reserve([3000, 2 * MIB + 5])
        contents = keep(store, slots)
        for start, nbytes in ((0, 1), (1, 0), (4095, 2), (4096, 4096), (MIB - 1, MIB), (2 * MIB + 4, 1)):
            assert torch.equal(read(store, slots[1], start, nbytes), contents[1][start : start + nbytes])

    def test_nothing_asked_nothing_done(self, store: Store) -> None:
        assert store.reserve([]) == []
        store.release([])
        assert save([], store).nbytes == load([], store).nbytes == 0
        empty = store.reserve([0, 0])
        assert [slot.nbytes for slot in empty] == [0, 0]
        assert fetch(store, empty)[0].shape == (0,)
        assert store.reserved_bytes == 0

    def test_no_room_means_nothing_reserved_and_nothing_lost(self, tmp_path: Path) -> None:
        with self.room_for(4 * MIB, tmp_path) as store:
            held = store.reserve([MIB])
            contents = keep(store, held)
            before = store.reserved_bytes
            with pytest.raises(StoreFullError) as caught:
                store.reserve([MIB, MIB, 2 * MIB])
            assert caught.value.errno == errno.ENOSPC
            assert caught.value.needed_bytes > 3 * MIB
            assert caught.value.free_bytes >= 0
            assert store.reserved_bytes == before
            held += store.reserve([3 * MIB])
            contents += keep(store, held[1:], first_seed=9)
            assert same(fetch(store, held), contents)

    def test_released_space_is_used_again(self, store: Store) -> None:
        kept = store.reserve([5000])
        contents = keep(store, kept)
        slots = store.reserve([MIB, 3000, MIB])
        held = store.reserved_bytes
        for _ in range(20):
            store.release(slots[::-1])
            slots = store.reserve([MIB, 3000, MIB])
        assert store.reserved_bytes == held
        assert same(fetch(store, kept), contents)

    def test_what_is_released_twice_is_refused(self, store: Store) -> None:
        slots = store.reserve([5000, 5000, 5000])
        store.release(slots[:1])
        with pytest.raises(ValueError, match="free already"):
            store.release(slots[:1])

    def test_its_own_memory_is_in_its_account(self, store: Store) -> None:
        keep(store, store.reserve([MIB, 3 * MIB]))
        blocks = sorted((block.data_ptr(), block.nbytes) for block in store.memory)
        assert sum(nbytes for _, nbytes in blocks) == store.host_bytes > 0
        assert all(a + nbytes <= b for (a, nbytes), (b, _) in pairwise(blocks))

    def test_closed_is_closed(self, tmp_path: Path) -> None:
        files, threads = open_files(), threading.active_count()
        store = self.make_store(tmp_path)
        slots = store.reserve([5000])
        keep(store, slots)
        store.close()
        store.close()
        assert (store.reserved_bytes, store.host_bytes, list(store.memory)) == (0, 0, [])
        assert open_files() == files
        assert threading.active_count() == threads
        calls: list[Callable[[], object]] = [
            lambda: store.reserve([1]),
            lambda: store.release(slots),
            lambda: keep(store, slots),
            lambda: fetch(store, slots),
            lambda: read(store, slots[0], 0, 1),
        ]
        for call in calls:
            with pytest.raises(ClosedError):
                call()

    @settings(max_examples=20, deadline=None, suppress_health_check=_INHERITED)
    @given(steps=st.lists(st.lists(st.integers(0, 40_000), max_size=6), max_size=12), seed=st.integers(0, 2**16))
    def test_whatever_is_reserved_kept_and_released(self, tmp_path: Path, steps: list[list[int]], seed: int) -> None:
        chance = random.Random(seed)
        held: dict[Slot, torch.Tensor] = {}
        store = self.make_store(tmp_path)
        for sizes in steps:
            slots = [slot for slot in store.reserve(sizes) if slot.nbytes]
            spans = sorted((slot.offset, slot.offset + slot.nbytes) for slot in [*held, *slots])
            assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
            held |= zip(slots, keep(store, slots, chance.randrange(1000)), strict=True)
            assert same(fetch(store, list(held)), list(held.values()))
            gone = chance.sample(list(held), chance.randint(0, len(held)))
            store.release(gone)
            for slot in gone:
                del held[slot]
        assert same(fetch(store, list(held)), list(held.values()))
        store.close()

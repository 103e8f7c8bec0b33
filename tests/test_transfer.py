"""Blocks of a transfer, on a store that writes down what it is asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.store_contract import noise
from torpor.errors import StoreError, UsageError
from torpor.stores.base import BlockStore, Slot, Store
from torpor.stores.batch import Batch
from torpor.stores.file import FileStore
from torpor.stores.pageable import PageableStore
from torpor.stores.slots import up
from torpor.transfer import Moved, Piece, load, read, save

_ALIGNMENT = 512
_CHUNK = 4 * _ALIGNMENT


class Recording(BlockStore):
    """Blocks in one tensor, and every call in a list."""

    name = "recording"
    alignment_bytes = _ALIGNMENT
    chunk_bytes = _CHUNK

    def __init__(self, nbytes: int, ring: int = 3) -> None:
        super().__init__()
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8)
        self.ring = [torch.zeros(_CHUNK, dtype=torch.uint8) for _ in range(ring)]
        self.calls: list[tuple[str, int, int]] = []
        self.ring_was_held = True
        self.lock = threading.Lock()
        self.fail_at = 0

    def reserve(self, sizes_bytes: Sequence[int]) -> list[Slot]:
        raise NotImplementedError

    def release(self, slots: Sequence[Slot]) -> None:
        raise NotImplementedError

    reserved_bytes = host_bytes = 0
    memory = ()

    def close(self) -> None:
        raise NotImplementedError

    def describe(self) -> str:
        return "a tensor"

    def buffers(self) -> Sequence[torch.Tensor]:
        return self.ring

    def write_block(self, offset: int, block: torch.Tensor) -> None:
        self._note("write", offset, block)
        self.bytes[offset : offset + block.numel()].copy_(block)

    def read_block(self, offset: int, block: torch.Tensor) -> None:
        self._note("read", offset, block)
        block.copy_(self.bytes[offset : offset + block.numel()])

    def sync(self) -> None:
        self.calls.append(("sync", 0, 0))

    def _note(self, what: str, offset: int, block: torch.Tensor) -> None:
        with self.lock:
            self.calls.append((what, offset, block.numel()))
            self.ring_was_held &= self.ring_lock.locked()
            number = len(self.calls)
        if self.fail_at and number >= self.fail_at:
            raise StoreError(f"call {number}")


def lay(sizes: list[int], gaps: list[int] | None = None) -> list[Slot]:
    """Slots one behind the other, with `gaps` aligned blocks in front of each."""
    slots, offset = [], 0
    for i, size in enumerate(sizes):
        offset += (gaps[i] if gaps else 0) * _ALIGNMENT
        slots.append(Slot(offset, size))
        offset += up(size, _ALIGNMENT)
    return slots


def pieces_of(slots: list[Slot]) -> list[Piece]:
    return [Piece(noise(slot.nbytes, i), slot) for i, slot in enumerate(slots)]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3 * _CHUNK), st.integers(0, 2)), max_size=15), st.randoms(use_true_random=False)
)
def test_any_pieces_in_any_order_arrive_in_aligned_blocks(layout: list[tuple[int, int]], chance) -> None:
    slots = lay([size for size, _ in layout], [gap for _, gap in layout])
    pieces = pieces_of(slots)
    chance.shuffle(pieces)
    store = Recording(sum(size + 3 * _ALIGNMENT for size, _ in layout) + _ALIGNMENT)
    moved = save(pieces, store)
    assert moved.nbytes == sum(slot.nbytes for slot in slots)
    for piece in pieces:
        slot = piece.slot
        assert torch.equal(store.bytes[slot.offset : slot.offset + slot.nbytes], piece.home)
    back = [Piece(torch.zeros_like(piece.home), piece.slot) for piece in pieces]
    load(back, store)
    assert all(torch.equal(a.home, b.home) for a, b in zip(back, pieces, strict=True))
    blocks = [(offset, nbytes) for what, offset, nbytes in store.calls if what != "sync"]
    assert all(offset % _ALIGNMENT == nbytes % _ALIGNMENT == 0 < nbytes <= _CHUNK for offset, nbytes in blocks)
    covered = {offset + i for offset, nbytes in blocks for i in range(0, nbytes, _ALIGNMENT)}
    own = {s.offset + i for s in slots for i in range(0, s.nbytes, _ALIGNMENT)}
    assert covered == own, "no block of somebody else's"


def test_small_neighbours_share_a_block_and_large_ones_are_cut() -> None:
    store = Recording(20 * _CHUNK)
    save(pieces_of(lay([100, 200, 300, 400])), store)
    assert store.calls == [("write", 0, _CHUNK), ("sync", 0, 0)]
    store.calls.clear()
    save(pieces_of(lay([100, 3 * _CHUNK])), store)
    writes = sorted(store.calls)[1:]
    assert writes == [
        ("write", 0, _CHUNK),
        ("write", _CHUNK, _CHUNK),
        ("write", 2 * _CHUNK, _CHUNK),
        ("write", 3 * _CHUNK, _ALIGNMENT),
    ]


def test_what_lies_apart_is_not_joined() -> None:
    store = Recording(20 * _CHUNK)
    save(pieces_of(lay([100, 100, 100], [0, 1, 0])), store)
    assert sorted(store.calls)[1:] == [("write", 0, _ALIGNMENT), ("write", 2 * _ALIGNMENT, 2 * _ALIGNMENT)]


def test_a_save_ends_with_one_sync_and_a_load_with_none() -> None:
    store = Recording(20 * _CHUNK)
    pieces = pieces_of(lay([_CHUNK] * 6))
    save(pieces, store)
    assert [what for what, _, _ in store.calls].count("sync") == 1
    assert store.calls[-1][0] == "sync"
    load(pieces, store)
    assert store.calls[-1][0] == "read"


def test_nothing_to_move_asks_nothing() -> None:
    store = Recording(_CHUNK)
    assert save([], store).nbytes == load([], store).nbytes == 0
    assert store.calls == []


@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("direction", [save, load])
def test_the_first_error_ends_it_as_it_came(direction, at: int) -> None:
    store = Recording(20 * _CHUNK)
    pieces = pieces_of(lay([_CHUNK] * 7))
    store.fail_at = at
    threads = threading.active_count()
    with pytest.raises(StoreError, match=r"^call \d+$") as caught:
        direction(pieces, store)
    assert int(str(caught.value).split()[1]) >= at
    assert caught.value.__context__ is None
    assert ("sync", 0, 0) not in store.calls
    assert len(store.calls) <= at + len(store.ring) + 1
    assert threading.active_count() == threads
    store.fail_at = 0
    save(pieces, store)  # the ring is free again
    assert torch.equal(read(store, pieces[3].slot, 0, _CHUNK), pieces[3].home)


def test_two_transfers_at_once_do_not_mix() -> None:
    store = Recording(64 * _CHUNK, ring=2)
    one, other = (
        pieces_of(lay([_CHUNK] * 32)),
        [Piece(noise(_CHUNK, 100 + i), Slot((32 + i) * _CHUNK, _CHUNK)) for i in range(32)],
    )
    threads = [threading.Thread(target=save, args=(pieces, store)) for pieces in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.ring_was_held
    for piece in [*one, *other]:
        assert torch.equal(store.bytes[piece.slot.offset : piece.slot.offset + _CHUNK], piece.home)


class Hasty(Recording):
    """Does two blocks of a batch in one call, and leaves every third to be asked for by itself."""

    batch_blocks = 5

    def write_blocks(self, batch: Batch, first: int, buffer: torch.Tensor) -> int:
        for number in range(first, min(len(batch), first + 2)):
            offset, nbytes = batch.block(number)
            batch.gather(number, buffer)
            self.bytes[offset : offset + nbytes].copy_(buffer[:nbytes])
        return min(len(batch), first + 2)

    def read_blocks(self, batch: Batch, first: int, buffer: torch.Tensor) -> int:
        for number in range(first, min(len(batch), first + 2)):
            offset, nbytes = batch.block(number)
            buffer[:nbytes].copy_(self.bytes[offset : offset + nbytes])
            batch.scatter(number, buffer)
        return min(len(batch), first + 2)


def test_what_a_store_did_not_do_in_one_call_is_done_by_the_block() -> None:
    store = Hasty(64 * _CHUNK)
    pieces = pieces_of(lay([_CHUNK] * 13))
    save(pieces, store)
    expected = [2 * _CHUNK, 7 * _CHUNK, 12 * _CHUNK]
    assert sorted(offset for what, offset, _ in store.calls if what == "write") == expected
    back = [Piece(torch.zeros_like(piece.home), piece.slot) for piece in pieces]
    load(back, store)
    assert sorted(offset for what, offset, _ in store.calls if what == "read") == expected
    assert all(torch.equal(a.home, b.home) for a, b in zip(back, pieces, strict=True))


class Elsewhere(torch.Tensor):
    """Not in host memory, says its device: an address that C must not follow."""

    is_cpu = False

    def data_ptr(self) -> int:
        return 1


def test_homes_that_are_not_in_host_memory_are_copied_by_torch(tmp_path: Path) -> None:
    for store in (Recording(64 * _CHUNK), FileStore(tmp_path)):
        slots = lay([_CHUNK] * 3) if isinstance(store, Recording) else store.reserve([100, 2**20, 300])
        pieces = pieces_of(slots)
        pieces[1] = Piece(pieces[1].home.as_subclass(Elsewhere), pieces[1].slot)
        save(pieces, store)
        back = [Piece(torch.zeros_like(piece.home), piece.slot) for piece in pieces]
        assert isinstance(back[1].home, Elsewhere)
        load(back, store)
        assert all(torch.equal(a.home, b.home) for a, b in zip(back, pieces, strict=True))
    store.close()


def test_a_home_may_be_a_storage(tmp_path: Path) -> None:
    sizes = [100, 3 * _CHUNK, 300]
    stores = (Recording(64 * _CHUNK), FileStore(tmp_path), PageableStore())
    for store in stores:
        slots = lay(sizes) if isinstance(store, Recording) else store.reserve(sizes)
        pieces = pieces_of(slots)
        save([Piece(piece.home.untyped_storage(), piece.slot) for piece in pieces], store)
        back = [torch.zeros_like(piece.home) for piece in pieces]
        load([Piece(home.untyped_storage(), slot) for home, slot in zip(back, slots, strict=True)], store)
        assert all(torch.equal(piece.home, home) for piece, home in zip(pieces, back, strict=True))
    for opened in stores[1:]:
        opened.close()


def test_a_homeless_kind_of_store_is_refused() -> None:
    class Neither(Store):
        name = "neither"
        reserve = release = close = describe = reserved_bytes = host_bytes = memory = lambda self: None

    piece = Piece(noise(10), Slot(0, 10))
    with pytest.raises(TypeError, match="Neither is neither"):
        read(Neither(), piece.slot, 0, 10)
    for direction in (save, load):
        with pytest.raises(TypeError, match="Neither is neither"):
            direction([piece], Neither())


@pytest.mark.parametrize(
    "home",
    [
        torch.zeros(_CHUNK - 1, dtype=torch.uint8),
        torch.zeros(_CHUNK + 1, dtype=torch.uint8),
        torch.zeros(2 * _CHUNK, dtype=torch.uint8)[::2],
        torch.zeros(_CHUNK, dtype=torch.int8),
        torch.zeros(_CHUNK - 1, dtype=torch.uint8).untyped_storage(),
        torch.zeros(_CHUNK + 1, dtype=torch.uint8).untyped_storage(),
    ],
    ids=["short", "long", "strided", "signed", "short storage", "long storage"],
)
@pytest.mark.parametrize("direction", [save, load])
def test_a_home_that_does_not_fit_its_slot_is_refused(direction, home: torch.UntypedStorage | torch.Tensor) -> None:
    blocks, memory = Recording(_CHUNK), PageableStore()
    for store, slot in ((blocks, Slot(0, _CHUNK)), (memory, memory.reserve([_CHUNK])[0])):
        with pytest.raises(UsageError, match=f"slot of {_CHUNK} bytes"):
            direction([Piece(home, slot)], store)
    assert blocks.calls == []
    memory.close()


def test_it_says_how_many_bytes_in_how_many_seconds() -> None:
    moved = save(pieces_of(lay([1000, 24])), Recording(_CHUNK))
    assert isinstance(moved, Moved)
    assert moved.nbytes == 1024
    assert moved.seconds > 0


def test_pieces_are_taken_while_earlier_ones_are_under_way() -> None:
    store = Recording(64 * _CHUNK)
    written_before = []

    def pieces() -> Iterator[Piece]:
        for piece in pieces_of(lay([_CHUNK] * 32)):
            written_before.append(len(store.calls))
            yield piece

    save(pieces(), store)
    assert written_before[-1] >= 32 - 2 * len(store.ring)


@pytest.mark.parametrize("count", [0, 1, 3, 20])
def test_an_error_of_who_makes_the_pieces_ends_it_too(count: int) -> None:
    store = Recording(64 * _CHUNK)

    def pieces() -> Iterator[Piece]:
        yield from pieces_of(lay([_CHUNK] * count))
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        save(pieces(), store)
    assert ("sync", 0, 0) not in store.calls
    assert not store.ring_lock.locked()

"""How pieces on GPUs are cut and joined into parts; the copies themselves are tested on a GPU."""

import ctypes
import random

import numpy as np
import pytest
import torch

from torpor import transfer_cuda
from torpor.stores.base import Slot
from torpor.stores.pageable import PageableStore
from torpor.stores.pinned import PinnedStore
from torpor.transfer import Piece
from torpor.transfer_cuda import PART_BYTES, SMALL_BYTES, _Lane, _parts, chunks

MIB = 1024**2


class Home:
    """As much of a tensor on a GPU as the cutting looks at."""

    def __init__(self, address: int, device: int = 0) -> None:
        self._address, self._device = address, device

    def data_ptr(self) -> int:
        return self._address

    def get_device(self) -> int:
        return self._device

    def __getitem__(self, stretch: slice) -> "Home":
        return Home(self._address + stretch.start, self._device)


def pieces_of(sizes, gaps=(0,), devices=(0,), seed=0):
    chance = random.Random(seed)
    offset, pieces = 0, []
    for i, nbytes in enumerate(sizes):
        offset += chance.choice(gaps)
        pieces.append(Piece(Home((i + 1) << 40, chance.choice(devices)), Slot(offset, nbytes)))
        offset += -(-nbytes // 64) * 64
    return pieces


def moved(parts):
    """Home address -> device, place in the store, bytes."""
    return {
        home: (part.device, part.slot.offset + offset, nbytes)
        for part in parts
        for home, offset, nbytes in zip(part.homes, part.offsets, part.sizes, strict=True)
    }


def wanted(pieces):
    found = {}
    for piece in pieces:
        step = PART_BYTES if piece.slot.nbytes >= SMALL_BYTES else piece.slot.nbytes or 1
        for at in range(0, piece.slot.nbytes, step):
            place = (piece.home.get_device(), piece.slot.offset + at, min(step, piece.slot.nbytes - at))
            found[piece.home.data_ptr() + at] = place
    return found


@pytest.mark.parametrize("seed", range(20))
def test_every_byte_is_moved_once_whatever_comes(seed):
    chance = random.Random(seed)
    sizes = [chance.choice([0, 1, 100, 5000, MIB, SMALL_BYTES - 1, SMALL_BYTES, 70 * MIB]) for _ in range(200)]
    pieces = pieces_of(sizes, gaps=(0, 0, 63, 64, 4096), devices=(0, 1, 2), seed=seed)
    if seed % 2:
        chance.shuffle(pieces)
    parts = list(_parts(pieces))
    assert moved(parts) == wanted(pieces)
    assert all(0 < part.slot.nbytes <= PART_BYTES for part in parts)
    assert all(o + n <= part.slot.nbytes for part in parts for o, n in zip(part.offsets, part.sizes, strict=True))


def test_small_neighbours_share_a_part_until_it_is_full():
    parts = list(_parts(pieces_of([MIB] * 200)))
    assert [len(part.homes) for part in parts] == [64, 64, 64, 8]


def test_a_gap_as_wide_as_a_cache_line_may_be_other_memory():
    assert len(list(_parts(pieces_of([64] * 10, gaps=(0,))))) == 1
    assert len(list(_parts(pieces_of([64] * 10, gaps=(64,))))) == 10


def test_pieces_are_taken_as_they_come():
    taken = []

    def source():
        for piece in pieces_of([MIB] * 200):
            taken.append(piece)
            yield piece

    next(iter(_parts(source())))
    assert len(taken) == 65


@pytest.mark.parametrize("fails", ["the generator", "a copy", "a wait"])
def test_after_a_failure_every_device_is_waited_for(fails, monkeypatch):
    events = []

    class Lane:
        def __init__(self, device, store, *, to_store):
            self._device = device.index

        def move(self, part):
            events.append(("move", self._device))
            if fails == "a copy" and len(events) == 2:
                raise RuntimeError("a copy failed")

        def finish(self):
            events.append(("finish", self._device))
            if fails == "a wait" and len(events) == 3:
                raise RuntimeError("a wait failed")

    def pieces():
        yield from (Piece(Home(1 << 40, device), Slot(0, SMALL_BYTES)) for device in (0, 1))
        if fails == "the generator":
            raise RuntimeError("the generator failed")

    monkeypatch.setattr(transfer_cuda, "_Lane", Lane)
    with pytest.raises(RuntimeError, match=f"{fails} failed"):
        transfer_cuda.save_from_cuda(pieces(), PageableStore())
    assert events == [("move", 0), ("move", 1), ("finish", 1), ("finish", 0)]


def test_chunks_cover_what_they_were_told():
    rng = np.random.default_rng(0)
    source, to, nbytes = (rng.integers(1, 1 << 20, 50) for _ in range(3))
    rows = chunks(source << 24, to << 24, nbytes)
    assert rows[:, 2].min() > 0
    for i in range(50):
        mine = rows[(rows[:, 0] >> 24) == source[i]]
        assert mine[:, 2].sum() == nbytes[i]
        assert ((mine[:, 1] - (to[i] << 24)) == (mine[:, 0] - (source[i] << 24))).all()
        assert (np.diff(mine[:, 0]) == mine[:-1, 2]).all()


class FullDevice(_Lane):
    """A lane without a GPU, of a device that has no room; its kernels are done by the processor."""

    def __init__(self, store, *, to_store):
        self._device, self._store, self._to_store = torch.device("cpu"), store, to_store
        self._staging, self._is_full = [], False

    def _launch(self, table):
        for source, to, nbytes in table.tolist():
            ctypes.memmove(to, source, nbytes)


@pytest.fixture
def full_device(monkeypatch):
    """`torch.empty` as on a GPU without room; the list grows by one for each time it is asked."""
    asked, real = [], torch.empty

    def refuse(size, **options):
        if size != PART_BYTES:
            return real(size, **options)
        asked.append(size)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    return asked


def test_without_room_for_staging_kernels_reach_the_store_themselves(full_device):
    store = PinnedStore()
    sizes = [random.Random(1).randrange(1, 9000) for _ in range(300)]
    homes = [torch.arange(nbytes).to(torch.uint8) for nbytes in sizes]
    before = [home.clone() for home in homes]
    pieces = [Piece(home, slot) for home, slot in zip(homes, store.reserve(sizes), strict=True)]
    parts = list(_parts(pieces))
    for lane, move in (
        (FullDevice(store, to_store=True), "_save"),
        (FullDevice(store, to_store=False), "_load_by_engine"),
    ):
        for part in parts * 2:
            getattr(lane, move)(part, 0)
        assert lane._is_full
        if move == "_save":
            assert all(torch.equal(store.tensor(p.slot), saved) for p, saved in zip(pieces, before, strict=True))
            for home in homes:
                home.zero_()
    assert all(map(torch.equal, homes, before))
    assert len(full_device) == 2, "asked once a transfer"
    store.close()


def test_a_store_that_kernels_cannot_reach_needs_the_room(full_device):
    store = PageableStore()
    piece = Piece(torch.zeros(100, dtype=torch.uint8), store.reserve([100])[0])
    (part,) = _parts([piece])
    with pytest.raises(torch.OutOfMemoryError):
        FullDevice(store, to_store=True)._save(part, 0)
    store.close()

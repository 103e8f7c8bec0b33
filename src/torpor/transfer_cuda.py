"""Bytes between GPUs and page-locked memory at the speed of the link, for 2 storages or for 20,000.

One stream a device and direction, parts of 64 MiB, one wait at the end. A part is a stretch of one large piece,
or small pieces whose slots lie side by side: those are gathered into a staging buffer by one kernel launch and
cross the link in one copy; on the way back they are scattered. Two staging buffers take turns; on a device without
room for them kernels read and write host memory.

After somebody freed much device memory the driver wipes it with the copy engine that also brings bytes to the
device, and for as long as that takes (110 GiB: half a second on an H200) copies to the device run at half their
rate. Copies by a kernel that reads host memory do not: they reach 92% of the undisturbed rate. So each part's
rate is watched, and kernels take over while the engine is slow.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from torpor.stores.base import AddressableStore, Slot
from torpor.stores.pinned import PinnedStore

if TYPE_CHECKING:
    from torpor.transfer import Piece

Int64s = npt.NDArray[np.int64]

#: What crosses the link in one copy; two staging buffers of this size are taken from the device meanwhile.
PART_BYTES = 64 * 1024**2
#: Below this, starting a copy costs more than a few percent of the copy (about 10 us against 55 GB/s).
SMALL_BYTES = 8 * 1024**2
#: Slots with at least so many bytes between them may belong to different memory.
_MAX_GAP_BYTES = 64

#: An engine slower than this part of its best rate shares its time with something else.
_SLOW = 0.75
#: What kernels copy before the engine is tried again.
_KERNEL_BYTES = 2 * 1024**3
#: Parts given to an engine that is not known to be slow before the first of them is judged.
_IN_FLIGHT = 3
#: Smaller parts say little about a rate.
_JUDGED_BYTES = 16 * 1024**2


def save_from_cuda(pieces: Iterable[Piece], store: AddressableStore) -> None:
    """Copy pieces that live on GPUs to their slots. The bytes are there on return.

    Fastest with pieces in the order of their slots. They are taken one by one while copies are under way, so
    making them costs nothing if they come from a generator.
    """
    _transfer(pieces, store, to_store=True)


def load_to_cuda(pieces: Iterable[Piece], store: AddressableStore) -> None:
    """Copy slots to pieces that live on GPUs; as `save_from_cuda` does."""
    _transfer(pieces, store, to_store=False)


def _transfer(pieces: Iterable[Piece], store: AddressableStore, *, to_store: bool) -> None:
    lanes: dict[int, _Lane] = {}
    # Every lane ends, after a failure of another too: a roll-back takes memory that copies under way would still use.
    with ExitStack() as ends:
        for part in _parts(pieces):
            lane = lanes.get(part.device)
            if lane is None:
                lane = lanes[part.device] = _Lane(torch.device("cuda", part.device), store, to_store=to_store)
                ends.callback(lane.finish)
            lane.move(part)


def warm_up(device: torch.device) -> None:
    """Do once, with little memory, what a transfer does, so that the first one does not wait for it.

    Kernels are compiled and loaded, and streams made: the driver takes some tens of MiB of the device for them, for
    good, which would else be missing from what the first sleep frees.
    """
    _transfer_a_little(device)
    torch.cuda.empty_cache()


def _transfer_a_little(device: torch.device) -> None:
    from torpor.transfer import Piece

    store = PinnedStore(device=device)
    homes = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for nbytes in (SMALL_BYTES, 64, 64)]
    try:
        slots = store.reserve([home.numel() for home in homes])
        pieces = [Piece(home, slot) for home, slot in zip(homes, slots, strict=True)]
        save_from_cuda(pieces, store)
        load_to_cuda(pieces, store)
    finally:
        store.close()


@dataclass(slots=True)
class _Part:
    """A stretch of the store that crosses the link at once, and the memory it is for."""

    device: int
    slot: Slot
    """All its bytes, with the gaps between them."""
    homes: list[int] = field(default_factory=list)
    """Addresses on the device."""
    offsets: list[int] = field(default_factory=list)
    """From the start of the slot, in bytes."""
    sizes: list[int] = field(default_factory=list)
    home: torch.Tensor | None = None
    """The memory itself, where it is one stretch as well."""

    def table(self, base: int, to_base: bool) -> Int64s:
        """Chunks to copy between the homes and memory at `base` that is laid out as the slot."""
        homes = np.array(self.homes, np.int64)
        places = np.array(self.offsets, np.int64) + base
        source, to = (homes, places) if to_base else (places, homes)
        return chunks(source, to, np.array(self.sizes, np.int64))


class _Lane:
    """One transfer of one device in one direction. Copies and kernels run on streams of their own: in the
    background they would else wait for the training, and the training for them."""

    def __init__(self, device: torch.device, store: AddressableStore, *, to_store: bool) -> None:
        self._device = device
        self._store = store
        self._to_store = to_store
        self._boundaries = store.boundaries() if isinstance(store, PinnedStore) else []
        self._copying = _own_stream(device, "save" if to_store else "load")
        self._kernels = _own_stream(device, "kernels")
        self._pace = _Pace(device, self._kernels, may_use_kernels=isinstance(store, PinnedStore))
        self._staging: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._is_full = False
        """Whether there was no room for a staging buffer."""
        self._tables = _Tables()
        self._turns = cycle((0, 1))
        for stream in (self._copying, self._kernels):
            stream.wait_stream(torch.cuda.current_stream(device))

    def move(self, part: _Part) -> None:
        """Start the copy of one part; on the way from the store, wait first until few others are under way."""
        with torch.cuda.device(self._device):
            turn = next(self._turns)
            if self._to_store:
                self._save(part, turn)
            elif self._pace.takes_engine(part.slot.nbytes):
                self._load_by_engine(part, turn)
            else:
                self._directly(part)

    def finish(self) -> None:
        """Wait for the end, and let go of the buffers."""
        self._copying.synchronize()
        self._kernels.synchronize()
        self._pace.judge_all()
        self._staging.clear()

    def _save(self, part: _Part, turn: int) -> None:
        if part.home is not None:
            self._copy(part.slot, part.home)
            return
        staged = self._stage(part, turn)
        if staged is None:
            self._directly(part)
            return
        buffer, free = staged
        self._kernels.wait_event(free)
        self._launch(part.table(buffer.data_ptr(), to_base=True))
        self._copying.wait_stream(self._kernels)
        self._copy(part.slot, buffer)
        free.record(self._copying)

    def _load_by_engine(self, part: _Part, turn: int) -> None:
        if part.home is not None:
            self._copy(part.slot, part.home)
            return
        staged = self._stage(part, turn)
        if staged is None:
            self._directly(part)
            return
        buffer, free = staged
        self._copying.wait_event(free)
        self._copy(part.slot, buffer)
        self._kernels.wait_stream(self._copying)
        self._launch(part.table(buffer.data_ptr(), to_base=False))
        free.record(self._kernels)

    def _directly(self, part: _Part) -> None:
        """A kernel reads or writes host memory itself."""
        host = self._store.tensor(part.slot)
        self._launch(part.table(host.data_ptr(), to_base=self._to_store))

    def _stage(self, part: _Part, turn: int) -> tuple[torch.Tensor, torch.cuda.Event] | None:
        """The staging buffer whose turn it is, and the event after which it may be used.

        None where the device is so full that there is no room for one, and kernels can reach the store.
        """
        if self._is_full:
            return None
        while len(self._staging) <= turn:
            try:
                buffer = torch.empty(PART_BYTES, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError:
                if not isinstance(self._store, PinnedStore):
                    raise
                self._is_full = True
                return None
            self._staging.append((buffer, torch.cuda.Event()))  # type: ignore[no-untyped-call]
        buffer, free = self._staging[turn]
        return buffer[: part.slot.nbytes], free

    def _copy(self, slot: Slot, device: torch.Tensor) -> None:
        """Copy one slot; cut where one registration ends and the next begins: the driver refuses to cross."""
        host = self._store.tensor(slot)
        first = bisect_right(self._boundaries, slot.offset)
        last = bisect_left(self._boundaries, slot.offset + slot.nbytes)
        cuts = [0, *(at - slot.offset for at in self._boundaries[first:last]), slot.nbytes]
        to, source = (host, device) if self._to_store else (device, host)
        with torch.cuda.stream(self._copying), self._pace.timed(self._copying, slot.nbytes):
            for begin, end in pairwise(cuts):
                to[begin:end].copy_(source[begin:end], non_blocking=True)

    def _launch(self, table: Int64s) -> None:
        """Copy on the device what the table says. The kernel reads it from host memory: an upload would wait in
        line behind the copies of other parts."""
        from torpor.gather_cuda import launch  # imports Triton, which only a GPU needs

        with torch.cuda.stream(self._kernels):
            launch(self._tables.keep(table))


class _Tables:
    """Tables in page-locked memory, for as long as kernels read them."""

    _BLOCK_BYTES = 1024**2

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._used = 0

    def keep(self, table: Int64s) -> torch.Tensor:
        """A page-locked copy of `table`."""
        if not self._blocks or self._used + table.size > len(self._blocks[-1]):
            length = max(self._BLOCK_BYTES // 8, table.size)
            self._blocks.append(torch.empty(length, dtype=torch.int64, pin_memory=True))
            self._used = 0
        locked = self._blocks[-1][self._used : self._used + table.size].view(table.shape)
        self._used += table.size
        locked.numpy()[:] = table
        return locked


class _Pace:
    """Rates of one transfer's parts, and whether the next one goes by the copy engine or by a kernel."""

    def __init__(self, device: torch.device, kernels: torch.cuda.Stream, *, may_use_kernels: bool) -> None:
        self._index = device.index
        self._kernels = kernels
        self._may_use_kernels = may_use_kernels
        self._flying: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()
        self._kernel_bytes = 0
        """Still to go by kernels before the engine is tried again."""
        self._in_flight = _IN_FLIGHT
        """Parts given to the engine before the first of them is judged; none where it was just slow."""

    def timed(self, stream: torch.cuda.Stream, nbytes: int) -> _Timed:
        """Around the copies of one part."""
        return _Timed(self._flying, stream, nbytes)

    def takes_engine(self, nbytes: int) -> bool:
        """Which way the next part goes. Waits until few parts are under way."""
        if not self._may_use_kernels:
            return True
        if self._kernel_bytes > 0:
            self._kernel_bytes -= nbytes
            if self._kernel_bytes > 0:
                return False
            self._kernels.synchronize()  # nothing else on the link while the engine is tried
            self._in_flight = 0
            return True
        while len(self._flying) > self._in_flight:
            self._judge()
        return self._kernel_bytes <= 0

    def judge_all(self) -> None:
        """Learn from the parts that are over."""
        while self._flying:
            self._judge()

    def _judge(self) -> None:
        begin, end, nbytes = self._flying.popleft()
        end.synchronize()
        if nbytes < _JUDGED_BYTES:
            return
        rate = nbytes / begin.elapsed_time(end)
        best = _best_rates[self._index] = max(rate, _best_rates.get(self._index, 0.0))
        if rate < _SLOW * best:
            self._kernel_bytes = _KERNEL_BYTES
        else:
            self._in_flight = _IN_FLIGHT


class _Timed:
    """Events around what is put on a stream, noted for later."""

    def __init__(
        self,
        notes: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]],
        stream: torch.cuda.Stream,
        nbytes: int,
    ) -> None:
        self._notes, self._stream, self._nbytes = notes, stream, nbytes
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def __enter__(self) -> None:
        self._begin.record(self._stream)

    def __exit__(self, *_: object) -> None:
        self._end.record(self._stream)
        self._notes.append((self._begin, self._end, self._nbytes))


#: Bytes a millisecond, the best seen of each device in either direction: the link is as fast both ways.
_best_rates: dict[int, float] = {}
_streams: dict[tuple[int, str], torch.cuda.Stream] = {}


def _own_stream(device: torch.device, use: str) -> torch.cuda.Stream:
    """The stream of a device and a use: made once, so that torch's allocator knows few."""
    key = (device.index, use)
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[key]


def _parts(pieces: Iterable[Piece]) -> Iterator[_Part]:
    """Pieces in parts, in the order they come."""
    part: _Part | None = None
    begin = end = 0
    for piece in pieces:
        offset, nbytes, device = piece.slot.offset, piece.slot.nbytes, piece.home.get_device()
        joins = part is not None and part.device == device and end <= offset < end + _MAX_GAP_BYTES
        if part is not None and not (joins and offset + nbytes - begin <= PART_BYTES):
            yield part
            part = None
        if nbytes >= SMALL_BYTES:
            yield from _stretches(piece, device)
        elif nbytes:
            if part is None:
                part = _Part(device, piece.slot)
                begin = offset
            part.homes.append(piece.home.data_ptr())
            part.offsets.append(offset - begin)
            part.sizes.append(nbytes)
            end = offset + nbytes
            part.slot = Slot(begin, end - begin)
    if part is not None:
        yield part


def _stretches(piece: Piece, device: int) -> Iterator[_Part]:
    """A large piece in parts."""
    address = piece.home.data_ptr()
    for begin in range(0, piece.slot.nbytes, PART_BYTES):
        nbytes = min(PART_BYTES, piece.slot.nbytes - begin)
        slot = Slot(piece.slot.offset + begin, nbytes)
        yield _Part(device, slot, [address + begin], [0], [nbytes], piece.home[begin : begin + nbytes])


#: Bytes that one program copies.
_CHUNK_BYTES = 64 * 1024


def chunks(source: Int64s, to: Int64s, nbytes: Int64s) -> Int64s:
    """One row a chunk: source address, address to copy to, bytes."""
    num_chunks = -(-nbytes // _CHUNK_BYTES)
    block = np.repeat(np.arange(len(nbytes)), num_chunks)
    offset = (np.arange(len(block)) - (np.cumsum(num_chunks) - num_chunks)[block]) * _CHUNK_BYTES
    rows = (source[block] + offset, to[block] + offset, np.minimum(nbytes[block] - offset, _CHUNK_BYTES))
    return np.ascontiguousarray(np.stack(rows, axis=1))

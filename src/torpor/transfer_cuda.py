"""Bytes between GPUs and page-locked memory at the speed of the link, for 2 storages or for 20,000.

One stream a device and direction. Large pieces are copied as they are. Small ones whose slots lie side by side
are gathered into a staging buffer by one kernel launch, and the buffer crosses the link in one copy; on the
way back it is scattered. Two staging buffers take turns, so gathering and copying overlap. One wait at the end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

#: Below this, starting a copy costs more than a few percent of the copy (about 10 us against 55 GB/s).
SMALL_BYTES = 8 * 1024**2
#: One copy of gathered pieces. Two buffers of this size are taken from the device for the time of a transfer.
STAGING_BYTES = 64 * 1024**2
#: Slots with at least so many bytes between them may belong to different memory.
_MAX_GAP_BYTES = 64


def save_from_cuda(pieces: Sequence[Piece], store: AddressableStore) -> None:
    """Copy pieces that live on GPUs to their slots. The bytes are there on return."""
    _transfer(pieces, store, to_store=True)


def load_to_cuda(pieces: Sequence[Piece], store: AddressableStore) -> None:
    """Copy slots to pieces that live on GPUs. The bytes are there on return."""
    _transfer(pieces, store, to_store=False)


def _transfer(pieces: Sequence[Piece], store: AddressableStore, to_store: bool) -> None:
    streams: list[torch.cuda.Stream] = []
    kept: list[torch.Tensor] = []
    for device in {piece.home.device for piece in pieces}:
        mine = sorted((piece for piece in pieces if piece.home.device == device), key=lambda piece: piece.slot.offset)
        with torch.cuda.device(device):
            lane = _Lane(device, store, to_store)
            streams.append(lane.copying)
            kept += lane.run(mine)
    for stream in streams:
        stream.synchronize()
    for device in {piece.home.device for piece in pieces if not to_store}:
        torch.cuda.current_stream(device).synchronize()  # the last scatter
    kept.clear()


@dataclass(slots=True)
class _Run:
    """Small pieces whose slots lie side by side, and that fit in one staging buffer."""

    slot: Slot
    """All their bytes, with the gaps between them."""
    homes: list[int]
    offsets: list[int]
    """From the start of the run, in bytes."""
    sizes: list[int]


class _Lane:
    """One device, one direction. Kernels run on the current stream, copies on one of their own."""

    def __init__(self, device: torch.device, store: AddressableStore, to_store: bool) -> None:
        self.copying = _copy_stream(device, to_store)
        self._device = device
        self._store = store
        self._to_store = to_store
        self._boundaries = store.boundaries() if isinstance(store, PinnedStore) else []

    def run(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Start all copies of pieces sorted by slot; returns what must live until they are over."""
        self.copying.wait_stream(torch.cuda.current_stream())
        large = [piece for piece in pieces if piece.slot.nbytes >= SMALL_BYTES]
        self._copy_large(large)
        small = [piece for piece in pieces if 0 < piece.slot.nbytes < SMALL_BYTES]
        return self._copy_small(small) if small else []

    def _copy_large(self, pieces: Sequence[Piece]) -> None:
        with torch.cuda.stream(self.copying):
            for piece in pieces:
                self._copy(piece.slot, piece.home)

    def _copy_small(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        runs = list(_runs(pieces))
        nbytes = max(run.slot.nbytes for run in runs)
        staging = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(min(2, len(runs)))]
        table, rows = _tables(runs, [buffer.data_ptr() for buffer in staging], self._to_store)
        on_device = torch.from_numpy(table).to(self._device)
        free = [torch.cuda.Event() for _ in staging]  # type: ignore[no-untyped-call]
        for turn, run, part in zip(cycle(range(len(staging))), runs, rows, strict=False):
            buffer = staging[turn][: run.slot.nbytes]
            if self._to_store:
                self._gather_then_copy(run, buffer, on_device[part], free[turn])
            else:
                self._copy_then_scatter(run, buffer, on_device[part], free[turn])
        return [*staging, on_device]

    def _gather_then_copy(self, run: _Run, buffer: torch.Tensor, table: torch.Tensor, free: torch.cuda.Event) -> None:
        kernels = torch.cuda.current_stream()
        kernels.wait_event(free)  # an event that was never recorded is over
        copy_chunks(table)
        self.copying.wait_stream(kernels)
        with torch.cuda.stream(self.copying):
            self._copy(run.slot, buffer)
        free.record(self.copying)

    def _copy_then_scatter(self, run: _Run, buffer: torch.Tensor, table: torch.Tensor, free: torch.cuda.Event) -> None:
        kernels = torch.cuda.current_stream()
        self.copying.wait_event(free)
        with torch.cuda.stream(self.copying):
            self._copy(run.slot, buffer)
        kernels.wait_stream(self.copying)
        copy_chunks(table)
        free.record(kernels)

    def _copy(self, slot: Slot, device: torch.Tensor) -> None:
        """Copy one slot; cut where one registration ends and the next begins: the driver refuses to cross."""
        host = self._store.tensor(slot)
        first = bisect_right(self._boundaries, slot.offset)
        last = bisect_left(self._boundaries, slot.offset + slot.nbytes)
        cuts = [0, *(at - slot.offset for at in self._boundaries[first:last]), slot.nbytes]
        for begin, end in pairwise(cuts):
            to, source = (host, device) if self._to_store else (device, host)
            to[begin:end].copy_(source[begin:end], non_blocking=True)


_streams: dict[tuple[int, bool], torch.cuda.Stream] = {}


def _copy_stream(device: torch.device, to_store: bool) -> torch.cuda.Stream:
    """The stream of a device and direction: made once, so that torch's allocator knows few."""
    key = (torch.cuda.current_device() if device.index is None else device.index, to_store)
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[key]


def _runs(pieces: Sequence[Piece]) -> Iterator[_Run]:
    """Pieces sorted by slot, as runs of at most `STAGING_BYTES`."""
    run: _Run | None = None
    for piece in pieces:
        offset, nbytes = piece.slot.offset, piece.slot.nbytes
        if run is not None:
            end = run.slot.offset + run.slot.nbytes
            length = offset + nbytes - run.slot.offset
            if offset - end >= _MAX_GAP_BYTES or length > STAGING_BYTES:
                yield run
                run = None
        if run is None:
            run = _Run(Slot(offset, nbytes), [], [], [])
        run.homes.append(piece.home.data_ptr())
        run.offsets.append(offset - run.slot.offset)
        run.sizes.append(nbytes)
        run.slot = Slot(run.slot.offset, offset + nbytes - run.slot.offset)
    if run is not None:
        yield run


def _tables(runs: Sequence[_Run], staging: Sequence[int], to_store: bool) -> tuple[Int64s, list[slice]]:
    """Chunks to copy for all runs, in order, and which of them are each run's."""
    tables: list[Int64s] = []
    rows: list[slice] = []
    begin = 0
    for run, buffer in zip(runs, cycle(staging), strict=False):
        homes = np.array(run.homes, np.int64)
        places = np.array(run.offsets, np.int64) + buffer
        source, to = (homes, places) if to_store else (places, homes)
        tables.append(chunks(source, to, np.array(run.sizes, np.int64)))
        rows.append(slice(begin, begin + len(tables[-1])))
        begin += len(tables[-1])
    return np.concatenate(tables), rows


#: Bytes that one program copies.
_CHUNK_BYTES = 64 * 1024


def chunks(source: Int64s, to: Int64s, nbytes: Int64s) -> Int64s:
    """One row a chunk: source address, address to copy to, bytes."""
    num_chunks = -(-nbytes // _CHUNK_BYTES)
    block = np.repeat(np.arange(len(nbytes)), num_chunks)
    offset = (np.arange(len(block)) - (np.cumsum(num_chunks) - num_chunks)[block]) * _CHUNK_BYTES
    rows = (source[block] + offset, to[block] + offset, np.minimum(nbytes[block] - offset, _CHUNK_BYTES))
    return np.ascontiguousarray(np.stack(rows, axis=1))


def copy_chunks(table: torch.Tensor) -> None:
    """Copy within a device what the rows of `chunks` say, in one launch on the current stream."""
    from torpor.gather_cuda import launch  # imports Triton, which only a GPU needs

    launch(table)

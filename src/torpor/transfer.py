"""Bytes between storages and a store: large blocks, a bounded ring, copies and I/O at the same time.

A block store is fed from a ring of buffers. One worker for each buffer takes the next batch of blocks, and for each of
them fills its buffer and writes it, or reads it and empties it, so that several requests are with the device while
others are copied. Batches are made as workers take them: pieces may come from a generator that is still computing. The
first error ends the transfer, after every call in flight has ended, and is raised as it came.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from torpor.errors import UsageError
from torpor.host_copies import HostCopies
from torpor.stores.base import AddressableStore, BlockStore, Slot, Store
from torpor.stores.batch import Batch
from torpor.stores.slots import up
from torpor.transfer_cuda import load_to_cuda, save_from_cuda


class Piece(NamedTuple):
    """One storage's bytes and their place.

    Attributes:
        home: a storage of `slot.nbytes` bytes in host memory, or a `uint8` tensor of shape `[slot.nbytes]` on any
            device.
        slot: where they wait.
    """

    home: torch.UntypedStorage | torch.Tensor
    slot: Slot

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return self.slot.nbytes


@dataclass(frozen=True, slots=True)
class Moved:
    """What one transfer did."""

    nbytes: int
    seconds: float


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


_T = TypeVar("_T", bound=_Sized)


@dataclass(slots=True)
class _Counted(Generic[_T]):
    """Things as they pass, once, and the bytes of those that did."""

    things: Iterable[_T]
    nbytes: int = 0

    def __iter__(self) -> Iterator[_T]:
        for thing in self.things:
            self.nbytes += thing.nbytes
            yield thing


def save(pieces: Iterable[Piece], store: Store) -> Moved:
    """Copy every piece to its slot; on return the bytes are in the store, not on the way.

    Pieces are taken while earlier ones are copied, so a generator may take its time to make them. Small ones cross
    together if they come in the order of their slots.

    Raises:
        StoreError: the store refused. Slots may hold anything then.
        UsageError: a home that does not have the bytes of its slot.
    """
    return _transfer(pieces, store, to_store=True)


def load(pieces: Iterable[Piece], store: Store) -> Moved:
    """Copy every slot to its piece; on return the bytes are there. Pieces are taken as by `save`.

    Raises:
        StoreError: the store refused. Pieces may hold anything then.
        UsageError: a home that does not have the bytes of its slot.
    """
    return _transfer(pieces, store, to_store=False)


def read(store: Store, slot: Slot, start: int, nbytes: int) -> torch.Tensor:
    """Bytes `[start, start + nbytes)` of a slot as a new CPU `uint8` tensor of shape `[nbytes]`, at offset 0.

    Raises:
        StoreError: the store refused.
    """
    out = torch.empty(nbytes, dtype=torch.uint8)
    if isinstance(store, AddressableStore):
        return out.copy_(store.tensor(slot)[start : start + nbytes])
    blocks = _blockwise(store)
    shift = (slot.offset + start) % blocks.alignment_bytes
    # a piece must begin at a multiple of the alignment: read a little more in front
    padded = torch.empty(shift + nbytes, dtype=torch.uint8) if shift else out
    _in_blocks([Piece(padded, Slot(slot.offset + start - shift, shift + nbytes))], blocks, to_store=False)
    return out.copy_(padded[shift:]) if shift else out


def _transfer(pieces: Iterable[Piece], store: Store, *, to_store: bool) -> Moved:
    start = time.perf_counter()
    if isinstance(store, AddressableStore):
        counted = _Counted(pieces)
        on_gpus = _of_gpus(counted, store, to_store=to_store)
        if to_store:
            save_from_cuda(on_gpus, store)
        else:
            load_to_cuda(on_gpus, store)
        nbytes = counted.nbytes
    else:
        blocks = _blockwise(store)
        nbytes = _in_blocks(pieces, blocks, to_store=to_store)
        if to_store and nbytes:
            blocks.sync()
    return Moved(nbytes, time.perf_counter() - start)


def _blockwise(store: Store) -> BlockStore:
    if not isinstance(store, BlockStore):
        raise TypeError(f"{type(store).__name__} is neither an AddressableStore nor a BlockStore")
    return store


def _of_gpus(pieces: Iterable[Piece], store: AddressableStore, *, to_store: bool) -> Iterator[Piece]:
    """Those on GPUs; the others are copied on the way."""
    copies = HostCopies()
    for piece in pieces:
        if isinstance(piece.home, torch.Tensor) and piece.home.is_cuda:
            yield piece
        else:
            home, slot = _whole(piece).data_ptr(), store.tensor(piece.slot).data_ptr()
            to, source = (slot, home) if to_store else (home, slot)
            copies.add(to, source, piece.slot.nbytes)
    copies.finish()


def _in_blocks(pieces: Iterable[Piece], store: BlockStore, *, to_store: bool) -> int:
    """Copy batch by batch, as many at a time as the ring has buffers; each has one to itself. The bytes copied."""
    move = _write if to_store else _read
    counted = _Counted(_batches(pieces, store))
    batches = iter(counted)
    ahead = list(islice(batches, 2))
    if not ahead:
        return 0
    with store.ring_lock:
        buffers = store.buffers()
        if len(ahead) == 1:  # not worth a thread
            move(ahead[0], buffers[0], store)
            return counted.nbytes
        queue = _Queue(chain(ahead, batches))

        def work(buffer: torch.Tensor, first: Batch) -> None:
            with queue.ended_by_error():
                for batch in chain([first], queue):
                    move(batch, buffer, store)

        with ThreadPoolExecutor(len(buffers), "torpor-transfer") as workers, queue.ended_by_error():
            # each begins as soon as there is a batch for it
            for worker in [workers.submit(work, *given) for given in zip(buffers, queue, strict=False)]:
                worker.result()
        return counted.nbytes


class _Queue:
    """Batches for several workers: each gets the next one that nobody has."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        with self._lock:
            return next(self._batches)

    @contextmanager
    def ended_by_error(self) -> Iterator[None]:
        """An error inside leaves no batch for anybody."""
        try:
            yield
        except BaseException:
            with self._lock:
                self._batches = iter(())
            raise


def _write(batch: Batch, buffer: torch.Tensor, store: BlockStore) -> None:
    number = 0
    while (number := store.write_blocks(batch, number, buffer)) < len(batch):
        offset, nbytes = batch.block(number)
        batch.gather(number, buffer)
        store.write_block(offset, buffer[:nbytes])
        number += 1


def _read(batch: Batch, buffer: torch.Tensor, store: BlockStore) -> None:
    number = 0
    while (number := store.read_blocks(batch, number, buffer)) < len(batch):
        offset, nbytes = batch.block(number)
        store.read_block(offset, buffer[:nbytes])
        batch.scatter(number, buffer)
        number += 1


def _whole(piece: Piece) -> torch.UntypedStorage | torch.Tensor:
    """The home of a piece, if it has the bytes of its slot: copies look at addresses only.

    Raises:
        UsageError: it is not one byte, or one `uint8`, for each byte of the slot, in one stretch.
    """
    home = piece.home
    if isinstance(home, torch.UntypedStorage):
        if home.nbytes() != piece.slot.nbytes:
            raise UsageError(f"a storage of {home.nbytes()} bytes for a slot of {piece.slot.nbytes} bytes")
    elif home.dtype is not torch.uint8 or home.numel() != piece.slot.nbytes or not home.is_contiguous():
        raise UsageError(
            f"a piece of {home.dtype}, shape {list(home.shape)}, strides {list(home.stride())} for a slot of "
            f"{piece.slot.nbytes} bytes: its home must be that many contiguous bytes, see byte_view()"
        )
    return home


def _batches(pieces: Iterable[Piece], store: BlockStore) -> Iterator[Batch]:
    """Pieces cut, and joined where their slots follow each other, into aligned blocks of at most one chunk."""
    chunk_bytes, alignment_bytes, most = store.chunk_bytes, store.alignment_bytes, store.batch_blocks
    batch = Batch()
    begin = end = 0
    for piece in pieces:
        home, slot = _whole(piece), piece.slot
        start, offset, left = 0, slot.offset, slot.nbytes
        while left:
            if offset != end or end - begin == chunk_bytes:
                if end > begin:
                    batch.end_block(begin, end - begin)
                if len(batch) == most:
                    yield batch
                    batch = Batch()
                begin = end = offset
            at = end - begin
            nbytes = left if at + left <= chunk_bytes else chunk_bytes - at
            batch.add_cut(at, home, start, nbytes)
            end += up(nbytes, alignment_bytes)
            start, offset, left = start + nbytes, offset + nbytes, left - nbytes
    if end > begin:
        batch.end_block(begin, end - begin)
        yield batch

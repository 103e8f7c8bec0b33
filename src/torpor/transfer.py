"""Bytes between storages and a store: large blocks, a bounded ring, copies and I/O at the same time.

A block store is fed from a ring of buffers: worker threads fill one and write it, or read one and empty it, so that
copies, page faults and I/O overlap. The first error ends the transfer, after every call in flight has ended, and
is raised as it came.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torpor.errors import UsageError
from torpor.stores.base import AddressableStore, BlockStore, Slot, Store
from torpor.transfer_cuda import load_to_cuda, save_from_cuda

#: Shorter copies keep the interpreter's lock: to wait for it again can take 5 ms, if another thread computes in Python.
_HOLD_GIL_BYTES = 16 * 1024
_memmove_with_gil = ctypes.PyDLL(None).memmove
_memmove_with_gil.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_with_gil.restype = ctypes.c_void_p


class Piece(NamedTuple):
    """One storage's bytes and their place.

    Attributes:
        home: `uint8` tensor of shape `[slot.nbytes]`, on any device.
        slot: where they wait.
    """

    home: torch.Tensor
    slot: Slot


@dataclass(frozen=True, slots=True)
class Moved:
    """What one transfer did."""

    nbytes: int
    seconds: float


class _Cut(NamedTuple):
    """Part of a piece inside a block: bytes `[start, start + nbytes)` of the piece, at `at` in the block."""

    home: torch.Tensor
    start: int
    nbytes: int
    at: int


@dataclass(slots=True)
class _Block:
    """An aligned stretch of the store, and what lies in it."""

    offset: int
    nbytes: int
    cuts: list[_Cut]


@dataclass(slots=True)
class _Counted:
    """Pieces as they pass, once, and the bytes of those that did."""

    pieces: Iterable[Piece]
    nbytes: int = 0

    def __iter__(self) -> Iterator[Piece]:
        for piece in self.pieces:
            self.nbytes += piece.slot.nbytes
            yield piece


def save(pieces: Iterable[Piece], store: Store) -> Moved:
    """Copy every piece to its slot; on return the bytes are in the store, not on the way.

    Pieces may come from a generator: those of a GPU are taken while copies are under way.

    Raises:
        StoreError: the store refused. Slots may hold anything then.
        UsageError: a home that does not have the bytes of its slot.
    """
    start = time.perf_counter()
    counted = _Counted(pieces)
    if isinstance(store, AddressableStore):
        save_from_cuda(_of_gpus(counted, lambda piece: _save_on_host(piece, store)), store)
    elif every := list(counted):
        blocks = _blockwise(store)
        _write(every, blocks)
        blocks.sync()
    return Moved(counted.nbytes, time.perf_counter() - start)


def load(pieces: Iterable[Piece], store: Store) -> Moved:
    """Copy every slot to its piece; on return the bytes are there. As for `save`, a generator will do.

    Raises:
        StoreError: the store refused. Pieces may hold anything then.
        UsageError: a home that does not have the bytes of its slot.
    """
    start = time.perf_counter()
    counted = _Counted(pieces)
    if isinstance(store, AddressableStore):
        load_to_cuda(_of_gpus(counted, lambda piece: _load_on_host(piece, store)), store)
    elif every := list(counted):
        _read(every, _blockwise(store))
    return Moved(counted.nbytes, time.perf_counter() - start)


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
    _read([Piece(padded, Slot(slot.offset + start - shift, shift + nbytes))], blocks)
    return out.copy_(padded[shift:]) if shift else out


def _blockwise(store: Store) -> BlockStore:
    if not isinstance(store, BlockStore):
        raise TypeError(f"{type(store).__name__} is neither an AddressableStore nor a BlockStore")
    return store


def _of_gpus(pieces: Iterable[Piece], copy: Callable[[Piece], None]) -> Iterator[Piece]:
    """Those on GPUs; the others are copied on the way."""
    for piece in pieces:
        if piece.home.is_cuda:
            yield piece
        else:
            copy(piece)


def _save_on_host(piece: Piece, store: AddressableStore) -> None:
    _copy(store.tensor(piece.slot), 0, _whole(piece), 0, piece.slot.nbytes)


def _load_on_host(piece: Piece, store: AddressableStore) -> None:
    _copy(_whole(piece), 0, store.tensor(piece.slot), 0, piece.slot.nbytes)


def _write(pieces: Sequence[Piece], store: BlockStore) -> None:
    def move(block: _Block, buffer: torch.Tensor) -> None:
        for cut in block.cuts:
            _copy(buffer, cut.at, cut.home, cut.start, cut.nbytes)
        store.write_block(block.offset, buffer)

    _in_blocks(pieces, store, move)


def _read(pieces: Sequence[Piece], store: BlockStore) -> None:
    def move(block: _Block, buffer: torch.Tensor) -> None:
        store.read_block(block.offset, buffer)
        for cut in block.cuts:
            _copy(cut.home, cut.start, buffer, cut.at, cut.nbytes)

    _in_blocks(pieces, store, move)


def _in_blocks(pieces: Sequence[Piece], store: BlockStore, move: Callable[[_Block, torch.Tensor], None]) -> None:
    """Call `move(block, buffer)` for each block, as many at a time as the ring has buffers; each has one to itself."""
    with store.ring_lock, ThreadPoolExecutor(len(store.buffers()), "torpor-transfer") as workers:
        idle = list(store.buffers())
        flying: deque[tuple[torch.Tensor, Future[None]]] = deque()
        for block in _blocks(pieces, store):
            if not idle:
                buffer, future = flying.popleft()
                future.result()
                idle.append(buffer)
            buffer = idle.pop()
            flying.append((buffer, workers.submit(move, block, buffer[: block.nbytes])))
        for _, future in flying:
            future.result()


def _copy(to: torch.Tensor, to_start: int, source: torch.Tensor, source_start: int, nbytes: int) -> None:
    """Copy `nbytes` bytes between two contiguous `uint8` tensors.

    On the host by memmove: `copy_` of more than 32 KiB starts a team of threads in each worker, which wait for
    each other in a spin; with other work on the machine that made a transfer six times slower.
    """
    if to.is_cpu and source.is_cpu:
        memmove = _memmove_with_gil if nbytes < _HOLD_GIL_BYTES else ctypes.memmove
        memmove(to.data_ptr() + to_start, source.data_ptr() + source_start, nbytes)
    else:
        to[to_start : to_start + nbytes].copy_(source[source_start : source_start + nbytes])


def _whole(piece: Piece) -> torch.Tensor:
    """The home of a piece, if it has the bytes of its slot: `_copy` looks at addresses only.

    Raises:
        UsageError: it is not one `uint8` for each byte of the slot, in one stretch.
    """
    home = piece.home
    if home.dtype is not torch.uint8 or home.numel() != piece.slot.nbytes or not home.is_contiguous():
        raise UsageError(
            f"a piece of {home.dtype}, shape {list(home.shape)}, strides {list(home.stride())} for a slot of "
            f"{piece.slot.nbytes} bytes: its home must be that many contiguous bytes, see byte_view()"
        )
    return home


def _blocks(pieces: Sequence[Piece], store: BlockStore) -> Iterator[_Block]:
    """Pieces in the order of their slots, cut and joined into aligned blocks of at most one chunk."""
    block: _Block | None = None
    for piece in sorted(pieces, key=lambda piece: piece.slot.offset):
        home, start = _whole(piece), 0
        while start < piece.slot.nbytes:
            offset = piece.slot.offset + start
            if block is None or block.offset + block.nbytes != offset or block.nbytes == store.chunk_bytes:
                if block is not None:
                    yield block
                block = _Block(offset, 0, [])
            nbytes = min(piece.slot.nbytes - start, store.chunk_bytes - block.nbytes)
            block.cuts.append(_Cut(home, start, nbytes, block.nbytes))
            block.nbytes += -(-nbytes // store.alignment_bytes) * store.alignment_bytes
            start += nbytes
    if block is not None:
        yield block

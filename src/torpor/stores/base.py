"""What every store does: keep the bytes of storages until they are wanted again.

Two kinds exist. An `AddressableStore` (pageable or page-locked memory) hands out a slot as a tensor, and
bytes are copied straight into it. A `BlockStore` (a file) takes and gives aligned blocks of a bounded ring
of buffers. `transfer.py` moves bytes between storages and either kind.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from torpor.stores.batch import Batch


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for `nbytes` bytes, at `offset` bytes from the start of its store. Example: `Slot(4096, 1000)`."""

    offset: int
    nbytes: int


class Store(ABC):
    """Reserves slots first, all or nothing, then keeps bytes in them until released."""

    name: ClassVar[str]

    @abstractmethod
    def reserve(self, sizes_bytes: Sequence[int]) -> list[Slot]:
        """One slot for each size, in order; consecutive slots of one call lie next to each other where they fit.

        The space is really there afterwards: writing into a reserved slot cannot run out of room.

        Raises:
            StoreFullError: not all of them fit; nothing was reserved.
            ClosedError: after `close()`.
        """

    @abstractmethod
    def release(self, slots: Sequence[Slot]) -> None:
        """Slots that nobody needs any more. Their space may be used again at once.

        Raises:
            ValueError: a slot that was released before.
            ClosedError: after `close()`.
        """

    @property
    @abstractmethod
    def reserved_bytes(self) -> int:
        """Bytes of the host or disk this store holds, padding included."""

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """Bytes of host memory this store holds (for a file: its ring)."""

    @property
    @abstractmethod
    def memory(self) -> Sequence[torch.Tensor]:
        """Those host bytes as tensors, so that an account does not take them for somebody else's."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent. Later calls raise `ClosedError`."""

    @abstractmethod
    def describe(self) -> str:
        """The store in a few words, for messages and ledgers: kind and place."""


class AddressableStore(Store):
    """A store whose slots are host memory."""

    @abstractmethod
    def tensor(self, slot: Slot) -> torch.Tensor:
        """The slot as a `uint8` tensor of shape `[slot.nbytes]` on the CPU, backed by the store."""


class BlockStore(Store):
    """A store that takes and gives aligned blocks. One transfer at a time uses its ring."""

    def __init__(self) -> None:
        self.ring_lock = threading.Lock()
        """Held by whoever fills or empties the ring."""

    alignment_bytes: int
    """Offsets, lengths and buffer addresses of `write_block` and `read_block` are multiples of this."""
    chunk_bytes: int
    """The size of one ring buffer: the largest block of one call."""

    @property
    def batch_blocks(self) -> int:
        """How many blocks `write_blocks` and `read_blocks` should be given at a time."""
        return 1

    @abstractmethod
    def buffers(self) -> Sequence[torch.Tensor]:
        """The ring: page-aligned `uint8` tensors of shape `[chunk_bytes]`, the same ones each time."""

    @abstractmethod
    def write_block(self, offset: int, block: torch.Tensor) -> None:
        """Write a 1-D `uint8` CPU tensor at `offset` bytes. Releases the GIL while writing; safe from several threads.

        Raises:
            StoreError: the device refused; the message has the path and the system's reason.
        """

    @abstractmethod
    def read_block(self, offset: int, block: torch.Tensor) -> None:
        """Fill a 1-D `uint8` CPU tensor from `offset`. Releases the GIL while reading; safe from several threads.

        Raises:
            StoreError: the device refused or the file is too short.
        """

    def write_blocks(self, batch: Batch, first: int, buffer: torch.Tensor) -> int:
        """Gather and write blocks of a batch faster than one by one, from number `first` on, as many as that goes with.

        Returns:
            The number of the first block that was not written: for `write_block`, which says what is wrong with it.
        """
        return first

    def read_blocks(self, batch: Batch, first: int, buffer: torch.Tensor) -> int:
        """The way back, as `write_blocks`."""
        return first

    @abstractmethod
    def sync(self) -> None:
        """Return when every block written so far is on the device, not in a cache of the kernel."""

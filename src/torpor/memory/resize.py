"""Storages freed and allocated again: works on any allocator, and the address changes.

Raw pointers to the storage (CUDA graphs, numpy views, tables of addresses) are stale afterwards; tensors and
views are not, they hold the storage. Reading a released storage fails or crashes, depending on the operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from torpor.errors import MemoryBackendError, TorporError
from torpor.memory.base import MemoryBackend
from torpor.memory.host import HostBackend


class Resizing(MemoryBackend):
    """What is the same on every device."""

    name: ClassVar[str] = "resize"
    keeps_address: ClassVar[bool] = False
    restores_zeros: ClassVar[bool] = False

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    def releasable_bytes(self, storage: torch.UntypedStorage) -> int:
        return storage.nbytes()

    def release(self, storages: Sequence[torch.UntypedStorage]) -> int:
        freed_bytes = 0
        for storage in storages:
            nbytes = storage.nbytes()
            if nbytes:
                self._sizes[storage._cdata] = nbytes
                try:
                    storage.resize_(0)
                except RuntimeError as error:  # somebody took a numpy view of it since it was asked about
                    self.restore(storages)
                    raise MemoryBackendError(f"freeing a storage of {nbytes} bytes: {error}") from error
                freed_bytes += nbytes
        return freed_bytes

    def restore(self, storages: Sequence[torch.UntypedStorage]) -> None:
        taken: list[torch.UntypedStorage] = []
        for storage in storages:
            nbytes = self._sizes.get(storage._cdata)
            if nbytes is None or storage.nbytes():
                continue
            try:
                storage.resize_(nbytes)
            except RuntimeError as error:  # torch's allocator has no type of its own for this on a CPU
                for again in taken:
                    again.resize_(0)
                raise self._failure(error, storages, nbytes) from error
            taken.append(storage)
        for storage in storages:
            self._sizes.pop(storage._cdata, None)

    def _failure(self, error: RuntimeError, storages: Sequence[torch.UntypedStorage], nbytes: int) -> TorporError:
        """What to raise where `storages` should come back and one of `nbytes` could not. All are released again."""
        return MemoryBackendError(f"allocating {nbytes} bytes again: {error}")

    def needed_bytes(self, storages: Sequence[torch.UntypedStorage]) -> int:
        return sum(self._sizes.get(storage._cdata, 0) for storage in storages)


class ResizeBackend(Resizing, HostBackend):
    """On the CPU."""

    def refusal(self, storage: torch.UntypedStorage) -> str | None:
        if storage.is_shared():
            return "shared or file-mapped memory: others may read it"
        if not storage.resizable():
            return "a storage that torch cannot resize: it belongs to a file, a buffer or another library"
        return None

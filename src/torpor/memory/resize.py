"""Storages freed and allocated again: works on any allocator, and the address changes.

Raw pointers to the storage (CUDA graphs, numpy views, tables of addresses) are stale afterwards; tensors and
views are not, they hold the storage. Reading a released storage fails or crashes, depending on the operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torpor.errors import MemoryBackendError
from torpor.memory import kernel
from torpor.memory.base import MemoryBackend


class ResizeBackend(MemoryBackend):
    """See the module's docstring."""

    name = "resize"
    device_type = "cpu"
    keeps_address = False
    restores_zeros = False

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    def refusal(self, storage: torch.UntypedStorage) -> str | None:
        if storage.is_shared():
            return "shared memory: other processes may read it"
        if not storage.resizable():
            return "a storage that torch cannot resize: it belongs to a file, a buffer or another library"
        return None

    def releasable_bytes(self, storage: torch.UntypedStorage) -> int:
        return storage.nbytes()

    def release(self, storages: Sequence[torch.UntypedStorage]) -> int:
        freed_bytes = 0
        for storage in storages:
            nbytes = storage.nbytes()
            if nbytes:
                self._sizes[storage._cdata] = nbytes
                storage.resize_(0)
                freed_bytes += nbytes
        return freed_bytes

    def restore(self, storages: Sequence[torch.UntypedStorage]) -> None:
        restored: list[torch.UntypedStorage] = []
        try:
            for storage in storages:
                nbytes = self._sizes.get(storage._cdata)
                if nbytes is not None and storage.nbytes() == 0:
                    storage.resize_(nbytes)
                    restored.append(storage)
        except RuntimeError as error:  # torch's allocator has no type of its own for this on a CPU
            for storage in restored:
                storage.resize_(0)
            raise MemoryBackendError(f"allocating {nbytes} bytes again: {error}") from error
        for storage in restored:
            del self._sizes[storage._cdata]

    def free_bytes(self, device: torch.device) -> int:
        return kernel.available_bytes()

    def used_bytes(self, device: torch.device) -> int:
        return kernel.process_resident_bytes()

    def settle(self) -> None:
        kernel.trim_heap()

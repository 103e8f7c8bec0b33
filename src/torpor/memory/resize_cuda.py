"""`resize` on a GPU: for storages outside `torpor.pool()`. Refused where a CUDA graph could see the old address.

Graphs cannot be asked which addresses they replay. But a capture allocates from a memory pool of its own, so
while the allocator has a private pool that is not ours, a graph may be alive, and every storage outside is kept.

Memory received from another process cannot be resized and is refused for that. Torch does not say of a storage
whether it was sent to another process: such a one must not sleep here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import torch

from torpor.errors import NotEnoughMemoryError, TorporError
from torpor.memory import allocator
from torpor.memory.allocator import PoolId
from torpor.memory.gpu import GpuBackend
from torpor.memory.resize import Resizing


def private_pools() -> set[PoolId]:
    """The allocator's private pools, by a look of its own."""
    return allocator.look().private_pools()


class CudaResizeBackend(Resizing, GpuBackend):
    """See the module's docstring."""

    def __init__(self, foreign_pools: Callable[[], Set[PoolId]] = private_pools) -> None:
        """`foreign_pools`: ids of the private pools in which a graph may have been captured, asked at `refresh`."""
        super().__init__()
        self._foreign_pools = foreign_pools
        self._graphs_may_live = False

    def refresh(self) -> None:
        """Look for private pools in the allocator's own account."""
        self._graphs_may_live = bool(self._foreign_pools())

    def graphs_may_live(self) -> bool:
        return self._graphs_may_live

    def refusal(self, storage: torch.UntypedStorage) -> str | None:
        if self._graphs_may_live:
            return (
                "a CUDA graph or a memory pool that is not ours is alive, and a replay would read the old address; "
                "allocate in torpor.pool()"
            )
        # not what a CPU storage is asked: `is_shared()` is true of every CUDA storage
        if not storage.resizable():
            return "a storage that torch cannot resize: it belongs to another process or another library"
        return None

    def _failure(self, error: RuntimeError, storages: Sequence[torch.UntypedStorage], nbytes: int) -> TorporError:
        if not isinstance(error, torch.OutOfMemoryError):
            return super()._failure(error, storages, nbytes)
        device = storages[0].device
        remedy = "Free memory there and wake again."
        return NotEnoughMemoryError(self.needed_bytes(storages), self.free_bytes(device), str(device), remedy)


def cuda_resize_backend(foreign_pools: Callable[[], Set[PoolId]] = private_pools) -> CudaResizeBackend:
    """The backend, where it can be.

    Raises:
        UnsupportedError: torch's allocator is one that does not say what it holds, graphs for instance.
    """
    allocator.require_native()
    return CudaResizeBackend(foreign_pools)

"""`resize` on a GPU: for storages outside `torpor.pool()`. Refused where a CUDA graph could see the old address.

Graphs cannot be asked which addresses they replay. But a capture allocates from a memory pool of its own, so
while the allocator has a private pool that is not ours, a graph may be alive, and every storage outside is kept.

Memory received from another process cannot be resized and is refused for that. Torch does not say of a storage
whether it was sent to another process: such a one must not sleep here.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import ClassVar

import torch

from torpor.memory import cuda
from torpor.memory.cuda import PoolId
from torpor.memory.resize import ResizeBackend


class CudaResizeBackend(ResizeBackend):
    """See the module's docstring."""

    name: ClassVar[str] = "resize"
    device_type: ClassVar[str] = "cuda"

    def __init__(self, ours: Callable[[], Set[PoolId]] = frozenset) -> None:
        """`ours`: ids of the pools in which no graph was captured, whatever their segments look like."""
        super().__init__()
        self._ours = ours
        self._graphs_may_live = False

    def refresh(self) -> None:
        """Look for private pools in the allocator's own account."""
        self._graphs_may_live = cuda.graphs_may_live(self._ours())

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

    def free_bytes(self, device: torch.device) -> int:
        return cuda.free_bytes(device)

    def used_bytes(self, device: torch.device) -> int:
        return cuda.used_bytes(device)

    def settle(self) -> None:
        torch.cuda.empty_cache()

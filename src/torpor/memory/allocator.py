"""What torch's caching allocator says of itself: segments, live blocks, pools, effective settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from torpor.errors import UnsupportedError

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.void]

#: One row a segment: what the allocator got by one call of `cudaMalloc`, or of a pool's own allocator.
SEGMENT = np.dtype([("address", np.int64), ("nbytes", np.int64), ("device", np.int64), ("pool", np.int64)])
#: One row a live block. `requested` are the bytes that were asked for: those of the storage that owns the block.
BLOCK = np.dtype([("address", np.int64), ("nbytes", np.int64), ("requested", np.int64), ("segment", np.int64)])

PoolId = tuple[int, int]

#: The allocator's id of the pool that is nobody's in particular.
COMMON_POOL = (0, 0)
#: The one block state whose contents somebody may still read. `active_awaiting_free` was freed by its owner.
_LIVE = "active_allocated"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The allocator's memory of all devices at one moment.

    Example: two blocks in one segment of a private pool are `segments=[(0x7f0000, 2097152, 0, 0)]`,
    `blocks=[(0x7f0000, 512, 400, 0), (0x7f0200, 1024, 1024, 0)]`, `pools=[(0, 1)]`.
    """

    segments: Rows
    """Rows of `SEGMENT`, sorted by address; `pool` is an index in `pools`."""
    blocks: Rows
    """Rows of `BLOCK`, sorted by address; `segment` is an index in `segments`."""
    pools: list[PoolId]

    def private_pools(self) -> set[PoolId]:
        """All pools but the common one: of `torch.cuda.MemPool`s, and one of each captured graph."""
        return {pool for pool in self.pools if pool != COMMON_POOL}

    def within(self, begin: Int64s, end: Int64s) -> Int64s:
        """For each segment the stretch it lies in, of those from `begin[i]` to `end[i]` (sorted); -1 for none."""
        address = self.segments["address"]
        at = np.searchsorted(begin, address, side="right") - 1
        if not len(begin):
            return at
        return np.where((at >= 0) & (address < end[at]), at, -1)


def look() -> Snapshot:
    """Ask the allocator. Costs some 1.5 us a block, most of it in torch."""
    pools: dict[PoolId, int] = {}
    segments: list[tuple[int, int, int, int]] = []
    # plain lists of numbers: a tuple a block would wake the garbage collector
    columns: tuple[list[int], ...] = ([], [], [])
    counts: list[int] = []
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        pool = pools.setdefault(tuple(segment["segment_pool_id"]), len(pools))
        segments.append((segment["address"], segment["total_size"], segment["device"], pool))
        live = [block for block in segment["blocks"] if block["state"] == _LIVE]
        columns[0].extend([block["address"] for block in live])
        columns[1].extend([block["size"] for block in live])
        columns[2].extend([block["requested_size"] for block in live])
        counts.append(len(live))
    return _sorted(np.array(segments, SEGMENT), columns, counts, list(pools))


def _sorted(segments: Rows, columns: tuple[list[int], ...], counts: list[int], pools: list[PoolId]) -> Snapshot:
    order = np.argsort(segments["address"])
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    blocks = np.empty(len(columns[0]), BLOCK)
    blocks["address"], blocks["nbytes"], blocks["requested"] = columns
    blocks["segment"] = np.repeat(place, counts)
    return Snapshot(segments[order], blocks[np.argsort(blocks["address"])], pools)


def borrow(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage over device memory that somebody else owns: an address for what has no tensor here."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return cast(torch.UntypedStorage, storage)  # the stub names the old class


def settings() -> dict[str, Any]:
    """The allocator's effective settings, from the allocator itself, not from environment variables."""
    found: dict[str, Any] = dict(torch.cuda.memory._snapshot()["allocator_settings"])
    found["backend"] = torch.cuda.get_allocator_backend()
    return found


def require_native() -> None:
    """Raise UnsupportedError under an allocator without pools, which does not say what it holds either."""
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise UnsupportedError(
            f"torch's CUDA allocator is '{backend}', which neither has pools nor says what it holds. "
            "Remove 'backend:' from PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"
        )

"""What the CUDA driver and torch's caching allocator say: free bytes, live blocks, effective settings."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Set
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from torpor.errors import MemoryBackendError, UnsupportedError
from torpor.memory.base import MemoryBackend, byte_view

Int64s = npt.NDArray[np.int64]

#: The one block state whose contents somebody may still read. `active_awaiting_free` was freed by its owner.
_LIVE = "active_allocated"

_SELF_TEST_BYTES = 64 * 1024**2
_SELF_TEST_TRIES = 3


def free_bytes(device: torch.device) -> int:
    """Bytes the driver would give to anybody now."""
    return torch.cuda.mem_get_info(device)[0]


def used_bytes(device: torch.device) -> int:
    """Bytes of `device` that this process holds as NVML tells it, or all processes together where it cannot.

    NVML cannot without the package `nvidia-ml-py`, or in a container that hides the host's process ids.
    Which of the two it is stays the same for the life of the process.
    """
    if _nvml_knows_us(device.index):
        return _nvml_used_bytes(device.index)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


@cache
def _nvml_knows_us(index: int) -> bool:
    try:
        import pynvml
    except ImportError:
        return False
    try:
        pynvml.nvmlInit()
        return _nvml_used_bytes(index) > 0
    except pynvml.NVMLError:
        return False


def _nvml_used_bytes(index: int) -> int:
    import pynvml

    uuid = torch.cuda.get_device_properties(index).uuid
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return sum(p.usedGpuMemory or 0 for p in processes if p.pid == os.getpid())


PoolId = tuple[int, int]

#: The allocator's id of the pool that is nobody's in particular.
_COMMON_POOL = (0, 0)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The live blocks in some stretches of memory, sorted by address; one array element a block.

    Example: `Blocks(address=[0x7f00, 0x8f00], nbytes=[512, 1024], requested=[400, 1024], stretch=[0, 0],
    pool=[0, 0], pools=[(0, 1)], homes=[[0]])`.
    """

    address: Int64s
    nbytes: Int64s
    """Bytes of the block, the allocator's rounding included."""
    requested: Int64s
    """Bytes that were asked for: those of the storage that owns the block."""
    stretch: Int64s
    """Index of the stretch it lies in."""
    pool: Int64s
    """Index of its memory pool in `pools`."""
    pools: list[PoolId]
    """The memory pools that have segments in the stretches, with live blocks or without."""
    homes: list[list[int]]
    """For each of the pools, the stretches its segments lie in."""


def live_blocks(begin: Int64s, end: Int64s) -> Blocks:
    """The live blocks in the stretches `begin[i]` to `end[i]` (sorted, not overlapping), by torch's account."""
    begins, ends = begin.tolist(), end.tolist()
    index: dict[PoolId, int] = {}
    homes: list[set[int]] = []
    # plain lists of numbers: a tuple a block would wake the garbage collector
    columns: tuple[list[int], ...] = ([], [], [], [], [])
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        at = bisect_right(begins, segment["address"]) - 1
        if at < 0 or segment["address"] >= ends[at]:
            continue
        pool = index.setdefault(tuple(segment["segment_pool_id"]), len(index))
        if pool == len(homes):
            homes.append(set())
        homes[pool].add(at)
        live = [block for block in segment["blocks"] if block["state"] == _LIVE]
        columns[0].extend([block["address"] for block in live])
        columns[1].extend([block["size"] for block in live])
        columns[2].extend([block["requested_size"] for block in live])
        columns[3].extend([at] * len(live))
        columns[4].extend([pool] * len(live))
    table = np.array(columns, np.int64)
    address, nbytes, requested, stretch, pool_of = table[:, np.argsort(table[0])]
    return Blocks(address, nbytes, requested, stretch, pool_of, list(index), [sorted(home) for home in homes])


def graphs_may_live(ours: Set[PoolId]) -> bool:
    """Whether the allocator has a private pool besides `ours`: each capture of a graph has one.

    `ours` are pools in which no graph was captured, whatever their segments look like.
    """
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return bool({tuple(segment["segment_pool_id"]) for segment in segments} - ours - {_COMMON_POOL})


def borrow(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage over device memory that somebody else owns: an address for what has no tensor here."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return cast(torch.UntypedStorage, storage)  # the stub names the old class


def allocator_settings() -> dict[str, Any]:
    """The allocator's effective settings, from the allocator itself, not from environment variables."""
    settings: dict[str, Any] = dict(torch.cuda.memory._snapshot()["allocator_settings"])
    settings["backend"] = torch.cuda.get_allocator_backend()
    return settings


def require_native_allocator() -> None:
    """Raise UnsupportedError under an allocator that has no pools of ours."""
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise UnsupportedError(
            f"torch's CUDA allocator is '{backend}', which cannot give the memory of single storages back. "
            "Remove 'backend:' from PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"
        )


def self_test(backend: MemoryBackend, storage: torch.UntypedStorage) -> None:
    """Put one storage of at least 64 MiB to sleep and wake it, and see that the driver got its memory back.

    The contents of `storage` are overwritten. Other processes move the driver's count too, so a rise is
    looked for up to three times.

    Raises:
        UnsupportedError: something is in the way; the message has what the allocator is set to.
    """
    if storage.nbytes() < _SELF_TEST_BYTES:
        raise MemoryBackendError(f"a self-test needs {_SELF_TEST_BYTES} bytes, the storage has {storage.nbytes()}")
    backend.refresh()
    refusal = backend.refusal(storage)
    if refusal is None:
        for _ in range(_SELF_TEST_TRIES):
            refusal = _try_once(backend, storage)
            if refusal is None:
                return
    raise UnsupportedError(
        f"memory backend {backend.name} failed its self-test: {refusal}. The allocator's settings are "
        f"{allocator_settings()}; 'expandable_segments:True' or a 'backend:' in PYTORCH_ALLOC_CONF or "
        "PYTORCH_CUDA_ALLOC_CONF are the usual causes"
    )


def _try_once(backend: MemoryBackend, storage: torch.UntypedStorage) -> str | None:
    nbytes, address = storage.nbytes(), storage.data_ptr()
    pattern = torch.arange(nbytes // 8, device=storage.device)
    byte_view(storage)[: pattern.nbytes].view(torch.int64).copy_(pattern)
    torch.cuda.synchronize(storage.device)
    free_before = free_bytes(storage.device)
    backend.release([storage])
    backend.settle()
    rise = free_bytes(storage.device) - free_before
    backend.restore([storage])
    view = byte_view(storage)[: pattern.nbytes].view(torch.int64)
    view.copy_(pattern)
    if backend.keeps_address and storage.data_ptr() != address:
        return f"the address changed from {address:#x} to {storage.data_ptr():#x}"
    if not torch.equal(view, pattern):
        return "memory does not hold what was written after a wake"
    if rise < nbytes:
        return f"the driver shows {rise} bytes more free after {nbytes} bytes were given back"
    return None

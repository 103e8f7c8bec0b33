"""What the CUDA driver and torch's caching allocator say: free bytes, live blocks, effective settings."""

from __future__ import annotations

import os
from collections.abc import Collection
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


@dataclass(frozen=True, slots=True)
class Blocks:
    """Live blocks of some segments, sorted by address. One array element a block.

    Example: `Blocks(address=[0x7f00, 0x8f00], nbytes=[512, 1024], requested=[400, 1024], segment=[0, 0],
    pools=[(0, 1)])`.
    """

    address: Int64s
    nbytes: Int64s
    """Bytes of the block, the allocator's rounding included."""
    requested: Int64s
    """Bytes that were asked for: those of the storage that owns the block."""
    segment: Int64s
    """Index of the block's segment in the addresses that were asked about."""
    pools: list[tuple[int, int]]
    """The memory pool of each segment, in the order of the addresses that were asked about."""


def live_blocks(segments: Int64s) -> Blocks:
    """The live blocks of the segments that start at the sorted addresses `segments`, by torch's account."""
    index = {address: i for i, address in enumerate(segments.tolist())}
    pools = [(0, 0)] * len(index)
    rows: list[tuple[int, int, int, int]] = []
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        at = index.get(segment["address"])
        if at is None:
            continue
        pools[at] = tuple(segment["segment_pool_id"])
        rows += [
            (block["address"], block["size"], block["requested_size"], at)
            for block in segment["blocks"]
            if block["state"] == _LIVE
        ]
    table = np.array(sorted(rows), np.int64).reshape(-1, 4)
    return Blocks(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy(), table[:, 3].copy(), pools)


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
        raise MemoryBackendError(
            f"a self-test needs {_SELF_TEST_BYTES} bytes, the storage has {storage.nbytes()}"
        )
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


def own_addresses(storages: Collection[torch.UntypedStorage]) -> Int64s:
    """Where storages begin."""
    return np.fromiter((storage.data_ptr() for storage in storages), np.int64, len(storages))

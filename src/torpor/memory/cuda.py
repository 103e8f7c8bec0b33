"""What the CUDA driver says: free bytes, bytes of this process, and whether a backend gives memory back."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from torpor.errors import MemoryBackendError, UnsupportedError
from torpor.memory import allocator, nvml
from torpor.memory.base import MemoryBackend, byte_view

DRIVER_LIBRARY = "libcuda.so.1"

#: What a self-test puts to sleep at least: much more than what others take or free meanwhile.
SELF_TEST_BYTES = 64 * 1024**2
_SELF_TEST_TRIES = 3


def free_bytes(device: torch.device) -> int:
    """Bytes the driver would give to anybody now."""
    return torch.cuda.mem_get_info(device)[0]


def has_pages(address: int) -> bool:
    """Whether `address` lies in virtual memory of the driver that has pages now.

    Not so for what `cudaMalloc` gave. See cuMemRetainAllocationHandle in the CUDA Driver API.
    """
    handle = ctypes.c_uint64()
    driver = _driver()
    if driver.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(address)):
        return False
    driver.cuMemRelease(handle)
    return True


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(DRIVER_LIBRARY)


def used_bytes(device: torch.device) -> int:
    """Bytes of `device` that this process holds as NVML tells it, or all processes together where it cannot.

    Which of the two it is stays the same for the life of the process: see `tells_processes_apart`.
    """
    if tells_processes_apart(device):
        own = nvml.process_bytes(_uuid(device))
        if own is not None:
            return own
    free, total = torch.cuda.mem_get_info(device)
    return total - free


@cache
def tells_processes_apart(device: torch.device) -> bool:
    """Whether NVML is there and knows what of `device` is this process's."""
    torch.cuda.synchronize(device)  # without a context the process is not known there
    return nvml.process_bytes(_uuid(device)) is not None


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def self_test(backend: MemoryBackend, storage: torch.UntypedStorage) -> None:
    """Put one storage of at least 64 MiB to sleep and wake it, and see that the driver has its memory in between.

    The contents of `storage` are overwritten. Where NVML does not tell processes apart, others move the driver's
    count too, so a fall is looked for up to three times.

    Raises:
        UnsupportedError: something is in the way; the message has what the allocator is set to.
    """
    if storage.nbytes() < SELF_TEST_BYTES:
        raise MemoryBackendError(f"a self-test needs {SELF_TEST_BYTES} bytes, the storage has {storage.nbytes()}")
    backend.refresh()
    refusal = backend.refusal(storage)
    if refusal is None:
        for _ in range(_SELF_TEST_TRIES):
            refusal = _try_once(backend, storage)
            if refusal is None:
                return
    raise UnsupportedError(
        f"memory backend {backend.name} failed its self-test: {refusal}. The allocator's settings are "
        f"{allocator.settings()}; 'expandable_segments:True' or a 'backend:' in PYTORCH_ALLOC_CONF or "
        "PYTORCH_CUDA_ALLOC_CONF are the usual causes"
    )


def _try_once(backend: MemoryBackend, storage: torch.UntypedStorage) -> str | None:
    nbytes, address = storage.nbytes(), storage.data_ptr()
    pattern = torch.arange(nbytes // 8, device=storage.device)
    byte_view(storage)[: pattern.nbytes].view(torch.int64).copy_(pattern)
    torch.cuda.synchronize(storage.device)
    backend.settle()  # what is idle is not the storage's
    used_before = used_bytes(storage.device)
    backend.release([storage])
    backend.settle()
    given = used_before - used_bytes(storage.device)
    backend.restore([storage])
    view = byte_view(storage)[: pattern.nbytes].view(torch.int64)
    view.copy_(pattern)
    if backend.keeps_address and storage.data_ptr() != address:
        return f"the address changed from {address:#x} to {storage.data_ptr():#x}"
    if not torch.equal(view, pattern):
        return "memory does not hold what was written after a wake"
    if given < nbytes:
        return f"the driver shows {given} bytes less in use after {nbytes} bytes were given back"
    return None

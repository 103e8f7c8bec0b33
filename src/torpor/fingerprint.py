"""Content fingerprints: 128 bits that tell whether a storage is what it was.

Each kind of memory has a function of its own, so fingerprints are compared with those of the same kind of
device. Neither is cryptographic: they find damage, not malice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import xxhash

Digest = bytes
"""16 bytes."""

_ZEROS = bytes(64)
_memcmp = ctypes.CDLL(None).memcmp
_memcmp_with_gil = ctypes.PyDLL(None).memcmp
for _function in (_memcmp, _memcmp_with_gil):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def fingerprint(block: torch.Tensor) -> Digest:
    """The fingerprint of one block; of many, `fingerprints` is much faster on a GPU."""
    return fingerprints([block])[0]


def fingerprints(blocks: Sequence[torch.Tensor]) -> list[Digest]:
    """One fingerprint for each block, computed where the block is; one launch for all blocks of a GPU.

    Args:
        blocks: contiguous 1-D `uint8` tensors, each of shape `[nbytes]`, on the CPU or on CUDA.

    On the CPU this is XXH3-128 in canonical byte order (https://xxhash.com); on CUDA what
    `fingerprint_reference` defines, whose `reference_digest` gives the same for a host copy.
    """
    devices = [block.device for block in blocks]
    distinct = set(devices)
    if len(distinct) == 1:
        return _on(devices[0], blocks)
    digests: list[Digest] = [b""] * len(blocks)
    for device in distinct:
        where = [i for i, other in enumerate(devices) if other == device]
        for i, digest in zip(where, _on(device, [blocks[i] for i in where]), strict=True):
            digests[i] = digest
    return digests


def is_zero(block: torch.Tensor) -> bool:
    """Whether every byte of a block of host memory is zero; of most others the first bytes settle it."""
    address, nbytes = block.data_ptr(), block.numel()
    if _memcmp_with_gil(address, _ZEROS, min(nbytes, len(_ZEROS))):
        return False
    return nbytes < 2 or _memcmp(address, address + 1, nbytes - 1) == 0  # each byte equals the one before it


def warm_up(device: torch.device) -> None:
    """Compile what the first fingerprint on a GPU would wait for."""
    fingerprints([torch.zeros(64, dtype=torch.uint8, device=device)])


def _on(device: torch.device, blocks: Sequence[torch.Tensor]) -> list[Digest]:
    if device.type == "cuda":
        from torpor.fingerprint_cuda import cuda_fingerprints  # imports Triton, which only a GPU needs

        return cuda_fingerprints(device, blocks)
    return [_xxh3(block) for block in blocks]


def _xxh3(block: torch.Tensor) -> Digest:
    nbytes = block.numel()
    if nbytes == 0:
        return xxhash.xxh3_128_digest(b"")
    window = (ctypes.c_char * nbytes).from_address(block.data_ptr())
    return xxhash.xxh3_128_digest(window)

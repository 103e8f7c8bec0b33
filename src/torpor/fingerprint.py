"""Content fingerprints: 128 bits that tell whether a storage is what it was.

Each kind of memory has a function of its own, so fingerprints are compared with those of the same kind of
device. Neither is cryptographic: they find damage, not malice.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import lru_cache

import torch
import xxhash

Digest = bytes
"""16 bytes."""

#: Zeros to feed from, few enough to stay in a processor's cache.
_ZEROS = memoryview(bytes(256 * 1024))
#: All addresses. To cut a stretch out of it takes less than half as long as to make a buffer for the stretch.
_MEMORY = memoryview((ctypes.c_char * sys.maxsize).from_address(0))


def fingerprint(block: torch.Tensor) -> Digest:
    """The fingerprint of one block; of many, `fingerprints` is much faster on a GPU."""
    return fingerprints([block])[0]


def fingerprints(blocks: Sequence[torch.UntypedStorage | torch.Tensor]) -> list[Digest]:
    """One fingerprint for each block, computed where the block is; one launch for all blocks of a GPU.

    Args:
        blocks: storages in host memory, or contiguous 1-D `uint8` tensors, each of shape `[nbytes]`, on the CPU or
            on CUDA.

    On the CPU this is XXH3-128 in canonical byte order (https://xxhash.com); on CUDA what
    `fingerprint_reference` defines, whose `reference_digest` gives the same for a host copy.
    """
    digests: list[Digest] = [b""] * len(blocks)
    of_gpus: dict[torch.device, dict[int, torch.Tensor]] = {}
    for i, block in enumerate(blocks):
        if isinstance(block, torch.UntypedStorage):
            digests[i] = _xxh3(block.data_ptr(), block.nbytes())
        elif block.is_cuda:
            of_gpus.setdefault(block.device, {})[i] = block
        else:
            digests[i] = _xxh3(block.data_ptr(), block.numel())
    for device, chosen in of_gpus.items():
        for i, digest in zip(chosen, _by_gpu(device, list(chosen.values())), strict=True):
            digests[i] = digest
    return digests


@lru_cache(maxsize=65536)
def fingerprint_of_zeros(nbytes: int) -> Digest:
    """The fingerprint of `nbytes` zeros in host memory."""
    digest = xxhash.xxh3_128()
    for start in range(0, nbytes, len(_ZEROS)):
        digest.update(_ZEROS[: nbytes - start])
    return digest.digest()


def warm_up(device: torch.device) -> None:
    """Compile what the first fingerprint on a GPU would wait for."""
    fingerprints([torch.zeros(64, dtype=torch.uint8, device=device)])


def _by_gpu(device: torch.device, blocks: Sequence[torch.Tensor]) -> list[Digest]:
    from torpor.fingerprint_cuda import cuda_fingerprints  # imports Triton, which only a GPU needs

    return cuda_fingerprints(device, blocks)


def _xxh3(begin: int, nbytes: int) -> Digest:
    return xxhash.xxh3_128_digest(_MEMORY[begin : begin + nbytes])

"""Content fingerprints: 128 bits that tell whether a storage is what it was."""

from __future__ import annotations

import ctypes

import torch
import xxhash

Digest = bytes
"""16 bytes."""


def fingerprint(block: torch.Tensor) -> Digest:
    """XXH3-128 of a contiguous 1-D `uint8` CPU tensor of shape `[nbytes]`, in canonical byte order.

    Source: the XXH3 family of xxHash, https://xxhash.com. Not cryptographic: it finds damage, not malice.
    """
    nbytes = block.numel()
    if nbytes == 0:
        return xxhash.xxh3_128_digest(b"")
    window = (ctypes.c_char * nbytes).from_address(block.data_ptr())
    return xxhash.xxh3_128_digest(window)

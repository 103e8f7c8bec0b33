"""The fingerprint of device memory, computed by the device at the speed of its memory.

`fingerprint_reference` defines it. Blocks are cut into chunks of units; a table of chunks on the device lets
one launch read any number of blocks, and each chunk adds its two sums to those of its block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from torpor.fingerprint_reference import KEY0, KEY1, UNIT_BYTES, Words, finish
from torpor.gather_cuda import launch

#: Bytes that one program reads: long enough to hide its start, short enough to spread few blocks over a GPU.
CHUNK_BYTES = 256 * 1024
#: Units that one program reads at a time.
_TILE_UNITS = 512
_NUM_WARPS = 4

_KEY0 = tl.constexpr(KEY0)
_KEY1 = tl.constexpr(KEY1)


def cuda_fingerprints(device: torch.device, blocks: Sequence[torch.Tensor]) -> list[bytes]:
    """Digests of contiguous 1-D `uint8` tensors on `device`, each of shape `[nbytes]`; waits for them.

    Runs on the current stream of `device`, and waits for no copy to the host on another one. Blocks that begin on a
    multiple of 16 bytes, as all storages do, are read at full speed, others more slowly.
    """
    num = len(blocks)
    begin = np.fromiter((block.data_ptr() for block in blocks), np.int64, num)
    nbytes = np.fromiter((block.numel() for block in blocks), np.int64, num)
    with torch.cuda.device(device):
        table = torch.from_numpy(_chunks(begin, nbytes)).to(device)
        sums = torch.zeros(num, 2, dtype=torch.uint64, device=device)
        if len(table):
            _add_chunks[(len(table),)](table, sums, TILE=_TILE_UNITS, num_warps=_NUM_WARPS)
        return finish(_on_host(sums), nbytes)


def _on_host(sums: torch.Tensor) -> Words:
    """What `sums.cpu()` is, brought by a kernel: a copy would wait in line behind those of a transfer under way."""
    host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
    table = torch.tensor([[sums.data_ptr(), host.data_ptr(), sums.nbytes]], pin_memory=True)
    launch(table)
    torch.cuda.current_stream().synchronize()
    words: Words = host.numpy()
    return words


def _chunks(begin: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """One row a chunk: address, index of its first unit in its block, bytes, index of its block."""
    num_chunks = -(-nbytes // CHUNK_BYTES)
    block = np.repeat(np.arange(len(begin)), num_chunks)
    first_chunk = np.cumsum(num_chunks) - num_chunks
    offset = (np.arange(len(block)) - first_chunk[block]) * CHUNK_BYTES
    rows = (
        begin[block] + offset,
        offset // UNIT_BYTES,
        np.minimum(nbytes[block] - offset, CHUNK_BYTES),
        block,
    )
    return np.ascontiguousarray(np.stack(rows, axis=1))


@triton.jit
def _product_of_halves(x):  # type: ignore[no-untyped-def]
    return x.to(tl.uint32).to(tl.uint64) * (x >> 32).to(tl.uint32).to(tl.uint64)


@triton.jit
def _rounds(x0, x1):  # type: ignore[no-untyped-def]
    x1 += _product_of_halves(x0)
    x0 += _product_of_halves(x1)
    x1 += _product_of_halves(x0)
    x0 += _product_of_halves(x1)
    x1 += _product_of_halves(x0)
    return x0, x1


@triton.jit  # type: ignore[untyped-decorator]
def _aligned_units(address, first, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words of the `TILE` units from `first` on. The address is a multiple of 16: a load takes 16 bytes."""
    words = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16) + 2 * first
    return tl.split(tl.reshape(tl.load(words + tl.arange(0, 2 * TILE)), [TILE, 2]))


@triton.jit  # type: ignore[untyped-decorator]
def _aligned_units_inside(address, first, inside, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same for a tile that the block does not fill: zeros outside."""
    words = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16) + 2 * first
    mask = tl.reshape(tl.join(inside, inside), [2 * TILE])
    return tl.split(tl.reshape(tl.load(words + tl.arange(0, 2 * TILE), mask=mask, other=0), [TILE, 2]))


@triton.jit
def _units_by_bytes(address, first, offsets, nbytes):  # type: ignore[no-untyped-def]
    """Words of the units `first + offsets`, byte by byte: any address, and zeros after `nbytes`."""
    octets = address.to(tl.pointer_type(tl.uint8))
    x0 = tl.zeros(offsets.shape, tl.uint64)
    x1 = tl.zeros(offsets.shape, tl.uint64)
    for i in tl.static_range(8):
        at = 16 * (first + offsets) + i
        x0 |= tl.load(octets + at, mask=at < nbytes, other=0).to(tl.uint64) << (8 * i)
        at += 8
        x1 |= tl.load(octets + at, mask=at < nbytes, other=0).to(tl.uint64) << (8 * i)
    return x0, x1


@triton.jit  # type: ignore[untyped-decorator]
def _add_chunks(table, sums, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = table + 4 * tl.program_id(0).to(tl.int64)
    address = tl.load(row)
    first_unit = tl.load(row + 1)
    nbytes = tl.load(row + 2)
    out = sums + 2 * tl.load(row + 3)
    offsets = tl.arange(0, TILE)
    sum0 = tl.zeros([TILE], tl.uint64)
    sum1 = tl.zeros([TILE], tl.uint64)
    full = tl.where(address % 16 == 0, nbytes // 16, 0)
    whole = full // TILE * TILE
    for first in range(0, whole, TILE):
        w0, w1 = _aligned_units(address, first, TILE)
        place = (first_unit + first + offsets + 1).to(tl.uint64)
        x0, x1 = _rounds(w0 + place * _KEY0, w1 + place * _KEY1)
        sum0 += x0
        sum1 += x1
    for first in range(whole, full, TILE):
        inside = first + offsets < full
        w0, w1 = _aligned_units_inside(address, first, inside, TILE)
        place = (first_unit + first + offsets + 1).to(tl.uint64)
        x0, x1 = _rounds(w0 + place * _KEY0, w1 + place * _KEY1)
        sum0 += tl.where(inside, x0, 0)
        sum1 += tl.where(inside, x1, 0)
    num_units = (nbytes + 15) // 16
    for first in range(full, num_units, TILE):
        w0, w1 = _units_by_bytes(address, first, offsets, nbytes)
        place = (first_unit + first + offsets + 1).to(tl.uint64)
        x0, x1 = _rounds(w0 + place * _KEY0, w1 + place * _KEY1)
        inside = first + offsets < num_units
        sum0 += tl.where(inside, x0, 0)
        sum1 += tl.where(inside, x1, 0)
    tl.atomic_add(out, tl.sum(sum0, 0))
    tl.atomic_add(out + 1, tl.sum(sum1, 0))

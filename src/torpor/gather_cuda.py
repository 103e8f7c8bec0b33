"""Many copies in one kernel launch: gathers small storages into one buffer, and scatters them back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: 8-byte words that one program copies at a time.
_TILE = 1024


def launch(table: torch.Tensor) -> None:
    """Copy what the rows of `table` say, on the current stream.

    Args:
        table: `int64` of shape `[num, 3]`, on the device or in page-locked memory, which must stay until the kernel
            is over. A row is an address to read from, one to write to, and bytes; either may be page-locked
            memory too.
    """
    _copy_chunks[(len(table),)](table.data_ptr(), TILE=_TILE, num_warps=4)


@triton.jit(do_not_specialize=["table"])  # type: ignore[untyped-decorator]
def _copy_chunks(table, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = table.to(tl.pointer_type(tl.int64)) + 3 * tl.program_id(0).to(tl.int64)
    source = tl.load(row)
    to = tl.load(row + 1)
    nbytes = tl.load(row + 2)
    offsets = tl.arange(0, TILE)
    words = tl.where((source | to) % 16 == 0, nbytes // 8, 0)
    whole = words // TILE * TILE
    source_words = tl.multiple_of(source.to(tl.pointer_type(tl.uint64)), 16)
    to_words = tl.multiple_of(to.to(tl.pointer_type(tl.uint64)), 16)
    for first in range(0, whole, TILE):
        tl.store(to_words + first + offsets, tl.load(source_words + first + offsets))
    for first in range(whole, words, TILE):
        at = first + offsets
        tl.store(to_words + at, tl.load(source_words + at, mask=at < words, other=0), mask=at < words)
    source_bytes = source.to(tl.pointer_type(tl.uint8))
    to_bytes = to.to(tl.pointer_type(tl.uint8))
    for first in range(8 * words, nbytes, TILE):
        at = first + offsets
        tl.store(to_bytes + at, tl.load(source_bytes + at, mask=at < nbytes, other=0), mask=at < nbytes)

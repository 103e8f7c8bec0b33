"""Blocks of a store and the memory that their bytes come from or go to, as tables that one call of C reads.

Around a block of a MiB, Python and the way back to the interpreter's lock take as long as the device does. So
several blocks go in one call, copies and requests together; block by block is for where that cannot be: memory of a
GPU, a block that the system refused, a package that was installed without a C compiler.
"""

from __future__ import annotations

from array import array

import torch

from torpor.compiled import copy_library
from torpor.host_copies import HostCopies


class Batch:
    """Aligned blocks, at least one, and the cuts of homes that lie in each. Holds the homes."""

    __slots__ = ("_blocks", "_cuts", "_homes", "_on_gpus")

    def __init__(self) -> None:
        self._blocks: list[int] = []
        """For each block: its offset in the store, its bytes, and where in the table of cuts its own end."""
        self._cuts: list[int] = []
        """For each cut: where in its block it begins, its address, its bytes."""
        self._homes: list[torch.UntypedStorage | torch.Tensor] = []
        self._on_gpus: dict[int, torch.Tensor] = {}
        """Cuts that are not in host memory, by their number."""

    def __len__(self) -> int:
        return len(self._blocks) // 3

    @property
    def nbytes(self) -> int:
        """Bytes of all cuts."""
        return sum(self._cuts[2::3])

    def add_cut(self, at: int, home: torch.UntypedStorage | torch.Tensor, start: int, nbytes: int) -> None:
        """Bytes `[start, start + nbytes)` of a home lie `at` bytes from the beginning of the block to be ended next."""
        if not isinstance(home, torch.UntypedStorage) and not home.is_cpu:
            self._on_gpus[len(self._homes)] = home[start : start + nbytes]
        self._cuts += (at, home.data_ptr() + start, nbytes)
        self._homes.append(home)

    def end_block(self, offset: int, nbytes: int) -> None:
        """The cuts since the last block are a block of `nbytes` bytes, padding included, at `offset`."""
        self._blocks += (offset, nbytes, len(self._homes))

    def block(self, number: int) -> tuple[int, int]:
        """A block's offset and bytes."""
        return self._blocks[3 * number], self._blocks[3 * number + 1]

    def write(self, fd: int, first: int, buffer: torch.Tensor) -> int:
        """Gather and write the blocks from the `first` on; the number of the first one that was not written whole."""
        return self._in_one_call("torpor_write_blocks", fd, first, buffer)

    def read(self, fd: int, first: int, buffer: torch.Tensor) -> int:
        """Read and scatter the blocks from the `first` on; the number of the first one that was not read whole."""
        return self._in_one_call("torpor_read_blocks", fd, first, buffer)

    def _in_one_call(self, function: str, fd: int, first: int, buffer: torch.Tensor) -> int:
        library = copy_library()
        if library is None or self._on_gpus:
            return first
        blocks, cuts = array("q", self._blocks), array("q", self._cuts)
        place, begin = blocks.buffer_info()[0], cuts.buffer_info()[0]
        return int(getattr(library, function)(fd, buffer.data_ptr(), place, first, len(self), begin))

    def gather(self, number: int, buffer: torch.Tensor) -> None:
        """Copy the bytes of a block into the buffer."""
        self._copy(number, buffer, to_buffer=True)

    def scatter(self, number: int, buffer: torch.Tensor) -> None:
        """Copy the bytes of a block out of the buffer."""
        self._copy(number, buffer, to_buffer=False)

    def _copy(self, number: int, buffer: torch.Tensor, *, to_buffer: bool) -> None:
        """On the host not by `copy_`: above 32 KiB it starts a team of threads in each worker, which wait for each
        other in a spin; with other work on the machine that made a transfer six times slower.
        """
        copies, begin = HostCopies(), buffer.data_ptr()
        for cut in range(self._blocks[3 * number - 1] if number else 0, self._blocks[3 * number + 2]):
            at, address, nbytes = self._cuts[3 * cut : 3 * cut + 3]
            outside, inside = self._on_gpus.get(cut), buffer[at : at + nbytes]
            if outside is None:
                to, source = (begin + at, address) if to_buffer else (address, begin + at)
                copies.add(to, source, nbytes)
            elif to_buffer:
                inside.copy_(outside)
            else:
                outside.copy_(inside)
        copies.finish()

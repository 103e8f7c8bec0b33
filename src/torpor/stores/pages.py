"""Host memory of our own, straight from the kernel."""

from __future__ import annotations

import mmap

import torch

from torpor.memory import kernel


def huge_pages(nbytes: int, count: int = 1) -> list[torch.Tensor]:
    """`count` new `uint8` tensors of shape `[nbytes]` side by side, on huge pages where the kernel has any.

    Direct I/O splits a request into stretches that are contiguous in physical memory, and a device takes a bounded
    number of those at a time: with pages of 4 KiB, requests of half a MiB and half the rate where it was measured.

    Raises:
        OSError: the kernel refused.
    """
    pages = mmap.mmap(-1, count * nbytes + kernel.HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    shift = -address % kernel.HUGE_PAGE_BYTES  # what lies before and behind is never touched and takes no memory
    kernel.madvise(address + shift, count * nbytes, kernel.MADV_HUGEPAGE)  # a wish: a refusal costs nothing but time
    return [torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=shift + k * nbytes) for k in range(count)]

"""Host memory straight from the kernel: aligned, apart, and given back with the last tensor."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from torpor.memory import kernel
from torpor.stores.pages import huge_pages

MIB = 1024**2


@pytest.mark.parametrize(("nbytes", "count"), [(4096, 1), (4096, 5), (2 * MIB, 4), (3 * MIB, 2)])
def test_they_lie_side_by_side_from_a_huge_page_on(nbytes: int, count: int) -> None:
    pages = huge_pages(nbytes, count)
    first = pages[0].data_ptr()
    assert first % kernel.HUGE_PAGE_BYTES == 0
    assert [page.data_ptr() for page in pages] == [first + k * nbytes for k in range(count)]
    assert all(page.dtype is torch.uint8 and page.shape == (nbytes,) for page in pages)


def test_each_is_a_storage_of_its_own_with_its_own_bytes() -> None:
    pages = huge_pages(8192, 3)
    assert [page.untyped_storage().nbytes() for page in pages] == [8192] * 3
    for k, page in enumerate(pages):
        page.fill_(k)
    assert [page.unique().tolist() for page in pages] == [[0], [1], [2]]


def test_memory_that_nobody_touched_is_not_taken() -> None:
    pages = huge_pages(64 * MIB)
    assert kernel.resident_bytes(pages[0].data_ptr(), 64 * MIB) == 0


def test_the_last_tensor_gives_all_of_it_back() -> None:
    pages = huge_pages(8 * MIB, 4)
    address = pages[0].data_ptr()
    for page in pages:
        page.fill_(1)
    last = pages.pop()
    del pages, page
    gc.collect()
    assert kernel.resident_bytes(address, 32 * MIB) == 32 * MIB, "one of them is still in use"
    before = kernel.process_resident_bytes()
    gone = weakref.ref(last)
    del last
    gc.collect()
    assert gone() is None
    assert kernel.process_resident_bytes() < before - 30 * MIB

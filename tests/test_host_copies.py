"""Copies of host memory in one call: the same bytes with the compiled library and without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torpor import host_copies
from torpor.compiled import copy_library
from torpor.host_copies import HostCopies

SIZE = 4096


@pytest.fixture(params=["compiled", "one by one"], autouse=True)
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    """The second way is that of a package without the library."""
    if request.param == "compiled" and copy_library() is None:
        pytest.skip("installed without a C compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "one by one":
            patch.setattr(host_copies, "copy_library", lambda: None)
        yield


@given(st.lists(st.integers(0, 300), max_size=40), st.integers(0, 7))
def test_every_byte_goes_where_it_should_and_no_other_is_touched(sizes: list[int], gap: int) -> None:
    source = torch.randint(1, 255, (SIZE * 4,), dtype=torch.uint8)
    to, expected = torch.zeros_like(source), torch.zeros_like(source)
    copies, at = HostCopies(), 3
    for size in sizes:
        copies.add(to.data_ptr() + at, source.data_ptr() + at + 1, size)
        expected[at : at + size] = source[at + 1 : at + 1 + size]
        at += size + gap
    copies.finish()
    assert torch.equal(to, expected)


def test_many_are_made_before_the_end_and_the_rest_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    source, to = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    monkeypatch.setattr(host_copies, "_MOST", 3)
    copies = HostCopies()
    for i in range(4):
        copies.add(to.data_ptr() + i, source.data_ptr() + 10 + i, 1)
    assert to[:4].tolist() == [10, 11, 12, 0]
    copies.finish()
    copies.finish()
    assert to[:4].tolist() == [10, 11, 12, 13]


def test_large_ones_are_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    source, to = torch.ones(SIZE, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
    monkeypatch.setattr(host_copies, "_MOST_BYTES", SIZE)
    HostCopies().add(to.data_ptr(), source.data_ptr(), SIZE)
    assert torch.equal(to, source)

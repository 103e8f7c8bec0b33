"""resize: freed and allocated again; what cannot be resized is refused, and an error leaves memory whole."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from contracts.memory_contract import MemoryContract
from torpor.errors import MemoryBackendError
from torpor.memory.base import byte_view
from torpor.memory.kernel import process_resident_bytes
from torpor.memory.resize import ResizeBackend

MIB = 1024**2


class TestResize(MemoryContract):
    def make_backend(self) -> ResizeBackend:
        return ResizeBackend()


@pytest.fixture
def backend() -> ResizeBackend:
    return ResizeBackend()


@contextmanager
def address_space_limit(more_bytes: int) -> Iterator[None]:
    """This process may map `more_bytes` more than it does, and no more."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_the_memory_is_really_gone(backend: ResizeBackend) -> None:
    large = [torch.ones(16 * MIB, dtype=torch.uint8) for _ in range(4)]
    small = [torch.ones(10_000, dtype=torch.uint8) for _ in range(3000)]  # from the heap, not from mmap
    storages = [tensor.untyped_storage() for tensor in (*large, *small)]
    before = process_resident_bytes()
    assert backend.release(storages) == 64 * MIB + 30_000_000
    backend.settle()
    # of small ones only the whole pages between what else lives on the heap
    assert before - process_resident_bytes() > 64 * MIB + 15_000_000
    backend.restore(storages)


def test_tensors_and_views_follow_the_storage(backend: ResizeBackend) -> None:
    base = torch.arange(100_000)
    view, saved = base[500:700].view(20, 10), base.clone()
    storage = base.untyped_storage()
    backend.release([storage])
    torch.full((100_000,), -1)  # somebody takes the freed memory
    backend.restore([storage])
    byte_view(storage).copy_(saved.view(torch.uint8))
    assert torch.equal(base, saved)
    assert torch.equal(view, saved[500:700].view(20, 10))
    view[0, 0] = -7
    assert int(base[500]) == -7


def test_autograd_does_not_take_it_for_a_change(backend: ResizeBackend) -> None:
    weight = torch.randn(1000, requires_grad=True)
    loss = (weight * weight).sum()
    saved, storage = weight.detach().clone(), weight.untyped_storage()
    backend.release([storage])
    backend.restore([storage])
    byte_view(storage).copy_(saved.view(torch.uint8))
    loss.backward()
    assert torch.equal(weight.grad, 2 * saved)


def test_what_cannot_be_resized_is_refused(backend: ResizeBackend, tmp_path: Path) -> None:
    torch.save(torch.randn(1000), tmp_path / "w.pt")
    looked_at = torch.randn(1000)
    looked_at.numpy()
    cases = {
        "numpy's": torch.from_numpy(np.zeros(1000)),
        "seen by numpy": looked_at,
        "a buffer's": torch.frombuffer(bytearray(1000), dtype=torch.uint8),
        "shared": torch.randn(1000).share_memory_(),
        "mapped": torch.load(tmp_path / "w.pt", mmap=True),
    }
    for name, tensor in cases.items():
        assert backend.refusal(tensor.untyped_storage()), name
    assert backend.refusal(torch.randn(1000).untyped_storage()) is None


def test_a_release_that_fails_half_way_brings_all_memory_back(backend: ResizeBackend) -> None:
    tensors = [torch.zeros(5000) for _ in range(4)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    assert all(backend.refusal(storage) is None for storage in storages)
    tensors[2].numpy()  # locks its size for good, after it was asked about
    with pytest.raises(MemoryBackendError, match="freeing a storage of 20000 bytes"):
        backend.release(storages)
    assert [storage.nbytes() for storage in storages] == [20_000] * 4
    assert float(tensors[0].fill_(1).sum()) == 5000


def test_no_memory_for_a_restore_leaves_all_released_and_can_be_tried_again(backend: ResizeBackend) -> None:
    tensors = [torch.ones(n * MIB, dtype=torch.uint8) for n in (8, 8, 512, 8)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    backend.release(storages)
    with address_space_limit(128 * MIB), pytest.raises(MemoryBackendError, match=f"allocating {512 * MIB} bytes"):
        backend.restore(storages)
    assert [storage.nbytes() for storage in storages] == [0] * 4
    backend.restore(storages)
    assert [storage.nbytes() for storage in storages] == [n * MIB for n in (8, 8, 512, 8)]


def test_an_empty_storage_stays_empty(backend: ResizeBackend) -> None:
    storage = torch.empty(0).untyped_storage()
    assert backend.release([storage]) == 0
    backend.restore([storage])
    assert storage.nbytes() == 0

"""The self-test of a GPU's memory backend, on memory of a CPU with a driver that counts."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from torpor.errors import MemoryBackendError, UnsupportedError
from torpor.memory import cuda
from torpor.memory.gpu import GpuBackend


class CountingBackend(GpuBackend):
    """`used` is what its driver shows; `idle` goes with `settle()`, as what torch has cached does."""

    name = "counting"
    keeps_address = True

    def __init__(self, *, frees: bool = True, idle: int = 0) -> None:
        self.frees, self.idle, self.used = frees, idle, cuda.SELF_TEST_BYTES + idle

    def refusal(self, storage: torch.UntypedStorage) -> str | None:
        return None

    def releasable_bytes(self, storage: torch.UntypedStorage) -> int:
        return storage.nbytes()

    def release(self, storages: Sequence[torch.UntypedStorage]) -> int:
        self.used -= cuda.SELF_TEST_BYTES if self.frees else 0
        return cuda.SELF_TEST_BYTES

    def restore(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self.used += cuda.SELF_TEST_BYTES if self.frees else 0

    def needed_bytes(self, storages: Sequence[torch.UntypedStorage]) -> int:
        return 0

    def settle(self) -> None:
        self.used -= self.idle
        self.idle = 0


@pytest.fixture
def try_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    def run(backend: CountingBackend, nbytes: int = cuda.SELF_TEST_BYTES) -> None:
        monkeypatch.setattr(cuda, "used_bytes", lambda _: backend.used)
        cuda.self_test(backend, torch.empty(nbytes, dtype=torch.uint8).untyped_storage())

    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(cuda.allocator, "settings", dict)
    return run


@pytest.mark.parametrize("idle", [0, cuda.SELF_TEST_BYTES])
def test_a_backend_that_frees_passes(try_it, idle):
    try_it(CountingBackend(idle=idle))


@pytest.mark.parametrize("idle", [0, 22 * 1024**2, cuda.SELF_TEST_BYTES, 4 * cuda.SELF_TEST_BYTES])
def test_cached_memory_does_not_count_as_freed_by_a_backend_that_frees_nothing(try_it, idle):
    with pytest.raises(UnsupportedError, match="failed its self-test: the driver shows 0 bytes less in use"):
        try_it(CountingBackend(frees=False, idle=idle))


def test_too_small_a_sample_is_refused(try_it):
    with pytest.raises(MemoryBackendError, match="the storage has 8"):
        try_it(CountingBackend(), nbytes=8)

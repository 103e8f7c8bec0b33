"""What `resize` refuses on a GPU, asked of storages that answer as CUDA's do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest
import torch

from torpor.errors import MemoryBackendError, NotEnoughMemoryError, TorporError
from torpor.memory import cuda
from torpor.memory.resize_cuda import CudaResizeBackend


@dataclass
class CudaStorage:
    """The answers of a CUDA storage, which calls itself shared whatever it is."""

    can_resize: bool = True

    def is_shared(self) -> bool:
        return True

    def resizable(self) -> bool:
        return self.can_resize


def refusal(backend: CudaResizeBackend, storage: CudaStorage) -> str | None:
    return backend.refusal(cast(torch.UntypedStorage, storage))


def test_ordinary_storages_are_taken_and_foreign_ones_refused() -> None:
    assert refusal(CudaResizeBackend(), CudaStorage()) is None
    assert "cannot resize" in (refusal(CudaResizeBackend(), CudaStorage(can_resize=False)) or "")


def test_a_private_pool_that_is_not_ours_is_a_reason() -> None:
    foreign: set[tuple[int, int]] = set()
    backend = CudaResizeBackend(lambda: foreign)
    backend.refresh()
    assert refusal(backend, CudaStorage()) is None
    foreign.add((0, 6))
    assert refusal(backend, CudaStorage()) is None, "as of the last look"
    backend.refresh()
    assert backend.graphs_may_live()
    assert "CUDA graph" in (refusal(backend, CudaStorage()) or "")


class Resizable:
    """A storage of a GPU that is full after so many allocations."""

    device = torch.device("cuda", 0)

    def __init__(self, number: int, room: list[int], error: type[RuntimeError]) -> None:
        self._cdata, self.room, self.error, self.size = number, room, error, 100

    def nbytes(self) -> int:
        return self.size

    def resize_(self, nbytes: int) -> None:
        if nbytes and not self.room[0]:
            raise self.error("CUDA out of memory")
        self.room[0] += -1 if nbytes else 1
        self.size = nbytes


@pytest.mark.parametrize(
    ("error", "expected"), [(torch.OutOfMemoryError, NotEnoughMemoryError), (RuntimeError, MemoryBackendError)]
)
def test_a_restore_without_room_says_how_much_is_needed_and_releases_what_it_took(
    monkeypatch: pytest.MonkeyPatch, error: type[RuntimeError], expected: type[TorporError]
) -> None:
    monkeypatch.setattr(cuda, "free_bytes", lambda device: 250)
    room = [0]
    storages = [cast(torch.UntypedStorage, Resizable(i, room, error)) for i in range(3)]
    backend = CudaResizeBackend(frozenset)
    assert backend.release(storages) == 300
    room[0] = 2
    with pytest.raises(expected) as caught:
        backend.restore(storages)
    if isinstance(caught.value, NotEnoughMemoryError):
        assert (caught.value.needed_bytes, caught.value.free_bytes) == (300, 250)
    assert [s.nbytes() for s in storages] == [0, 0, 0]
    room[0] = 3
    backend.restore(storages)
    assert [s.nbytes() for s in storages] == [100, 100, 100]

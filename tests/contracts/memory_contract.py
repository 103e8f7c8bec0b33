"""What every memory backend must do. Inherit `MemoryContract` in the test of a new backend and give it storages."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytest
import torch

from torpor.memory import open_backends
from torpor.memory.base import MemoryBackend, byte_view

#: No multiple of a page, and not aligned alike.
_SIZES = (100_003, 4096 * 5, 1_000_001, 300_000)


class MemoryContract(ABC):
    """The promises of `torpor.memory.base.MemoryBackend`."""

    @abstractmethod
    def make_backend(self) -> MemoryBackend:
        """A new backend."""

    def make_tensors(self, backend: MemoryBackend) -> list[torch.Tensor]:
        """Tensors of `uint8` that `backend` can release, each with a storage of its own."""
        torch.manual_seed(0)
        return [torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=backend.device_type) for nbytes in _SIZES]

    @pytest.fixture
    def backend(self) -> MemoryBackend:
        return self.make_backend()

    @pytest.fixture
    def tensors(self, backend: MemoryBackend) -> list[torch.Tensor]:
        tensors = self.make_tensors(backend)
        backend.refresh()
        return tensors

    def test_it_is_filed_under_its_device(self, backend: MemoryBackend) -> None:
        assert open_backends([backend]) == {backend.device_type: [backend]}
        assert backend.name

    def test_it_takes_ordinary_storages(self, backend: MemoryBackend, tensors: list[torch.Tensor]) -> None:
        for storage in _storages(tensors):
            assert backend.refusal(storage) is None
            assert 0 < backend.releasable_bytes(storage) <= storage.nbytes()

    def test_it_gives_what_it_said(self, backend: MemoryBackend, tensors: list[torch.Tensor]) -> None:
        storages = _storages(tensors)
        said = sum(map(backend.releasable_bytes, storages))
        assert backend.release(storages) == said
        assert backend.needed_bytes(storages) == said
        backend.settle()
        backend.restore(storages)

    def test_a_round_trip_keeps_size_views_and_what_it_promises(
        self, backend: MemoryBackend, tensors: list[torch.Tensor]
    ) -> None:
        storages, views = _storages(tensors), [tensor[50:90_000] for tensor in tensors[:1]]
        all_bytes = [byte_view(storage) for storage in storages]
        before = [tensor.clone() for tensor in tensors]
        addresses = [storage.data_ptr() for storage in storages]
        for _ in range(3):
            backend.release(storages)
            backend.settle()
            backend.restore(storages)
            assert [storage.nbytes() for storage in storages] == [tensor.numel() for tensor in before]
            if backend.keeps_address:
                assert [storage.data_ptr() for storage in storages] == addresses
            if backend.restores_zeros:
                given = [backend.releasable_bytes(storage) for storage in storages]
                kept = [int((tensor != 0).sum()) for tensor in tensors]
                assert all(k <= s.nbytes() - g for k, s, g in zip(kept, storages, given, strict=True))
            for block, saved in zip(all_bytes, before, strict=True):
                block.copy_(saved)
            assert all(map(torch.equal, tensors, before))
            assert torch.equal(views[0], before[0][50:90_000])

    def test_the_others_are_left_alone(self, backend: MemoryBackend, tensors: list[torch.Tensor]) -> None:
        storages = _storages(tensors)
        before = [tensor.clone() for tensor in tensors]
        backend.release(storages[::2])
        assert all(map(torch.equal, tensors[1::2], before[1::2]))
        backend.restore(storages[::2])
        assert all(map(torch.equal, tensors[1::2], before[1::2]))

    def test_restoring_what_is_present_changes_nothing(
        self, backend: MemoryBackend, tensors: list[torch.Tensor]
    ) -> None:
        storages = _storages(tensors)
        before = [tensor.clone() for tensor in tensors]
        backend.release(storages[:2])
        backend.restore(storages)  # a roll-back does not know how far a release came
        assert all(map(torch.equal, tensors[2:], before[2:]))
        for storage, saved in zip(storages[:2], before, strict=False):
            byte_view(storage).copy_(saved)
        backend.restore(storages)
        assert all(map(torch.equal, tensors, before))

    def test_nothing_asked_nothing_done(self, backend: MemoryBackend) -> None:
        assert backend.release([]) == 0
        backend.restore([])
        backend.settle()
        backend.refresh()

    def test_the_system_is_asked_for_what_is_free_and_used(
        self, backend: MemoryBackend, tensors: list[torch.Tensor]
    ) -> None:
        device = tensors[0].device
        assert backend.free_bytes(device) > 0
        assert backend.used_bytes(device) > 0


def _storages(tensors: list[torch.Tensor]) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tensors]

"""What `resize` refuses on a GPU, asked of storages that answer as CUDA's do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

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

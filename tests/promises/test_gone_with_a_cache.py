"""Memory that only a backend sees may go when caches are dropped; a sleep has no business with it any more."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import torpor
from torpor import Sleeper
from torpor.errors import MemoryBackendError
from torpor.memory.madvise import MadviseBackend

N = 100_000


class Pool(MadviseBackend):
    """Sees one block more than the rules, while its owner lives; gives back live blocks only."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.ones(N)
        self.alive = True

    def strays(self, known: Sequence[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        return [self.hidden.untyped_storage()] if self.alive else []

    def releasable_bytes(self, storage: torch.UntypedStorage) -> int:
        return super().releasable_bytes(storage) if self._is_block(storage) else 0

    def release(self, storages: Sequence[torch.UntypedStorage]) -> int:
        if not all(map(self._is_block, storages)):
            raise MemoryBackendError("not a block of the pool")
        return super().release(storages)

    def _is_block(self, storage: torch.UntypedStorage) -> bool:
        return self.alive or storage.data_ptr() != self.hidden.data_ptr()


def test_what_lived_in_a_dropped_cache_is_out_of_the_account() -> None:
    pool, cache, kept = Pool(), {"a": torch.ones(N)}, torch.ones(N)

    def drop() -> None:
        cache.clear()
        pool.alive = False

    derived = torpor.derived("cache", lambda: dict(cache), drop=drop)
    with Sleeper(extra={"kept": kept}, derived=[derived], memory=[pool], store="pageable") as sleeper:
        ledger = sleeper.sleep()
        assert {row.component: row.storages for row in ledger.rows} == {"caches": 1, "kept": 1}
        sleeper.wake()
    assert kept.eq(1).all()


def test_without_a_drop_it_sleeps_with_the_rest() -> None:
    pool = Pool()
    with Sleeper(extra={"kept": torch.ones(N)}, memory=[pool], store="pageable") as sleeper:
        assert {row.component for row in sleeper.sleep().rows} == {"other", "kept"}
        sleeper.wake()
    assert pool.hidden.eq(1).all()

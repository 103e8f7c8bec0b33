"""Memory that no rule claims: moved where one sleeper is open, kept where it may be another actor's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torpor import Sleeper
from torpor.kinds import Fate
from torpor.memory.madvise import MadviseBackend

N = 100_000


class Pool(MadviseBackend):
    """Sees all that was allocated in it, and names what is neither known nor asleep."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[torch.Tensor] = []
        self.asleep: set[int] = set()

    def full(self, value: float) -> torch.Tensor:
        self.held.append(torch.full((N,), value))
        return self.held[-1]

    def strays(self, known: Sequence[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        excused = {storage.data_ptr() for storage in known} | self.asleep
        storages = [tensor.untyped_storage() for tensor in self.held]
        return [storage for storage in storages if storage.data_ptr() not in excused]

    def release(self, storages: Sequence[torch.UntypedStorage]) -> int:
        self.asleep |= {storage.data_ptr() for storage in storages}
        return super().release(storages)

    def restore(self, storages: Sequence[torch.UntypedStorage]) -> None:
        super().restore(storages)
        self.asleep -= {storage.data_ptr() for storage in storages}


def _open(pool: Pool, **extra: torch.Tensor) -> Sleeper:
    return Sleeper(extra=extra, memory=[pool], store="pageable", report_leftovers=False)


def test_what_another_sleeper_cares_for_stays_awake() -> None:
    pool = Pool()
    actor, critic, hidden = pool.full(1), pool.full(2), pool.full(3)
    with _open(pool, actor=actor) as first, _open(pool, critic=critic) as second:
        rows = {row.component: row for row in first.sleep().rows}
        assert {name: (row.fate, row.storages) for name, row in rows.items()} == {
            "actor": (Fate.MOVED, 1),
            "other": (Fate.KEPT, 1),
        }
        assert "another sleeper is open" in rows["other"].reason
        critic += 1  # a step while the actor sleeps
        second.sleep()
        first.wake()
        actor += 1
        second.wake()
    assert [tensor.unique().tolist() for tensor in (actor, critic, hidden)] == [[2], [3], [3]]


def test_a_closed_sleeper_cares_for_nothing() -> None:
    pool = Pool()
    actor, critic = pool.full(1), pool.full(2)
    _open(pool, critic=critic).close()
    with _open(pool, actor=actor) as sleeper:
        assert {row.component: row.fate for row in sleeper.sleep().rows} == {"actor": Fate.MOVED, "other": Fate.MOVED}
        sleeper.wake()
    assert critic.eq(2).all()

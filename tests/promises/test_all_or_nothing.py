"""A failure at any primitive call of sleep or wake leaves the actor where it was, whole, and can be retried."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_actor import SmallActor

from torpor import Sleeper
from torpor.errors import MemoryBackendError, NotEnoughMemoryError, StoreError, StoreFullError, TorporError
from torpor.memory.madvise import MadviseBackend
from torpor.memory.resize import ResizeBackend
from torpor.stores.base import Slot
from torpor.stores.file import FileStore
from torpor.stores.pageable import PageableStore


class Fuse:
    """Counts primitive calls and blows at the `at`-th; 0 never blows."""

    def __init__(self) -> None:
        self.arm(0)

    def tick(self, error: type[TorporError], what: str) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.blown = True
            raise error(f"injected into call {self.calls}: {what}")

    def arm(self, at: int) -> None:
        self.at, self.calls, self.blown = at, 0, False


def _fused(base: type[Any], error: type[TorporError], *methods: str) -> type[Any]:
    """`base` whose `methods` tick the instance's fuse first."""

    def wrap(method: str) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any) -> Any:
            self.fuse.tick(error, method)
            return getattr(super(made, self), method)(*arguments)

        return call

    made = type(f"Fused{base.__name__}", (base,), {method: wrap(method) for method in methods})
    return made


FusedFileStore = _fused(FileStore, StoreError, "reserve", "write_block", "read_block", "sync")
FusedPageableStore = _fused(PageableStore, StoreError, "reserve", "tensor")
FusedMadvise = _fused(MadviseBackend, MemoryBackendError, "release", "restore")
FusedResize = _fused(ResizeBackend, MemoryBackendError, "release", "restore")

COMBINATIONS = [
    (FusedFileStore, FusedMadvise),
    (FusedFileStore, FusedResize),
    (FusedPageableStore, FusedMadvise),
]


@pytest.fixture(params=COMBINATIONS, ids=lambda pair: "-".join(cls.__name__ for cls in pair))
def rigged(request: pytest.FixtureRequest, trained: SmallActor, tmp_path: Path) -> Iterator[tuple[Sleeper, Fuse]]:
    store_class, backend_class = request.param
    fuse = Fuse()
    store_class.fuse = backend_class.fuse = fuse
    store = store_class(tmp_path) if issubclass(store_class, FileStore) else store_class()
    sleeper = Sleeper(trained.model, optimizer=trained.optimizer, store=store, memory=[backend_class()])
    yield sleeper, fuse
    fuse.arm(0)
    sleeper.close()


def _count(fuse: Fuse, call: Callable[[], object]) -> int:
    fuse.arm(0)
    call()
    return fuse.calls


def test_every_failing_call_of_a_sleep(rigged: tuple[Sleeper, Fuse], trained: SmallActor) -> None:
    sleeper, fuse = rigged
    before = trained.bits()
    total = _count(fuse, sleeper.sleep)
    sleeper.wake()
    assert total >= 3
    failed = 0
    for at in range(1, total + 1):
        trained.model[0].weight.data[0, 0] += 1  # so that there is something to write
        before = trained.bits()
        fuse.arm(at)
        with contextlib.suppress(TorporError):  # the last calls are not reached when less has changed
            sleeper.sleep()
        failed += fuse.blown
        assert sleeper.is_asleep != fuse.blown
        if not sleeper.is_asleep:
            assert trained.bits() == before
            trained.model(torch.ones(1, 128))
        fuse.arm(0)
        sleeper.sleep()
        sleeper.wake()
        assert trained.bits() == before
    assert failed >= 3


def test_every_failing_call_of_a_wake(rigged: tuple[Sleeper, Fuse], trained: SmallActor) -> None:
    sleeper, fuse = rigged
    before = trained.bits()
    sleeper.sleep()
    total = _count(fuse, sleeper.wake)
    assert total >= 2
    for at in range(1, total + 1):
        fuse.arm(0)
        sleeper.sleep()
        fuse.arm(at)
        with pytest.raises(TorporError, match="injected"):
            sleeper.wake()
        assert sleeper.is_asleep
        fuse.arm(0)
        sleeper.wake()
        assert trained.bits() == before


def test_two_failures_in_one_sleep_keep_the_bytes_in_the_store(
    rigged: tuple[Sleeper, Fuse], trained: SmallActor
) -> None:
    """The release fails, and taking back what was released fails too: asleep, whole, and wakes later."""
    sleeper, fuse = rigged
    before = trained.bits()

    class Stubborn(Fuse):
        def tick(self, error: type[TorporError], what: str) -> None:
            if what in ("release", "restore"):
                raise error(f"injected into {what}")

    stubborn = Stubborn()
    type(sleeper._store).fuse = type(sleeper._backends["cpu"][0]).fuse = stubborn  # type: ignore[attr-defined]
    with pytest.raises(MemoryBackendError) as caught:
        sleeper.sleep()
    assert "stay asleep" in "".join(caught.value.__notes__)
    type(sleeper._store).fuse = type(sleeper._backends["cpu"][0]).fuse = fuse  # type: ignore[attr-defined]
    sleeper.wake()
    assert trained.bits() == before


class TightMadvise(MadviseBackend):
    """A machine whose free memory the test sets."""

    free = 2**62

    def free_bytes(self, device: torch.device) -> int:
        return self.free


def test_a_wake_without_room_stays_asleep_with_both_numbers(trained: SmallActor, tmp_path: Path) -> None:
    backend = TightMadvise()
    before = trained.bits()
    with Sleeper(trained.model, optimizer=trained.optimizer, store_dir=tmp_path, memory=[backend]) as sleeper:
        needed = sleeper.sleep().freed_bytes
        backend.free = 4096
        with pytest.raises(NotEnoughMemoryError) as caught:
            sleeper.wake()
        assert (caught.value.needed_bytes, caught.value.free_bytes) == (needed, 4096)
        assert isinstance(caught.value, MemoryError)
        assert sleeper.is_asleep
        backend.free = needed
        sleeper.wake()
        assert trained.bits() == before


def test_a_wake_waits_for_promised_memory(trained: SmallActor, tmp_path: Path) -> None:
    class Promised(MadviseBackend):
        looks = 0

        def free_bytes(self, device: torch.device) -> int:
            self.looks += 1
            return 0 if self.looks < 5 else 2**62

    backend = Promised()
    with Sleeper(trained.model, store_dir=tmp_path, memory=[backend]) as sleeper:
        sleeper.sleep()
        sleeper.wake(wait_s=30)
    assert backend.looks == 5


def test_a_store_that_is_too_small_refuses_before_anything_moves(trained: SmallActor) -> None:
    class Recording(MadviseBackend):
        released = 0

        def release(self, storages: Sequence[torch.UntypedStorage]) -> int:
            self.released += len(storages)
            return super().release(storages)

    backend = Recording()
    before = trained.bits()
    store = PageableStore(budget_bytes=70_000)  # one weight fits, two do not
    with Sleeper(trained.model, optimizer=trained.optimizer, store=store, memory=[backend]) as sleeper:
        with pytest.raises(StoreFullError, match="Nothing was freed") as caught:
            sleeper.sleep()
        assert caught.value.needed_bytes > 70_000
        assert backend.released == 0
        assert store.reserve([60_000]) != [Slot(0, 0)]  # the failed sleep holds no room
        assert trained.bits() == before

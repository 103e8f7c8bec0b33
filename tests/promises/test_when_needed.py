"""Only what is needed, when it is needed: partial sleep by bytes, lazy wake, a sleep that does not block."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from small_actor import SmallActor

import torpor
from torpor import Fate, Sleeper, State
from torpor.errors import AsleepError, StoreError, UsageError
from torpor.stores.file import FileStore


def test_need_bytes_takes_what_costs_no_copy_first(trained: SmallActor, sleeper: Sleeper) -> None:
    ledger = sleeper.sleep(need_bytes=60_000)
    assert ledger.bytes_by_fate() == {Fate.ZEROED: 128 * 128 * 4}
    assert 60_000 <= ledger.freed_bytes < 2 * 60_000
    assert ledger.copied_bytes == 0


@pytest.mark.parametrize("need_bytes", [1, 100_000, 200_000, 300_000])
def test_need_bytes_frees_that_much_and_no_storage_more(need_bytes: int, trained: SmallActor, sleeper: Sleeper) -> None:
    before = trained.bits()
    ledger = sleeper.sleep(need_bytes=need_bytes)
    sizes = [s.decision.releasable_bytes for s in sleeper._dormant]
    assert ledger.freed_bytes >= need_bytes
    assert ledger.freed_bytes - min(sizes) < need_bytes
    sleeper.sleep()
    sleeper.wake()
    assert trained.bits() == before


def test_more_than_there_is_is_refused_with_the_limit(sleeper: Sleeper) -> None:
    with pytest.raises(UsageError, match=r"frees at most \d+ bytes"):
        sleeper.sleep("params", need_bytes=2**40)
    assert not sleeper.is_asleep


def test_a_partial_sleep_is_a_state_of_its_own(sleeper: Sleeper) -> None:
    sleeper.sleep("params", need_bytes=1)
    assert sleeper.components()["params"] is State.PARTLY
    sleeper.sleep("params")
    assert sleeper.components()["params"] is State.ASLEEP


class GatedFileStore(FileStore):
    """Reads, or writes, wait until the test opens the gate."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.reads = threading.Event()
        self.reads.set()
        self.writes = threading.Event()
        self.writes.set()
        self.error: StoreError | None = None

    def read_block(self, offset: int, block: torch.Tensor) -> None:
        assert self.reads.wait(60)
        super().read_block(offset, block)

    def write_block(self, offset: int, block: torch.Tensor) -> None:
        assert self.writes.wait(60)
        if self.error is not None:
            raise self.error
        super().write_block(offset, block)


@pytest.fixture
def gated(trained: SmallActor, tmp_path: Path) -> tuple[Sleeper, GatedFileStore]:
    store = GatedFileStore(tmp_path)
    return Sleeper(trained.model, optimizer=trained.optimizer, store=store), store


def test_a_lazy_wake_computes_before_the_optimizer_is_there(
    gated: tuple[Sleeper, GatedFileStore], trained: SmallActor
) -> None:
    sleeper, store = gated
    twin = SmallActor()
    for k in range(2):
        twin.step(k)
    sleeper.sleep()
    sleeper.wake(["params", "buffers", "grads"])
    store.reads.clear()
    first = sleeper.wake(lazy=True)
    assert first.copied_bytes < 2 * 128 * 128 * 4  # no moment was read yet
    trained.optimizer.zero_grad()
    trained.backward(1)  # runs while the moments wait at the gate
    threading.Timer(0.2, store.reads.set).start()
    trained.optimizer.step()  # waits for them
    assert not sleeper.is_asleep
    assert trained.bits() == twin.bits()
    sleeper.close()


def test_a_lazy_wake_returns_the_ledger_of_the_rest(gated: tuple[Sleeper, GatedFileStore]) -> None:
    sleeper, _ = gated
    slept = sleeper.sleep()
    first = sleeper.wake(lazy=True)
    rest = sleeper.finish()
    assert rest is not None
    assert first.copied_bytes + rest.copied_bytes == slept.copied_bytes
    assert sleeper.finish() is None
    sleeper.close()


def test_a_lazy_wake_that_fails_is_told_and_can_be_retried(
    gated: tuple[Sleeper, GatedFileStore], trained: SmallActor
) -> None:
    sleeper, store = gated
    before = trained.bits()
    sleeper.sleep()
    sleeper.wake(["params", "buffers", "grads"])
    intact, store.read_block = store.read_block, _failing_read  # type: ignore[method-assign]
    sleeper.wake(lazy=True)
    with pytest.raises(StoreError, match="cable"):
        trained.optimizer.step()
    with pytest.raises(AsleepError):
        trained.optimizer.step()
    store.read_block = intact  # type: ignore[method-assign]
    sleeper.wake()
    assert trained.bits() == before
    sleeper.close()


def _failing_read(offset: int, block: torch.Tensor) -> None:
    raise StoreError(f"the cable is out at {offset}")


def test_a_sleep_in_the_background_frees_as_it_goes(gated: tuple[Sleeper, GatedFileStore], trained: SmallActor) -> None:
    sleeper, store = gated
    before = trained.bits()
    store.writes.clear()
    handle = sleeper.sleep(blocking=False)
    assert not handle.done
    with pytest.raises(TimeoutError):
        handle.wait_for(2**40, timeout_s=0.01)
    with pytest.raises(TimeoutError):
        handle.result(timeout_s=0.01)
    threading.Timer(0.2, store.writes.set).start()
    with pytest.raises(AsleepError):  # waits for the sleep, then refuses
        trained.model(torch.ones(1, 128))
    ledger = handle.result()
    assert handle.wait_for(ledger.freed_bytes) == ledger.freed_bytes
    with pytest.raises(UsageError, match="were waited for"):
        handle.wait_for(ledger.freed_bytes + 1)
    sleeper.close()
    assert trained.bits() == before


def test_a_step_beside_the_planning_of_a_background_sleep_waits(trained: SmallActor, tmp_path: Path) -> None:
    def slowly() -> list[torch.Tensor]:
        time.sleep(0.1)
        return []

    before = trained.bits()
    slow = torpor.derived("slow", slowly, drop=lambda: None)
    with Sleeper(trained.model, optimizer=trained.optimizer, derived=[slow], store_dir=tmp_path) as sleeper:
        sleeper.sleep(blocking=False)
        with pytest.raises(AsleepError):
            trained.optimizer.step()
    assert trained.bits() == before


def test_a_background_sleep_that_fails_leaves_everything_awake(
    gated: tuple[Sleeper, GatedFileStore], trained: SmallActor
) -> None:
    sleeper, store = gated
    before = trained.bits()
    store.error = StoreError("disk on fire")
    handle = sleeper.sleep(blocking=False)
    with pytest.raises(StoreError, match="fire"):
        handle.wait_for(2**40)
    store.error = None
    assert not sleeper.is_asleep
    assert trained.bits() == before
    trained.model(torch.ones(1, 128))
    sleeper.close()

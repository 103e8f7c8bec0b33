"""Ranks sleep and wake together or not at all, and whoever cannot, is late or has died is named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from sharded import ShardedActor

from torpor import Sleeper
from torpor.errors import DesyncError, MemoryBackendError, RankError, StoreError, StoreFullError
from torpor.memory.resize import ResizeBackend
from torpor.stores.file import FileStore

CULPRIT = 1


class Trap:
    """What happens at the next call of one method, on the rank that set it."""

    def __init__(self) -> None:
        self.method, self.spring = "", lambda: None

    def set(self, method: str, spring: Callable[[], None]) -> None:
        self.method, self.spring = method, spring

    def check(self, method: str) -> None:
        if method == self.method:
            self.method = ""
            self.spring()


class TrappedStore(FileStore):
    trap: Trap

    def reserve(self, *arguments: Any) -> Any:
        self.trap.check("reserve")
        return super().reserve(*arguments)

    def write_block(self, *arguments: Any) -> None:
        self.trap.check("write_block")
        super().write_block(*arguments)

    def read_block(self, *arguments: Any) -> None:
        self.trap.check("read_block")
        super().read_block(*arguments)


class TrappedMemory(ResizeBackend):
    trap: Trap

    def release(self, *arguments: Any) -> int:
        self.trap.check("release")
        return super().release(*arguments)

    def restore(self, *arguments: Any) -> None:
        self.trap.check("restore")
        super().restore(*arguments)

    def free_bytes(self, device: torch.device) -> int:
        try:
            self.trap.check("free_bytes")
        except MemoryBackendError:
            return 1000
        return super().free_bytes(device)


def _trapped(timeout_s: float = 30.0) -> tuple[ShardedActor, Sleeper, Trap]:
    actor, trap = ShardedActor(), Trap()
    store, memory = TrappedStore(Path(os.environ["TORPOR_DIR"])), TrappedMemory()
    store.trap = memory.trap = trap
    sleeper = Sleeper(
        actor.model,
        optimizer=actor.optimizer,
        store=store,
        memory=[memory],
        group=dist.group.WORLD,
        agree_timeout_s=timeout_s,
    )
    actor.step(0)
    return actor, sleeper, trap


def _raiser(error: Exception) -> Callable[[], None]:
    def spring() -> None:
        raise error

    return spring


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FALLING = {
    "reserve": StoreFullError(100, 10, "a disk", "Make room."),
    "write_block": StoreError("cable pulled"),
    "release": MemoryBackendError("refused"),
}
WAKING = {
    "free_bytes": MemoryBackendError("stands for no room"),
    "restore": MemoryBackendError("no address"),
    "read_block": StoreError("bad sector"),
}


def _fail_everywhere() -> list[dict[str, Any]]:
    """One rank fails at each primitive call in turn; then the call is made again."""
    actor, sleeper, trap = _trapped()
    seen = []
    for k, (method, error) in enumerate([*FALLING.items(), *WAKING.items()]):
        actor.step(k)  # so that there is something to copy
        before = actor.bits()
        call = sleeper.sleep if method in FALLING else sleeper.wake
        if method in WAKING:
            sleeper.sleep()
        was_asleep = sleeper.is_asleep
        if dist.get_rank() == CULPRIT:
            trap.set(method, _raiser(error))
        caught: dict[str, Any] = {"method": method}
        try:
            call()
        except RankError as refused:
            caught |= {"rank": refused.rank, "text": str(refused), "kind": refused.kind}
            caught["cause"] = type(refused.__cause__).__name__
        caught["stayed"] = sleeper.is_asleep == was_asleep
        caught["unharmed"] = was_asleep or actor.bits() == before
        call()
        sleeper.wake()
        caught["whole"] = actor.bits() == before
        seen.append(caught)
    actor.step(99)
    sleeper.close()
    return seen


def test_a_failure_on_one_rank_at_any_step_keeps_every_rank_where_it_was() -> None:
    innocent, culprit = run_ranks(_fail_everywhere)
    for seen in (innocent, culprit):
        assert [c["method"] for c in seen if not (c["stayed"] and c["unharmed"] and c["whole"])] == []
        assert [c.get("rank") for c in seen] == [CULPRIT] * len(seen)
    for case, (method, error) in zip(innocent, [*FALLING.items(), *WAKING.items()], strict=True):
        if method == "free_bytes":
            assert case["kind"] == "NotEnoughMemoryError"
            assert "1000 bytes" in case["text"]
        else:
            assert case["kind"] == type(error).__name__
            assert str(error) in case["text"]
        assert case["cause"] == "NoneType"
    assert [c["cause"] for c in culprit] == [c["kind"] for c in innocent]


def _be_late() -> list[tuple[int, str, bool]]:
    """The culprit comes when the other has given up; what is decided is decided for it too."""
    actor, sleeper, _ = _trapped(timeout_s=0.5)
    signals = dist.PrefixStore("test", dist.group.WORLD.get_group_store())
    before, seen = actor.bits(), []
    if dist.get_rank() == CULPRIT:
        signals.wait(["given up"], timedelta(seconds=20))
    start = time.monotonic()
    try:
        sleeper.sleep()
    except RankError as error:
        seen.append((error.rank, error.kind, time.monotonic() - start < 10))
    signals.set("given up", "yes")
    assert actor.bits() == before
    dist.barrier()
    sleeper.sleep()
    sleeper.wake()
    assert actor.bits() == before
    return seen


def test_a_late_rank_is_named_and_gets_the_same_verdict() -> None:
    assert run_ranks(_be_late) == [[(CULPRIT, "late", True)]] * 2


def _wait_for_room() -> tuple[bool, bool]:
    """One rank's memory is there only after the others would have given up on a rank that does nothing."""
    actor, sleeper, trap = _trapped(timeout_s=0.5)
    before = actor.bits()
    sleeper.sleep()
    dist.barrier()
    start = time.monotonic()
    if dist.get_rank() == CULPRIT:
        trap.set("free_bytes", lambda: time.sleep(1.0))
    sleeper.wake(wait_s=20)
    return actor.bits() == before, time.monotonic() - start >= 0.9


def test_ranks_that_wait_for_memory_are_waited_for() -> None:
    assert run_ranks(_wait_for_room) == [(True, True)] * 2


def _die_at(method: str) -> dict[str, Any]:
    actor, sleeper, trap = _trapped(timeout_s=60.0)
    before, was_asleep = actor.bits(), False
    if method in WAKING:
        sleeper.sleep()
        was_asleep = True
    dist.barrier()
    if dist.get_rank() == CULPRIT:
        if method == "before":
            _die()
        trap.set(method, _die)
    start = time.monotonic()
    call = sleeper.wake if was_asleep else sleeper.sleep
    try:
        call()
    except RankError as error:
        facts = {"rank": error.rank, "kind": error.kind, "seconds": time.monotonic() - start}
    facts["stayed"] = sleeper.is_asleep == was_asleep
    sleeper.close()
    return facts | {"whole": actor.bits() == before}


@pytest.mark.parametrize("method", ["before", "write_block", "release", "read_block"])
def test_a_rank_that_dies_is_named_at_once_and_the_others_stay_whole(method: str) -> None:
    facts, _ = run_ranks(_die_at, method, dying=[CULPRIT])
    assert (facts["rank"], facts["kind"]) == (CULPRIT, "ended")
    assert facts["seconds"] < 10
    assert facts["stayed"]
    assert facts["whole"]


def _lose_the_store(port_file: str) -> tuple[str, bool]:
    """The rank that hosts the key-value store dies."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == CULPRIT:
        host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        Path(port_file + ".part").write_text(str(host.port))
        Path(port_file + ".part").rename(port_file)
    while not Path(port_file).exists():
        time.sleep(0.01)
    store = host if rank == CULPRIT else dist.TCPStore("127.0.0.1", int(Path(port_file).read_text()))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    actor, sleeper, trap = _trapped(timeout_s=30.0)
    before = actor.bits()
    trap.set("write_block", _die if rank == CULPRIT else lambda: None)
    try:
        sleeper.sleep()
    except RankError as error:
        kind = error.kind
    sleeper.close()
    return kind, actor.bits() == before


def test_the_death_of_the_rank_that_hosts_the_store_is_an_error_too(tmp_path: Path) -> None:
    answer, _ = run_ranks(_lose_the_store, str(tmp_path / "port"), dying=[CULPRIT])
    assert answer == ("no store", True)


def _call_apart() -> tuple[str, dict[int, str]]:
    actor, sleeper, _ = _trapped()
    components = "optimizer" if dist.get_rank() == CULPRIT else None
    try:
        sleeper.sleep(components)
    except DesyncError as error:
        message = str(error)
        calls = error.calls
    assert not sleeper.is_asleep
    sleeper.sleep("optimizer")
    sleeper.close()
    actor.step(1)
    return message, calls


def test_different_calls_are_refused_and_both_are_named() -> None:
    for message, calls in run_ranks(_call_apart):
        assert calls == {0: "sleep(all, need_bytes=None)", 1: "sleep(['optimizer'], need_bytes=None)"}
        assert "every rank must make the same call" in message


def _lazily() -> tuple[bool, float]:
    """A lazy wake, and more rounds than keys may pile up for."""
    slept = _train_lazily(dist.group.WORLD)
    return slept[:-1] == _train_lazily(None)[:-1], slept[-1]


def _train_lazily(group: dist.ProcessGroup | None) -> tuple[list[float], dict[str, bytes], int]:
    actor, losses, keys = ShardedActor(), [], []
    with Sleeper(actor.model, optimizer=actor.optimizer, group=group, agree_timeout_s=30) as sleeper:
        for k in range(5):
            losses.append(actor.step(k))
            sleeper.sleep(blocking=False).result()
            sleeper.wake(lazy=True)
            sleeper.finish()
            dist.barrier()
            keys.append(dist.group.WORLD.get_group_store().num_keys())
            dist.barrier()
    return losses, actor.bits(), keys[-1] - keys[1]


def test_a_lazy_wake_is_agreed_too_and_old_keys_are_removed() -> None:
    for equal, new_keys in run_ranks(_lazily):
        assert equal
        assert new_keys < 8

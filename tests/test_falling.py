"""A GPU's memory is fingerprinted in groups, each while the one before it is copied. No GPU here: the order is seen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import torpor
from torpor import Fate, Sleeper, falling
from torpor.errors import StoreError
from torpor.falling import Sleeping, groups_of, same_streams
from torpor.fingerprint import Digest, fingerprints
from torpor.ledger import Stopwatch
from torpor.stores.base import Store
from torpor.transfer import Moved, Piece, save

N = 20_000


class AsOnGpu:
    """Host memory treated as a GPU's; what the way down does with it, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.fail_at = ""
        self._names: dict[int, str] = {}
        monkeypatch.setattr(Sleeping, "is_on_host", False)
        monkeypatch.setattr(falling, "_GPU_GROUP_BYTES", 1)
        monkeypatch.setattr(falling, "SMALL_BYTES", 4 * N)
        monkeypatch.setattr(falling, "fingerprints", self._fingerprints)
        monkeypatch.setattr(falling, "save", self._save)
        monkeypatch.setattr(falling, "same_streams", self._same_streams)
        monkeypatch.setattr(Stopwatch, "stage", self._staged(Stopwatch.stage))

    def tensor(self, name: str, size: int = N) -> torch.Tensor:
        made = torch.randn(size)
        self._names[made.data_ptr()] = name
        return made

    def taken(self) -> list[str]:
        """The events since this was last asked."""
        events, self.events = self.events, []
        return events

    def _fingerprints(self, blocks: Sequence[torch.Tensor]) -> list[Digest]:
        for block in blocks:
            name = self._names[block.data_ptr()]
            self.events.append(f"fingerprint {name}")
            if name == self.fail_at:
                raise StoreError(f"injected at {name}")
        return fingerprints(blocks)

    def _save(self, pieces: Iterable[Piece], store: Store) -> Moved:
        def seen() -> Iterator[Piece]:
            for piece in pieces:
                self.events.append(f"copy {self._names[piece.home.data_ptr()]}")
                yield piece

        return save(seen(), store)

    def _same_streams(self, sleepers: Sequence[Sleeping]) -> Callable[[], AbstractContextManager[None]]:
        return nullcontext

    def _staged(self, stage: Callable[[Stopwatch, str], AbstractContextManager[None]]) -> Any:
        @contextmanager
        def staged(watch: Stopwatch, name: str) -> Iterator[None]:
            if name in ("fingerprint", "copy"):
                self.events.append(f"[{name}]")
            with stage(watch, name):
                yield

        return staged


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> AsOnGpu:
    return AsOnGpu(monkeypatch)


def test_each_group_is_fingerprinted_while_the_one_before_is_copied(gpu: AsOnGpu) -> None:
    tensors = [gpu.tensor(name) for name in "abc"]
    with Sleeper(extra=tensors, store="pageable") as sleeper:
        sleeper.sleep()
        events = gpu.taken()
    assert events == [
        *("[fingerprint]", "fingerprint a", "[copy]", "copy a"),
        *("fingerprint b", "copy b", "fingerprint c", "copy c"),
    ]


def test_small_storages_are_fingerprinted_before_any_copy(gpu: AsOnGpu) -> None:
    tensors = [gpu.tensor("a"), gpu.tensor("small", N - 1), gpu.tensor("b"), gpu.tensor("tiny", N // 2)]
    with Sleeper(extra=tensors, store="pageable") as sleeper:
        sleeper.sleep()
        events = gpu.taken()
    assert events == [
        *("[fingerprint]", "fingerprint small", "fingerprint tiny", "fingerprint a", "[copy]"),
        *("copy a", "copy small", "fingerprint b", "copy b", "copy tiny"),
    ]


def test_what_is_rebuilt_comes_last(gpu: AsOnGpu) -> None:
    masters, cast_ = [gpu.tensor(name) for name in "ab"], gpu.tensor("cast")
    cast_.copy_(masters[0])
    copied = torpor.derived("cast", cast_, rebuild=lambda out, source: out.copy_(source), sources=[masters[0]])
    with Sleeper(extra=masters, derived=[copied], store="pageable", verify=False) as sleeper:
        assert sleeper.sleep().bytes_by_fate()[Fate.REBUILT] == cast_.nbytes
        assert gpu.taken()[-3:] == ["fingerprint b", "copy b", "fingerprint cast"]
        sleeping = {s.decision.entry.address: s for s in sleeper._dormant}
        assert sleeping[cast_.data_ptr()].digest is not None


def test_what_did_not_change_is_not_copied_again(gpu: AsOnGpu) -> None:
    tensors = [gpu.tensor(name) for name in "abcd"]
    with Sleeper(extra=tensors, store="pageable") as sleeper:
        sleeper.sleep()
        sleeper.wake()
        gpu.taken()
        tensors[2][0] += 1
        before = [tensor.clone() for tensor in tensors]
        ledger = sleeper.sleep()
        assert [event for event in gpu.taken() if event.startswith("copy")] == ["copy c"]
        assert ledger.bytes_by_fate() == {Fate.CLEAN: 12 * N, Fate.MOVED: 4 * N}
        sleeper.wake()
    assert all(map(torch.equal, tensors, before))


def test_a_fingerprint_that_fails_after_copies_leaves_all_awake_and_no_slot_trusted(gpu: AsOnGpu) -> None:
    tensors = [gpu.tensor(name) for name in "abc"]
    with Sleeper(extra=tensors, store="pageable") as sleeper:
        sleeper.sleep()
        sleeper.wake()
        before = [tensor.clone() for tensor in tensors]
        tensors[0].add_(1)
        gpu.taken()
        gpu.fail_at = "b"
        with pytest.raises(StoreError, match="injected at b"):
            sleeper.sleep()
        assert gpu.taken()[-2:] == ["copy a", "fingerprint b"]
        assert not sleeper.is_asleep
        tensors[0].copy_(before[0])  # what its slot held until the failed sleep
        gpu.fail_at = ""
        assert sleeper.sleep().bytes_by_fate() == {Fate.MOVED: 4 * N, Fate.CLEAN: 8 * N}
        sleeper.wake()
    assert all(map(torch.equal, tensors, before))


def test_groups_keep_the_order_and_only_the_last_is_small() -> None:
    def sized(nbytes: int) -> Sleeping:
        return Sleeping(cast(Any, SimpleNamespace(entry=SimpleNamespace(nbytes=nbytes))))

    sleepers = [sized(nbytes) for nbytes in (1, 9, 9, 4, 5)]
    assert list(groups_of(sleepers, 10)) == [sleepers[:2], sleepers[2:4], sleepers[4:]]


def test_another_thread_uses_the_streams_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each GPU, and none for the host."""
    mine = threading.local()
    mine.streams = {0: "my stream", 1: "my other stream"}
    used: list[str] = []

    @contextmanager
    def stream(chosen: str) -> Iterator[None]:
        used.append(chosen)
        yield
        used.append(f"{chosen} left")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mine.streams[device.index])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    devices = [torch.device(name) for name in ("cpu", "cuda:0", "cuda:1", "cuda:0")]
    sleepers = [Sleeping(cast(Any, SimpleNamespace(entry=SimpleNamespace(device=device)))) for device in devices]
    here = same_streams(sleepers)

    def work() -> None:
        with here():
            used.append("work")

    other = threading.Thread(target=work)
    other.start()
    other.join()
    assert sorted(used[:2]) == ["my other stream", "my stream"]
    assert used[2] == "work"
    assert len(used) == 5

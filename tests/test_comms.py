"""The choice of a way for process groups, and suspending with a backend that records what it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from torpor import comms
from torpor.agreement import Alone
from torpor.comms import CommsMode, Groups, suspend_obstacle
from torpor.errors import AsleepError, MemoryBackendError, UnsupportedError, UsageError
from torpor.kinds import Fate
from torpor.ledger import Stopwatch

CUDA_HERE = torch.cuda.is_available()


class RecordingBackend:
    """Stands for NCCL's: notes what it is asked, and refuses if told so."""

    def __init__(self, name: str, events: list[str], refusal: str = "") -> None:
        self._name, self._events, self._refusal = name, events, refusal

    def suspend(self) -> None:
        if self._refusal:
            raise RuntimeError(self._refusal)
        self._events.append(f"suspend {self._name}")

    def resume(self) -> None:
        self._events.append(f"resume {self._name}")


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _suspendable(monkeypatch: pytest.MonkeyPatch, refusals: dict[str, str]) -> tuple[Groups, list[str]]:
    """Three groups of one rank whose backends record; the machine is taken to have an NCCL that can suspend."""
    events: list[str] = []
    made = {name: dist.new_group([0]) for name in ("a", "b", "c")}
    backends = {id(made[name]): RecordingBackend(name, events, refusals.get(name, "")) for name in made}
    monkeypatch.setattr(comms, "suspend_obstacle", lambda: "")
    monkeypatch.setattr(comms, "_nccl_backends", lambda group: [backends[id(group)]])
    return Groups(made), events


def _sleep(groups: Groups) -> Any:
    return groups.sleep(Alone(), Stopwatch())


def test_groups_without_device_memory_are_kept_and_say_so() -> None:
    groups = Groups({"world": dist.group.WORLD})
    assert groups.mode is CommsMode.KEEP
    [row] = _sleep(groups)
    assert (row.component, row.fate, row.freed_bytes) == ("comms", Fate.KEPT, 0)
    assert "no device memory" in row.reason
    assert not groups.is_asleep
    assert groups["world"] is dist.group.WORLD


@pytest.mark.skipif(CUDA_HERE, reason="says why it cannot be without a GPU")
def test_suspend_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match=f"cannot be suspended: {suspend_obstacle()}"):
        Groups({"world": dist.group.WORLD}, mode="suspend")


@pytest.mark.skipif("suspend" not in vars(Backend), reason="needs a torch that can suspend backends")
def test_an_old_nccl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert suspend_obstacle() == "NCCL 2.28.9 is loaded, 2.29.7 is needed"
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    assert suspend_obstacle() == ""


def test_what_was_given_ready_made_cannot_be_rebuilt() -> None:
    with pytest.raises(UsageError, match="needs a function"):
        Groups({"world": dist.group.WORLD}, mode="rebuild")
    with pytest.raises(UsageError, match="'auto', 'keep', 'suspend', 'rebuild'"):
        Groups({}, mode="drop")


def test_groups_with_device_memory_are_suspended_where_nccl_can_and_rebuilt_or_kept_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _suspendable(monkeypatch, {})[0].mode is CommsMode.SUSPEND
    monkeypatch.setattr(comms, "suspend_obstacle", lambda: "NCCL is old")
    monkeypatch.setattr(comms, "_nccl_backends", lambda group: [object()])
    rebuilt, kept = Groups(lambda _: {"a": dist.new_group([0])}), Groups({"a": dist.new_group([0])})
    assert (rebuilt.mode, kept.mode) == (CommsMode.REBUILD, CommsMode.KEEP)
    assert "NCCL is old" in rebuilt.reason
    assert "somebody else holds the groups" in kept.reason


def test_suspended_groups_come_back_and_cannot_be_used_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, events = _suspendable(monkeypatch, {})
    group = groups["a"]
    [row] = _sleep(groups)
    assert row.fate is Fate.DROPPED
    assert _sleep(groups) == []
    with pytest.raises(AsleepError, match=r"'a'.*'comms' is asleep"):
        groups["a"]
    groups.wake(Alone(), Stopwatch())
    assert groups.wake(Alone(), Stopwatch()) == []
    assert groups["a"] is group
    assert events == ["suspend a", "suspend b", "suspend c", "resume a", "resume b", "resume c"]


def test_a_refused_suspend_resumes_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, events = _suspendable(monkeypatch, {"c": "shared with another communicator"})
    with pytest.raises(MemoryBackendError, match="process group 'c': suspend: shared with another"):
        _sleep(groups)
    assert events == ["suspend a", "suspend b", "resume b", "resume a"]
    assert not groups.is_asleep


def test_a_group_that_never_connected_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, events = _suspendable(monkeypatch, {"b": "NCCL communicator not initialized"})
    _sleep(groups)
    assert events == ["suspend a", "suspend c"]
    assert groups.is_asleep


def test_an_unknown_group_is_named() -> None:
    with pytest.raises(UsageError, match=r"no process group 'tp'; there are \['dp'\]"):
        Groups({"dp": dist.group.WORLD})["tp"]

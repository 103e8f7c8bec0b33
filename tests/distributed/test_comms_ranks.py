"""Process groups sleep and come back with the same ranks, names, order and timeouts; the world too."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from sharded import ShardedActor

from torpor import Sleeper
from torpor.comms import CommsMode, Groups
from torpor.errors import AsleepError, RankError, StateError
from torpor.kinds import Fate, State

LONG, SHORT = timedelta(minutes=90), timedelta(minutes=7)


def _timeout(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def _sum(group: dist.ProcessGroup) -> float:
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value, group=group)
    return value.item()


def _a_world_and_its_groups() -> Groups:
    """The world that the harness made gives way to one of the holder's own."""
    store, rank, size = dist.group.WORLD.get_group_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()

    def create(number: int) -> Mapping[str, Any]:
        fresh = dist.PrefixStore(f"world-{number}", store)
        dist.init_process_group("gloo", store=fresh, rank=rank, world_size=size, timeout=LONG)
        both = dist.new_group([0, 1], timeout=SHORT, group_desc="both")
        mine = dist.new_group([0], timeout=LONG, group_desc="first alone")
        return {"world": dist.group.WORLD, "both": both, "first": mine}

    return Groups(create, mode="rebuild")


def _rebuild_the_world() -> list[dict[str, Any]]:
    groups = _a_world_and_its_groups()
    tensor = torch.arange(1 << 16, dtype=torch.float32)
    seen = []
    with Sleeper(extra=[tensor], memory="resize", comms=groups, group=groups["world"], agree_timeout_s=20) as sleeper:
        for _ in range(3):
            before = groups["both"]
            ledger = sleeper.sleep()
            asleep = {"initialized": dist.is_initialized(), "states": sleeper.components()}
            try:
                groups["both"]
            except AsleepError as error:
                asleep["component"] = error.component
            [row] = [row for row in ledger.rows if row.component == "comms"]
            asleep["read"] = sleeper.read(tensor).sum().item()
            sleeper.wake()
            seen.append(
                asleep
                | {
                    "row": (row.fate, row.storages),
                    "new object": groups["both"] is not before,
                    "sums": [_sum(groups[name]) for name in ("world", "both")],
                    "timeouts": [_timeout(groups[name]) for name in ("world", "both")],
                    "ranks": [dist.get_process_group_ranks(groups[name]) for name in ("world", "both")],
                    "names": groups.names,
                    "is the world": groups["world"] is dist.group.WORLD,
                    "member of first": isinstance(groups["first"], dist.ProcessGroup),
                    "descriptions": groups["both"].group_desc,
                }
            )
    return seen


def test_world_and_groups_come_back_with_their_timeouts_ranks_and_order() -> None:
    for rank, seen in enumerate(run_ranks(_rebuild_the_world)):
        assert len(seen) == 3
        for facts in seen:
            assert not facts["initialized"]
            assert facts["component"] == "comms"
            assert facts["states"] == {"extra": State.ASLEEP, "comms": State.ASLEEP}
            assert facts["read"] == sum(range(1 << 16))
            assert facts["row"] == (Fate.DROPPED, 3)
            assert facts["new object"]
            assert facts["is the world"]
            assert facts["sums"] == [3.0, 3.0]
            assert facts["timeouts"] == [LONG, SHORT]
            assert facts["ranks"] == [[0, 1], [0, 1]]
            assert facts["names"] == ["world", "both", "first"]
            assert facts["member of first"] == (rank == 0)
            assert facts["descriptions"] == "both"


def _change_a_timeout() -> tuple[str, bool, float]:
    timeouts = iter([LONG, SHORT, LONG])
    groups = Groups(lambda _: {"both": dist.new_group([0, 1], timeout=next(timeouts))}, mode="rebuild")
    tensor = torch.ones(1 << 16)
    with Sleeper(extra=[tensor], memory="resize", comms=groups, group=dist.group.WORLD, agree_timeout_s=20) as sleeper:
        sleeper.sleep()
        message = ""
        try:
            sleeper.wake()
        except RankError as error:
            message = f"{error.kind}: {error}"
        still = sleeper.is_asleep and tensor.untyped_storage().nbytes() == 0
        sleeper.wake()
        return message, still, _sum(groups["both"])


def test_groups_that_come_back_other_than_they_were_are_refused() -> None:
    for message, still_asleep, total in run_ranks(_change_a_timeout):
        assert message.startswith("StateError: rank ")
        assert "'both'" in message
        assert "5400" in message
        assert "420" in message
        assert still_asleep
        assert total == 3.0


def _train_with_groups_of_its_own() -> dict[str, Any]:
    """FSDP's mesh cannot be told of new groups: it is kept; what the loop made itself is rebuilt."""
    groups = Groups(lambda _: {"metrics": dist.new_group([0, 1], timeout=SHORT)}, mode="rebuild")
    held = Groups({"mesh": dist.group.WORLD})
    facts: dict[str, Any] = {"held": (held.mode, held.reason)}
    runs = []
    for comms in (None, groups):
        actor = ShardedActor()
        names = list(actor.model.state_dict())
        sleeper = Sleeper(actor.model, optimizer=actor.optimizer, comms=comms, group=dist.group.WORLD)
        losses = []
        for k in range(3):
            losses.append(actor.step(k))
            if comms is not None:
                sleeper.sleep()
                facts["read"] = len(sleeper.state_dict()) == len(names)
                facts["still asleep"] = sleeper.components()["comms"]
                sleeper.wake("params")
                facts["apart"] = sleeper.components()["comms"]
                sleeper.wake()
                facts["sum"] = _sum(groups["metrics"])
        sleeper.close()
        runs.append((losses, actor.bits()))
    facts["equal"] = runs[0] == runs[1]
    return facts


def test_training_goes_on_to_the_bit_with_rebuilt_groups_beside_kept_ones() -> None:
    for facts in run_ranks(_train_with_groups_of_its_own):
        assert facts["held"] == (CommsMode.KEEP, "no device memory in them")
        assert (facts["still asleep"], facts["apart"]) == (State.ASLEEP, State.ASLEEP)
        assert facts["sum"] == 3.0
        assert facts["read"]
        assert facts["equal"]


def _restore_what_was_found() -> list[State]:
    groups = Groups(lambda _: {"both": dist.new_group([0, 1])}, mode="rebuild")
    states, before = [], groups["both"]
    with Sleeper(comms=groups, group=dist.group.WORLD, agree_timeout_s=20) as sleeper:
        with sleeper.asleep():
            states.append(sleeper.components()["comms"])
            with pytest.raises(KeyError):  # torch knows it no more
                dist.get_process_group_ranks(before)
        states.append(sleeper.components()["comms"])
        sleeper.sleep("comms")
        with sleeper.awake():
            states.append(sleeper.components()["comms"])
        states.append(sleeper.components()["comms"])
    assert _sum(groups["both"]) == 3.0
    return states


def test_contexts_restore_the_groups_they_found() -> None:
    expected = [State.ASLEEP, State.AWAKE, State.AWAKE, State.ASLEEP]
    assert run_ranks(_restore_what_was_found) == [expected] * 2


def _fail_to_make_them() -> tuple[str, bool]:
    """One rank cannot make its groups; the other has made its own and gives them up again."""
    wrong = {"now": False}

    def create(number: int) -> Mapping[str, Any]:
        if wrong["now"] and dist.get_rank() == 1:
            wrong["now"] = False
            raise StateError("no ports left")
        return {"mine": dist.new_group([dist.get_rank()], use_local_synchronization=True)}

    groups = Groups(create, mode="rebuild")
    with Sleeper(comms=groups, group=dist.group.WORLD, agree_timeout_s=20) as sleeper:
        sleeper.sleep()
        wrong["now"] = True
        try:
            sleeper.wake()
        except RankError as error:
            message = f"{error.rank} {error.failures[error.rank]}"
        asleep = sleeper.is_asleep
        sleeper.wake()
    return message, asleep and not groups.is_asleep


def test_a_rank_that_cannot_connect_leaves_all_asleep() -> None:
    assert run_ranks(_fail_to_make_them) == [("1 no ports left", True)] * 2


def _lose_a_rank_while_groups_sleep() -> tuple[int, str, bool, bool]:
    groups = Groups(lambda _: {"both": dist.new_group([0, 1])}, mode="rebuild")
    tensor = torch.ones(1 << 16)
    sleeper = Sleeper(extra=[tensor], memory="resize", comms=groups, group=dist.group.WORLD, agree_timeout_s=60)
    sleeper.sleep()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        sleeper.close()
    except RankError as error:
        return error.rank, error.kind, groups.is_asleep, tensor.sum().item() == 1 << 16
    raise AssertionError("it connected to a rank that is gone")


def test_a_close_without_a_rank_brings_the_tensors_back_and_names_it() -> None:
    answer, _ = run_ranks(_lose_a_rank_while_groups_sleep, dying=[1])
    assert answer == (1, "ended", True, True)

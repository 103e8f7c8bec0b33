"""What votes come to, and who is still alive; the ranks themselves are in `tests/distributed`."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from torpor import agreement
from torpor.agreement import Agreement, Alone
from torpor.errors import DesyncError, RankError, UsageError
from torpor.ledger import Stopwatch


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_complete_votes_for_one_call_agree() -> None:
    assert agreement._judge({0: {"call": "sleep(all)"}, 1: {"call": "sleep(all)"}}) == {"agreed": True}
    assert agreement._judge({0: {}, 1: {}}) == {"agreed": True}


def test_every_rank_that_votes_against_is_named() -> None:
    votes = {0: {}, 3: {"reason": "disk full", "kind": "StoreFullError"}, 5: {"reason": "no", "kind": "OSError"}}
    error = agreement._error(agreement._judge(votes), "copy")
    assert (error.rank, error.kind, error.stage) == (3, "StoreFullError", "copy")
    assert error.failures == {3: "disk full", 5: "no"}
    assert "rank 3: disk full; rank 5: no (at 'copy')" in str(error)


def test_different_calls_are_a_desync_that_blames_the_smaller_side() -> None:
    votes = {0: {"call": "sleep(all)"}, 1: {"call": "wake(all)"}, 2: {"call": "sleep(all)"}}
    error = agreement._error(agreement._judge(votes), "begin")
    assert isinstance(error, DesyncError)
    assert error.rank == 1
    assert "ranks [0, 2] call sleep(all), ranks [1] call wake(all)" in str(error)


@pytest.mark.parametrize(
    "error", [RankError({1: "disk full", 2: "late"}, "copy", "StoreFullError"), DesyncError({0: "sleep", 1: "wake"})]
)
def test_errors_of_ranks_travel(error: RankError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.rank, copy.failures, copy.stage, copy.kind) == (
        str(error),
        error.rank,
        error.failures,
        error.stage,
        error.kind,
    )


def test_many_culprits_are_counted_not_listed() -> None:
    error = RankError(dict.fromkeys(range(7), "no"), "copy", "late")
    assert "and 3 more ranks" in str(error)


def test_a_process_is_told_from_its_remains_and_from_its_successor() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = agreement._started(child.pid)
    assert started is not None
    alive = agreement._Process(agreement._place(), child.pid, started)
    successor = agreement._Process(agreement._place(), child.pid, started - 1)
    elsewhere = agreement._Process("another machine", child.pid, started - 1)
    assert (alive.has_ended(), successor.has_ended(), elsewhere.has_ended()) == (False, True, False)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
    assert alive.has_ended()
    child.communicate()
    assert alive.has_ended()


def test_a_timeout_must_be_positive(world: dist.ProcessGroup) -> None:
    with pytest.raises(UsageError, match="agree_timeout_s=0"):
        Agreement(world, 0)


def test_a_rank_alone_agrees_with_itself_and_waiting_is_in_the_account(world: dist.ProcessGroup) -> None:
    watch = Stopwatch()
    round_ = Agreement(world, 5).begin("sleep(all)", watch)
    with round_.stage("copy"):
        pass
    with pytest.raises(RankError, match="rank 0: no room") as caught, round_.stage("free"):
        raise OSError("no room")
    assert isinstance(caught.value.__cause__, OSError)
    assert watch.stages["agree"] > 0


def test_an_interrupt_passes_as_it_is_and_the_others_are_told(world: dist.ProcessGroup) -> None:
    round_ = Agreement(world, 5).begin("sleep(all)", Stopwatch())
    with pytest.raises(KeyboardInterrupt), round_.stage("copy"):
        raise KeyboardInterrupt
    with pytest.raises(RankError, match="rank 0: KeyboardInterrupt"):
        round_.vote("copy", {})  # what another rank would read


def test_without_a_group_exceptions_pass_as_they_are() -> None:
    with pytest.raises(OSError, match="no room"), Alone().begin("sleep(all)", Stopwatch()).stage("copy"):
        raise OSError("no room")

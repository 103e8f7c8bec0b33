"""A second sleep or wake moves nothing; components go in any order; context managers restore what they found."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import pytest
import torch
from small_actor import SmallActor

from torpor import Fate, Sleeper, State
from torpor.errors import ClosedError, UsageError


def test_second_calls_move_nothing(sleeper: Sleeper) -> None:
    assert sleeper.sleep().freed_bytes > 0
    again = sleeper.sleep()
    assert (again.copied_bytes, again.freed_bytes, again.nbytes) == (0, 0, 0)
    assert sleeper.wake().copied_bytes > 0
    again = sleeper.wake()
    assert (again.copied_bytes, again.taken_bytes) == (0, 0)


@pytest.mark.parametrize("order", list(itertools.permutations(["params", "optimizer", "grads"])))
def test_components_in_any_order(order: tuple[str, ...], trained: SmallActor, sleeper: Sleeper) -> None:
    before = trained.bits()
    for name in order:
        sleeper.sleep(name)
        assert sleeper.components()[name] is State.ASLEEP
    for name in reversed(order[1:]):
        sleeper.wake(name)
        assert sleeper.components()[name] is State.AWAKE
    assert sleeper.components()[order[0]] is State.ASLEEP
    sleeper.wake()
    assert trained.bits() == before


def test_an_unchanged_actor_is_clean_the_second_time(trained: SmallActor, sleeper: Sleeper) -> None:
    trained.optimizer.zero_grad()
    first = sleeper.sleep()
    sleeper.wake()
    second = sleeper.sleep()
    assert first.copied_bytes > 0
    assert second.copied_bytes == 0
    assert second.bytes_by_fate()[Fate.CLEAN] == first.bytes_by_fate()[Fate.MOVED]
    sleeper.wake()


def test_a_write_that_bumps_no_version_is_noticed(trained: SmallActor, sleeper: Sleeper) -> None:
    with sleeper.asleep():
        pass
    weight = trained.model[0].weight
    weight.data.view(-1)[17] = 3.0
    before = trained.bits()
    ledger = sleeper.sleep("params")
    assert ledger.copied_bytes == weight.nbytes
    sleeper.wake()
    assert trained.bits() == before


def test_asleep_nests_and_restores_on_exceptions(sleeper: Sleeper) -> None:
    sleeper.sleep("optimizer")
    with contextlib.suppress(KeyError), sleeper.asleep():
        with sleeper.asleep("params"):
            assert sleeper.components()["params"] is State.ASLEEP
        assert sleeper.components()["params"] is State.ASLEEP
        raise KeyError
    assert sleeper.components()["params"] is State.AWAKE
    assert sleeper.components()["optimizer"] is State.ASLEEP


def test_awake_puts_back_to_sleep_what_slept(trained: SmallActor, sleeper: Sleeper) -> None:
    sleeper.sleep()
    with contextlib.suppress(KeyError), sleeper.awake("params"):
        assert sleeper.components()["params"] is State.AWAKE
        assert sleeper.components()["optimizer"] is State.ASLEEP
        raise KeyError
    assert sleeper.components()["params"] is State.ASLEEP


def test_awake_restores_a_partial_sleep(trained: SmallActor, sleeper: Sleeper) -> None:
    sleeper.sleep("params", need_bytes=1)
    asleep = sleeper._dormant.keys()
    with sleeper.awake():
        assert not sleeper.is_asleep
    assert sleeper._dormant.keys() == asleep


def test_kept_components_stay(trained: SmallActor, tmp_path: Path) -> None:
    with Sleeper(trained.model, optimizer=trained.optimizer, store_dir=tmp_path, keep=["params", "buffers"]) as sleeper:
        ledger = sleeper.sleep()
        assert {(row.fate, row.reason) for row in ledger.rows if row.component == "params"} == {
            (Fate.KEPT, "asked for")
        }
        trained.model(torch.ones(2, 128))  # may compute
        assert sleeper.components()["params"] is State.AWAKE


def test_unknown_components_are_listed(sleeper: Sleeper, trained: SmallActor, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'weights'.*'params'"):
        sleeper.sleep("weights")
    with pytest.raises(UsageError, match="need_bytes=0"):
        sleeper.sleep(need_bytes=0)


def test_close_wakes_and_closes(trained: SmallActor, tmp_path: Path) -> None:
    before = trained.bits()
    sleeper = Sleeper(trained.model, optimizer=trained.optimizer, store_dir=tmp_path)
    sleeper.sleep()
    sleeper.close()
    sleeper.close()
    assert trained.bits() == before
    assert list(tmp_path.rglob("*")) == [] or not any(p.is_file() for p in tmp_path.rglob("*"))
    with pytest.raises(ClosedError):
        sleeper.sleep()

"""Every byte is in the ledger under one fate; memory is judged by the kernel; cycles leave no residue."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from small_actor import SmallActor
from torch import nn

from torpor import Fate, Sleeper, derived
from torpor.memory import kernel

MIB = 1024**2


class BigActor:
    """32 MiB of weights, with moments: large enough for the kernel's count to mean something."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            *[nn.Linear(512, 1024, bias=False) if i % 2 else nn.Linear(1024, 512, bias=False) for i in range(16)]
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.model(torch.ones(2, 1024)).sum().backward()
        self.optimizer.step()
        gc.collect()
        kernel.trim_heap()  # what earlier tests freed is not this actor's

    def storages(self) -> list[torch.UntypedStorage]:
        moments = [v for s in self.optimizer.state.values() for v in s.values() if v.ndim]
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [t.untyped_storage() for t in (*self.model.parameters(), *moments, *grads)]

    def resident_bytes(self) -> int:
        return sum(kernel.resident_bytes(s.data_ptr(), s.nbytes()) for s in self.storages())


def test_resident_memory_is_under_three_percent_and_addresses_are_kept(tmp_path: Path) -> None:
    actor = BigActor()
    addresses = [s.data_ptr() for s in actor.storages()]
    before = actor.resident_bytes()
    with Sleeper(actor.model, optimizer=actor.optimizer, store_dir=tmp_path) as sleeper:
        ledger = sleeper.sleep()
        assert actor.resident_bytes() < 0.03 * before
        assert [s.data_ptr() for s in actor.storages()] == addresses
        assert ledger.used_before_bytes - ledger.used_after_bytes > 0.9 * before - ledger.host_bytes
        assert abs(ledger.unexplained_bytes) < 8 * MIB
        assert sum(row.nbytes for row in ledger.rows) == sum(s.nbytes() for s in actor.storages()) + 16 * 4
        sleeper.wake()
        assert [s.data_ptr() for s in actor.storages()] == addresses


_CYCLES = """
import gc, json, sys
from test_closed_account import BigActor
from torpor import Sleeper
from torpor.memory import kernel
actor = BigActor()
awake, asleep, store = [], [], []
with Sleeper(actor.model, optimizer=actor.optimizer, store_dir=sys.argv[1]) as sleeper:
    for _ in range(20):
        store.append(sleeper.sleep().store_bytes)
        gc.collect()
        asleep.append(kernel.process_resident_bytes())
        sleeper.wake()
        gc.collect()
        awake.append(kernel.process_resident_bytes())
print(json.dumps([awake, asleep, store]))
"""


def test_twenty_cycles_leave_a_flat_line(tmp_path: Path) -> None:
    """In a process of its own; medians, so that a page or two of somebody else's do not count as growth."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _CYCLES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    awake, asleep, store = json.loads(done.stdout)
    for resident in (awake, asleep):
        assert statistics.median(resident[-6:]) - statistics.median(resident[2:8]) <= MIB
    assert len(set(store)) == 1


def test_ledgers_are_json_and_their_tables_name_every_fate(trained: SmallActor, sleeper: Sleeper) -> None:
    ledger = sleeper.sleep()
    plain = json.loads(json.dumps(ledger.to_json()))
    assert plain["totals"]["copied_bytes"] == ledger.copied_bytes == sum(r["copied_bytes"] for r in plain["rows"])
    assert sum(plain["totals"]["by_fate"].values()) == ledger.nbytes
    for fate in ledger.bytes_by_fate():
        assert f" {fate} " in ledger.table()
    assert set(ledger.bytes_by_component()) == {"params", "grads", "optimizer", "buffers"}


def test_explain_says_what_a_sleep_will_do_and_moves_nothing(trained: SmallActor, sleeper: Sleeper) -> None:
    text = sleeper.explain()
    assert not sleeper.is_asleep
    ledger = sleeper.sleep()
    for row in ledger.rows:
        assert any(f"{row.component} " in line and f" {row.fate} " in line for line in text.splitlines()), row


def test_a_tensor_outside_every_component_is_named_with_its_holder(trained: SmallActor, sleeper: Sleeper) -> None:
    class Hoarder:
        def __init__(self) -> None:
            self.stash = torch.ones(9000, 1024)

    hoarder = Hoarder()
    found = [left for left in sleeper.sleep().leftovers if left.shape == (9000, 1024)]
    assert len(found) == 1
    assert (found[0].nbytes, found[0].dtype) == (hoarder.stash.nbytes, "float32")
    assert "stash" in found[0].holder


def test_leftovers_are_named_without_reading_what_sleeps(sleeper: Sleeper) -> None:
    class Key:
        def __repr__(self) -> str:
            raise AssertionError("a parameter's words are its values, and these may be away")

    kept = {Key(): torch.ones(9100, 1024), (0, False): 1}
    (found,) = [left for left in sleeper.sleep().leftovers if left.shape == (9100, 1024)]
    assert "a Key" in found.holder
    assert "(0, False)" in found.holder
    assert len(kept) == 2


def test_dropped_caches_are_freed_through_their_owner_before_anything_is_copied(tmp_path: Path) -> None:
    cache = {"rope": torch.ones(512, 1024)}
    events: list[str] = []

    def drop() -> None:
        events.append("dropped")
        cache.clear()

    made = derived("rope", lambda: list(cache.values()), drop=drop)
    with Sleeper(extra={"params": [torch.randn(256, 1024)]}, derived=[made], store_dir=tmp_path) as sleeper:
        ledger = sleeper.sleep()
        assert events == ["dropped"]
        assert ledger.bytes_by_fate()[Fate.DROPPED] == 512 * 1024 * 4
        assert ledger.copied_bytes == 256 * 1024 * 4
        sleeper.wake()
        sleeper.sleep()  # an empty cache is no error
        assert events == ["dropped"]


def test_a_dropped_cache_that_somebody_holds_is_left(tmp_path: Path) -> None:
    cache = {"rope": torch.ones(512, 1024)}
    held = cache["rope"]
    made = derived("rope", lambda: list(cache.values()), drop=cache.clear)
    with Sleeper(derived=[made], store_dir=tmp_path) as sleeper:
        assert sleeper.sleep().bytes_by_fate() == {Fate.LEFT: held.nbytes}

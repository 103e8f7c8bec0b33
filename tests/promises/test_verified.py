"""Every wake compares fingerprints; damage in the store is an error that names the storage, never data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_actor import SmallActor

from torpor import Fate, Sleeper, derived
from torpor.errors import CorruptError
from zoo import bits


def _damage(sleeper: Sleeper, name: str) -> None:
    """Flip one bit of a sleeping storage, in the store itself."""
    sleeping = next(s for s in sleeper._dormant if s.decision.entry.name.endswith(name))
    assert sleeping.place is not None
    store = sleeper._store
    block = store.buffers()[0][: store.alignment_bytes]  # type: ignore[attr-defined]
    offset = sleeping.place.slot.offset // store.alignment_bytes * store.alignment_bytes  # type: ignore[attr-defined]
    store.read_block(offset, block)  # type: ignore[attr-defined]
    block[sleeping.place.slot.offset - offset] ^= 1
    store.write_block(offset, block)  # type: ignore[attr-defined]


def test_damage_is_named_and_nothing_wakes(trained: SmallActor, sleeper: Sleeper) -> None:
    before = trained.bits()
    sleeper.sleep()
    _damage(sleeper, "0.weight")
    with pytest.raises(CorruptError) as caught:
        sleeper.wake()
    assert [name.endswith("0.weight") for name in caught.value.names] == [True]
    assert sleeper.is_asleep
    _damage(sleeper, "0.weight")  # flips the bit back
    sleeper.wake()
    assert trained.bits() == before


def test_verify_false_turns_it_off(trained: SmallActor, tmp_path: Path) -> None:
    before = bits(trained.model[0].weight)
    with Sleeper(trained.model, store_dir=tmp_path, verify=False) as sleeper:
        sleeper.sleep()
        _damage(sleeper, "0.weight")
        sleeper.wake()
    assert bits(trained.model[0].weight) != before


def test_a_rebuild_that_would_lose_bits_is_moved_instead(tmp_path: Path) -> None:
    master = torch.randn(64, 1024)
    cast = master.bfloat16()
    cast[3, 3] += 1.0  # somebody loaded weights that the master does not hold
    cache = derived("cast", cast, rebuild=lambda out, source: out.copy_(source), sources=[master], component="params")
    before = bits(cast)
    with Sleeper(extra={"optimizer": [master]}, derived=[cache], store_dir=tmp_path) as sleeper:
        ledger = sleeper.sleep()
        assert {row.fate for row in ledger.rows if row.component == "params"} == {Fate.MOVED}
        sleeper.wake()
    assert bits(cast) == before


def test_a_rebuild_is_checked_against_what_slept(tmp_path: Path) -> None:
    master = torch.randn(64, 1024)
    cast = master.bfloat16()
    wrong = False

    def rebuild(out: torch.Tensor, source: torch.Tensor) -> None:
        out.copy_(source)
        if wrong:
            out.view(-1)[0] = 7

    cache = derived("cast", cast, rebuild=rebuild, sources=[master], component="params")
    before = bits(cast)
    with Sleeper(extra={"optimizer": [master]}, derived=[cache], store_dir=tmp_path) as sleeper:
        assert sleeper.sleep().bytes_by_fate()[Fate.REBUILT] == cast.nbytes
        wrong = True
        with pytest.raises(CorruptError, match="cast"):
            sleeper.wake()
        wrong = False
        sleeper.wake("params")  # its source still sleeps and is read from the store
        assert bits(cast) == before

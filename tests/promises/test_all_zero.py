"""A storage of zeros is neither written nor read: it is zero-filled, and verified like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torpor import Fate, Sleeper
from torpor.errors import CorruptError


@pytest.fixture(params=["madvise", "resize"])
def memory(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_zeros_are_not_copied(tmp_path: Path, memory: str) -> None:
    zeros, ones = torch.zeros(50_000), torch.ones(50_000)
    with Sleeper(extra={"state": [zeros, ones]}, store_dir=tmp_path, memory=memory) as sleeper:
        ledger = sleeper.sleep()
        assert {row.fate: (row.copied_bytes, row.reason) for row in ledger.rows} == {
            Fate.ZEROED: (0, "all zero"),
            Fate.MOVED: (ones.nbytes, ""),
        }
        assert torch.equal(sleeper.read(zeros), torch.zeros(50_000))
        assert sleeper.wake().copied_bytes == ones.nbytes
        assert torch.equal(zeros, torch.zeros(50_000))
        assert torch.equal(ones, torch.ones(50_000))


@pytest.mark.parametrize("at", [0, 25_000, 49_999])
def test_one_bit_is_enough_to_be_copied(tmp_path: Path, at: int) -> None:
    almost = torch.zeros(50_000)
    almost[at] = -0.0
    with Sleeper(extra={"state": almost}, store_dir=tmp_path) as sleeper:
        assert sleeper.sleep().bytes_by_fate() == {Fate.MOVED: almost.nbytes}
        sleeper.wake()
        assert almost.signbit().nonzero().tolist() == [[at]]


def test_each_sleep_looks_anew(tmp_path: Path, memory: str) -> None:
    tensor = torch.zeros(50_000)
    fates = []
    with Sleeper(extra={"state": tensor}, store_dir=tmp_path, memory=memory) as sleeper:
        for value in (0.0, 1.0, 1.0, 0.0, 1.0, 2.0):
            tensor.fill_(value)
            fates += sleeper.sleep().bytes_by_fate()
            sleeper.wake()
            assert torch.equal(tensor, torch.full((50_000,), value))
    assert fates == [Fate.ZEROED, Fate.MOVED, Fate.CLEAN, Fate.ZEROED, Fate.CLEAN, Fate.MOVED]


def test_zeros_are_verified_at_the_wake(tmp_path: Path) -> None:
    tensor = torch.zeros(50_000)
    with Sleeper(extra={"state": tensor}, store_dir=tmp_path) as sleeper:
        sleeper.sleep()
        sleeping = sleeper._dormant.of(["state"])[0]
        digest, sleeping.digest = sleeping.digest, bytes(16)
        with pytest.raises(CorruptError, match="state"):
            sleeper.wake()
        sleeping.digest = digest
        sleeper.wake()
    assert torch.equal(tensor, torch.zeros(50_000))

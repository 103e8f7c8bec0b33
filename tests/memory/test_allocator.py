"""What is read out of torch's own account of its memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torpor.memory import allocator


def block(address: int, size: int, state: str = "active_allocated", requested: int = 0) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested or size, "state": state}


def segment(address: int, pool: tuple[int, int], blocks: list[dict[str, Any]], device: int = 0) -> dict[str, Any]:
    nbytes = sum(b["size"] for b in blocks)
    return {"address": address, "total_size": nbytes, "device": device, "segment_pool_id": pool, "blocks": blocks}


@pytest.fixture
def snapshot(monkeypatch: pytest.MonkeyPatch) -> allocator.Snapshot:
    segments = [
        segment(9000, (0, 3), [block(9000, 500, requested=400), block(9500, 500, "inactive")], device=1),
        segment(1000, (0, 0), [block(1000, 100, "inactive"), block(1100, 50), block(1150, 50)]),
        segment(5000, (0, 3), [block(5000, 1000, "active_awaiting_free")]),
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    return allocator.look()


def test_live_blocks_know_their_segment_and_segments_their_pool(snapshot: allocator.Snapshot) -> None:
    assert snapshot.blocks.tolist() == [(1100, 50, 50, 0), (1150, 50, 50, 0), (9000, 500, 400, 2)]
    found = [(a, n, device, snapshot.pools[pool]) for a, n, device, pool in snapshot.segments.tolist()]
    assert found == [(1000, 200, 0, (0, 0)), (5000, 1000, 0, (0, 3)), (9000, 1000, 1, (0, 3))]
    assert snapshot.private_pools() == {(0, 3)}


def test_segments_are_placed_in_the_stretch_that_contains_them(snapshot: allocator.Snapshot) -> None:
    begin, end = np.array([900, 4000, 8000]), np.array([1500, 4500, 10_000])
    assert snapshot.within(begin, end).tolist() == [0, -1, 2]
    assert snapshot.within(np.array([], np.int64), np.array([], np.int64)).tolist() == [-1, -1, -1]


def test_an_allocator_without_memory_is_an_empty_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    empty = allocator.look()
    assert (len(empty.segments), len(empty.blocks), empty.pools) == (0, 0, [])

"""What `vmm` decides, over a driver made of ordinary memory and an allocator whose blocks the test sets."""

import ctypes
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_gpu import MIB, Rig, needs_cc

from torpor.errors import MemoryBackendError, NotEnoughMemoryError
from torpor.memory import vmm
from torpor.memory.allocator import BLOCK, SEGMENT, Snapshot
from torpor.memory.pool import PoolState
from torpor.memory.vmm import VmmBackend

GPU = torch.device("cuda", 0)
pytestmark = needs_cc


@dataclass(eq=False)
class Storage:
    """As much of a storage as the backend looks at."""

    address: int
    size: int
    device: torch.device = GPU

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.size


class Allocator:
    """Stands for torch's: pieces from the library, and blocks in them."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.blocks: list[tuple[int, int]] = []
        self.pieces: list[tuple[int, int, int]] = []
        self.foreign: list[tuple[int, int]] = []
        """Segments that are not the library's, in the second pool."""

    def piece(self, nbytes: int, pool: int = 0) -> int:
        address = self.rig.malloc(nbytes)
        self.pieces.append((address, nbytes, pool))
        return address

    def block(self, address: int, nbytes: int) -> Storage:
        self.blocks.append((address, nbytes))
        ctypes.memset(address, len(self.blocks) % 251, 64)
        return Storage(address, nbytes)

    def look(self) -> Snapshot:
        """Each piece is a segment, and blocks lie in them."""
        pieces = sorted(self.pieces + [(address, nbytes, 1) for address, nbytes in self.foreign])
        segments = np.array([(a, n, 0, pool) for a, n, pool in pieces], SEGMENT)
        rows = sorted(self.blocks)
        at = np.searchsorted(segments["address"], [a for a, _ in rows], side="right") - 1
        blocks = np.array([(a, n, n, segment) for (a, n), segment in zip(rows, at.tolist(), strict=True)], BLOCK)
        return Snapshot(segments, blocks, [(0, 1), (0, 2)][: max(segments["pool"], default=-1) + 1])


class Pools:
    """Stands for the memory pools: counts how often they were set aside."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.generation = 0
        self.suspended = 0
        self.in_use: set[tuple[int, int]] = set()

    def suspend(self, device: int) -> None:
        self.suspended += 1

    def set_aside(self, device: int) -> set[tuple[int, int]]:
        return {(0, 1), (0, 2)} - self.in_use


@dataclass
class World:
    backend: VmmBackend
    allocator: Allocator
    rig: Rig
    pools: Pools


@pytest.fixture
def world(compiled: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    library, driver = (Path(shutil.copy(path, tmp_path)) for path in compiled)
    rig = Rig(library, driver)
    allocator, pools = Allocator(rig), Pools()
    monkeypatch.setattr(vmm.allocator, "look", allocator.look)
    monkeypatch.setattr(vmm.allocator, "borrow", lambda address, nbytes, device: Storage(address, nbytes, device))
    monkeypatch.setattr(vmm.cuda, "free_bytes", lambda device: 12345)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    return World(VmmBackend(rig.vmm, pools), allocator, rig, pools)


def mapped(world: World) -> list[bool]:
    return [bool(row["mapped"]) for row in world.rig.vmm.extents()]


def test_an_extent_goes_with_the_last_of_its_storages(world: World) -> None:
    base = world.allocator.piece(20 * MIB)
    first, second = (world.allocator.block(base + i * 4 * MIB, 4 * MIB) for i in range(2))
    world.backend.refresh()
    assert [world.backend.releasable_bytes(s) for s in (first, second)] == [4 * MIB, 4 * MIB]
    assert [world.backend.release([s]) for s in (first, second)] == [0, 20 * MIB]
    assert world.backend.needed_bytes([first]) == 20 * MIB
    world.backend.restore([second])
    assert mapped(world) == [True]
    assert world.backend.needed_bytes([first]) == 0
    world.backend.restore([first, second])
    assert world.backend.release([first, second]) == 20 * MIB


def test_a_live_block_that_nobody_knows_holds_its_extent_until_it_sleeps(world: World) -> None:
    base = world.allocator.piece(20 * MIB)
    known = world.allocator.block(base, 4 * MIB)
    world.allocator.block(base + 8 * MIB, 1 * MIB)
    world.backend.refresh()
    (stray,) = world.backend.strays([known])
    assert (stray.data_ptr(), stray.nbytes()) == (base + 8 * MIB, 1 * MIB)
    assert world.backend.strays([known]) == [stray], "the same object"
    assert world.backend.release([known]) == 0
    assert ctypes.string_at(base + 8 * MIB, 1) == b"\x02"
    assert world.backend.release([stray]) == 20 * MIB
    assert world.backend.strays([known]) == [], "what sleeps is no stray"
    world.backend.refresh()
    assert world.backend.strays([known]) == []
    world.backend.restore([stray, known])
    assert world.backend.strays([known]) == [stray]


def test_cached_free_memory_goes_and_comes_with_its_pool(world: World) -> None:
    used = world.allocator.block(world.allocator.piece(40 * MIB), 40 * MIB)
    world.allocator.piece(48 * MIB)
    other = world.allocator.block(world.allocator.piece(36 * MIB, pool=1), 36 * MIB)
    assert world.backend.release([used]) == 88 * MIB
    assert mapped(world) == [False, False, True]
    assert world.backend.needed_bytes([used]) == 88 * MIB
    world.backend.restore([used])
    assert mapped(world) == [True, True, True]
    assert world.backend.release([other]) == 36 * MIB


def test_what_was_dropped_gives_its_pages_back_though_nothing_of_its_pool_sleeps(world: World) -> None:
    base = world.allocator.piece(20 * MIB)
    kept = world.allocator.block(base, 4 * MIB)
    world.allocator.piece(40 * MIB)  # a cache that was dropped
    world.allocator.piece(48 * MIB, pool=1)  # in use again
    world.pools.in_use = {(0, 2)}
    world.backend.refresh()
    world.backend.settle()
    assert mapped(world) == [True, False, True]
    assert world.pools.states(0) == {(0, 1): PoolState.HOLLOW, (0, 2): PoolState.AWAKE}
    assert ctypes.string_at(base, 1) == b"\x01"
    assert world.backend.release([kept]) == 20 * MIB
    world.backend.restore([kept])
    assert mapped(world) == [True, True, True]
    assert world.pools.states(0) == {(0, 1): PoolState.AWAKE, (0, 2): PoolState.AWAKE}


def test_memory_that_two_pools_share_stays_while_one_of_them_is_in_use(world: World) -> None:
    for i in range(100):
        world.allocator.piece(2 * MIB, pool=i % 2)
    in_second = np.array([address for address, _, pool in world.allocator.pieces if pool == 1])
    extents = world.rig.vmm.extents()
    holds = [bool(((in_second >= e["address"]) & (in_second < e["address"] + e["nbytes"])).any()) for e in extents]
    assert 0 < sum(holds) < len(holds) < 100, "some extents are of one pool, some are shared"
    world.pools.in_use = {(0, 2)}
    world.backend.refresh()
    world.backend.settle()
    assert mapped(world) == holds
    world.pools.in_use = set()
    world.backend.settle()
    assert not any(mapped(world))
    assert set(world.pools.states(0).values()) == {PoolState.DEAD}


def test_a_driver_that_takes_no_idle_memory_back_leaves_it_usable(world: World) -> None:
    world.allocator.piece(40 * MIB)
    world.backend.refresh()
    world.rig.fail("cuMemUnmap", 1)
    with pytest.raises(MemoryBackendError, match="cuMemUnmap"):
        world.backend.settle()
    assert mapped(world) == [True]
    assert world.pools.states(0) == {(0, 1): PoolState.AWAKE}


def test_what_a_failed_release_meant_to_free_is_there_again(world: World) -> None:
    storages = [world.allocator.block(world.allocator.piece(40 * MIB), 40 * MIB) for _ in range(3)]
    for call in ("cuMemUnmap", "cuMemRelease"):
        world.rig.fail(call, 2)
        with pytest.raises(MemoryBackendError, match=call):
            world.backend.release(storages)
        assert mapped(world) == [True] * 3
        assert world.backend.needed_bytes(storages) == 0
    assert world.backend.release(storages) == 120 * MIB


def test_what_a_failed_restore_meant_to_bring_sleeps_on(world: World) -> None:
    storages = [world.allocator.block(world.allocator.piece(40 * MIB), 40 * MIB) for _ in range(3)]
    world.backend.release(storages)
    world.rig.driver.fake_capacity(100 * MIB)
    with pytest.raises(NotEnoughMemoryError) as caught:
        world.backend.restore(storages)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (120 * MIB, 12345)
    assert mapped(world) == [False] * 3
    world.rig.fail("cuMemMap", 2)
    with pytest.raises(MemoryBackendError, match="cuMemMap"):
        world.backend.restore(storages[:2])
    assert mapped(world) == [False] * 3
    world.backend.restore(storages[:2])
    assert world.backend.needed_bytes(storages) == 40 * MIB


def test_a_new_block_where_a_sleeping_one_died_is_awake(world: World) -> None:
    address = world.allocator.piece(40 * MIB)
    world.backend.release([world.allocator.block(address, 40 * MIB)])
    world.allocator.blocks.clear()
    world.rig.free(address)
    world.allocator.pieces.clear()
    assert world.allocator.piece(40 * MIB) == address, "addresses come back"
    newcomer = world.allocator.block(address, 40 * MIB)
    world.backend.refresh()
    assert world.backend.strays([]) != []
    assert world.backend.release([newcomer]) == 40 * MIB


def test_outsiders_and_parts_are_refused(world: World) -> None:
    whole = world.allocator.block(world.allocator.piece(40 * MIB), 40 * MIB)
    assert world.backend.refusal(whole) is None
    assert "outside torpor.pool()" in str(world.backend.refusal(Storage(4096, 100)))
    assert world.backend.releasable_bytes(Storage(4096, 100)) == 0
    part = Storage(whole.address, 512)
    assert "a part of a block" in str(world.backend.refusal(part))
    with pytest.raises(MemoryBackendError, match="a part of a block"):
        world.backend.release([part])
    assert "not cpu" in str(world.backend.refusal(torch.empty(1).untyped_storage()))


def test_memory_taken_after_the_last_look_is_looked_at(world: World) -> None:
    world.allocator.block(world.allocator.piece(40 * MIB), 40 * MIB)
    world.backend.refresh()
    before = world.pools.suspended
    later = world.allocator.block(world.allocator.piece(40 * MIB), 40 * MIB)
    assert world.backend.refusal(later) is None
    assert world.pools.suspended == before + 1
    world.pools.generation += 1
    world.backend.refusal(later)
    assert world.pools.suspended == before + 2


def test_the_states_of_pools(world: World) -> None:
    first = world.allocator.block(world.allocator.piece(40 * MIB), 40 * MIB)
    world.allocator.block(world.allocator.piece(40 * MIB, pool=1), 40 * MIB)
    states = world.pools.states
    assert states(0) == {(0, 1): PoolState.AWAKE, (0, 2): PoolState.AWAKE}
    world.backend.release([first])
    assert states(0) == {(0, 1): PoolState.ASLEEP, (0, 2): PoolState.AWAKE}
    world.allocator.blocks = world.allocator.blocks[1:]
    assert states(0) == {(0, 1): PoolState.DEAD, (0, 2): PoolState.AWAKE}


def test_a_storage_alone_in_its_extent_gives_all_of_it(world: World) -> None:
    alone = world.allocator.block(world.allocator.piece(40 * MIB), 36 * MIB)
    world.backend.refresh()
    assert world.backend.releasable_bytes(alone) == 40 * MIB
    assert world.backend.release([alone]) == 40 * MIB


def test_private_pools_without_memory_of_ours_are_foreign(world: World) -> None:
    world.allocator.block(world.allocator.piece(40 * MIB), 40 * MIB)
    world.backend.refresh()
    assert not world.backend.graphs_may_live()
    world.allocator.foreign = [(1, 2 * MIB)]
    assert not world.backend.graphs_may_live(), "as of the last look"
    world.backend.refresh()
    assert world.backend.foreign_pools() == {(0, 2)}
    assert world.backend.graphs_may_live()


def test_the_states_of_segments_and_what_lies_idle(world: World) -> None:
    base = world.allocator.piece(2 * MIB)
    storages = [world.allocator.block(base, MIB)]
    storages += [world.allocator.block(world.allocator.piece(40 * MIB), 40 * MIB) for _ in range(2)]
    world.allocator.foreign = [(1, 2 * MIB)]
    world.backend.refresh()
    world.backend.release(storages[2:])
    segments = world.allocator.look().segments
    assert dict(zip(segments["address"].tolist(), world.backend.states_of(segments).tolist(), strict=True)) == {
        1: -1,
        base: 1,
        storages[1].address: 1,
        storages[2].address: 0,
    }
    assert world.backend.idle_bytes(GPU) == 0
    small = [world.allocator.piece(2 * MIB) for _ in range(100)]
    world.rig.free(small[-1])
    assert world.backend.idle_bytes(GPU) == world.rig.held()[0] - (40 + 2 + 99 * 2) * MIB > 0


def test_a_stray_in_the_place_of_a_dead_one_is_another(world: World) -> None:
    address = world.allocator.piece(40 * MIB)
    world.allocator.block(address, 40 * MIB)
    world.backend.refresh()
    (first,) = world.backend.strays([])
    world.allocator.blocks.clear()
    world.allocator.pieces.clear()
    world.rig.free(address)
    world.backend.refresh()
    assert world.backend.strays([]) == []
    assert world.allocator.piece(40 * MIB) == address
    world.allocator.block(address, 40 * MIB)
    world.backend.refresh()
    (second,) = world.backend.strays([])
    assert second is not first
    assert len(world.backend._borrowed._storages) == 1, "the dead one is forgotten"

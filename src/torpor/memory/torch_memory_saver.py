"""Memory backend `torch_memory_saver`: for memory that lives in the regions of that library already.

    with torch_memory_saver.region("actor"):
        model = Model().cuda()
        optimizer = AdamW(model.parameters())
    sleeper = torpor.Sleeper(model, optimizer=optimizer, memory="torch_memory_saver")

Torpor decides and copies, the library pauses and resumes, without a backup of its own. It does so for all memory of a
tag at once, so a region goes with the last of its storages: components that sleep apart from each other need
regions of their own. What is alive in a region of the actor and in no component is moved by its address.

The library ends the process instead of raising. So each of its calls is checked first: nothing is paused that is
paused, or resumed that is not; there is room for what is resumed; nothing was allocated in a region that sleeps. For
as long as one sleeps, `region()`, `pause()` and `resume()` of it raise. One gap cannot be closed from here: memory that
another process takes after the look at it and before the library's own calls. A margin makes that unlikely.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from torpor.errors import MemoryBackendError, NotEnoughMemoryError
from torpor.memory import allocator, cuda
from torpor.memory.allocator import COMMON_POOL, Int64s, PoolId, Rows, Snapshot
from torpor.memory.gpu import GpuBackend
from torpor.memory.saver_library import DEFAULT_TAG, Region, SaverLibrary, saver_library
from torpor.memory.survey import Borrowed, Survey, give_back

#: Left free by a resume. The driver's free bytes are not all of them to be had, and others may take some meanwhile.
MARGIN_BYTES = 64 * 1024**2


@dataclass(slots=True, eq=False)
class _Look:
    """What lies in the regions, as of one look at the allocator."""

    tags: list[str]
    objections: dict[str, str]
    """Tag -> why it cannot be paused."""
    segments: Rows
    """Those in regions, rows of `allocator.SEGMENT`."""
    tag_of_segment: Int64s
    live: Survey
    """Its units are the tags."""

    def tag_of(self, block: int) -> str:
        return self.tags[int(self.live.unit[block])]

    def segments_of(self, tag: str) -> Rows:
        return self.segments[self.tag_of_segment == self.tags.index(tag)] if tag in self.tags else self.segments[:0]


class TorchMemorySaverBackend(GpuBackend):
    """See the module's docstring. Thread-safe."""

    name: ClassVar[str] = "torch_memory_saver"
    keeps_address: ClassVar[bool] = True

    def __init__(self, library: SaverLibrary, has_pages: Callable[[int], bool] = cuda.has_pages) -> None:
        """`has_pages`: whether an address has pages of the driver's virtual memory now."""
        self._library = library
        self._has_pages = has_pages
        self._lock = threading.RLock()
        self._borrowed = Borrowed()
        self._foreign_pools: set[PoolId] = set()
        self._paused: dict[str, Rows] = {}
        """Tag -> the segments whose pages went with it."""
        self._look = self._look_at(allocator.look())

    def refresh(self) -> None:
        with self._lock:
            snapshot = allocator.look()
            before, self._look = self._look, self._look_at(snapshot)
            live = self._look.live
            slept = set(_keys(before.live, np.flatnonzero(before.live.asleep)))
            if slept:
                everything = np.arange(len(live.blocks))
                live.mark(everything[[key in slept for key in _keys(live, everything)]], asleep=True)
            self._foreign_pools = snapshot.private_pools() - {region.pool_id for region in self._library.regions()}

    def refusal(self, storage: torch.UntypedStorage) -> str | None:
        live = self._look.live
        block = live.index.get(storage.data_ptr())
        if block is None:
            return "allocated outside the regions of torch_memory_saver"
        return live.objection(block, storage.nbytes()) or self._look.objections.get(self._look.tag_of(block))

    def releasable_bytes(self, storage: torch.UntypedStorage) -> int:
        """The whole region if the storage is alone in it, else its block; 0 outside all regions."""
        live = self._look.live
        block = live.index.get(storage.data_ptr())
        return 0 if block is None else live.gives[block]

    def strays(self, known: Sequence[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        """What is alive and unknown in the regions that hold something known. Other regions are somebody else's."""
        with self._lock:
            live = self._look.live
            if self._borrowed:
                self._borrowed.keep(set(_keys(live, np.arange(len(live.blocks)))))
            owned = live.owned(known)
            touched = np.unique(live.unit[owned[owned >= 0]]).tolist()
            ours = [i for i in touched if self._look.tags[i] not in self._look.objections]
            found = live.strays(known)
            chosen = found[np.isin(live.unit[found], ours)]
            devices = self._look.segments["device"][live.blocks["segment"][chosen]].tolist()
            return [
                self._borrowed.get(key, *key, device) for key, device in zip(_keys(live, chosen), devices, strict=True)
            ]

    def release(self, storages: Sequence[torch.UntypedStorage]) -> int:
        """Mark storages as asleep, and pause the regions in which nothing is awake any more.

        Raises:
            MemoryBackendError: a region cannot be paused; the message has the reason. Nothing was paused.
        """
        with self._lock:
            live = self._look.live
            blocks = self._owned(storages)
            changed = live.mark(blocks, asleep=True)
            touched = [self._look.tags[i] for i in np.unique(live.unit[blocks]).tolist() if live.awake_in[i] == 0]
            going = [tag for tag in touched if tag not in self._paused]
            try:
                self._require_nothing_unseen(going)
                for tag in going:
                    self._require_all_there(tag)
            except MemoryBackendError:
                live.mark(changed, asleep=False)
                raise
            return sum(self._pause(tag) for tag in going)

    def restore(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Resume the regions of `storages`.

        Raises:
            NotEnoughMemoryError: there is no room; both numbers inside.
            MemoryBackendError: something was allocated in a region that sleeps. In both cases everything sleeps
                as before.
        """
        with self._lock:
            blocks = self._owned(storages)
            tags = self._paused_among(blocks)
            if tags:
                self._require_nothing_new(tags)
                self._require_room(tags)
            for tag in tags:
                self._library.resume(tag)
                del self._paused[tag]
                self._library.guard(self._paused)
            self._look.live.mark(blocks, asleep=False)

    def needed_bytes(self, storages: Sequence[torch.UntypedStorage]) -> int:
        with self._lock:
            tags = self._paused_among(self._owned(storages))
            return sum(int(self._paused[tag]["nbytes"].sum()) for tag in tags)

    def free_bytes(self, device: torch.device) -> int:
        """By the driver, less the margin that a resume leaves."""
        return max(0, cuda.free_bytes(device) - MARGIN_BYTES)

    def graphs_may_live(self) -> bool:
        return bool(self._foreign_pools)

    def states_of(self, segments: Rows) -> Int64s:
        inside = np.isin(segments["address"], self._look.segments["address"])
        gone = [rows["address"] for rows in self._paused.values()]
        paused = np.isin(segments["address"], np.concatenate(gone) if gone else [])
        return np.where(paused, 0, np.where(inside, 1, -1))

    def _look_at(self, snapshot: Snapshot) -> _Look:
        regions = self._library.regions()
        tags = sorted({region.tag for region in regions})
        tag_of_pool = {region.pool_id: tags.index(region.tag) for region in regions}
        of_pools = np.array([tag_of_pool.get(pool, -1) for pool in snapshot.pools], np.int64)
        tag_of_segment = of_pools[snapshot.segments["pool"]]
        inside = tag_of_segment >= 0
        blocks = snapshot.blocks[inside[snapshot.blocks["segment"]]]
        unit = tag_of_segment[blocks["segment"]]
        blocks["segment"] = np.cumsum(inside)[blocks["segment"]] - 1
        segments, tag_of_segment = snapshot.segments[inside], tag_of_segment[inside]
        sizes = np.bincount(tag_of_segment, segments["nbytes"], minlength=len(tags)).astype(np.int64)
        live = Survey(blocks, unit, len(tags), give_back(unit, blocks["nbytes"], sizes))
        look = _Look(tags, {}, segments, tag_of_segment, live)
        look.objections |= self._objections(snapshot, regions)
        look.objections |= {tag: gone for tag in tags if tag not in self._paused and (gone := self._gone(look, tag))}
        return look

    def _objections(self, snapshot: Snapshot, regions: Sequence[Region]) -> dict[str, str]:
        found = self._taken_outside(snapshot, regions)
        for region in regions:
            if region.keeps_backup:
                found[region.tag] = (
                    f"the region '{region.tag}' keeps a backup of its own, and would be copied twice: use "
                    "region(..., enable_cpu_backup=False, enable_disk_backup=False)"
                )
        return found

    def _taken_outside(self, snapshot: Snapshot, regions: Sequence[Region]) -> dict[str, str]:
        """Tags that memory outside the regions may have too; torch would go on using it while it is paused."""
        if not self._library.hooks_every_thread():
            return {}
        inside = {region.pool_id for region in regions}
        outside = [row for row in snapshot.segments if snapshot.pools[row["pool"]] not in inside]
        taken = [row for row in outside if self._has_pages(int(row["address"]))]
        if not taken:
            return {}
        # on another device than a region's own its allocations go to the common pool, with its tag
        known = len({int(row["device"]) for row in snapshot.segments}) == 1 and all(
            snapshot.pools[row["pool"]] == COMMON_POOL for row in taken
        )
        reason = (
            f"torch_memory_saver holds {sum(int(row['nbytes']) for row in taken)} bytes outside its regions "
            "(TMS_INIT_ENABLE, or a captured graph) that may have the tag '{}' too, and torch would use them while "
            "they are paused: allocate in a region with a tag of its own"
        )
        return {tag: reason.format(tag) for tag in ({DEFAULT_TAG} if known else {region.tag for region in regions})}

    def _owned(self, storages: Sequence[torch.UntypedStorage]) -> Int64s:
        live = self._look.live
        blocks = live.owned(storages)
        for storage in storages if (blocks < 0).any() else ():
            reason = self.refusal(storage)
            if reason is not None:
                raise MemoryBackendError(f"{storage.nbytes()} bytes at {storage.data_ptr():#x}: {reason}")
        return blocks

    def _paused_among(self, blocks: Int64s) -> list[str]:
        tags = [self._look.tags[i] for i in np.unique(self._look.live.unit[blocks]).tolist()]
        return [tag for tag in tags if tag in self._paused]

    def _gone(self, look: _Look, tag: str) -> str | None:
        """Why the memory of a region cannot be read, nor paused: it is not there."""
        gone = [row for row in look.segments_of(tag) if not self._has_pages(int(row["address"]))]
        if not gone:
            return None
        return f"somebody else paused the region '{tag}' ({len(gone)} segments have no memory): resume it first"

    def _require_nothing_unseen(self, tags: Collection[str]) -> None:
        """What another thread allocated in a region since the last look was not copied."""
        if not tags:
            return
        now = self._look_at(allocator.look())
        seen = set(_keys(self._look.live, np.arange(len(self._look.live.blocks))))
        for block, key in enumerate(_keys(now.live, np.arange(len(now.live.blocks)))):
            if key not in seen and now.tag_of(block) in tags:
                _, nbytes = key
                raise MemoryBackendError(
                    f"{nbytes} bytes were allocated in the region '{now.tag_of(block)}' while it was put to sleep: "
                    "leave the region first, on all threads"
                )

    def _require_all_there(self, tag: str) -> None:
        """The library ends the process when it is to pause what is paused."""
        reason = self._look.objections.get(tag) or self._gone(self._look, tag)
        if reason is not None:
            raise MemoryBackendError(reason)

    def _require_nothing_new(self, tags: Collection[str]) -> None:
        """The library ends the process when it is to resume what is not paused."""
        now = self._look_at(allocator.look())
        for tag in tags:
            segments = now.segments_of(tag)
            awake = [row for row in segments if self._has_pages(int(row["address"]))]
            if awake:
                raise MemoryBackendError(
                    f"{sum(int(row['nbytes']) for row in awake)} bytes were allocated in the region '{tag}' while it "
                    "slept, and the library cannot resume it beside them. Its memory stays without pages, its bytes "
                    "can be read from the store: see Sleeper.state_dict()"
                )
            self._paused[tag] = segments  # some may have been freed meanwhile

    def _require_room(self, tags: Collection[str]) -> None:
        """The library ends the process when there is no room."""
        coming = np.concatenate([self._paused[tag] for tag in tags])
        for index in np.unique(coming["device"]).tolist():
            device = torch.device("cuda", index)
            needed = int(coming["nbytes"][coming["device"] == index].sum())
            free = self.free_bytes(device)
            if needed > free:
                raise NotEnoughMemoryError(needed, free, str(device), "Free memory there and wake again.")

    def _pause(self, tag: str) -> int:
        self._library.pause(tag)
        segments = self._look.segments_of(tag)
        self._paused[tag] = segments
        self._library.guard(self._paused)
        return int(segments["nbytes"].sum())


def _keys(live: Survey, blocks: Int64s) -> list[tuple[int, int]]:
    """For each block address and bytes. No other can take its place: its region is closed while it sleeps."""
    chosen = live.blocks[blocks]
    return list(zip(chosen["address"].tolist(), chosen["nbytes"].tolist(), strict=True))


def saver_backend() -> TorchMemorySaverBackend:
    """The backend over the installed library.

    Raises:
        UnsupportedError: the library is not installed, or a version of it that is not known.
    """
    return TorchMemorySaverBackend(saver_library())

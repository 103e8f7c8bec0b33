"""Live blocks in units of memory that go and come together, and which of them sleep."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import torch

from torpor.memory import allocator
from torpor.memory.allocator import Bools, Int64s, Rows


@dataclass(slots=True, eq=False)
class Survey:
    """What a backend with an allocator of its own knows of the blocks in there, as of its last look."""

    blocks: Rows
    """Rows of `allocator.BLOCK`, sorted by address."""
    unit: Int64s
    """For each block the index of the unit it lies in."""
    num_units: int
    gives: list[int]
    """For each block what its sleep gives back: its unit if it is alone there, else itself."""
    asleep: Bools = field(init=False)
    """For each block, whether its contents are somewhere else."""
    awake_in: Int64s = field(init=False)
    """For each unit its live blocks that are not asleep."""
    index: dict[int, int] = field(init=False)
    """Block by address."""
    _requested: list[int] = field(init=False)
    """As numbers that Python reads fast."""

    def __post_init__(self) -> None:
        self.asleep = np.zeros(len(self.blocks), np.bool_)
        self.awake_in = np.bincount(self.unit, minlength=self.num_units)
        self.index = dict(zip(self.blocks["address"].tolist(), range(len(self.blocks)), strict=True))
        self._requested = self.blocks["requested"].tolist()

    def objection(self, block: int, nbytes: int) -> str | None:
        """Why a storage of `nbytes` at the address of `block` does not own it."""
        requested = self._requested[block]
        if nbytes < requested:
            return f"a part of a block of {requested} bytes that belongs to something else"
        return None

    def owned(self, storages: Sequence[torch.UntypedStorage]) -> Int64s:
        """For each storage the index of the block it owns; -1 if it owns none, or a part of one only."""
        found = np.full(len(storages), -1)
        if not len(self.blocks):
            return found
        address = np.fromiter([storage.data_ptr() for storage in storages], np.int64, len(storages))
        nbytes = np.fromiter([storage.nbytes() for storage in storages], np.int64, len(storages))
        at = np.minimum(np.searchsorted(self.blocks["address"], address), len(self.blocks) - 1)
        owns = (self.blocks["address"][at] == address) & (self.blocks["requested"][at] <= nbytes)
        return np.where(owns, at, found)

    def mark(self, blocks: Int64s, asleep: bool) -> Int64s:
        """Mark blocks; return those that changed."""
        before = self.asleep.copy()
        self.asleep[blocks] = asleep
        changed = np.flatnonzero(self.asleep != before)
        counts = np.bincount(self.unit[changed], minlength=self.num_units)
        self.awake_in += -counts if asleep else counts
        return changed

    def strays(self, known: Sequence[torch.UntypedStorage]) -> Int64s:
        """The blocks that nobody in `known` owns and that are not asleep."""
        stray = ~self.asleep
        if stray.any():
            owned = self.owned(known)
            stray[owned[owned >= 0]] = False
        return np.flatnonzero(stray)


def give_back(unit: Int64s, nbytes: Int64s, unit_bytes: Int64s) -> list[int]:
    """`Survey.gives` for blocks of `nbytes` in units of `unit_bytes`."""
    alone = np.bincount(unit, minlength=len(unit_bytes))[unit] == 1
    gives: list[int] = np.where(alone, unit_bytes[unit], nbytes).tolist()
    return gives


class Borrowed:
    """Storages over blocks that some tensor out of sight owns: the same object for as long as the block lives."""

    def __init__(self) -> None:
        self._storages: dict[tuple[int, ...], torch.UntypedStorage] = {}

    def keep(self, living: Set[tuple[int, ...]]) -> None:
        """Forget those whose key is not in `living`. A key tells a block from a later one in its place."""
        self._storages = {key: storage for key, storage in self._storages.items() if key in living}

    def __bool__(self) -> bool:
        return bool(self._storages)

    def get(self, key: tuple[int, ...], address: int, nbytes: int, device: int) -> torch.UntypedStorage:
        """The storage for a block."""
        storage = self._storages.get(key)
        if storage is None:
            storage = allocator.borrow(address, nbytes, torch.device("cuda", device))
            self._storages[key] = storage
        return storage

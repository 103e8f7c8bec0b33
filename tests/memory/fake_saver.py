"""`torch_memory_saver` over ordinary memory: what it was asked, and the states in which it would end the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

_LOST = 0xDB


class ProcessEnded(BaseException):
    """Where the library calls `exit(1)`."""


@dataclass
class Allocation:
    """One segment, with one block in it that is alive or not."""

    tag: str | None
    pool: tuple[int, int]
    memory: torch.Tensor
    active: bool = True
    alive: bool = True

    @property
    def address(self) -> int:
        return self.memory.data_ptr()


@dataclass
class FakeSaver:
    """Only the library's own methods have its names; the rest is for tests."""

    mode: str = "torch"
    capacity_bytes: int = 2**40
    events: list[tuple[str, str | None]] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._impl: Any = SimpleNamespace(_mem_pools={}, _hook_mode=self.mode)
        self._current: tuple[str | None, tuple[int, int]] = (None, (0, 0))

    # ---------------------------------------------------------------- the library

    @contextmanager
    def region(
        self, tag: str = "default", enable_cpu_backup: bool = False, enable_disk_backup: bool = False
    ) -> Iterator[None]:
        key = (tag, enable_cpu_backup, enable_disk_backup, "", 0)
        pools = self._impl._mem_pools
        pool = pools.setdefault(key, SimpleNamespace(id=(0, len(pools) + 1)))
        before, self._current = self._current, (tag, pool.id)
        try:
            yield
        finally:
            self._current = before

    def cuda_graph(self, cuda_graph: object, pool: object = None, *, tag: str = "default") -> None:
        self.events.append(("cuda_graph", tag))

    def pause(self, tag: str | None = None) -> None:
        self.events.append(("pause", tag))
        for allocation in self._tagged(tag):
            if not allocation.active:
                raise ProcessEnded("Cannot pause allocation that is not active")
            allocation.active = False
            allocation.memory.fill_(_LOST)

    def resume(self, tag: str | None = None) -> None:
        self.events.append(("resume", tag))
        for allocation in self._tagged(tag):
            if allocation.active:
                raise ProcessEnded("Cannot resume allocation that is not paused")
            if allocation.memory.nbytes > self.free_bytes():
                raise ProcessEnded("out of memory")
            allocation.active = True

    # ---------------------------------------------------------------- for tests

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A tensor where the library would put it now."""
        memory = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        tag, pool = self._current
        self.allocations.append(Allocation(tag, pool, memory))
        return memory

    def give_up(self, tensor: torch.Tensor) -> None:
        """Its owner let go of it; torch's allocator caches the block."""
        next(a for a in self.allocations if a.address == tensor.data_ptr()).alive = False

    def snapshot(self) -> list[dict[str, Any]]:
        """As `torch.cuda.memory_snapshot` gives it."""
        return [
            {
                "address": a.address,
                "total_size": a.memory.nbytes,
                "device": 0,
                "segment_pool_id": a.pool,
                "blocks": [
                    {
                        "address": a.address,
                        "size": a.memory.nbytes,
                        "requested_size": a.memory.nbytes,
                        "state": "active_allocated" if a.alive else "inactive",
                    }
                ],
            }
            for a in self.allocations
        ]

    def has_pages(self, address: int) -> bool:
        """What the driver says of an address."""
        return any(a.address == address and a.active and a.tag is not None for a in self.allocations)

    def free_bytes(self, device: object = None) -> int:
        return self.capacity_bytes - sum(a.memory.nbytes for a in self.allocations if a.active)

    def _tagged(self, tag: str | None) -> list[Allocation]:
        return [a for a in self.allocations if a.tag is not None and tag in (None, a.tag)]

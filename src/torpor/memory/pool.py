"""Which allocations of which thread go into memory that can sleep."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto

import torch

from torpor.errors import StateError
from torpor.memory.allocator import PoolId
from torpor.memory.vmm_library import VmmLibrary


class PoolState(Enum):
    """What may be done with a pool that was set aside."""

    AWAKE = auto()
    ASLEEP = auto()
    """Something in it sleeps."""
    HOLLOW = auto()
    """What is alive in it is awake, but some of its cached free memory has no pages."""
    DEAD = auto()
    """Nothing in it is alive, and some of it has no pages: its addresses can go."""


@dataclass(slots=True, eq=False)
class _Scope:
    """A `with pool():` that is open now. Its memory pool may be exchanged while it is."""

    device: int
    thread: int | None
    """The thread whose allocations it takes; None takes those of all threads."""
    mempool: torch.cuda.MemPool


class Pools:
    """Torch memory pools over one `VmmLibrary`.

    Torch lets one scope at a time allocate in a pool, so each open scope has a pool to itself; closed, the
    pool waits for the next scope. While anything sleeps, the pools there were are set aside and new scopes get
    new pools: torch would hand out cached blocks that have no memory.
    """

    def __init__(self, library: VmmLibrary) -> None:
        self._library = library
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(
            str(library.path), "torpor_vmm_malloc", "torpor_vmm_free"
        )
        self.lock = threading.RLock()
        """Guards the pools, and what the backend knows of them."""
        self._usable: dict[int, list[torch.cuda.MemPool]] = {}
        self._aside: dict[int, list[torch.cuda.MemPool]] = {}
        self._dead: dict[int, list[torch.cuda.MemPool]] = {}
        self._open: list[_Scope] = []
        self.generation = 0
        """Grows when torch may allocate again in pools that were set aside."""
        self.states: Callable[[int], Mapping[PoolId, PoolState]] = lambda device: {}
        """The state of each pool of a device that has memory; set by the backend."""

    @contextmanager
    def use(self, device: int, all_threads: bool) -> Iterator[None]:
        """Allocations on `device`, of this thread or of all, go into a pool until the block ends."""
        with self.lock:
            scope = None if self._covers(device, all_threads) else self._enter(device, all_threads)
        try:
            yield
        finally:
            if scope is not None:
                with self.lock:
                    self._leave(scope)

    def sample(self, device: int, nbytes: int) -> torch.Tensor:
        """A tensor of `nbytes` bytes, alone in a new pool that is set aside."""
        with self.lock:
            scope = _Scope(device, threading.get_ident(), self._new(device))
            self._aside.setdefault(device, []).append(scope.mempool)
            self._start(scope)
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))
            finally:
                self._stop(scope)

    def suspend(self, device: int) -> None:
        """From now on nothing is allocated in the pools that exist, until they are found awake.

        Open scopes that this thread may exchange go on in a new pool.

        Raises:
            StateError: another thread is inside `pool()`, so its next allocation could get memory that goes.
        """
        with self.lock:
            scopes = [scope for scope in self._open if scope.device == device]
            if any(scope.thread not in (None, threading.get_ident()) for scope in scopes):
                raise StateError("another thread is inside torpor.pool(): its allocations would race with the sleep")
            self._library.seal(device, True)
            self._aside.setdefault(device, []).extend(self._usable.pop(device, []))
            for scope in scopes:
                self._stop(scope)
                self._aside[device].append(scope.mempool)
                scope.mempool = self._new(device)
                self._start(scope)

    def set_aside(self, device: int) -> set[PoolId]:
        """The pools in which nothing is allocated now, nor before something has looked at their states."""
        return {mempool.id for mempool in self._aside.get(device, [])}

    def _covers(self, device: int, all_threads: bool) -> bool:
        """Whether an open scope already takes these allocations."""
        threads = (None,) if all_threads else (None, threading.get_ident())
        return any(scope.device == device and scope.thread in threads for scope in self._open)

    def _enter(self, device: int, all_threads: bool) -> _Scope:
        self._reclaim(device)
        self._let_go(device)
        usable = self._usable.setdefault(device, [])
        mempool = usable.pop() if usable else self._new(device)
        scope = _Scope(device, None if all_threads else threading.get_ident(), mempool)
        self._start(scope)
        self._open.append(scope)
        return scope

    def _leave(self, scope: _Scope) -> None:
        self._open.remove(scope)
        self._stop(scope)
        self._usable.setdefault(scope.device, []).append(scope.mempool)

    def _reclaim(self, device: int) -> None:
        """Take pools back into use once nothing sleeps in any of them; those that died are over."""
        aside = self._aside.pop(device, [])
        if not aside:
            return
        states = self.states(device)
        found: dict[PoolState, list[torch.cuda.MemPool]] = {state: [] for state in PoolState}
        for mempool in aside:
            found[states.get(mempool.id, PoolState.AWAKE)].append(mempool)
        self._dead.setdefault(device, []).extend(found[PoolState.DEAD])
        self._aside[device] = found[PoolState.ASLEEP] + found[PoolState.HOLLOW]
        if PoolState.ASLEEP in states.values():
            self._aside[device] += found[PoolState.AWAKE]
            return
        self._usable.setdefault(device, []).extend(found[PoolState.AWAKE])
        self._library.seal(device, False)
        self.generation += 1

    def _let_go(self, device: int) -> None:
        """End dead pools, unless a scope is open: torch ends the process if a pool ends while it allocates in one."""
        if all(scope.device != device for scope in self._open):
            self._dead.pop(device, None)

    def _new(self, device: int) -> torch.cuda.MemPool:
        with torch.cuda.device(device):
            return torch.cuda.MemPool(self._allocator.allocator())  # type: ignore[no-untyped-call]

    def _start(self, scope: _Scope) -> None:
        if scope.thread is None:
            torch._C._cuda_beginAllocateToPool(scope.device, scope.mempool.id)
        else:
            torch._C._cuda_beginAllocateCurrentThreadToPool(scope.device, scope.mempool.id)

    def _stop(self, scope: _Scope) -> None:
        torch._C._cuda_endAllocateToPool(scope.device, scope.mempool.id)
        torch._C._cuda_releasePool(scope.device, scope.mempool.id)

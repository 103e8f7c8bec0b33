"""Memory backend `vmm`: device memory whose pages go and come back while its addresses stay.

    with torpor.pool():
        model = Model().cuda()
        optimizer = AdamW(model.parameters())

What is allocated inside lies in extents of our own (`_vmm.c`): stretches of addresses with one set of pages.
A storage of more than 32 MiB has one to itself, smaller ones share extents of at most 64 MiB. The pages of an
extent can go when every live block in it belongs to a storage that sleeps, so components that sleep apart from
each other are best allocated in turn, not interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from typing import ClassVar, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import torch

from torpor.errors import DriverError, MemoryBackendError, NotEnoughMemoryError, TorporError
from torpor.memory import allocator, cuda
from torpor.memory.allocator import Bools, Int64s, PoolId, Rows, Snapshot
from torpor.memory.gpu import GpuBackend
from torpor.memory.pool import Pools, PoolState
from torpor.memory.survey import Borrowed, Survey, give_back
from torpor.memory.vmm_library import Extents, VmmLibrary, vmm_library

P = ParamSpec("P")
R = TypeVar("R")

_CUDA_ERROR_OUT_OF_MEMORY = 2


@contextmanager
def pool(device: torch.device | int | str | None = None, *, all_threads: bool = False) -> Iterator[None]:
    """Put what is allocated inside into memory that can sleep with its addresses kept.

    Such memory cannot be sent to another process: CUDA's legacy IPC, which `torch.multiprocessing` uses, refuses it
    ("invalid argument"). Copy what is to be sent into a buffer made outside.

    Args:
        device: the CUDA device; the current one if None.
        all_threads: take the allocations of all threads, the autograd engine's among them. Without it,
            gradients that `backward()` allocates are not taken.

    Raises:
        UnsupportedError: no driver, no compiled part, or an allocator setting that defeats pools.
    """
    backend = vmm_backend()
    index = torch.cuda._utils._get_device_index(device, optional=True)
    with backend.pools.use(index, all_threads):
        yield


@cache
def vmm_backend() -> VmmBackend:
    """The backend of this process.

    Raises:
        UnsupportedError: no driver, no compiled part, or an allocator setting that defeats pools.
    """
    library = vmm_library()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    allocator.require_native()
    return VmmBackend(library, Pools(library))


@dataclass(slots=True, eq=False)
class _Device:
    """What lay where on one device when the allocator was last looked at, and which of it sleeps."""

    extents: Extents
    live: Survey
    """Its units are the extents."""
    pool: Int64s
    """For each live block its memory pool, as an index in `pool_ids`."""
    pool_ids: list[PoolId]
    homes: dict[int, Int64s]
    """For each pool that has segments here the extents they lie in."""
    generation: int
    """Of the pools; a later one may have allocated in the same places."""
    serial: int
    """Of the library; a later one has more extents."""

    def mates(self, blocks: Int64s) -> Bools:
        """For each extent, whether it has memory of a pool that one of `blocks` is in."""
        found = np.zeros(len(self.extents), np.bool_)
        for pool_index in np.unique(self.pool[blocks]).tolist():
            found[self.homes[pool_index]] = True
        return found

    def only_in(self, pools: Set[PoolId]) -> Bools:
        """For each extent, whether it has memory of one of `pools` and of no other."""
        has = {wanted: np.zeros(len(self.extents), np.bool_) for wanted in (True, False)}
        for pool_index, home in self.homes.items():
            has[self.pool_ids[pool_index] in pools][home] = True
        return has[True] & ~has[False]

    def empty(self) -> Bools:
        """For each extent, whether it holds cached free memory only."""
        return np.equal(np.bincount(self.live.unit, minlength=len(self.extents)), 0)

    def keys(self, blocks: Int64s) -> list[tuple[int, ...]]:
        """For each block its extent's serial, address and bytes: what tells it from a later one in its place."""
        chosen = self.live.blocks[blocks]
        serials = self.extents["serial"][self.live.unit[blocks]]
        columns = (serials, chosen["address"], chosen["nbytes"])
        return list(zip(*(column.tolist() for column in columns), strict=True))


def _survey_device(
    extents: Extents, snapshot: Snapshot, generation: int, serial: int, before: _Device | None
) -> _Device:
    extent_of = snapshot.within(extents["address"], extents["address"] + extents["nbytes"])
    unit = extent_of[snapshot.blocks["segment"]]
    blocks, unit = snapshot.blocks[unit >= 0], unit[unit >= 0]
    gives = give_back(unit, blocks["nbytes"], extents["nbytes"])
    live = Survey(blocks, unit, len(extents), gives)
    pool = snapshot.segments["pool"]
    homes = {index: np.unique(extent_of[(extent_of >= 0) & (pool == index)]) for index in range(len(snapshot.pools))}
    homes = {index: home for index, home in homes.items() if len(home)}
    found = _Device(extents, live, pool[blocks["segment"]], snapshot.pools, homes, generation, serial)
    if before is not None and before.live.asleep.any():
        slept = set(before.keys(np.flatnonzero(before.live.asleep)))
        everything = np.arange(len(blocks))
        live.mark(everything[[key in slept for key in found.keys(everything)]], asleep=True)
    return found


def _exclusive(method: Callable[Concatenate[VmmBackend, P], R]) -> Callable[Concatenate[VmmBackend, P], R]:
    """One thread at a time, together with the pools."""

    @wraps(method)
    def locked(self: VmmBackend, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.pools.lock:
            return method(self, *args, **kwargs)

    return cast("Callable[Concatenate[VmmBackend, P], R]", locked)  # `wraps` blurs it


class VmmBackend(GpuBackend):
    """Gives back the pages of extents whose live blocks all sleep, and takes new ones at the same addresses.

    One sleep: `refresh()` looks at the allocator, `strays()` names live blocks that nobody else knows,
    `release()` any number of times, later `restore()` any number of times. The caller has waited for all work
    that uses what it releases: pages go at once. Thread-safe.
    """

    name: ClassVar[str] = "vmm"
    keeps_address: ClassVar[bool] = True

    def __init__(self, library: VmmLibrary, pools: Pools) -> None:
        self.pools = pools
        pools.states = self._pool_states
        self._library = library
        self._devices: dict[int, _Device] = {}
        self._borrowed = Borrowed()
        self._foreign_pools: set[PoolId] = set()

    @_exclusive
    def refresh(self) -> None:
        """Look at the allocator anew: at the start of a sleep, after caches were dropped.

        Raises:
            StateError: another thread is inside `pool()`.
        """
        devices = {*self._library.extents()["device"].tolist(), *self._devices}
        for device in devices:
            self.pools.suspend(device)
        self._survey(devices)

    @_exclusive
    def self_test(self, device: torch.device) -> None:
        """See that the driver has the pages of 64 MiB while they sleep, that address and contents are right after.

        Raises:
            UnsupportedError: one of these is not so; the message has what the allocator is set to.
            MemoryBackendError: too little device memory: the test takes 192 MiB for a moment.
        """
        self.pools.suspend(device.index)  # a pool that is open now would take the sample beside what is in it
        try:
            sample = self.pools.sample(device.index, cuda.SELF_TEST_BYTES)
            cuda.self_test(self, sample.untyped_storage())
        except torch.OutOfMemoryError as error:
            raise MemoryBackendError(
                f"the self-test of vmm needs {3 * cuda.SELF_TEST_BYTES} bytes on {device} for a moment, "
                f"{cuda.free_bytes(device)} are free: call prewarm() before the device is full"
            ) from error
        self.release([sample.untyped_storage()])  # for good: its pool may have to wait for its end

    def refusal(self, storage: torch.UntypedStorage) -> str | None:
        """Why not: the storage lies outside `torpor.pool()`, or is a part of somebody's block."""
        if storage.device.type != self.device_type:
            return f"vmm handles cuda memory, not {storage.device.type}"
        live, block = self._known(storage)
        if block is None:
            return "allocated outside torpor.pool()"
        return live.objection(block, storage.nbytes())

    def releasable_bytes(self, storage: torch.UntypedStorage) -> int:
        """The whole extent if the storage is alone in it, else its block; 0 outside `torpor.pool()`."""
        live, block = self._known(storage)
        return live.gives[block] if block is not None else 0

    @_exclusive
    def strays(self, known: Sequence[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        """Live blocks of the pools that are not in `known` and not asleep: as storages, by address.

        They own nothing: each stands for memory that some tensor out of sight owns, and is the same object
        for as long as the block lives. The extent of such a block keeps its pages until it sleeps too.
        """
        if self._borrowed:
            self._borrowed.keep({key for d in self._devices.values() for key in d.keys(np.arange(len(d.pool)))})
        found: list[torch.UntypedStorage] = []
        for index, device in self._devices.items():
            for key in device.keys(device.live.strays(known)):
                _, address, nbytes = key
                found.append(self._borrowed.get(key, address, nbytes, index))
        return found

    @_exclusive
    def release(self, storages: Sequence[torch.UntypedStorage]) -> int:
        """Mark storages as asleep; give back the extents of their pools in which nothing is awake any more.

        An extent goes with the last of its storages, so what several calls give back adds up.
        """
        given_bytes = 0
        done: list[torch.UntypedStorage] = []
        for index, group in _by_device(storages).items():
            device = self._current(index)
            blocks = self._owned(device, group)
            changed = device.live.mark(blocks, asleep=True)
            going = self._with_pages(device, (device.live.awake_in == 0) & device.mates(blocks), mapped=True)
            try:
                given_bytes += self._library.unmap(going, index)
            except DriverError:
                device.live.mark(changed, asleep=False)
                self._library.map(going, index)
                self.restore(done)
                raise
            done += group
        return given_bytes

    @_exclusive
    def restore(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """New pages for the extents of `storages`, and for those with cached free memory of their pools.

        Raises:
            NotEnoughMemoryError: the driver has too few pages; both numbers inside.
            MemoryBackendError: it refused for another reason. In both cases everything sleeps as before.
        """
        done: list[torch.UntypedStorage] = []
        for index, group in _by_device(storages).items():
            device = self._seen(index)
            blocks = self._owned(device, group)
            changed = device.live.mark(blocks, asleep=False)
            wanted = device.mates(blocks) & ((device.live.awake_in > 0) | device.empty())
            coming = self._with_pages(device, wanted, mapped=False)
            try:
                self._library.map(coming, index)
            except DriverError as error:
                device.live.mark(changed, asleep=True)
                self.release(done)
                raise self._as_shortage(error, device, coming) from error
            done += [group[i] for i in np.flatnonzero(np.isin(blocks, changed)).tolist()]

    @_exclusive
    def settle(self) -> None:
        """Also give back the extents that hold cached free memory only. Pools that have such wait for their next wake:
        what is allocated until then goes into others.

        Raises:
            MemoryBackendError: the driver refused; extents of live memory have their pages all the same.
        """
        super().settle()
        for index, device in self._devices.items():
            idle = device.empty() & device.only_in(self.pools.set_aside(index))
            self._library.unmap(self._with_pages(device, idle, mapped=True), index)

    @_exclusive
    def needed_bytes(self, storages: Sequence[torch.UntypedStorage]) -> int:
        """Bytes that `restore(storages)` would take from the driver now, on all devices together."""
        needed = 0
        for index, group in _by_device(storages).items():
            device = self._seen(index)
            blocks = self._owned(device, group)
            wanted = device.empty() & device.mates(blocks)
            wanted[device.live.unit[blocks]] = True
            coming = self._with_pages(device, wanted, mapped=False)
            needed += int(device.extents["nbytes"][np.isin(device.extents["address"], coming)].sum())
        return needed

    @_exclusive
    def foreign_pools(self) -> set[PoolId]:
        """The allocator's private pools without memory of ours, as of the last `refresh`: graphs have such."""
        return set(self._foreign_pools)

    def graphs_may_live(self) -> bool:
        return bool(self.foreign_pools())

    def states_of(self, segments: Rows) -> Int64s:
        extents = self._library.extents()
        if not len(extents):
            return super().states_of(segments)
        at = np.searchsorted(extents["address"], segments["address"], side="right") - 1
        inside = (at >= 0) & (segments["address"] < (extents["address"] + extents["nbytes"])[at])
        return np.where(inside, extents["mapped"][at], -1)

    def idle_bytes(self, device: torch.device) -> int:
        extents = self._library.extents(device.index)
        return int((extents["nbytes"] - extents["used_bytes"])[extents["mapped"] == 1].sum())

    def _look(self, index: int) -> None:
        """A new survey of a device, with nothing allocated in the surveyed pools until they are awake."""
        self.pools.suspend(index)
        self._survey({index})

    def _survey(self, devices: Iterable[int]) -> None:
        """Look once at the allocator, for several devices."""
        generation, serial, extents = self.pools.generation, self._library.serial(), self._library.extents()
        snapshot = allocator.look()
        for index in devices:
            of_device = extents[extents["device"] == index]
            before = self._devices.get(index)
            self._devices[index] = _survey_device(of_device, snapshot, generation, serial, before)
        inside = snapshot.within(extents["address"], extents["address"] + extents["nbytes"]) >= 0
        ours = {snapshot.pools[i] for i in np.unique(snapshot.segments["pool"][inside]).tolist()}
        self._foreign_pools = snapshot.private_pools() - ours

    def _current(self, index: int) -> _Device:
        device = self._devices.get(index)
        if device is None or device.generation != self.pools.generation:
            self._look(index)
        return self._devices[index]

    def _seen(self, index: int) -> _Device:
        """As it was last looked at: what sleeps does not move."""
        if index not in self._devices:
            self._survey({index})
        return self._devices[index]

    def _known(self, storage: torch.UntypedStorage) -> tuple[Survey, int | None]:
        """The survey of the storage's device, and the block at its address."""
        index, address = storage.device.index, storage.data_ptr()
        device = self._devices.get(index)
        if device is not None and device.generation == self.pools.generation:
            block = device.live.index.get(address)
            if block is not None:
                return device.live, block
        return self._known_anew(index, address)

    @_exclusive
    def _known_anew(self, index: int, address: int) -> tuple[Survey, int | None]:
        device = self._current(index)
        if address not in device.live.index and device.serial != self._library.serial():
            self._look(index)
            device = self._devices[index]
        return device.live, device.live.index.get(address)

    def _owned(self, device: _Device, storages: Sequence[torch.UntypedStorage]) -> Int64s:
        blocks = device.live.owned(storages)
        if (blocks < 0).any():
            culprit = storages[int(np.argmin(blocks))]
            raise MemoryBackendError(
                f"{culprit.nbytes()} bytes at {culprit.data_ptr():#x} on {culprit.device} are not a block "
                f"of the pool: {self.refusal(culprit)}"
            )
        return blocks

    def _with_pages(self, device: _Device, wanted: Bools, mapped: bool) -> list[int]:
        """Addresses of the wanted extents that still exist and have pages (or have none)."""
        now = self._library.extents()
        same = now["serial"][now["mapped"] == int(mapped)]
        chosen = device.extents[wanted]
        return chosen["address"][np.isin(chosen["serial"], same)].tolist()  # type: ignore[no-any-return]

    @_exclusive
    def _pool_states(self, index: int) -> dict[PoolId, PoolState]:
        self._survey({index})
        device = self._devices[index]
        mapped = device.extents["mapped"] == 1
        asleep = set(device.pool[device.live.asleep].tolist())
        alive = set(device.pool.tolist())
        states: dict[PoolId, PoolState] = {}
        for i, home in device.homes.items():
            whole = bool(mapped[home].all())
            if i in asleep:
                state = PoolState.ASLEEP
            elif i in alive:
                state = PoolState.AWAKE if whole else PoolState.HOLLOW
            else:
                state = PoolState.AWAKE if whole else PoolState.DEAD
            states[device.pool_ids[i]] = state
        return states

    def _as_shortage(self, error: DriverError, device: _Device, addresses: list[int]) -> TorporError:
        if error.code != _CUDA_ERROR_OUT_OF_MEMORY:
            return error
        extents = device.extents[np.isin(device.extents["address"], addresses)]
        where = torch.device("cuda", int(extents["device"][0]))
        return NotEnoughMemoryError(
            int(extents["nbytes"].sum()),
            cuda.free_bytes(where),
            str(where),
            "Free memory there and wake again.",
        )


def _by_device(storages: Sequence[torch.UntypedStorage]) -> dict[int, list[torch.UntypedStorage]]:
    groups: dict[int, list[torch.UntypedStorage]] = {}
    for storage in storages:
        groups.setdefault(storage.device.index, []).append(storage)
    return groups

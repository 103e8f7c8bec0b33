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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from typing import ClassVar, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from torpor.errors import MemoryBackendError, NotEnoughMemoryError, TorporError
from torpor.memory import cuda
from torpor.memory.base import MemoryBackend
from torpor.memory.cuda import Blocks, Int64s, PoolId, live_blocks
from torpor.memory.pool import Pools, PoolState
from torpor.memory.vmm_library import DriverError, Extents, VmmLibrary, vmm_library

P = ParamSpec("P")
R = TypeVar("R")
Bools = npt.NDArray[np.bool_]

_CUDA_ERROR_OUT_OF_MEMORY = 2


@contextmanager
def pool(device: torch.device | int | str | None = None, *, all_threads: bool = False) -> Iterator[None]:
    """Put what is allocated inside into memory that can sleep with its addresses kept.

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
    cuda.require_native_allocator()
    return VmmBackend(library, Pools(library))


@dataclass(slots=True, eq=False)
class _Survey:
    """What lay where on one device when the allocator was last looked at, and which of it sleeps."""

    extents: Extents
    blocks: Blocks
    asleep: Bools
    """For each block, whether its contents are somewhere else."""
    awake_in: Int64s
    """For each extent, its live blocks that are not asleep."""
    index: dict[int, int]
    """Block by address."""
    requested: list[int]
    """For each block the bytes that were asked for, as numbers that Python reads fast."""
    gives: list[int]
    """For each block what its sleep gives back: its extent if it is alone there, else itself."""
    generation: int
    """Of the pools; a later one may have allocated in the same places."""
    serial: int
    """Of the library; a later one has more extents."""

    def covered(self, storages: Sequence[torch.UntypedStorage]) -> Int64s:
        """For each storage the index of the block it owns; -1 if it owns none, or a part of one only."""
        return np.fromiter((self._covered(storage) for storage in storages), np.int64, len(storages))

    def _covered(self, storage: torch.UntypedStorage) -> int:
        at = self.index.get(storage.data_ptr(), -1)
        return at if at < 0 or self.requested[at] <= storage.nbytes() else -1

    def mark(self, blocks: Int64s, asleep: bool) -> Int64s:
        """Mark blocks; return those that changed."""
        before = self.asleep.copy()
        self.asleep[blocks] = asleep
        changed = np.flatnonzero(self.asleep != before)
        counts = np.bincount(self.blocks.stretch[changed], minlength=len(self.awake_in))
        self.awake_in += -counts if asleep else counts
        return changed

    def mates(self, blocks: Int64s) -> Bools:
        """For each extent, whether it has memory of a pool that one of `blocks` is in."""
        found = np.zeros(len(self.extents), np.bool_)
        for pool_index in set(self.blocks.pool[blocks].tolist()):
            found[self.blocks.homes[pool_index]] = True
        return found

    def empty(self) -> Bools:
        """For each extent, whether it holds cached free memory only."""
        return np.equal(np.bincount(self.blocks.stretch, minlength=len(self.extents)), 0)


def _new_survey(extents: Extents, generation: int, serial: int, before: _Survey | None) -> _Survey:
    blocks = live_blocks(extents["address"], extents["address"] + extents["nbytes"])
    asleep = np.zeros(len(blocks.address), np.bool_)
    slept = set(_keys(before)[before.asleep].tolist()) if before is not None else set()
    if slept:
        asleep[:] = [key in slept for key in _keys_of(extents, blocks).tolist()]
    awake_in = np.bincount(blocks.stretch[~asleep], minlength=len(extents))
    index = dict(zip(blocks.address.tolist(), range(len(asleep)), strict=True))
    alone = np.bincount(blocks.stretch, minlength=len(extents))[blocks.stretch] == 1
    gives = np.where(alone, extents["nbytes"][blocks.stretch], blocks.nbytes).tolist()
    requested = blocks.requested.tolist()
    return _Survey(extents, blocks, asleep, awake_in, index, requested, gives, generation, serial)


def _keys(survey: _Survey) -> npt.NDArray[np.void]:
    return _keys_of(survey.extents, survey.blocks)


def _keys_of(extents: Extents, blocks: Blocks) -> npt.NDArray[np.void]:
    """For each block its extent's serial and its address: what tells it from a later one in its place."""
    keys = np.empty(len(blocks.address), [("serial", np.int64), ("address", np.int64)])
    keys["serial"] = extents["serial"][blocks.stretch]
    keys["address"] = blocks.address
    return keys


def _exclusive(method: Callable[Concatenate[VmmBackend, P], R]) -> Callable[Concatenate[VmmBackend, P], R]:
    """One thread at a time, together with the pools."""

    @wraps(method)
    def locked(self: VmmBackend, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.pools.lock:
            return method(self, *args, **kwargs)

    return cast("Callable[Concatenate[VmmBackend, P], R]", locked)  # `wraps` blurs it


class VmmBackend(MemoryBackend):
    """Gives back the pages of extents whose live blocks all sleep, and takes new ones at the same addresses.

    One sleep: `refresh()` looks at the allocator, `strays()` names live blocks that nobody else knows,
    `release()` any number of times, later `restore()` any number of times. The caller has waited for all work
    that uses what it releases: pages go at once. Thread-safe.
    """

    name: ClassVar[str] = "vmm"
    device_type: ClassVar[str] = "cuda"
    keeps_address: ClassVar[bool] = True
    restores_zeros: ClassVar[bool] = False

    def __init__(self, library: VmmLibrary, pools: Pools) -> None:
        self.pools = pools
        pools.states = self._pool_states
        self._library = library
        self._surveys: dict[int, _Survey] = {}
        self._borrowed: dict[tuple[int, int, int], torch.UntypedStorage] = {}

    @_exclusive
    def refresh(self) -> None:
        """Look at the allocator anew: at the start of a sleep, after caches were dropped.

        Raises:
            StateError: another thread is inside `pool()`.
        """
        for device in {*self._library.extents()["device"].tolist(), *self._surveys}:
            self._look(device)

    def refusal(self, storage: torch.UntypedStorage) -> str | None:
        """Why not: the storage lies outside `torpor.pool()`, or is a part of somebody's block."""
        if storage.device.type != self.device_type:
            return f"vmm handles cuda memory, not {storage.device.type}"
        survey, block = self._known(storage)
        if block is None:
            return "allocated outside torpor.pool()"
        requested = survey.requested[block]
        if storage.nbytes() < requested:
            return f"a part of a block of {requested} bytes that belongs to something else"
        return None

    def releasable_bytes(self, storage: torch.UntypedStorage) -> int:
        """The whole extent if the storage is alone in it, else its block; 0 outside `torpor.pool()`."""
        survey, block = self._known(storage)
        return survey.gives[block] if block is not None else 0

    @_exclusive
    def strays(self, known: Sequence[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        """Live blocks of the pools that are not in `known` and not asleep: as storages, by address.

        They own nothing: each stands for memory that some tensor out of sight owns, and is the same object
        for as long as the block lives. The extent of such a block keeps its pages until it sleeps too.
        """
        found: dict[tuple[int, int, int], torch.UntypedStorage] = {}
        living: set[tuple[int, int, int]] = set()
        for device, survey in self._surveys.items():
            stray = ~survey.asleep
            owned = survey.covered([storage for storage in known if storage.device.index == device])
            stray[owned[owned >= 0]] = False
            keys = [
                (*key, nbytes)
                for key, nbytes in zip(_keys(survey).tolist(), survey.blocks.nbytes.tolist(), strict=True)
            ]
            living.update(keys)
            for at in np.flatnonzero(stray).tolist():
                _, address, nbytes = key = keys[at]
                found[key] = self._borrowed.get(key) or cuda.borrow(address, nbytes, torch.device("cuda", device))
        self._borrowed = {key: lent for key, lent in self._borrowed.items() if key in living} | found
        return list(found.values())

    @_exclusive
    def release(self, storages: Sequence[torch.UntypedStorage]) -> int:
        """Mark storages as asleep; give back the extents of their pools in which nothing is awake any more.

        An extent goes with the last of its storages, so what several calls give back adds up.
        """
        given_bytes = 0
        done: list[torch.UntypedStorage] = []
        for device, group in _by_device(storages).items():
            survey = self._current(device)
            blocks = self._owned(survey, group)
            changed = survey.mark(blocks, asleep=True)
            going = self._with_pages(survey, (survey.awake_in == 0) & survey.mates(blocks), mapped=True)
            try:
                given_bytes += self._library.unmap(going, device)
            except DriverError:
                survey.mark(changed, asleep=False)
                self._library.map(going, device)
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
        for device, group in _by_device(storages).items():
            survey = self._surveys.get(device) or self._survey(device)
            blocks = self._owned(survey, group)
            changed = survey.mark(blocks, asleep=False)
            wanted = survey.mates(blocks) & ((survey.awake_in > 0) | survey.empty())
            coming = self._with_pages(survey, wanted, mapped=False)
            try:
                self._library.map(coming, device)
            except DriverError as error:
                survey.mark(changed, asleep=True)
                self.release(done)
                raise self._as_shortage(error, survey, coming) from error
            done += [group[i] for i in np.flatnonzero(np.isin(blocks, changed)).tolist()]

    @_exclusive
    def needed_bytes(self, storages: Sequence[torch.UntypedStorage]) -> int:
        """Bytes that `restore(storages)` would take from the driver now, on all devices together."""
        needed = 0
        for device, group in _by_device(storages).items():
            survey = self._surveys.get(device) or self._survey(device)
            blocks = self._owned(survey, group)
            wanted = survey.empty() & survey.mates(blocks)
            wanted[survey.blocks.stretch[blocks]] = True
            coming = self._with_pages(survey, wanted, mapped=False)
            needed += int(survey.extents["nbytes"][np.isin(survey.extents["address"], coming)].sum())
        return needed

    @_exclusive
    def pool_ids(self) -> set[PoolId]:
        """The allocator's ids of the pools with memory of ours, as of the last `refresh`."""
        return {pool_id for survey in self._surveys.values() for pool_id in survey.blocks.pools}

    def graphs_may_live(self) -> bool:
        return cuda.graphs_may_live(self.pool_ids())

    def free_bytes(self, device: torch.device) -> int:
        """By the driver."""
        return cuda.free_bytes(device)

    def used_bytes(self, device: torch.device) -> int:
        """By NVML for this process, or by the driver for all where NVML does not tell processes apart."""
        return cuda.used_bytes(device)

    def settle(self) -> None:
        """Have torch return cached blocks outside the pools to the driver."""
        torch.cuda.empty_cache()

    def _look(self, device: int) -> _Survey:
        """A new survey of `device`, with nothing allocated in the surveyed pools until they are awake."""
        self.pools.suspend(device)
        return self._survey(device)

    def _survey(self, device: int) -> _Survey:
        generation, serial = self.pools.generation, self._library.serial()
        survey = _new_survey(self._library.extents(device), generation, serial, self._surveys.get(device))
        self._surveys[device] = survey
        return survey

    def _current(self, device: int) -> _Survey:
        survey = self._surveys.get(device)
        if survey is None or survey.generation != self.pools.generation:
            return self._look(device)
        return survey

    @_exclusive
    def _known(self, storage: torch.UntypedStorage) -> tuple[_Survey, int | None]:
        """The survey of the storage's device, and the block at its address."""
        device, address = storage.device.index, storage.data_ptr()
        survey = self._current(device)
        if address not in survey.index and survey.serial != self._library.serial():
            survey = self._look(device)
        return survey, survey.index.get(address)

    def _owned(self, survey: _Survey, storages: Sequence[torch.UntypedStorage]) -> Int64s:
        blocks = survey.covered(storages)
        if (blocks < 0).any():
            culprit = storages[int(np.argmin(blocks))]
            raise MemoryBackendError(
                f"{culprit.nbytes()} bytes at {culprit.data_ptr():#x} on {culprit.device} are not a block "
                f"of the pool: {self.refusal(culprit)}"
            )
        return blocks

    def _with_pages(self, survey: _Survey, wanted: Bools, mapped: bool) -> list[int]:
        """Addresses of the wanted extents that still exist and have pages (or have none)."""
        now = self._library.extents()
        same = now["serial"][now["mapped"] == int(mapped)]
        chosen = survey.extents[wanted]
        return chosen["address"][np.isin(chosen["serial"], same)].tolist()  # type: ignore[no-any-return]

    @_exclusive
    def _pool_states(self, device: int) -> dict[PoolId, PoolState]:
        survey = self._survey(device)
        mapped = survey.extents["mapped"] == 1
        asleep = set(survey.blocks.pool[survey.asleep].tolist())
        alive = set(survey.blocks.pool.tolist())
        states: dict[PoolId, PoolState] = {}
        for i, (pool_id, home) in enumerate(zip(survey.blocks.pools, survey.blocks.homes, strict=True)):
            if i in asleep:
                states[pool_id] = PoolState.ASLEEP
            else:
                states[pool_id] = PoolState.DEAD if i not in alive and not mapped[home].all() else PoolState.AWAKE
        return states

    def _as_shortage(self, error: DriverError, survey: _Survey, addresses: list[int]) -> TorporError:
        if error.code != _CUDA_ERROR_OUT_OF_MEMORY:
            return error
        extents = survey.extents[np.isin(survey.extents["address"], addresses)]
        device = torch.device("cuda", int(extents["device"][0]))
        return NotEnoughMemoryError(
            int(extents["nbytes"].sum()),
            cuda.free_bytes(device),
            str(device),
            "Free memory there and wake again.",
        )


def _by_device(storages: Sequence[torch.UntypedStorage]) -> dict[int, list[torch.UntypedStorage]]:
    groups: dict[int, list[torch.UntypedStorage]] = {}
    for storage in storages:
        groups.setdefault(storage.device.index, []).append(storage)
    return groups

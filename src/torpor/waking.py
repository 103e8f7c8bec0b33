"""Waking up: wait for room, take the memory, bring the bytes, verify. A failure leaves everything asleep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from torpor.agreement import Round
from torpor.errors import CorruptError, NotEnoughMemoryError, TorporError
from torpor.falling import (
    STORED,
    Sleeping,
    by_backend,
    groups_of,
    in_store_order,
    is_large,
    same_streams,
    take_memory,
    zero,
)
from torpor.fingerprint import fingerprints
from torpor.kinds import Fate
from torpor.ledger import Stopwatch
from torpor.memory.base import MemoryBackend
from torpor.rebuilding import Resolve, rebuilt_first, with_fate
from torpor.stores.base import Store
from torpor.transfer import Piece, load

#: Seconds between two looks at the free memory while waiting for room.
_POLL_S = 0.02
#: What is handed to a transfer before memory is taken for what needs no copy: as much as may be under way meanwhile.
_COPIED_BYTES = 256 * 1024**2
#: What of that memory is taken at a time: a driver needs less than a millisecond.
_TAKEN_BYTES = 2 * 1024**3
#: A transfer's buffers, several times.
_SPARE_BYTES = 1024**3


def wake_up(
    sleepers: Sequence[Sleeping],
    store: Store,
    stopwatch: Stopwatch,
    agreed: Round,
    *,
    resolve: Resolve,
    verify: bool,
    wait_s: float,
    last: Callable[[], None] = lambda: None,
) -> None:
    """Memory and contents of `sleepers` come back on every rank that agrees, or nothing does.

    Args:
        last: called when everything is back; its failure counts too.

    Raises:
        NotEnoughMemoryError: the memory was not free within `wait_s` seconds.
        CorruptError: bytes came back different; names them.
        MemoryBackendError, StoreError: the system refused.
        RankError: in place of each of these, where ranks agree.
    """
    groups = by_backend(sleepers)
    with agreed.stage("room", extra_s=wait_s), stopwatch.stage("wait"):
        spare_bytes = _wait_for_room(groups, wait_s)
    first, beside = _parted(sleepers, spare_bytes)
    try:
        with agreed.stage("restore"):
            with stopwatch.stage("restore"):
                take_memory(first)
            with stopwatch.stage("copy"):
                pieces = (sleeping.piece() for sleeping in in_store_order(first))
                load(_taking_memory(pieces, beside) if beside else pieces, store)
            with stopwatch.stage("rebuild"):
                zero(first)
                _rebuild(sleepers, resolve)
            if verify:
                with stopwatch.stage("verify"):
                    _verify(sleepers)
        last()
    except BaseException:
        _fall_back(groups)
        raise


def _wait_for_room(groups: Sequence[tuple[MemoryBackend, list[Sleeping]]], wait_s: float) -> dict[torch.device, int]:
    """Room on each device for what all backends together will take there; the bytes that are free beyond that."""
    deadline = time.monotonic() + wait_s
    needed: dict[torch.device, int] = {}
    judges: dict[torch.device, list[MemoryBackend]] = {}
    for backend, group in groups:
        for device, storages in _by_device(group).items():
            needed[device] = needed.get(device, 0) + backend.needed_bytes(storages)
            judges.setdefault(device, []).append(backend)
    spare_bytes: dict[torch.device, int] = {}
    for device, nbytes in needed.items():
        while (free := min(backend.free_bytes(device) for backend in judges[device])) < nbytes:
            if time.monotonic() >= deadline:
                raise NotEnoughMemoryError(
                    nbytes,
                    free,
                    str(device),
                    "Free memory there and wake again, or wait for it with wait_s=.",
                )
            time.sleep(_POLL_S)
        spare_bytes[device] = free - nbytes
    return spare_bytes


def _by_device(sleepers: Iterable[Sleeping]) -> dict[torch.device, list[torch.UntypedStorage]]:
    storages: dict[torch.device, list[torch.UntypedStorage]] = {}
    for sleeping in sleepers:
        storages.setdefault(sleeping.decision.entry.device, []).append(sleeping.storage)
    return storages


def _parted(
    sleepers: Sequence[Sleeping], spare_bytes: Mapping[torch.device, int]
) -> tuple[list[Sleeping], list[Sleeping]]:
    """What gets its memory before anything is copied, and what may get it meanwhile: large storages of GPUs that no
    copy fills, where a transfer's own buffers take none of the room for them.
    """
    roomy = {device for device, nbytes in spare_bytes.items() if device.type == "cuda" and nbytes >= _SPARE_BYTES}
    if not roomy:
        return list(sleepers), []
    first: list[Sleeping] = []
    beside: list[Sleeping] = []
    for sleeping in sleepers:
        may_wait = sleeping.fate not in STORED and is_large(sleeping) and sleeping.decision.entry.device in roomy
        (beside if may_wait else first).append(sleeping)
    return first, beside


def _taking_memory(pieces: Iterable[Piece], beside: Sequence[Sleeping]) -> Iterator[Piece]:
    """The same pieces. Every now and then, while copies are under way, some of `beside` gets its memory, zeroed where
    it was dead: on the streams of the caller, whoever takes the pieces.
    """
    here = same_streams(beside)
    groups = groups_of(beside, _TAKEN_BYTES)

    def take(group: Sequence[Sleeping]) -> None:
        with here():
            take_memory(group)
            zero(group)

    def passing() -> Iterator[Piece]:
        nbytes = 0
        for piece in pieces:
            yield piece
            nbytes += piece.slot.nbytes
            if nbytes >= _COPIED_BYTES:
                nbytes = 0
                take(next(groups, []))
        for group in groups:
            take(group)

    return passing()


def _rebuild(sleepers: Sequence[Sleeping], resolve: Resolve) -> None:
    """Recompute what is derived, from sources that are awake or read from the store."""
    rebuilt = with_fate(sleepers, Fate.REBUILT)
    first = {id(s) for s in rebuilt_first(rebuilt)}
    for sleeping in sorted(rebuilt, key=lambda s: id(s) not in first):
        rebuild = sleeping.decision.entry.rebuild
        if rebuild is not None:
            out = sleeping.decision.entry.claims[0].tensor
            rebuild.fn(out, *(resolve(source) for source in rebuild.sources))


def _verify(sleepers: Sequence[Sleeping]) -> None:
    known = [sleeping for sleeping in sleepers if sleeping.digest is not None]
    digests = fingerprints([sleeping.home for sleeping in known])
    damaged = [
        sleeping.decision.entry.name
        for sleeping, digest in zip(known, digests, strict=True)
        if sleeping.digest != digest
    ]
    if damaged:
        raise CorruptError(damaged, "fingerprints differ from those taken at sleep; everything is still asleep")


def _fall_back(groups: Sequence[tuple[MemoryBackend, list[Sleeping]]]) -> None:
    """Give back what this call took. The store still holds every byte."""
    for device in {s.decision.entry.device for _, group in groups for s in group if not s.is_on_host}:
        torch.cuda.synchronize(device)  # what is being zeroed or rebuilt is about to lose its memory
    for backend, group in groups:
        try:
            backend.release([sleeping.decision.entry.storage for sleeping in group])
        except TorporError:
            continue  # its memory stays taken; the bytes in the store decide at the next wake

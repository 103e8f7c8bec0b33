"""Waking up: wait for room, take the memory, bring the bytes, verify. A failure leaves everything asleep."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from torpor.agreement import Round
from torpor.errors import CorruptError, NotEnoughMemoryError, TorporError
from torpor.falling import Sleeping, by_backend, in_store_order
from torpor.fingerprint import fingerprints
from torpor.kinds import Fate
from torpor.ledger import Stopwatch
from torpor.memory.base import MemoryBackend
from torpor.rebuilding import Resolve, rebuilt_first
from torpor.stores.base import Store
from torpor.transfer import load

#: Seconds between two looks at the free memory while waiting for room.
_POLL_S = 0.02


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
        _wait_for_room(groups, wait_s)
    try:
        with agreed.stage("restore"):
            with stopwatch.stage("restore"):
                for backend, group in groups:
                    backend.restore([sleeping.storage for sleeping in group])
            with stopwatch.stage("copy"):
                load((sleeping.piece() for sleeping in in_store_order(sleepers)), store)
            with stopwatch.stage("rebuild"):
                _remake(sleepers, resolve)
            if verify:
                with stopwatch.stage("verify"):
                    _verify(sleepers)
        last()
    except BaseException:
        _fall_back(groups)
        raise


def _wait_for_room(groups: Sequence[tuple[MemoryBackend, list[Sleeping]]], wait_s: float) -> None:
    """Room on each device for what all backends together will take there."""
    deadline = time.monotonic() + wait_s
    needed: dict[torch.device, int] = {}
    judges: dict[torch.device, list[MemoryBackend]] = {}
    for backend, group in groups:
        for device in {sleeping.decision.entry.device for sleeping in group}:
            storages = [s.storage for s in group if s.decision.entry.device == device]
            needed[device] = needed.get(device, 0) + backend.needed_bytes(storages)
            judges.setdefault(device, []).append(backend)
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


def _remake(sleepers: Sequence[Sleeping], resolve: Resolve) -> None:
    """Zero what was dead; recompute what is derived, from sources that are awake or read from the store."""
    for sleeping in sleepers:
        if sleeping.fate is Fate.ZEROED:
            sleeping.bytes.zero_()
    first = {id(s) for s in rebuilt_first(sleepers)}
    rebuilt = [s for s in sleepers if s.fate is Fate.REBUILT]
    for sleeping in sorted(rebuilt, key=lambda s: id(s) not in first):
        rebuild = sleeping.decision.entry.rebuild
        if rebuild is not None:
            out = sleeping.decision.entry.claims[0].tensor
            rebuild.fn(out, *(resolve(source) for source in rebuild.sources))


def _verify(sleepers: Sequence[Sleeping]) -> None:
    known = [sleeping for sleeping in sleepers if sleeping.digest is not None]
    digests = fingerprints([sleeping.bytes for sleeping in known])
    damaged = [
        sleeping.decision.entry.name
        for sleeping, digest in zip(known, digests, strict=True)
        if sleeping.digest != digest
    ]
    if damaged:
        raise CorruptError(damaged, "fingerprints differ from those taken at sleep; everything is still asleep")


def _fall_back(groups: Sequence[tuple[MemoryBackend, list[Sleeping]]]) -> None:
    """Give back what this call took. The store still holds every byte."""
    for backend, group in groups:
        try:
            backend.release([sleeping.storage for sleeping in group])
        except TorporError:
            continue  # its memory stays taken; the bytes in the store decide at the next wake

"""Going to sleep: reserve, copy what changed, then free. A failure leaves everything awake and intact."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice

import torch

from torpor.agreement import Round
from torpor.errors import TorporError
from torpor.fingerprint import Digest, fingerprint_of_zeros, fingerprints
from torpor.kinds import Fate
from torpor.ledger import Row, Stopwatch
from torpor.memory.base import HOST, MemoryBackend, byte_view
from torpor.plan import Decision
from torpor.rebuilding import Resolve, make_ready, with_fate
from torpor.shelf import Place, Shelf, watch
from torpor.stores.base import Slot, Store
from torpor.transfer import Piece, load, save
from torpor.transfer_cuda import SMALL_BYTES

#: Fates whose bytes wait in the store.
STORED = (Fate.MOVED, Fate.CLEAN)
#: What a thread fingerprints ahead of the copy, at least: a stretch that the processor's cache still holds by then.
_GROUP_BYTES = 4 * 1024**2
#: The same for a GPU: it takes about a millisecond for what crosses its link in forty.
_GPU_GROUP_BYTES = 2 * 1024**3


@dataclass(slots=True, eq=False)
class Sleeping:
    """One storage of a sleeping component, and all that its wake needs."""

    decision: Decision
    place: Place | None = None
    """Where the bytes wait; None for fates that store none."""
    digest: Digest | None = None
    """What the bytes were; None where they are dead or never left."""
    copied_bytes: int = 0
    _home: torch.UntypedStorage | torch.Tensor | None = field(default=None, repr=False)

    @property
    def home(self) -> torch.UntypedStorage | torch.Tensor:
        """All bytes of the storage, for a copy or a fingerprint while its memory is there. On the host the storage
        itself: a view takes longer to make than 1 KiB to copy."""
        if self._home is None:
            storage = self.decision.entry.storage
            self._home = storage if self.is_on_host else byte_view(storage)
        return self._home

    @property
    def bytes(self) -> torch.Tensor:
        """The same, as `byte_view` gives them; to be read and written."""
        return self.home if isinstance(self.home, torch.Tensor) else byte_view(self.home)

    @property
    def storage(self) -> torch.UntypedStorage:
        """The storage itself, held alive while it sleeps."""
        return self.decision.entry.storage

    @property
    def fate(self) -> Fate:
        """What became of it."""
        return self.decision.fate

    @property
    def is_on_host(self) -> bool:
        """Whether its memory is the host's."""
        return self.decision.entry.device == HOST

    @property
    def slot(self) -> Slot:
        """Where in the store its bytes wait."""
        if self.place is None:
            raise TypeError(f"{self.decision.entry.name} is {self.fate}: the store holds no bytes of it")
        return self.place.slot

    def piece(self) -> Piece:
        """Its bytes and their place in the store, for a copy in either direction."""
        return Piece(self.home, self.slot)


def drop_caches(decisions: Iterable[Decision]) -> list[Row]:
    """Have the owners clear the caches whose fate is `dropped`; each distinct callable once.

    Must come before the allocator returns its blocks: a cache that is cleared later frees nothing. What
    somebody else still holds after the drop is accounted as `left`.
    """
    dropped = [decision for decision in decisions if decision.fate is Fate.DROPPED]
    if not dropped:
        return []
    owners = {id(drop): drop for decision in dropped for drop in decision.entry.drops}
    watched = [(decision.row(), watch(decision.entry.storage)) for decision in dropped]
    for decision in dropped:
        decision.entry.forget()
    for drop in owners.values():
        drop()
    gc.collect()
    return [row if is_gone() else _still_held(row) for row, is_gone in watched]


def _still_held(row: Row) -> Row:
    return Row(
        row.component,
        row.role,
        Fate.LEFT,
        1,
        row.nbytes,
        reason="its owner dropped it, somebody else holds it",
    )


class Falling:
    """One call's way down. Makes `Sleeping` records; the caller keeps those of a call that succeeded."""

    def __init__(
        self,
        store: Store,
        shelf: Shelf,
        stopwatch: Stopwatch,
        agreed: Round,
        *,
        resolve: Resolve,
        prove_rebuilds: bool,
    ) -> None:
        self._store = store
        self._shelf = shelf
        self._stopwatch = stopwatch
        self._agreed = agreed
        self._resolve = resolve
        self._prove_rebuilds = prove_rebuilds
        self._new_places: list[int] = []
        self._freed: list[Sleeping] = []
        self.stuck: list[Sleeping] = []
        """After a failure whose roll-back failed as well: what is asleep all the same."""

    def run(
        self,
        decisions: Sequence[Decision],
        batch_bytes: int,
        on_freed: Callable[[int], None],
        last: Callable[[], None] = lambda: None,
    ) -> list[Sleeping]:
        """Copy and free `decisions`, at least `batch_bytes` at a time; then call `last`, whose failure counts too.

        Raises whatever went wrong, after everything that this call freed is back in place. Several ranks vote
        after each step, also those that have nothing to move: let them go in one batch.
        """
        sleepers = [Sleeping(decision) for decision in decisions]
        try:
            with self._agreed.stage("reserve"):
                self._reserve(sleepers)
            for batch in list(groups_of(_cheapest_first(sleepers), batch_bytes)) or [[]]:
                with self._agreed.stage("copy"):
                    self._save(batch)
                with self._agreed.stage("free"):
                    freed_bytes = self._free(batch)
                on_freed(freed_bytes)
            last()
        except BaseException as error:
            self._roll_back(error)
            raise
        return sleepers

    def _reserve(self, sleepers: Sequence[Sleeping]) -> None:
        """Room for every storage that may have to be copied, before anything is freed."""
        with self._stopwatch.stage("reserve"):
            make_ready(sleepers, self._resolve, prove=self._prove_rebuilds)
            stored = [s for s in sleepers if s.decision.fate in STORED]
            entries = [s.decision.entry for s in stored]
            places, self._new_places = self._shelf.reserve([(entry.storage, entry.nbytes) for entry in entries])
            for sleeping, place in zip(stored, places, strict=True):
                sleeping.place = place

    def _save(self, batch: Sequence[Sleeping]) -> None:
        """Copy what changed. Fingerprints are taken on the way, a little ahead of the copy: the seconds of the stage
        `fingerprint` are those before the first copy, of all later ones the copies hide what they can.
        """
        on_host: list[Sleeping] = []
        on_gpus: list[Sleeping] = []
        for sleeping in (*in_store_order(batch), *with_fate(batch, Fate.REBUILT)):
            (on_host if sleeping.is_on_host else on_gpus).append(sleeping)
        changed: list[Sleeping] = []
        with self._stopwatch.stage("fingerprint"):
            of_gpus = _begun(_fingerprinted_by_gpus(on_gpus))
        with self._stopwatch.stage("copy"):
            of_host = self._pieces_to_copy(_fingerprinted(on_host), changed, see_zeros=True)
            save(chain(self._pieces_to_copy(of_gpus, changed, see_zeros=False), of_host), self._store)
        for sleeping in changed:
            if sleeping.place is not None:
                sleeping.place.digest = sleeping.digest

    def _pieces_to_copy(
        self, sleepers: Iterable[Sleeping], changed: list[Sleeping], see_zeros: bool
    ) -> Iterator[Piece]:
        """Those that the store should hold and does not, also noted in `changed`; the others learn their fate."""
        for sleeping in sleepers:
            decision, place = sleeping.decision, sleeping.place
            if place is None:
                if decision.fate in STORED:
                    raise LookupError(f"no slot was reserved for {decision.entry.name}")
            elif place.digest == sleeping.digest:
                decision.fate = Fate.CLEAN
            elif see_zeros and sleeping.digest == fingerprint_of_zeros(place.slot.nbytes):
                decision.fate, decision.reason = Fate.ZEROED, "all zero"
                sleeping.place = None
            else:
                place.digest = None  # the slot is about to be overwritten
                sleeping.copied_bytes = place.slot.nbytes
                changed.append(sleeping)
                yield Piece(sleeping.home, place.slot)

    def _free(self, batch: Sequence[Sleeping]) -> int:
        """Give the memory back; what is dead goes last, because a roll-back cannot bring it back."""
        freed_bytes = 0
        with self._stopwatch.stage("free"):
            dead = Fate.ZEROED
            groups = by_backend(sorted(batch, key=lambda s: s.decision.fate is dead))
            for backend, sleepers in groups:
                self._freed.extend(sleepers)
                freed_bytes += backend.release([sleeping.decision.entry.storage for sleeping in sleepers])
            for backend, _ in groups:
                backend.settle()
        return freed_bytes

    def _roll_back(self, error: BaseException) -> None:
        """Everything freed so far comes back. What cannot stays asleep, whole in the store, in `stuck`."""
        try:
            bring_back(self._freed, self._store)
        except TorporError as second:
            self.stuck = self._freed
            error.add_note(f"taking it back failed too ({second}): {len(self.stuck)} storages stay asleep; call wake()")
        else:
            self._shelf.remove(self._new_places)


def bring_back(sleepers: Sequence[Sleeping], store: Store) -> None:
    """Memory and bytes of storages, from wherever they wait. Nothing is verified here."""
    take_memory(sleepers)
    load((sleeping.piece() for sleeping in in_store_order(sleepers)), store)
    zero(sleepers)


def take_memory(sleepers: Iterable[Sleeping]) -> None:
    """Memory for them, with no contents that anybody may read."""
    for backend, group in by_backend(sleepers):
        backend.restore([sleeping.decision.entry.storage for sleeping in group])


def zero(sleepers: Iterable[Sleeping]) -> None:
    """Fill what was dead, or all zero."""
    for sleeping in with_fate(sleepers, Fate.ZEROED):
        sleeping.bytes.zero_()


def in_store_order(sleepers: Iterable[Sleeping]) -> list[Sleeping]:
    """Those whose bytes wait in the store, by their slots: a copy joins what lies side by side."""
    return sorted([s for s in sleepers if s.decision.fate in STORED], key=_offset)


def _offset(sleeping: Sleeping) -> int:
    return sleeping.slot.offset


def by_backend(sleepers: Iterable[Sleeping]) -> list[tuple[MemoryBackend, list[Sleeping]]]:
    """Storages that have a backend, grouped by it in the order of first appearance."""
    groups: dict[int, tuple[MemoryBackend, list[Sleeping]]] = {}
    for sleeping in sleepers:
        backend = sleeping.decision.backend
        if backend is not None:
            group = groups.get(id(backend))
            if group is None:
                group = groups[id(backend)] = backend, []
            group[1].append(sleeping)
    return list(groups.values())


def is_large(sleeping: Sleeping) -> bool:
    """Whether its copy takes long enough to do other things meanwhile."""
    return sleeping.decision.entry.nbytes >= SMALL_BYTES


def same_streams(sleepers: Iterable[Sleeping]) -> Callable[[], AbstractContextManager[None]]:
    """Makes contexts in which those streams are current on the GPUs of `sleepers` that are so now.

    For what is made on a transfer's way: it may be asked for by another thread, whose streams are others.
    """
    devices = {sleeping.decision.entry.device for sleeping in sleepers if not sleeping.is_on_host}
    streams = [torch.cuda.current_stream(device) for device in devices]

    @contextmanager
    def current() -> Iterator[None]:
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield

    return current


def groups_of(sleepers: Iterable[Sleeping], group_bytes: int) -> Iterator[list[Sleeping]]:
    """Groups of at least `group_bytes`, in order; the last may have less."""
    group: list[Sleeping] = []
    nbytes = 0
    for sleeping in sleepers:
        group.append(sleeping)
        nbytes += sleeping.decision.entry.nbytes
        if nbytes >= group_bytes:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _cheapest_first(sleepers: Iterable[Sleeping]) -> list[Sleeping]:
    """What needs no copy first, so that its memory is free at once."""
    return sorted(sleepers, key=lambda s: s.decision.fate in STORED)


def _fingerprinted(sleepers: Sequence[Sleeping]) -> Iterator[Sleeping]:
    """All of them, with their digests: a thread takes those of the next group while this one is copied."""
    with ThreadPoolExecutor(1, "torpor-fingerprint") as thread:
        coming: deque[Future[Sequence[Sleeping]]] = deque()
        for group in groups_of(sleepers, _GROUP_BYTES):
            coming.append(thread.submit(_take_digests, group))
            if len(coming) > 1:
                yield from coming.popleft().result()
        for last in coming:
            yield from last.result()


def _fingerprinted_by_gpus(sleepers: Sequence[Sleeping]) -> Iterator[Sleeping]:
    """All of them, with their digests: each group's are taken while the one before it, handed out, is copied. Those of
    small storages come before everything: to keep the link busy with such takes the processor all its time.
    """
    here = same_streams(sleepers)
    _take_digests([sleeping for sleeping in sleepers if not is_large(sleeping)])
    for group in groups_of(sleepers, _GPU_GROUP_BYTES):
        with here():
            _take_digests([sleeping for sleeping in group if is_large(sleeping)])
        yield from group


def _begun(sleepers: Iterator[Sleeping]) -> Iterator[Sleeping]:
    """The same, with all done already that the first one needs."""
    first = list(islice(sleepers, 1))
    return chain(first, sleepers)


def _take_digests(sleepers: Sequence[Sleeping]) -> Sequence[Sleeping]:
    digests = fingerprints([sleeping.home for sleeping in sleepers])
    for sleeping, digest in zip(sleepers, digests, strict=True):
        sleeping.digest = digest
    return sleepers

"""Opens and closes the account of each call: what memory was in use before and after, and where every byte is."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal
from weakref import ReferenceType

import torch

from torpor.comms import COMPONENT
from torpor.falling import Sleeping
from torpor.inventory import Inventory
from torpor.ledger import Ledger, Leftover, Row, Stopwatch, add_up
from torpor.leftovers import find_leftovers, large_tensors
from torpor.memory import Backends
from torpor.memory.account import Accountant, Addresses
from torpor.memory.base import HOST
from torpor.memory.gpu import GpuBackend
from torpor.stores.base import Store


class Books:
    """The accounts of one sleeper.

    Args:
        in_full: also look for tensors that no component knows, and account for every byte that a GPU's driver counts.
    """

    def __init__(self, store: Store, backends: Backends, *, in_full: bool) -> None:
        self._store = store
        self._backends = backends
        self._in_full = in_full
        self._accountant = Accountant([b for b in backends.every() if isinstance(b, GpuBackend)])
        self._devices: set[torch.device] = set()
        self._known: set[int] = set()
        self._known_on_gpus: frozenset[int] = frozenset()

    def look(self, inventory: Inventory, asleep: Collection[int]) -> None:
        """On which devices there is anything, and what is nobody's leftover: the actor's storages, and those that sleep
        (by `UntypedStorage._cdata`)."""
        self._devices = {entry.device for entry in inventory.entries}
        if self._in_full:
            self._known = set(inventory.keys()).union(asleep)
            gpus = self._gpus()
            self._known_on_gpus = frozenset(e.address for e in inventory.entries if e.device in gpus)

    def candidates(self) -> list[ReferenceType[torch.Tensor]]:
        """Tensors that may turn out to be left over. To be asked for before a plan makes records of every storage:
        all of the process's objects are looked through."""
        return large_tensors(self._backends.keys()) if self._in_full else []

    def leftovers(self, candidates: Iterable[ReferenceType[torch.Tensor]]) -> list[Leftover]:
        """Those of `candidates` that are still there, and neither the actor's nor the store's."""
        return find_leftovers(
            candidates, self._known | {block.untyped_storage()._cdata for block in self._store.memory}
        )

    def note_awake(self, sleepers: Iterable[Sleeping]) -> None:
        """They are back, at addresses that may be others than before."""
        if self._known_on_gpus:
            self._known_on_gpus |= {s.storage.data_ptr() for s in sleepers if not s.is_on_host}

    def open(self, kind: Literal["sleep", "wake"]) -> Ledger:
        """A ledger with what is in use now."""
        return Ledger(
            kind,
            self._store.describe(),
            used_before_bytes=self.used_bytes(),
            host_before_bytes=self._store.host_bytes,
            counts_host=not self._gpus(),
        )

    def close(self, ledger: Ledger, rows: Iterable[Row], watch: Stopwatch, asleep: Iterable[Sleeping]) -> None:
        """Fill in what the call did and what is in use now, while all of `asleep` sleep."""
        ledger.rows = add_up(rows)
        ledger.stages = watch.stages
        ledger.used_after_bytes = self.used_bytes()
        ledger.store_bytes = self._store.reserved_bytes
        ledger.host_bytes = self._store.host_bytes
        if self._in_full:
            comms_bytes = sum(row.freed_bytes for row in ledger.rows if row.component == COMPONENT)
            self._accountant.outside(-comms_bytes if ledger.kind == "sleep" else comms_bytes)
            gpus = self._gpus()
            ledger.devices = self._accountant.accounts(gpus, self._addresses(asleep)) if gpus else []

    def used_bytes(self) -> int:
        """Of the GPUs that have storages; of the host where none has: there the store's own memory counts too."""
        return self._backends.used_bytes(self._gpus() or [HOST])

    def _addresses(self, asleep: Iterable[Sleeping]) -> Addresses:
        """Where on GPUs storages are; one that sleeps without its address kept is nowhere."""
        decisions = [s.decision for s in asleep]
        kept = frozenset(d.entry.address for d in decisions if d.backend is not None and d.backend.keeps_address)
        moved = {d.entry.address for d in decisions if d.backend is not None and not d.backend.keeps_address}
        return Addresses(self._known_on_gpus - moved - kept, kept)

    def _gpus(self) -> list[torch.device]:
        return [device for device in self._devices if device.type == "cuda"]

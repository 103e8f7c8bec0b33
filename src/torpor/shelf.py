"""Which slot of the store holds the bytes of which storage, and what those bytes were.

A slot outlives the wake: if the storage still has the same fingerprint at the next sleep, its bytes need
not be copied again (`clean`). The shelf holds no storage alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torpor.fingerprint import Digest
from torpor.stores.base import Slot, Store

#: Whether a storage that is watched is gone.
Gone = Callable[[], bool]


def watch(storage: torch.UntypedStorage) -> Gone:
    """Tell later whether this storage is gone, without keeping it alive."""
    gone: Gone = StorageWeakRef(storage).expired  # type: ignore[no-untyped-call]
    return gone


@dataclass(slots=True)
class Place:
    """A slot, and the fingerprint of the bytes in it; None while they are unknown."""

    is_orphan: Gone
    slot: Slot
    digest: Digest | None = None


class Shelf:
    """The places of one store, by storage."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._places: dict[int, Place] = {}

    def reserve(self, storages: Sequence[tuple[torch.UntypedStorage, int]]) -> tuple[list[Place], list[int]]:
        """A place for each `(storage, nbytes)`: the one it has, if it still has this size, else a new one.

        Slots of storages that are gone are given back first.

        Returns:
            The places in order, and the keys of the new ones, for `remove` should the sleep fail.

        Raises:
            StoreFullError: they do not fit. Nothing was reserved.
        """
        keys = [storage._cdata for storage, _ in storages]
        alive = set(keys)  # a key is an address, which nothing else gets while the storage is watched
        self.remove([key for key, place in self._places.items() if key not in alive and place.is_orphan()])
        new = [
            (key, storage, nbytes)
            for key, (storage, nbytes) in zip(keys, storages, strict=True)
            if (place := self._places.get(key)) is None or place.slot.nbytes != nbytes
        ]
        self.remove([key for key, _, _ in new if key in self._places])
        slots = self._store.reserve([nbytes for _, _, nbytes in new])
        for (key, storage, _), slot in zip(new, slots, strict=True):
            self._places[key] = Place(watch(storage), slot)
        return [self._places[key] for key in keys], [key for key, _, _ in new]

    def remove(self, keys: Iterable[int]) -> None:
        """Forget places and release their slots."""
        self._store.release([self._places.pop(key).slot for key in keys])

"""Memory that only a backend sees: live, in its own pools, and claimed by no rule.

With one sleeper in the process it belongs to its actor, as far as anybody can tell, and is moved by address. With
several (an actor's and a critic's) nobody can tell whose it is, and it stays: what the others use must not go.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import torch

from torpor.inventory import Entry, Inventory, take_inventory
from torpor.kinds import Fate, Role
from torpor.memory.base import MemoryBackend, byte_view
from torpor.rules.base import Actor, Claim, Rule

_NOBODY_KNOWS_IT = "live in torpor.pool(), and no rule knows it"
_WHOSE = f"{_NOBODY_KNOWS_IT}; another sleeper is open, and it may be its actor's: hand it in as `extra`"


class Owner:
    """What one sleeper has under its care, from now until `leave()`; also known to the other sleepers."""

    def __init__(self, actor: Actor, rules: Sequence[Rule]) -> None:
        self._actor, self._rules = actor, rules
        _open.add(self)

    def leave(self) -> None:
        """The sleeper is closed: its actor's memory is the others' again."""
        _open.discard(self)

    def inventory(self, backends: Sequence[MemoryBackend]) -> Inventory:
        """What the rules claim, and what only `backends` see that is no other sleeper's."""
        found = self._claimed()
        known = _storages(found)
        strays = _strays(backends, known)
        others = [other for other in list(_open) if other is not self] if strays else []
        if others:
            theirs = [storage for other in others for storage in _storages(other._claimed())]
            strays = _strays(backends, known + theirs)
        fate, reason = (Fate.KEPT, _WHOSE) if others else (Fate.MOVED, _NOBODY_KNOWS_IT)
        found.add([_entry(storage, fate, reason) for storage in strays])
        return found

    def _claimed(self) -> Inventory:
        return take_inventory(self._actor, self._rules)


_open: WeakSet[Owner] = WeakSet()


def _strays(backends: Sequence[MemoryBackend], known: Sequence[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    return [storage for backend in backends for storage in backend.strays(known)]


def _storages(inventory: Inventory) -> list[torch.UntypedStorage]:
    return [storage for entry in inventory.entries for storage in entry.storages]


def _entry(storage: torch.UntypedStorage, fate: Fate, reason: str) -> Entry:
    name = f"block of {storage.nbytes()} bytes at {storage.data_ptr():#x}"
    claim = Claim(name, byte_view(storage), Role.OTHER, "other")
    return Entry(
        storage=storage,
        nbytes=storage.nbytes(),
        device=storage.device,
        address=storage.data_ptr(),
        role=claim.role,
        component=claim.component,
        claims=[claim],
        fate=fate,
        reason=reason,
        storages=(storage,),
    )

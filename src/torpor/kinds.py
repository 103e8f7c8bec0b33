"""The words of the account: what a storage is, and what one sleep did with it."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a storage is. Declared from the strongest to the weakest: where two claims meet on one
    storage, the role declared first wins (a tied weight that is also a plain attribute is a `PARAM`, and who
    knows that a parameter is an adapter knows more)."""

    ADAPTER = "adapter"
    PARAM = "param"
    MASTER = "master"
    MOMENT = "moment"
    BUFFER = "buffer"
    GRAD = "grad"
    QUANTIZED_CACHE = "quantized_cache"
    WORKSPACE = "workspace"
    OTHER = "other"

    @property
    def rank(self) -> int:
        """Position in the order above; lower is stronger."""
        return _ROLE_RANK[self]


class Fate(StrEnum):
    """What one sleep does with a storage. See the table in the user's guide."""

    MOVED = "moved"
    CLEAN = "clean"
    REBUILT = "rebuilt"
    DROPPED = "dropped"
    ZEROED = "zeroed"
    KEPT = "kept"
    LEFT = "left"


class State(StrEnum):
    """Where a component is."""

    AWAKE = "awake"
    PARTLY = "partly asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    FALLING = "falling asleep"


_ROLE_RANK = {role: rank for rank, role in enumerate(Role)}

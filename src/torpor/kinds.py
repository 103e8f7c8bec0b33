"""The words of the account: what a storage is, and what one sleep did with it."""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import TypeVar

_Kind = TypeVar("_Kind", bound=type[Enum])


def plain_members(kind: _Kind) -> _Kind:
    """The class with its members as plain attributes, as Python 3.12 has them.

    Before that each look at a member runs a descriptor written in Python, seven times as long as what is done with it;
    a sleep and a wake look at maybe twenty for each storage.
    """
    for member in kind:
        type.__setattr__(kind, member.name, member)  # the class itself refuses
    return kind


@plain_members
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


@plain_members
class Fate(StrEnum):
    """What one sleep does with a storage. See the table in the user's guide."""

    MOVED = "moved"
    CLEAN = "clean"
    REBUILT = "rebuilt"
    DROPPED = "dropped"
    ZEROED = "zeroed"
    KEPT = "kept"
    LEFT = "left"


@plain_members
class State(StrEnum):
    """Where a component is."""

    AWAKE = "awake"
    PARTLY = "partly asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    FALLING = "falling asleep"


_ROLE_RANK = {role: rank for rank, role in enumerate(Role)}

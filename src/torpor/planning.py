"""What a call would do: the actor as it is now, and a fate for each of its storages that is awake."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torpor.books import Books
from torpor.dormant import Dormant
from torpor.errors import UsageError
from torpor.inventory import Inventory
from torpor.kinds import Fate
from torpor.memory import Backends
from torpor.plan import Decision, Plan, choose_bytes, decide
from torpor.strays import Owner

#: Component names that may be asked for although nothing in them exists yet.
_KNOWN = ("params", "adapters", "grads", "optimizer", "buffers", "caches", "comms")


class Planner:
    """Plans the calls of one sleeper.

    Args:
        keep: components that never sleep.
        named: components that the user named, with or without storages.
    """

    def __init__(
        self,
        owner: Owner,
        backends: Backends,
        dormant: Dormant,
        books: Books,
        *,
        keep: Collection[str],
        named: Collection[str],
    ) -> None:
        self._owner = owner
        self._backends = backends
        self._dormant = dormant
        self._books = books
        self._keep = frozenset(keep)
        self._named = named

    def inventory(self) -> Inventory:
        """All memory of the actor, asleep or awake."""
        return self._owner.inventory(list(self._backends.every()))

    def plan(
        self, names: Collection[str] | None, need_bytes: int | None = None, only: Collection[int] | None = None
    ) -> Plan:
        """Decisions for everything that is awake, in `names` if given, and in `only` (by `UntypedStorage._cdata`) if
        given; as many as free `need_bytes` if given.

        Raises:
            UsageError: an unknown component, or more bytes than that would free.
        """
        self._backends.refresh()
        inventory = self.inventory()
        self._require_known(names, inventory)
        asleep = self._dormant.keys()
        self._books.look(inventory, asleep)
        entries = [
            entry
            for entry in inventory.entries
            if (names is None or entry.component in names)
            and entry.storage._cdata not in asleep
            and (only is None or entry.storage._cdata in only)
        ]
        plan = decide(entries, self._backends, self._keep)
        return plan if need_bytes is None else Plan(_enough(plan.decisions, need_bytes, names))

    def left_after_drop(self, decisions: Sequence[Decision]) -> list[Decision]:
        """What is still to be done once caches were dropped.

        Memory that nobody claimed may have gone with them: it was theirs, or garbage that the collector found.
        """
        left = [d for d in decisions if d.fate is not Fate.DROPPED]
        if len(left) == len(decisions):
            return left
        self._backends.refresh()
        return [d for d in left if d.backend is None or d.backend.releasable_bytes(d.entry.storage)]

    def _require_known(self, names: Collection[str] | None, inventory: Inventory) -> None:
        known = {*_KNOWN, *self._named, *inventory.by_component(), *self._dormant.components()}
        unknown = self._keep.union(names or ()) - known
        if unknown:
            raise UsageError(f"unknown component {sorted(unknown)}; there are {sorted(known)}")


def _enough(decisions: Sequence[Decision], need_bytes: int, names: Collection[str] | None) -> list[Decision]:
    can_free = sum(d.releasable_bytes for d in decisions)
    if need_bytes > can_free:
        raise UsageError(
            f"need_bytes={need_bytes}: what is awake in {sorted(names) if names else 'all components'} frees "
            f"at most {can_free} bytes; explain() lists it"
        )
    return choose_bytes(decisions, need_bytes)

"""What sleeps, by component: whole or in part, behind its guards, readable from the store."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from torpor.falling import Sleeping
from torpor.guards import Guards
from torpor.kinds import State
from torpor.plan import Decision
from torpor.reading import Reader
from torpor.stores.base import Store


class Dormant:
    """The sleeping storages of one actor.

    Args:
        guards: set whenever that changes what sleeps.
        keep: components that never sleep: what becomes of their storages is noted, and not guarded.
    """

    def __init__(self, store: Store, guards: Guards, keep: Collection[str]) -> None:
        self._store = store
        self._guards = guards
        self._keep = keep
        self._by_component: dict[str, list[Sleeping]] = {}
        self._partly: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._by_component)

    def __iter__(self) -> Iterator[Sleeping]:
        """Every storage that sleeps, component by component."""
        return (sleeping for group in self._by_component.values() for sleeping in group)

    def components(self, names: Collection[str] | None = None) -> list[str]:
        """Those that sleep, whole or in part; of `names` if given."""
        return [name for name in self._by_component if names is None or name in names]

    def of(self, names: Collection[str] | None) -> list[Sleeping]:
        """What sleeps of `names`, or of all."""
        return [sleeping for name in self.components(names) for sleeping in self._by_component[name]]

    def keys(self, names: Collection[str] | None = None) -> set[int]:
        """`UntypedStorage._cdata` of every storage over memory that sleeps, of `names` if given."""
        return {storage._cdata for s in self.of(names) for storage in s.decision.entry.storages}

    def states(self) -> dict[str, State]:
        """Of every component that sleeps, whole or in part."""
        return {name: State.PARTLY if name in self._partly else State.ASLEEP for name in self._by_component}

    @property
    def partly(self) -> frozenset[str]:
        """Components of which something else is awake."""
        return frozenset(self._partly)

    def note_partly(self, touched: Collection[str], awake: Collection[str]) -> None:
        """Of the components `touched` those in `awake` still have something that could sleep."""
        self._partly = (self._partly - set(touched)) | (set(touched) & set(awake))

    def adopt(self, sleepers: Iterable[Sleeping]) -> None:
        """They sleep from now on. Their guards were set before the first of them was copied."""
        for sleeping in sleepers:
            self._by_component.setdefault(sleeping.decision.entry.component, []).append(sleeping)

    def release(self, sleepers: Sequence[Sleeping]) -> None:
        """They are awake, and no longer guarded."""
        woken = {id(s) for s in sleepers}
        for name in list(self._by_component):
            self._by_component[name] = [s for s in self._by_component[name] if id(s) not in woken]
            if not self._by_component[name]:
                del self._by_component[name]
                self._partly.discard(name)
        self.guard()

    def guard(self, falling: Iterable[Decision] = ()) -> None:
        """Guard what sleeps, and what is falling asleep."""
        entries = [s.decision.entry for s in self]
        entries += [d.entry for d in falling if d.entry.component not in self._keep]
        self._guards.arm({s._cdata: entry.component for entry in entries for s in entry.storages})

    def reader(self, but: Collection[int] = ()) -> Reader:
        """A reader of what sleeps, `but` those (by `id`) whose bytes are back already."""
        return Reader([s for s in self if id(s) not in but], self._store)

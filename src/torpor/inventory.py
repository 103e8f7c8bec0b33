"""From what the rules claim to storages: each byte in one entry, with one role, one component, one fate.

Tensors share storages (views, ties), and two storages can share memory (numpy round trips,
`torch.frombuffer`). Claims are grouped by storage, storages by memory, and each group becomes one `Entry`:

- the strongest role gives component and first name;
- a fate that gives up contents (`zeroed`, `dropped`, `rebuilt`) needs every claim that has a say to allow
  exactly that, and claims that allow it to cover every byte; otherwise the entry is `moved`, with the reason;
- `kept` wins over everything.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from torpor.kinds import Fate, Role
from torpor.rules.base import Actor, Claim, Gate, Rebuild, Rule, Standing
from torpor.rules.walk import plain


@dataclass(slots=True, eq=False)
class Entry:
    """One piece of memory: a storage, or several storages over the same bytes."""

    storage: torch.UntypedStorage
    """The storage that contains all others of this entry."""
    nbytes: int
    device: torch.device
    address: int
    role: Role
    component: str
    names: tuple[str, ...]
    """All names, the strongest claim's first."""
    claims: tuple[Claim, ...]
    """All claims, the strongest first. With fate `rebuilt` the first one's tensor is what to rebuild."""
    fate: Fate
    reason: str
    storages: tuple[torch.UntypedStorage, ...]
    """All storages over this memory, `storage` first."""

    @property
    def name(self) -> str:
        """The strongest claim's name."""
        return self.names[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of the strongest claim's tensor; for messages."""
        return self.claims[0].tensor.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the strongest claim's tensor; for messages."""
        return self.claims[0].tensor.shape

    @property
    def rebuild(self) -> Rebuild | None:
        """How to compute the contents again; set with fate `rebuilt` only."""
        return self.claims[0].rebuild if self.fate is Fate.REBUILT else None

    @property
    def drops(self) -> tuple[Callable[[], None], ...]:
        """What clears the owners' caches, each once; set with fate `dropped` only."""
        if self.fate is not Fate.DROPPED:
            return ()
        return tuple(dict.fromkeys(claim.drop for claim in self.claims if claim.drop is not None))

    def forget(self) -> None:
        """Let go of the storages, so that their owner's drop can free them. Names and sizes stay."""
        self.storage = torch.UntypedStorage(0)
        self.storages = ()
        self.claims = tuple(replace(claim, tensor=_like_on_meta(claim.tensor)) for claim in self.claims)


@dataclass(slots=True, eq=False)
class Inventory:
    """All memory of one actor, at one moment. Holds the storages: drop it when done."""

    entries: list[Entry]
    """By component in the order of first appearance, then by name."""
    left: list[Claim]
    """What has a name and no memory to treat: meta, lazy, opaque tensors."""
    _by_storage: dict[int, Entry] = field(default_factory=dict, repr=False)
    """`StorageImpl` -> entry."""

    def by_component(self) -> dict[str, list[Entry]]:
        """Component -> its entries, in the order of `entries`."""
        components: dict[str, list[Entry]] = {}
        for entry in self.entries:
            components.setdefault(entry.component, []).append(entry)
        return components

    def find(self, tensor: torch.Tensor) -> Entry | None:
        """The entry with the memory of `tensor` (of its first part, for a subclass); None if there is none."""
        for _, part, why_left in plain("", tensor):
            if not why_left:
                storage = part.untyped_storage()
                return self._by_storage.get(storage._cdata) or self._at(storage)
        return None

    def _at(self, storage: torch.UntypedStorage) -> Entry | None:
        """By address: another storage over memory that an entry has."""
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        spots = sorted((e.address, i) for i, e in enumerate(self.entries) if e.device == storage.device and e.nbytes)
        position = bisect_right(spots, (begin, len(self.entries))) - 1
        if position < 0 or begin == end:
            return None
        entry = self.entries[spots[position][1]]
        return entry if end <= entry.address + entry.nbytes else None


def take_inventory(actor: Actor, rules: Sequence[Rule]) -> Inventory:
    """Ask every rule for its claims and merge them, one entry for each piece of memory."""
    raise NotImplementedError

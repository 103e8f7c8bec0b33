"""From what the rules claim to storages: each byte in one entry, with one role, one component, one fate.

Tensors share storages (views, ties), and two storages can share memory (numpy round trips,
`torch.frombuffer`). Claims are grouped by storage, storages by memory, and each group becomes one `Entry`:

- the strongest role gives component and first name;
- a fate that gives up contents (`zeroed`, `dropped`, `rebuilt`) needs every claim that has a say to allow
  exactly that, and claims that allow it to cover every byte; otherwise the entry is `moved`, with the reason;
- `kept` wins over everything.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from torpor.kinds import Fate, Role
from torpor.rules.base import Actor, Claim, Gate, Rebuild, Rule, Standing
from torpor.rules.walk import plain

# looked at for each of maybe 100,000 claims: to name a member takes as long as all that is done with it (Python 3.11)
_MOVED, _LEFT, _REBUILT, _DECLARED = Fate.MOVED, Fate.LEFT, Fate.REBUILT, Standing.DECLARED


@dataclass(slots=True, eq=False)
class Entry:
    """One piece of memory: a storage, or several storages over the same bytes."""

    storage: torch.UntypedStorage = field(repr=False)
    """The storage that contains all others of this entry."""
    nbytes: int
    device: torch.device
    address: int
    role: Role
    component: str
    claims: list[Claim] = field(repr=False)
    """All claims, the strongest first. With fate `rebuilt` the first one's tensor is what to rebuild."""
    fate: Fate
    reason: str
    storages: tuple[torch.UntypedStorage, ...] = field(repr=False)
    """All storages over this memory, `storage` first."""

    @property
    def name(self) -> str:
        """The strongest claim's name."""
        return self.claims[0].name

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the strongest claim's first."""
        return tuple(dict.fromkeys(claim.name for claim in self.claims))

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
        self.storage = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        self.storages = ()
        self.claims = [replace(claim, tensor=_like_on_meta(claim.tensor)) for claim in self.claims]


@dataclass(slots=True, eq=False)
class Inventory:
    """All memory of one actor, at one moment. Holds the storages: drop it when done."""

    entries: list[Entry] = field(init=False, default_factory=list)
    """By component in the order of first appearance, then by name; what was added later comes last."""
    left: list[Claim]
    """What has a name and no memory to treat: meta, lazy, opaque tensors."""
    _by_storage: dict[int, Entry] = field(init=False, default_factory=dict, repr=False)
    """`StorageImpl` -> entry."""

    def add(self, entries: Sequence[Entry]) -> None:
        """Append what was not known yet."""
        self.entries += entries
        self._by_storage.update({storage._cdata: entry for entry in entries for storage in entry.storages})

    def by_component(self) -> dict[str, list[Entry]]:
        """Component -> its entries, in the order of `entries`."""
        return _by_component(self.entries)

    def keys(self) -> Set[int]:
        """`UntypedStorage._cdata` of every storage."""
        return self._by_storage.keys()

    def find(self, tensor: torch.Tensor) -> Entry | None:
        """The entry with the memory of `tensor` (of a subclass: its first part); None if there is none."""
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
    """Ask every rule for its claims and merge them: one entry for each piece of memory.

    Where claims are equally strong the earlier rule's goes first, so give the rules from the most specific
    to the most general. The fate of an entry does not depend on any order.
    """
    with collector_paused():
        found, left = _collect(actor, rules)
        gates = _Gates()
        entries = [_merged(piece, gates) for piece in _pieces(found)]
        inventory = Inventory(left)
        inventory.add(_in_order(entries))
        _move_what_has_no_source(inventory)
        return inventory


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection of cycles inside: while 100,000 records are made it would run over the whole heap
    several times, two thirds of the time in a process that has a few large libraries."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_Piece: TypeAlias = list[Entry]
"""Storages over the same memory. The first begins at the lowest address, and is the largest that does."""


def _collect(actor: Actor, rules: Sequence[Rule]) -> tuple[list[Entry], list[Claim]]:
    """An entry for each storage, as its first claim has it, with all claims in the order of the rules."""
    by_storage: dict[int, Entry] = {}
    left: list[Claim] = []
    for rule in rules:
        for claim in rule.claims(actor):
            if claim.fate is _LEFT:
                left.append(claim)
                continue
            storage = claim.tensor.untyped_storage()
            key = storage._cdata
            entry = by_storage.get(key)
            if entry is None:
                by_storage[key] = Entry(
                    storage,
                    storage.nbytes(),
                    storage.device,
                    storage.data_ptr(),
                    claim.role,
                    claim.component,
                    [claim],
                    claim.fate,
                    claim.reason,
                    (storage,),
                )
            else:
                entry.claims.append(claim)
    with_memory = []
    for entry in by_storage.values():
        if entry.address or not entry.nbytes:
            with_memory.append(entry)
        else:
            left += [replace(claim, fate=Fate.LEFT, reason="no memory behind it") for claim in entry.claims]
    return with_memory, left


def _pieces(entries: Sequence[Entry]) -> list[_Piece]:
    """Storages that share at least one byte belong together. In the order of the first claim."""
    spans: dict[torch.device, list[tuple[int, int, int]]] = {}
    pieces: list[_Piece] = [[entry] for entry in entries]
    for index, entry in enumerate(entries):
        if entry.nbytes:
            spans.setdefault(entry.device, []).append((entry.address, -entry.nbytes, index))
    for on_device in spans.values():
        on_device.sort()
        end = first = 0
        for address, minus_nbytes, index in on_device:
            if address >= end:
                first, end = index, address - minus_nbytes
            else:
                pieces[first] += pieces[index]
                pieces[index] = []
                end = max(end, address - minus_nbytes)
    return [piece for piece in pieces if piece]


def _merged(piece: _Piece, gates: _Gates) -> Entry:
    """The first of `piece`, with the claims of all and the fate that these allow."""
    entry = piece[0]
    if len(piece) == len(entry.claims) == 1 and _are_simply_moved(entry.claims):
        return entry  # it is as its only claim has it
    alone_nbytes, first_names = entry.nbytes, [one.claims[0].name for one in piece[:4]]
    if len(piece) > 1:
        entry.claims = [claim for one in piece for claim in one.claims]
        entry.nbytes = max(one.address + one.nbytes for one in piece) - entry.address
        entry.storages = tuple(one.storage for one in piece)
    entry.claims, entry.fate, entry.reason = _judge(entry, gates)
    if entry.nbytes > alone_nbytes:
        entry.fate, entry.reason = Fate.KEPT, f"separate storages overlap in part: {', '.join(first_names)}"
    entry.role, entry.component = entry.claims[0].role, entry.claims[0].component
    return entry


def _in_order(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for group in _by_component(entries).values() for entry in sorted(group, key=_first_name)]


def _first_name(entry: Entry) -> str:
    return entry.claims[0].name


def _by_component(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    components: dict[str, list[Entry]] = {}
    for entry in entries:
        components.setdefault(entry.component, []).append(entry)
    return components


_GIVES_UP_CONTENTS = frozenset({Fate.ZEROED, Fate.DROPPED, Fate.REBUILT})


_Verdict: TypeAlias = tuple[list[Claim], Fate, str]
"""Claims with the strongest first, the fate, the reason."""


def _strength(claim: Claim) -> int:
    return claim.role.rank


class _Gates:
    """Asks each gate once for each inventory."""

    def __init__(self) -> None:
        self._answers: dict[int, bool] = {}

    def reason_if_closed(self, claim: Claim) -> str | None:
        for gate in claim.gates:
            if not self._is_open(gate):
                return gate.reason_when_closed
        return None

    def _is_open(self, gate: Gate) -> bool:
        if id(gate) not in self._answers:
            self._answers[id(gate)] = gate.is_open()
        return self._answers[id(gate)]


def _judge(entry: Entry, gates: _Gates) -> _Verdict:
    """Order the claims and find the most careful fate."""
    if _are_simply_moved(entry.claims):
        claims = sorted(entry.claims, key=_strength)
        return claims, Fate.MOVED, _first_reason(claims)
    claims, voters = _by_strength(entry.claims)
    for claim in claims:
        if claim.fate is Fate.KEPT:
            return claims, Fate.KEPT, claim.reason
    opinions = [_opinion(claim, gates) for claim in voters]
    wanted = next((fate for fate, _ in opinions if fate in _GIVES_UP_CONTENTS), None)
    if wanted is None:
        return claims, Fate.MOVED, opinions[0][1]
    for claim, (fate, reason) in zip(voters, opinions, strict=True):
        if fate is not wanted:
            return claims, Fate.MOVED, _forbidden(wanted, claim, fate, reason)
    objection = _gap(voters, wanted, entry.address, entry.nbytes)
    if objection:
        return claims, Fate.MOVED, f"not {wanted}: {objection}"
    if wanted is Fate.REBUILT:
        claims = sorted(claims, key=lambda claim: claim.rebuild is None)
    return claims, wanted, opinions[0][1]


def _are_simply_moved(claims: Sequence[Claim]) -> bool:
    """The usual case, and there are many: nothing to weigh."""
    for claim in claims:  # noqa: SIM110 - `all` over a generator takes twice as long
        if claim.fate is not _MOVED or claim.standing >= _DECLARED:
            return False
    return True


def _first_reason(claims: Sequence[Claim]) -> str:
    for claim in claims:
        if claim.reason:
            return claim.reason
    return ""


def _by_strength(found: list[Claim]) -> tuple[list[Claim], list[Claim]]:
    """All claims, the strongest first, and those of them that have a say in the fate.

    A claim by place alone has none where somebody declared the storage or owns it, and none where another rule
    knows the same role; any claim has none where a rule knows the owner of the memory in the same role.
    """
    declared = any(claim.standing >= Standing.DECLARED for claim in found)
    known = {claim.role for claim in found if claim.standing in (Standing.KNOWN, Standing.OWNED)}
    owned = {claim.role for claim in found if claim.standing is Standing.OWNED}

    def weakness(claim: Claim) -> tuple[bool, int]:
        return declared and claim.standing is Standing.FOUND, _strength(claim)

    claims = sorted(found, key=weakness)
    voters = [
        claim
        for claim in claims
        if (claim.standing is not Standing.FOUND or not (declared or claim.role in known))
        and (claim.standing is Standing.OWNED or claim.role not in owned)
    ]
    return claims, voters


def _opinion(claim: Claim, gates: _Gates) -> tuple[Fate, str]:
    if claim.fate not in _GIVES_UP_CONTENTS:
        return Fate.MOVED, claim.reason
    closed = gates.reason_if_closed(claim)
    return (claim.fate, claim.reason) if closed is None else (Fate.MOVED, closed)


def _forbidden(wanted: Fate, claim: Claim, fate: Fate, reason: str) -> str:
    why = f"{claim.name} ({claim.role}) is to be {fate}"
    return f"not {wanted}: {why}" + (f": {reason}" if reason else "")


def _gap(claims: Sequence[Claim], fate: Fate, address: int, nbytes: int) -> str:
    """Why `claims`, which all allow `fate`, are not enough for the whole memory; empty if they are."""
    if fate is Fate.REBUILT:
        if any(claim.rebuild is not claims[0].rebuild for claim in claims):
            return "several rebuilds are declared for one storage"
        if claims[0].rebuild is None:
            return f"{claims[0].name} does not say how"
        claims = claims[:1]
    covered = _covered_bytes([claim.tensor for claim in claims], address, nbytes)
    return "" if covered == nbytes else f"the claims cover {covered} of the storage's {nbytes} bytes"


def _covered_bytes(tensors: Sequence[torch.Tensor], address: int, nbytes: int) -> int:
    if not nbytes or any(t.nbytes == nbytes and _is_dense(t) for t in tensors):
        return nbytes
    covered, end = 0, address
    for begin, length in sorted((t.data_ptr(), t.nbytes) for t in tensors if _is_dense(t)):
        covered += max(0, begin + length - max(end, begin))
        end = max(end, begin + length)
    return covered


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their range of memory, each byte once, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _move_what_has_no_source(inventory: Inventory) -> None:
    """A rebuild needs sources that come back by copy, never left, or are rebuilt from such as do: one step, no more."""
    rebuilt = [entry for entry in inventory.entries if entry.fate is _REBUILT]
    for entry, reason in [(entry, _missing_source(inventory, entry)) for entry in rebuilt]:
        if reason:
            entry.fate, entry.reason = Fate.MOVED, reason


def _missing_source(inventory: Inventory, entry: Entry) -> str:
    if entry.rebuild is None:
        return ""
    for source in entry.rebuild.sources:
        for part in _parts(source):
            home = inventory.find(part)
            if home is entry:
                return "not rebuilt: its source shares its memory"
            if home is not None and home.fate in _GIVES_UP_CONTENTS and not _is_rebuilt_first(inventory, home):
                return f"not rebuilt: its source {home.name} is {home.fate}"
    return ""


def _is_rebuilt_first(inventory: Inventory, entry: Entry) -> bool:
    """Whether it is rebuilt, and from nothing that is."""
    if entry.rebuild is None:
        return False
    homes = [inventory.find(part) for source in entry.rebuild.sources for part in _parts(source)]
    return all(home is None or home.fate not in _GIVES_UP_CONTENTS for home in homes)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    return (part for _, part, why_left in plain("", tensor) if not why_left)


def _like_on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

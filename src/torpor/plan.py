"""One fate for each storage, with the reason, before anything moves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torpor.errors import GIB
from torpor.inventory import Entry
from torpor.kinds import Fate
from torpor.ledger import Row, Sums, fates_in_words
from torpor.memory.base import MemoryBackend

_KEPT, _DROPPED = Fate.KEPT, Fate.DROPPED  # to name a member takes as long as to look one up in a dict (Python 3.11)
#: Fates that give memory back without copying, cheapest first; `need_bytes=` takes them before any `moved`.
_WITHOUT_A_COPY = (Fate.DROPPED, Fate.ZEROED, Fate.REBUILT)


@dataclass(slots=True, eq=False)
class Decision:
    """What will be done with one storage, and why."""

    entry: Entry
    fate: Fate
    reason: str
    backend: MemoryBackend | None = None
    """Who gives the memory back; None for `kept` and `dropped`."""
    releasable_bytes: int = 0

    def row(self) -> Row:
        """This decision as a line of the account, with nothing copied."""
        return add_up_decisions([(self, 0)])[0]


def add_up_decisions(decisions: Iterable[tuple[Decision, int]]) -> list[Row]:
    """Decisions, each with the bytes that were copied, as lines of the account."""
    sums = Sums()
    for decision, copied_bytes in decisions:
        entry = decision.entry
        row = sums.row(entry.component, entry.role, decision.fate, decision.reason)
        row.storages += 1
        row.nbytes += entry.nbytes
        row.copied_bytes += copied_bytes
        row.freed_bytes += decision.releasable_bytes
    return sums.rows()


@dataclass(slots=True)
class Plan:
    """One decision for each storage that the call may touch."""

    decisions: list[Decision]

    def table(self) -> str:
        """The plan for a person. `moved` bytes turn `clean` where the store holds the same, `zeroed` if all are 0."""
        rows = add_up_decisions((decision, 0) for decision in self.decisions)
        line = "{:<12} {:<15} {:<8} {:>8} {:>10} {:>10}  {}"
        head = line.format("component", "role", "fate", "storages", "GiB", "would free", "why")
        body = [
            line.format(
                row.component,
                row.role,
                row.fate,
                row.storages,
                f"{row.nbytes / GIB:.3f}",
                f"{row.freed_bytes / GIB:.3f}",
                row.reason,
            ).rstrip()
            for row in rows
        ]
        by_fate: dict[Fate, int] = {}
        for row in rows:
            by_fate[row.fate] = by_fate.get(row.fate, 0) + row.nbytes
        return "\n".join([head, *body, "in all: " + (fates_in_words(by_fate) or "nothing")])


def decide(
    entries: Iterable[Entry],
    backends: Mapping[str, Sequence[MemoryBackend]],
    keep: Collection[str],
) -> Plan:
    """Give each entry its fate.

    Args:
        entries: what is awake and may go to sleep.
        backends: memory backends by `torch.device.type`, the preferred one first.
        keep: components that were asked to stay.
    """
    entries = list(entries)
    on = {device: backends.get(device.type, ()) for device in {entry.device for entry in entries}}
    return Plan([_decide_one(entry, on[entry.device], keep) for entry in entries])


def _decide_one(entry: Entry, backends: Sequence[MemoryBackend], keep: Collection[str]) -> Decision:
    if entry.component in keep:
        return Decision(entry, Fate.KEPT, "asked for")
    if entry.fate is _KEPT:
        return Decision(entry, Fate.KEPT, entry.reason)
    if entry.fate is _DROPPED:
        return Decision(entry, Fate.DROPPED, entry.reason, None, entry.nbytes)
    if entry.nbytes == 0:
        return Decision(entry, Fate.KEPT, "empty")
    refusals: list[str] = []
    for backend in backends:
        refusal = _refusal(entry, backend)
        if refusal is None:
            releasable_bytes = backend.releasable_bytes(entry.storage)
            if releasable_bytes:
                return Decision(entry, entry.fate, entry.reason, backend, releasable_bytes)
            refusal = "too small to give a page back"
        refusals.append(refusal)
    return Decision(entry, Fate.KEPT, "; ".join(refusals) or f"no memory backend for {entry.device.type}")


def _refusal(entry: Entry, backend: MemoryBackend) -> str | None:
    if len(entry.storages) > 1 and not backend.keeps_address:
        return "two owners of the same memory, and its address would change"
    return backend.refusal(entry.storage)


def choose_bytes(decisions: Sequence[Decision], need_bytes: int) -> list[Decision]:
    """As few bytes as free at least `need_bytes`: what costs no copy first, then copies, no larger than needed.

    Everything, if all of it together frees less.
    """
    chosen: list[Decision] = []
    missing = need_bytes
    for without_a_copy in (True, False):
        group = [d for d in decisions if d.releasable_bytes and (d.fate in _WITHOUT_A_COPY) == without_a_copy]
        too_large: list[Decision] = []
        for decision in sorted(group, key=lambda d: -d.releasable_bytes):
            if 0 < missing < decision.releasable_bytes:
                too_large.append(decision)
            elif missing > 0:
                chosen.append(decision)
                missing -= decision.releasable_bytes
        if missing > 0 and too_large:
            chosen.append(too_large[-1])
            missing -= too_large[-1].releasable_bytes
    return _without_surplus(chosen, -missing)


def _without_surplus(chosen: list[Decision], surplus_bytes: int) -> list[Decision]:
    """Leave out what a later, larger choice made needless; what would be copied first, the largest first."""
    needed = []
    for decision in sorted(chosen, key=lambda d: (d.fate in _WITHOUT_A_COPY, -d.releasable_bytes)):
        if decision.releasable_bytes <= surplus_bytes:
            surplus_bytes -= decision.releasable_bytes
        else:
            needed.append(decision)
    return needed

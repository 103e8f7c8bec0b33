"""Rebuilds: made ready and proved before their originals are freed, in the right order when they come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from torpor.fingerprint import fingerprints
from torpor.kinds import Fate
from torpor.memory.base import byte_view
from torpor.rules.walk import plain

if TYPE_CHECKING:
    from torpor.falling import Sleeping
    from torpor.inventory import Entry
    from torpor.rules.base import Rebuild

#: Resolves a tensor that may sleep to one with its contents: itself, or a host copy from the store.
Resolve = Callable[[torch.Tensor], torch.Tensor]

#: Scratch memory for the proof of a rebuild that can be narrowed.
_PROOF_BYTES = 256 * 1024**2


def with_fate(sleepers: Iterable[Sleeping], fate: Fate) -> list[Sleeping]:
    """Those with this fate. Asked about all storages several times a call, and to name a member costs more than to
    compare with one (Python 3.11)."""
    return [sleeping for sleeping in sleepers if sleeping.decision.fate is fate]


def make_ready(sleepers: Iterable[Sleeping], resolve: Resolve, *, prove: bool) -> None:
    """Bring up to date what is to be rebuilt; with `prove`, have everything moved that a rebuild would change.

    Args:
        sleepers: those whose originals are about to be given up, all of them still there.
        resolve: for sources, which may be asleep already.
    """
    rebuilt = [(s, s.decision.entry.rebuild) for s in with_fate(sleepers, Fate.REBUILT)]
    refreshed: set[int] = set()
    for _, rebuild in rebuilt:
        if rebuild is not None and rebuild.refresh is not None and id(rebuild.refresh) not in refreshed:
            refreshed.add(id(rebuild.refresh))
            rebuild.refresh(*map(resolve, rebuild.sources))
    for sleeping, rebuild in rebuilt:
        if rebuild is None:
            raise TypeError(f"{sleeping.decision.entry.name} is to be rebuilt, and no claim says how")
        if prove and not rebuild.agree(_gives_its_bits(sleeping.decision.entry, rebuild, resolve)):
            sleeping.decision.fate = Fate.MOVED
            sleeping.decision.reason = "its rebuild does not give the bits it has"


def _gives_its_bits(entry: Entry, rebuild: Rebuild, resolve: Resolve) -> bool:
    """Rebuild into scratch memory and compare; in stretches of some MiB, where the rebuild has such."""
    original = entry.claims[0].tensor
    if rebuild.narrow is None:
        scratch = torch.empty_strided(original.size(), original.stride(), dtype=original.dtype, device=original.device)
        rebuild.fn(scratch, *map(resolve, rebuild.sources))
        rebuilt, kept = fingerprints([byte_view(scratch.untyped_storage()), byte_view(entry.storage)])
        return rebuilt == kept
    alike, length = True, _PROOF_BYTES // original.itemsize
    for begin in range(0, original.numel(), length):  # to the end, whatever is found: other ranks may take part
        end = min(begin + length, original.numel())
        scratch = torch.empty(end - begin, dtype=original.dtype, device=original.device)
        part = rebuild.narrow(begin, end)
        part.fn(scratch, *map(resolve, part.sources))
        kept_bytes = byte_view(entry.storage)[begin * original.itemsize : end * original.itemsize]
        alike &= torch.equal(scratch.view(torch.uint8), kept_bytes)
    return alike


def rebuilt_first(sleepers: Sequence[Sleeping]) -> list[Sleeping]:
    """What is rebuilt from nothing that is itself rebuilt in the same call, so that the rest finds it there."""
    rebuilt = with_fate(sleepers, Fate.REBUILT)
    storages = {storage._cdata for s in rebuilt for storage in s.decision.entry.storages}
    return [s for s in rebuilt if storages.isdisjoint(_source_storages(s.decision.entry.rebuild))]


def _source_storages(rebuild: Rebuild | None) -> set[int]:
    """`UntypedStorage._cdata` of what it is rebuilt from."""
    sources = rebuild.sources if rebuild is not None else ()
    parts = (part for source in sources for _, part, why_left in plain("", source) if not why_left)
    return {part.untyped_storage()._cdata for part in parts}

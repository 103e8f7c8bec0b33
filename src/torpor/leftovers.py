"""Tensors that stay on the device although no component knows them, and who holds them."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable
from types import FrameType
from typing import Any
from weakref import ReferenceType, ref

import torch

from torpor.ledger import Leftover

#: Smaller tensors are not worth a line.
MIN_BYTES = 1024**2
#: Holders are looked for among the largest only.
_MAX_NAMED = 8


def large_tensors(device_types: Collection[str]) -> list[ReferenceType[torch.Tensor]]:
    """Live tensors on devices of those types whose storage has at least `MIN_BYTES`, not kept alive.

    Only tensors with a Python object are seen: what C++ alone holds (saved activations) is not.
    """
    return [
        ref(tensor)
        for tensor in _live_tensors()
        if tensor.layout is torch.strided
        and (storage := tensor.untyped_storage()).nbytes() >= MIN_BYTES  # most are smaller: what is cheap goes first
        and storage.device.type in device_types
    ]


def find_leftovers(large: Iterable[ReferenceType[torch.Tensor]], known: Collection[int]) -> list[Leftover]:
    """Those that are still there and whose storage is not in `known`, the largest first, one line a storage.

    Args:
        large: from `large_tensors`.
        known: `UntypedStorage._cdata` of every storage in the account.
    """
    found: dict[int, torch.Tensor] = {}
    for tensor in (reference() for reference in large):
        if tensor is not None:
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage.nbytes() >= MIN_BYTES:
                found.setdefault(storage._cdata, tensor)
    largest_first = sorted(found.values(), key=lambda tensor: -tensor.untyped_storage().nbytes())
    holders = _holders(largest_first[:_MAX_NAMED], found)
    return [_describe(tensor, holders.get(id(tensor), "not looked for: too many")) for tensor in largest_first]


def _live_tensors() -> list[torch.Tensor]:
    """Every tensor with a Python object, but for those that are made of others: these are looked at themselves.

    Found by type, not `isinstance`: that one asks proxies, which answer for what they wrap, and is slower. All objects
    of the process pass; `compress` and `map` in place of this loop took twice as long.
    """
    kinds = _types_with_memory()
    return [thing for thing in gc.get_objects() if type(thing) in kinds]


def _types_with_memory() -> set[type]:
    """`torch.Tensor` and every subclass there is that does not stand for other tensors."""
    kinds: set[type[torch.Tensor]] = set()
    new: list[type[torch.Tensor]] = [torch.Tensor]
    while new:
        kind = new.pop()
        kinds.add(kind)
        new += [child for child in type.__subclasses__(kind) if child not in kinds]
    return {kind for kind in kinds if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__}


def _describe(tensor: torch.Tensor, holder: str) -> Leftover:
    return Leftover(
        nbytes=tensor.untyped_storage().nbytes(),
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        device=str(tensor.device),
        holder=holder,
    )


def _holders(tensors: list[torch.Tensor], found: dict[int, torch.Tensor]) -> dict[int, str]:
    """Who refers to each tensor, by its id; one scan for all of them, because a scan reads every Python object."""
    words: dict[int, set[str]] = {id(tensor): set() for tensor in tensors}
    for referrer in gc.get_referrers(*tensors) if tensors else ():
        if referrer is not found and referrer is not tensors:
            for referent in gc.get_referents(referrer):
                if id(referent) in words:
                    words[id(referent)].add(_in_words(referrer, referent))
    return {
        key: ", ".join(sorted(kinds - {""})[:4]) or "no Python object (a C++ holder)" for key, kinds in words.items()
    }


def _in_words(referrer: Any, tensor: torch.Tensor) -> str:
    if isinstance(referrer, FrameType):
        code = referrer.f_code
        return "" if code.co_filename == __file__ else f"a local of {code.co_qualname}"
    if type(referrer) is dict:
        return f"a dict with keys {sorted(map(_key_in_words, list(referrer)[:3]))}"
    if type(referrer) in (list, tuple, set):
        return f"a {type(referrer).__name__} of {len(referrer)}"
    attributes = [key for key, value in getattr(referrer, "__dict__", {}).items() if value is tensor]
    return ".".join([type(referrer).__module__, type(referrer).__qualname__, *attributes[:1]])


def _key_in_words(key: object) -> str:
    """Plain values as they are. What else a key says of itself may read memory that sleeps: a parameter does."""
    plain = key if isinstance(key, tuple) else (key,)
    if all(isinstance(part, str | int | float | torch.dtype | torch.device | None) for part in plain):
        return str(key)
    return f"a {type(key).__name__}"

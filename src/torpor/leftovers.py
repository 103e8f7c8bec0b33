"""Tensors that stay on the device although no component knows them, and who holds them."""

from __future__ import annotations

import gc
from collections.abc import Collection
from types import FrameType
from typing import Any

import torch

from torpor.ledger import Leftover

#: Smaller tensors are not worth a line.
MIN_BYTES = 1024**2
#: Finding a holder scans every object of the process once.
_MAX_NAMED = 8


def find_leftovers(known: Collection[int], device_types: Collection[str], min_bytes: int = MIN_BYTES) -> list[Leftover]:
    """Live tensors whose storage is not in `known`, the largest first, one line a storage.

    Args:
        known: `UntypedStorage._cdata` of every storage in the account.
        device_types: device types to look at.
        min_bytes: storages smaller than this are passed over.

    Only tensors with a Python object are seen: what C++ alone holds (saved activations) is not.
    """
    found: dict[int, torch.Tensor] = {}
    for thing in gc.get_objects():
        # `type(...)`, not `isinstance`: the latter asks proxies, and they answer for what they wrap
        if issubclass(type(thing), torch.Tensor) and thing.device.type in device_types:
            storage = _storage_of(thing)
            if storage is not None and storage.nbytes() >= min_bytes and storage._cdata not in known:
                found.setdefault(storage._cdata, thing)
    largest_first = sorted(found.values(), key=lambda tensor: -tensor.untyped_storage().nbytes())
    return [_describe(tensor, found, named=i < _MAX_NAMED) for i, tensor in enumerate(largest_first)]


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    if tensor.layout is not torch.strided or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return None  # its parts are tensors of their own and are looked at themselves
    return tensor.untyped_storage()


def _describe(tensor: torch.Tensor, found: dict[int, torch.Tensor], named: bool) -> Leftover:
    return Leftover(
        nbytes=tensor.untyped_storage().nbytes(),
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        device=str(tensor.device),
        holder=_holder(tensor, found) if named else "not looked for: too many",
    )


def _holder(tensor: torch.Tensor, found: dict[int, torch.Tensor]) -> str:
    words = [_in_words(referrer, tensor) for referrer in gc.get_referrers(tensor) if referrer is not found]
    kinds = sorted({word for word in words if word})
    return ", ".join(kinds[:4]) or "no Python object (a C++ holder)"


def _in_words(referrer: Any, tensor: torch.Tensor) -> str:
    if isinstance(referrer, FrameType):
        code = referrer.f_code
        return "" if code.co_filename == __file__ else f"a local of {code.co_qualname}"
    if type(referrer) is dict:
        return f"a dict with keys {sorted(map(str, list(referrer)[:3]))}"
    if type(referrer) in (list, tuple, set):
        return f"a {type(referrer).__name__} of {len(referrer)}"
    attributes = [key for key, value in getattr(referrer, "__dict__", {}).items() if value is tensor]
    return ".".join([type(referrer).__module__, type(referrer).__qualname__, *attributes[:1]])

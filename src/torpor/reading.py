"""Reading what sleeps: the same nested structure, with every sleeping tensor read from the store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from torpor.falling import STORED, Sleeping
from torpor.kinds import Fate
from torpor.memory.base import byte_view
from torpor.stores.base import Store
from torpor.transfer import read


class Reader:
    """Host copies of sleeping tensors; ties between them are kept within one `tree` call."""

    def __init__(self, sleepers: Iterable[Sleeping], store: Store) -> None:
        self._store = store
        self._by_storage = {
            storage._cdata: (sleeping, _shift_bytes(storage, sleeping))
            for sleeping in sleepers
            if sleeping.decision.backend is not None
            for storage in sleeping.decision.entry.storages
        }

    def tree(self, values: Any) -> Any:
        """`values` with a host copy in the place of each sleeping tensor; awake tensors pass, detached.

        Containers are those of `torch.utils._pytree` (dict, list, tuple and such).
        """
        ties: dict[int, torch.Tensor] = {}
        seen: dict[tuple[Any, ...], torch.Tensor] = {}

        def one(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in ties:
                ties[id(tensor)] = self._tied(tensor, seen)
            return ties[id(tensor)]

        return tree_map_only(torch.Tensor, one, values)

    def _tied(self, tensor: torch.Tensor, seen: dict[tuple[Any, ...], torch.Tensor]) -> torch.Tensor:
        if _is_wrapper(tensor) or tensor.layout is not torch.strided:
            return self.tensor(tensor)
        key = (
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
            tensor.dtype,
        )
        if key not in seen:
            seen[key] = self.tensor(tensor)
        return seen[key]

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """One tensor with its contents: itself, detached, if awake; a host copy of its shape and strides if asleep."""
        if _is_wrapper(tensor):
            return self._subclass(tensor)
        if tensor.layout is not torch.strided:
            return tensor.detach()
        found = self._by_storage.get(tensor.untyped_storage()._cdata)
        return tensor.detach() if found is None else self._host_copy(tensor, *found)

    def _subclass(self, tensor: Any) -> torch.Tensor:
        names, context = tensor.__tensor_flatten__()
        held = {name: getattr(tensor, name) for name in names}  # a DTensor names its mesh too
        parts = {name: self.tensor(part) if isinstance(part, torch.Tensor) else part for name, part in held.items()}
        rebuilt: torch.Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
        return rebuilt

    def _host_copy(self, tensor: torch.Tensor, sleeping: Sleeping, shift_bytes: int) -> torch.Tensor:
        first, nbytes = _extent(tensor)
        start = first + shift_bytes
        if nbytes == 0:
            block = torch.empty(0, dtype=torch.uint8)
        elif sleeping.fate in STORED and sleeping.place is not None:
            block = read(self._store, sleeping.place.slot, start, nbytes)
        elif sleeping.fate is Fate.REBUILT:
            block = self._rebuilt(sleeping, start, nbytes)
        else:
            block = torch.zeros(nbytes, dtype=torch.uint8)
        # bytes `[nbytes]` as a tensor of the dtype, shape and strides wanted, at offset 0
        return torch.empty(0, dtype=tensor.dtype).set_(block.untyped_storage(), 0, tensor.size(), tensor.stride())

    def _rebuilt(self, sleeping: Sleeping, start: int, nbytes: int) -> torch.Tensor:
        """Some bytes of the storage, computed again on the host; all of it is, where it cannot be narrowed."""
        entry = sleeping.decision.entry
        original, rebuild = entry.claims[0].tensor, entry.rebuild
        if rebuild is None:
            raise TypeError(f"{entry.name} is to be rebuilt, and no claim says how")
        if rebuild.narrow is None:
            out = torch.empty_strided(original.size(), original.stride(), dtype=original.dtype)
        else:
            begin, end = start // original.itemsize, -(-(start + nbytes) // original.itemsize)
            out = torch.empty(end - begin, dtype=original.dtype)
            rebuild, start = rebuild.narrow(begin, end), start - begin * original.itemsize
        rebuild.fn(out, *(self.tensor(source) for source in rebuild.sources))
        return byte_view(out.untyped_storage())[start : start + nbytes].clone()


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a subclass holds other tensors and says which (`__tensor_flatten__`): DTensor, torchao, quantized."""
    return hasattr(type(tensor), "__tensor_flatten__")


def _shift_bytes(storage: torch.UntypedStorage, sleeping: Sleeping) -> int:
    """How far into the stored bytes this storage begins: not 0 only for one that lies inside another."""
    entry = sleeping.decision.entry
    return 0 if storage is entry.storage else storage.data_ptr() - entry.address


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and number of bytes of its storage that a strided tensor reaches."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return int(tensor.storage_offset()) * tensor.itemsize, (last + 1) * tensor.itemsize

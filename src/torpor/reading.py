"""Reading what sleeps: the same nested structure, with every sleeping tensor read from the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from torpor.falling import STORED, Sleeping
from torpor.kinds import Fate
from torpor.stores.base import Store
from torpor.transfer import read


class Reader:
    """Host copies of sleeping tensors; ties between them are kept within one `tree` call."""

    def __init__(self, sleeping: Mapping[int, Sleeping], store: Store) -> None:
        self._sleeping = sleeping
        self._store = store

    def tree(self, values: Any) -> Any:
        """`values` with a host copy in the place of each sleeping tensor; awake tensors are passed through, detached.

        Containers are those of `torch.utils._pytree` (dict, list, tuple and such).
        """
        ties: dict[tuple[Any, ...], torch.Tensor] = {}

        def one(tensor: torch.Tensor) -> torch.Tensor:
            key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
            if key not in ties:
                ties[key] = self.tensor(tensor)
            return ties[key]

        return tree_map_only(torch.Tensor, one, values)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """One tensor with its contents: itself, detached, if awake; a host copy of its shape and strides if asleep."""
        sleeping = self._sleeping.get(tensor.untyped_storage()._cdata)
        if sleeping is None or sleeping.decision.backend is None:
            return tensor.detach()
        return self._host_copy(tensor, sleeping)

    def _host_copy(self, tensor: torch.Tensor, sleeping: Sleeping) -> torch.Tensor:
        start, nbytes = _extent(tensor)
        if nbytes == 0:
            return torch.empty(tensor.size(), dtype=tensor.dtype)
        if sleeping.fate is Fate.REBUILT:
            return self._rebuilt(sleeping, tensor)
        if sleeping.fate in STORED and sleeping.place is not None:
            block = read(self._store, sleeping.place.slot, start, nbytes)
        else:
            block = torch.zeros(nbytes, dtype=torch.uint8)
        return _shaped(block, tensor)

    def _rebuilt(self, sleeping: Sleeping, tensor: torch.Tensor) -> torch.Tensor:
        """Recompute the whole storage on the host, then cut the wanted tensor out of it."""
        entry = sleeping.decision.entry
        original = entry.claims[0].tensor
        whole = torch.empty_strided(original.size(), original.stride(), dtype=original.dtype)
        if entry.rebuild is None:
            raise TypeError(f"{entry.name} is to be rebuilt, and no claim says how")
        entry.rebuild.fn(whole, *(self.tensor(source) for source in entry.rebuild.sources))
        storage = whole.untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(
            storage, tensor.storage_offset(), tensor.size(), tensor.stride()
        )


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and number of bytes of its storage that a strided tensor reaches."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.storage_offset() * tensor.itemsize, (last + 1) * tensor.itemsize


def _shaped(block: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Bytes `[nbytes]` as a tensor of the dtype, shape and strides of `like`, at offset 0."""
    return torch.empty(0, dtype=like.dtype).set_(block.untyped_storage(), 0, like.size(), like.stride())


"""Weights on their way between processes: many tensors in one array of bytes, which Ray shares without copying."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BUCKET_BYTES = 64 * 1024**2
"""What a bucket holds at most, unless one tensor alone is larger; two of them are under way at a time."""
_ALIGNMENT = 64
"""Where a tensor may begin: no dtype needs more, and copies are fastest from the start of a cache line."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a bucket, in bytes from its start."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def of(self, whole: Tensor) -> Tensor:
        """The tensor, as a view of the bucket's bytes."""
        return whole[self.offset : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Whole tensors, in the order in which they came.

    Iterating gives (name, view). One that came through Ray is read-only memory: a write to a view of it is a segfault.
    """

    places: tuple[Place, ...]
    data: npt.NDArray[np.uint8]
    """Shape (bytes,)."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        whole = self.whole
        for place in self.places:
            yield place.name, place.of(whole)

    @property
    def whole(self) -> Tensor:
        """The same memory as uint8, of shape (bytes,)."""
        with warnings.catch_warnings():
            # Ray's is read-only, of which torch would warn: nobody writes to weights that have arrived.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(self.data)


def empty_bucket(places: tuple[Place, ...]) -> Bucket:
    """Room for tensors at `places`, which are not there yet."""
    return Bucket(places, np.empty(places[-1].end, dtype=np.uint8))


def in_buckets(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Neighbours together, at most `bucket_bytes` or one tensor. A tensor is done with before the next is asked for."""
    filling = _Filling(bucket_bytes)
    for name, tensor in weights:
        if not filling.has_room_for(tensor):
            if filling.places:
                yield filling.bucket()
            filling = _Filling(max(bucket_bytes, tensor.nbytes))
        filling.add(name, tensor)
    if filling.places:
        yield filling.bucket()


class _Filling:
    """A bucket that tensors are still copied into."""

    def __init__(self, nbytes: int) -> None:
        self._data = np.empty(nbytes, dtype=np.uint8)
        self._whole = torch.from_numpy(self._data)
        self.places: list[Place] = []

    @property
    def _next(self) -> int:
        return -(-self.places[-1].end // _ALIGNMENT) * _ALIGNMENT if self.places else 0

    def has_room_for(self, tensor: Tensor) -> bool:
        return self._next + tensor.nbytes <= len(self._data)

    def add(self, name: str, tensor: Tensor) -> None:
        place = Place(name, tensor.dtype, tuple(tensor.shape), self._next)
        place.of(self._whole).copy_(tensor.detach())
        self.places.append(place)

    def bucket(self) -> Bucket:
        return Bucket(tuple(self.places), self._data[: self.places[-1].end])

"""One block of memory for many tensors, so that all of it can be given back and taken again in one call."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torpor.memory.resize import ResizeBackend

_ALIGNMENT_BYTES = 64
"""A cache line, and the width of the widest vector load: no tensor straddles more lines than it must."""


class Arena:
    """A block that hands out tensors, and can be given back and retaken under them.

    All tensors are windows on one storage whose size goes to 0 and back, so whatever refers to them need not
    be told. Their contents are lost. Reading one while the block is released is undefined, so the owner
    must refuse it.
    """

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        self._block = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._backend = ResizeBackend()

    @property
    def held_bytes(self) -> int:
        """Bytes of memory held now: the capacity, or 0 while released."""
        return self._block.untyped_storage().nbytes()

    @property
    def capacity_bytes(self) -> int:
        """Bytes this arena can hand out in total."""
        return self._capacity_bytes

    def take(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor inside the block, contents undefined. The caller has checked that it fits."""
        size = torch.Size(shape)
        nbytes = size.numel() * dtype.itemsize
        window = self._block[self._used_bytes : self._used_bytes + nbytes]
        self._used_bytes += aligned(nbytes)
        return window.view(dtype).view(size)

    def reset(self) -> None:
        """Hand out from the start again; tensors handed out so far share memory with later ones."""
        self._used_bytes = 0

    def release(self) -> None:
        """Give the memory back to the system: freed alone, it may stay with the allocator."""
        self._backend.release([self._block.untyped_storage()])
        if self._block.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            self._backend.settle()

    def restore(self) -> None:
        """Take the memory again, contents undefined.

        Raises:
            MemoryBackendError: the system refused; the block is still released.
        """
        self._backend.restore([self._block.untyped_storage()])


def aligned(nbytes: int) -> int:
    """Bytes that a tensor of `nbytes` takes in an arena."""
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def move_parameters(module: torch.nn.Module) -> Arena:
    """Put all parameters of `module` into one new arena, values unchanged, tied ones staying tied.

    Parameters stay the same objects. While it runs, at most the module and one copy of it are in memory.
    """
    parameters = list(module.parameters())
    capacity_bytes = sum(aligned(parameter.nbytes) for parameter in parameters)
    arena = Arena(capacity_bytes, parameters[0].device)
    for parameter in parameters:
        window = arena.take(parameter.shape, parameter.dtype)
        window.copy_(parameter.detach())
        parameter.data = window
    return arena

"""What every memory backend does: give the memory of storages back, and take it again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

#: What host memory is on. To compare with it takes a tenth of what `device.type` does.
HOST = torch.device("cpu")


def byte_view(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of `storage` as a `uint8` tensor of shape `[nbytes]` on its device.

    A view with a version counter of its own: writing through it restores raw bytes without telling
    autograd that a tensor changed. It follows the storage: good again after a backend restored it.
    """
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class MemoryBackend(ABC):
    """Gives the memory of storages back to the system and takes it again.

    A backend knows neither stores nor roles. Its caller has every byte that matters in a safe place
    before `release`, and writes the bytes back after `restore`.
    """

    name: ClassVar[str]
    device_type: ClassVar[str]
    """The `torch.device.type` whose memory this backend handles."""
    keeps_address: ClassVar[bool]
    """Whether `data_ptr()` is the same after `restore`."""
    restores_zeros: ClassVar[bool]
    """Whether all bytes that `release` gave back read zero after `restore`. The rest keep their contents."""

    def refresh(self) -> None:  # noqa: B027 - an optional step, not a missing one
        """Look at the memory map anew, before a round of `refusal`s."""

    @abstractmethod
    def refusal(self, storage: torch.UntypedStorage) -> str | None:
        """Why this storage cannot be released without harm, as a clause for the ledger; None if it can."""

    @abstractmethod
    def releasable_bytes(self, storage: torch.UntypedStorage) -> int:
        """How many bytes `release` would give back for this storage; 0 if it is too small to give any."""

    @abstractmethod
    def release(self, storages: Sequence[torch.UntypedStorage]) -> int:
        """Give the memory back; return the bytes given back.

        Raises:
            MemoryBackendError: the system refused. The memory of all `storages` is present again, but
                the contents of any of them may be lost: the caller writes them back.
        """

    @abstractmethod
    def restore(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Take the memory again. Contents are undefined unless `restores_zeros`.

        Raises:
            MemoryBackendError: the system refused. All `storages` are released as before the call.
        """

    def strays(self, known: Sequence[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        """Live memory of this backend's own allocator that is neither in `known` nor asleep, as storages."""
        return []

    def needed_bytes(self, storages: Sequence[torch.UntypedStorage]) -> int:
        """Bytes that `restore(storages)` would take now."""
        return sum(self.releasable_bytes(storage) for storage in storages)

    @abstractmethod
    def free_bytes(self, device: torch.device) -> int:
        """Bytes that `restore` could take now on `device`, by the judgement of driver or kernel."""

    @abstractmethod
    def used_bytes(self, device: torch.device) -> int:
        """Bytes of `device` memory this process holds, by the judgement of driver or kernel."""

    def graphs_may_live(self) -> bool:
        """Whether a captured graph may read memory of this kind by its address. For all it can tell."""
        return False

    def settle(self) -> None:  # noqa: B027 - an optional step, not a missing one
        """Return what an allocator still caches to the system, after a round of releases."""

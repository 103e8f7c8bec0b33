"""What every backend for GPU memory answers alike: the driver is the judge."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from torpor.memory import cuda
from torpor.memory.allocator import Int64s, Rows
from torpor.memory.base import MemoryBackend


class GpuBackend(MemoryBackend):
    """Backends whose memory is a GPU's."""

    device_type: ClassVar[str] = "cuda"
    restores_zeros: ClassVar[bool] = False

    def free_bytes(self, device: torch.device) -> int:
        """By the driver."""
        return cuda.free_bytes(device)

    def used_bytes(self, device: torch.device) -> int:
        """By NVML for this process, or by the driver for all where NVML does not tell processes apart."""
        return cuda.used_bytes(device)

    def settle(self) -> None:
        """Have torch return to the driver what other processes have let go of, and cached blocks outside all pools."""
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()

    def self_test(self, device: torch.device) -> None:
        """See on memory of its own that this backend frees `device`'s, where settings could defeat it unseen.

        Raises:
            UnsupportedError: it does not; the message has what the allocator is set to.
            MemoryBackendError: too little device memory for the test.
        """

    def states_of(self, segments: Rows) -> Int64s:
        """For each row of `allocator.SEGMENT`: 1 if this backend's own allocator made it, 0 if it has no memory now,
        -1 if it is not of this backend.
        """
        return np.full(len(segments), -1)

    def idle_bytes(self, device: torch.device) -> int:
        """Memory of this backend's own allocator that torch's allocator does not know."""
        return 0

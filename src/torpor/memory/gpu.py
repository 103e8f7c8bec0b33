"""What every backend for GPU memory answers alike: the driver is the judge."""

from __future__ import annotations

from typing import ClassVar

import torch

from torpor.memory import cuda
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
        """Have torch return cached blocks outside all pools to the driver."""
        torch.cuda.empty_cache()

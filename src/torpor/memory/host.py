"""What every backend for host memory answers alike: the kernel is the judge."""

from __future__ import annotations

from typing import ClassVar

import torch

from torpor.memory import kernel
from torpor.memory.base import MemoryBackend


class HostBackend(MemoryBackend):
    """Backends whose memory is this process's own, on the CPU."""

    device_type: ClassVar[str] = "cpu"

    def free_bytes(self, device: torch.device) -> int:
        return kernel.available_bytes()

    def used_bytes(self, device: torch.device) -> int:
        return kernel.process_resident_bytes()

    def settle(self) -> None:
        """What was freed (gradients set to None, say) still lies in glibc's heap."""
        kernel.trim_heap()

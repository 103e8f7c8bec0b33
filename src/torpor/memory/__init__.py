"""One file for each way of giving memory back and taking it again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from torpor.errors import UnsupportedError, UsageError
from torpor.memory.base import MemoryBackend


class Backends(dict[str, list[MemoryBackend]]):
    """Backends by `torch.device.type`, the preferred one first."""

    def every(self) -> Iterator[MemoryBackend]:
        """Each of them, of whatever device."""
        return (backend for backends in self.values() for backend in backends)

    def refresh(self) -> None:
        """What was allocated and dropped since the backends last looked decides which pages can go."""
        for backend in self.every():
            backend.refresh()

    def settle(self) -> None:
        """Return what allocators still cache to driver and system."""
        for backend in self.every():
            backend.settle()

    def graphs_may_live(self) -> bool:
        """Whether a captured graph may read memory of any of them by its address."""
        return any(backend.graphs_may_live() for backend in self.every())

    def used_bytes(self, devices: Collection[torch.device]) -> int:
        """Bytes that this process holds on all of `devices`, as kernel or driver counts them."""
        return sum(self[device.type][0].used_bytes(device) for device in devices if device.type in self)


_NAMES = ("auto", "madvise", "resize", "vmm", "torch_memory_saver")


def open_backends(memory: str | Sequence[MemoryBackend]) -> Backends:
    """The backends that a sleeper asks, by the devices whose memory they handle.

    Args:
        memory: backends, or a name. `"auto"`: `madvise`, and once CUDA is in use `vmm` (where it can be) and
            `resize`. `"resize"`: on the CPU, and once CUDA is in use on GPUs.

    Raises:
        UsageError: an unknown name, with the names there are.
        UnsupportedError: one that cannot be here, with the reason.
    """
    by_device = Backends()
    for backend in _by_name(memory) if isinstance(memory, str) else memory:
        by_device.setdefault(backend.device_type, []).append(backend)
    return by_device


def _by_name(name: str) -> list[MemoryBackend]:
    from torpor.memory.madvise import MadviseBackend
    from torpor.memory.resize import ResizeBackend

    on_gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if name == "auto":
        return [MadviseBackend(), *(_on_gpus() if on_gpus else ())]
    if name == "madvise":
        return [MadviseBackend()]
    if name == "resize":
        from torpor.memory.resize_cuda import cuda_resize_backend

        return [ResizeBackend(), *([cuda_resize_backend()] if on_gpus else ())]
    if name == "vmm":
        from torpor.memory.vmm import vmm_backend

        return [vmm_backend()]
    if name == "torch_memory_saver":
        from torpor.memory.torch_memory_saver import saver_backend

        return [saver_backend()]
    raise UsageError(f"memory={name!r}: unknown backend; there are {', '.join(map(repr, _NAMES))}")


def _on_gpus() -> list[MemoryBackend]:
    from torpor.memory.resize_cuda import cuda_resize_backend
    from torpor.memory.vmm import vmm_backend

    try:
        vmm = vmm_backend()
    except UnsupportedError:  # `memory="vmm"` and `torpor.pool()` say why; here the next best will do
        return [cuda_resize_backend()]
    return [vmm, cuda_resize_backend(vmm.foreign_pools)]  # vmm looks first

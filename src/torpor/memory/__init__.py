"""One file for each way of giving memory back and taking it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from torpor.errors import UnsupportedError, UsageError
from torpor.memory.base import MemoryBackend

_NAMES = ("auto", "madvise", "resize", "vmm", "torch_memory_saver")


def open_backends(memory: str | Sequence[MemoryBackend]) -> Mapping[str, Sequence[MemoryBackend]]:
    """Backends by `torch.device.type`, the preferred one first.

    Args:
        memory: backends, or a name. `"auto"`: `madvise`, and once CUDA is in use `vmm` (where it can be) and
            `resize`. `"resize"`: on the CPU, and once CUDA is in use on GPUs.

    Raises:
        UsageError: an unknown name, with the names there are.
        UnsupportedError: one that cannot be here, with the reason.
    """
    backends = _by_name(memory) if isinstance(memory, str) else memory
    by_device: dict[str, list[MemoryBackend]] = {}
    for backend in backends:
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

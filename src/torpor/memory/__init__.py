"""One file for each way of giving memory back and taking it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

from torpor.errors import UsageError
from torpor.memory.base import MemoryBackend

#: Backend name -> where it lives; imported when it is asked for.
BACKENDS = {
    "madvise": "torpor.memory.madvise:MadviseBackend",
    "resize": "torpor.memory.resize:ResizeBackend",
}
#: What `memory="auto"` means.
_AUTO = ("madvise",)


def open_backends(memory: str | Sequence[MemoryBackend]) -> Mapping[str, Sequence[MemoryBackend]]:
    """Backends by `torch.device.type`, the preferred one first.

    Raises:
        UsageError: an unknown name, with the names there are.
    """
    backends = [_make(name) for name in (_AUTO if memory == "auto" else (memory,))] if isinstance(memory, str) else memory
    by_device: dict[str, list[MemoryBackend]] = {}
    for backend in backends:
        by_device.setdefault(backend.device_type, []).append(backend)
    return by_device


def _make(name: str) -> MemoryBackend:
    if name not in BACKENDS:
        raise UsageError(f"memory={name!r}: unknown backend; there are 'auto', {', '.join(map(repr, BACKENDS))}")
    module, _, attribute = BACKENDS[name].partition(":")
    backend = getattr(import_module(module), attribute)()
    if not isinstance(backend, MemoryBackend):
        raise TypeError(f"{BACKENDS[name]} is no MemoryBackend")
    return backend

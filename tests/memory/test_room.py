"""A wake looks for room for everything that it will take of a device, whichever backend takes it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from torpor.errors import NotEnoughMemoryError
from torpor.falling import Sleeping
from torpor.memory.base import MemoryBackend
from torpor.waking import _wait_for_room

GPUS = [torch.device("cuda", index) for index in range(2)]


class Backend:
    """Needs a byte for each storage; says what is free as the test sets it."""

    def __init__(self, free: dict[torch.device, list[int]]) -> None:
        self.free = free

    def needed_bytes(self, storages: Sequence[object]) -> int:
        return len(storages)

    def free_bytes(self, device: torch.device) -> int:
        found = self.free[device]
        return found.pop(0) if len(found) > 1 else found[0]


def group(backend: Backend, *counts: int) -> tuple[MemoryBackend, list[Sleeping]]:
    """As many storages on each GPU as `counts` says."""
    devices = [device for device, count in zip(GPUS, counts, strict=True) for _ in range(count)]
    entries = [
        SimpleNamespace(storage=object(), decision=SimpleNamespace(entry=SimpleNamespace(device=d))) for d in devices
    ]
    return cast(Any, backend), cast(Any, entries)


def test_what_two_backends_need_adds_up() -> None:
    free = {GPUS[0]: [7], GPUS[1]: [4]}
    first, second = Backend(free), Backend(free)
    with pytest.raises(NotEnoughMemoryError) as caught:
        _wait_for_room([group(first, 4, 0), group(second, 4, 4)], 0.0)
    assert (caught.value.needed_bytes, caught.value.free_bytes, caught.value.device) == (8, 7, "cuda:0")
    _wait_for_room([group(first, 4, 0), group(second, 3, 4)], 0.0)


def test_the_most_careful_backend_decides() -> None:
    plenty, careful = Backend({GPUS[0]: [100]}), Backend({GPUS[0]: [5]})
    with pytest.raises(NotEnoughMemoryError) as caught:
        _wait_for_room([group(plenty, 3, 0), group(careful, 3, 0)], 0.0)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (6, 5)


def test_memory_that_comes_in_time_is_waited_for() -> None:
    backend = Backend({GPUS[0]: [1, 2, 9]})
    _wait_for_room([group(backend, 3, 0)], 5.0)

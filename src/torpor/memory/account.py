"""Where the memory of a GPU is: every byte that the driver counts for this process, under one line."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch

from torpor.ledger import DeviceAccount
from torpor.memory import allocator, cuda
from torpor.memory.allocator import Bools, Int64s, Rows, Snapshot
from torpor.memory.gpu import GpuBackend

#: The lines of an account, in the order of the table.
AWAKE = "storages awake"
HELD = "storages asleep whose memory others hold"
LEFT = "live memory that no component knows"
WORKSPACES = "cuBLAS workspaces"
GRAPHS = "private pools of graphs and others"
SLACK = "cached by torch's allocator"
IDLE = "idle in torpor.pool()"
CONTEXT = "context, kernels and libraries"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Of the storages on GPUs that the inventory knows."""

    awake: Set[int]
    asleep: Set[int]


class Accountant:
    """Keeps the accounts of one sleeper.

    What the driver counts and torch's allocator does not know (context, kernels, other libraries) has no account of
    its own. It is taken for what it is at the first look; from then on its growth shows as unexplained.
    """

    def __init__(self, backends: Sequence[GpuBackend]) -> None:
        self._backends = backends
        self._outside_bytes: dict[torch.device, int] = {}

    def accounts(self, devices: Collection[torch.device], addresses: Addresses) -> list[DeviceAccount]:
        """The account of each device, now; none without a backend for GPUs. Costs one look at the allocator."""
        if not devices or not self._backends:
            return []
        snapshot = allocator.look()
        states = _states(snapshot.segments, self._backends)
        return [self._account(device, snapshot, states, addresses) for device in sorted(devices, key=str)]

    def outside(self, nbytes: int) -> None:
        """Memory that torch's allocator does not know was taken by the caller, or given back if `nbytes` is negative.

        On which of several devices is not known: then it stays unexplained.
        """
        if len(self._outside_bytes) == 1:
            for device in self._outside_bytes:
                self._outside_bytes[device] += nbytes

    def _account(self, device: torch.device, snapshot: Snapshot, states: _States, known: Addresses) -> DeviceAccount:
        here = snapshot.segments["device"] == device.index
        lines = {CONTEXT: 0, **_in_segments(snapshot, here & states.with_pages, states.ours, known, device)}
        lines[IDLE] = sum(backend.idle_bytes(device) for backend in self._backends)
        used, is_own = cuda.used_bytes(device), cuda.tells_processes_apart(device)
        lines[CONTEXT] = self._outside_bytes.setdefault(device, used - sum(lines.values()))
        return DeviceAccount(str(device), used, is_own, {name: nbytes for name, nbytes in lines.items() if nbytes})


@dataclass(frozen=True, slots=True)
class _States:
    """For each segment whether it has memory, and whether a backend's own allocator made it."""

    with_pages: Bools
    ours: Bools


def _states(segments: Rows, backends: Sequence[GpuBackend]) -> _States:
    state = np.full(len(segments), -1)
    for backend in backends:
        state = np.maximum(state, backend.states_of(segments))
    return _States(state != 0, state >= 0)


def _in_segments(
    snapshot: Snapshot, chosen: Bools, ours: Bools, known: Addresses, device: torch.device
) -> dict[str, int]:
    """Bytes of the chosen segments by line."""
    segments = snapshot.segments
    private = np.array([pool != allocator.COMMON_POOL for pool in snapshot.pools], np.bool_)[segments["pool"]]
    of_graphs = chosen & private & ~ours
    plain = chosen & ~of_graphs
    blocks = snapshot.blocks[plain[snapshot.blocks["segment"]]]
    kinds = _kinds(blocks, known, cublas_workspace_bytes(torch.cuda.get_device_capability(device)))
    lines = {
        name: int(blocks["nbytes"][kinds == kind].sum()) for kind, name in enumerate((AWAKE, HELD, WORKSPACES, LEFT))
    }
    lines[GRAPHS] = int(segments["nbytes"][of_graphs].sum())
    lines[SLACK] = int(segments["nbytes"][plain].sum()) - int(blocks["nbytes"].sum())
    return lines


def _kinds(blocks: Rows, known: Addresses, workspace_bytes: int) -> Int64s:
    """For each block 0 if a storage that is awake owns it, 1 if one that sleeps, 2 for a workspace, else 3."""
    workspace = blocks["requested"] == workspace_bytes
    kinds = np.where(workspace, 2, 3)
    for kind, addresses in ((1, known.asleep), (0, known.awake - known.asleep)):
        kinds[np.isin(blocks["address"], np.fromiter(addresses, np.int64, len(addresses)))] = kind
    return kinds


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """What torch takes for each cuBLAS handle and stream, as a block that no tensor owns.

    The environment's CUBLAS_WORKSPACE_CONFIG is pairs `:KiB:count`. Defaults: aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    words = [word for word in os.environ.get("CUBLAS_WORKSPACE_CONFIG", "").split(":") if word]
    if words and len(words) % 2 == 0 and all(word.isdigit() for word in words):
        return sum(int(kib) * 1024 * int(count) for kib, count in zip(words[::2], words[1::2], strict=True))
    return 4096 * 1024 * 8 if capability[0] >= 9 else 4096 * 1024 * 2 + 16 * 1024 * 8

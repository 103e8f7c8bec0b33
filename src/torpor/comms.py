"""Process groups as the component `comms`: kept, suspended, or destroyed at sleep and made again at wake.

An idle NCCL communicator holds from 0.5 GiB to several GiB of device memory. Three ways, chosen by version:

    suspend   NCCL gives its buffers back and keeps the communicator; every object that holds the group goes on
              working after the wake. Needs NCCL 2.29.7 and a torch whose backends have `suspend` (2.13 does).
    rebuild   the groups are destroyed, last made first, and the user's `create` makes them again. A group is then a
              new object: take it from this holder (`groups["tp"]`) at each use, and keep no other reference.
    keep      they stay, and the ledger says why: nothing to free (gloo), or they were captured by something that cannot
              be told of a new object. FSDP's modules and `DeviceMesh` capture theirs.

    groups = Groups(create)             create(0): all groups, in one order on all ranks
    sleeper = Sleeper(..., comms=groups, group=...)
    groups["tp"]                        the group as it is now; AsleepError while it sleeps

Nothing of `torch.distributed` is replaced. Sleeping communicators cannot be used: a save that runs meanwhile uses
a gloo group that is not in the holder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from torpor.agreement import ENDED, LATE, NO_STORE, Round
from torpor.errors import AsleepError, MemoryBackendError, RankError, StateError, UnsupportedError, UsageError
from torpor.kinds import Fate, Role
from torpor.ledger import Row, Stopwatch

COMPONENT = "comms"
_NCCL_WITH_SUSPEND = (2, 29, 7)
#: Part of torch's message for a group that has not connected yet, and so holds nothing.
_NOT_CONNECTED = "not initialized"

#: Makes every group, by name, in the same order on every rank; called with 0 at first and one more each time. A
#: rank that is no member of a group has what `new_group` returns for it.
Create = Callable[[int], Mapping[str, Any]]


class CommsMode(StrEnum):
    """What a sleep does with process groups."""

    KEEP = "keep"
    SUSPEND = "suspend"
    REBUILD = "rebuild"


class Groups:
    """The process groups of one actor, by name.

    Args:
        source: makes the groups (`Create`), for `rebuild`; or groups that somebody else holds, by name. If the
            world is among what `source` makes, it owns all groups: destroying the world destroys them all. Give the
            world a store of its own for each number, `PrefixStore(f"world-{number}", store)`, or it reads the
            addresses of its predecessor.
        mode: `"keep"`, `"suspend"`, `"rebuild"`, or `"auto"`: `suspend` where it can be, else `rebuild` where it can
            be, else `keep`; `keep` where no group holds device memory.

    Raises:
        UsageError: an unknown mode, or `rebuild` of groups that were given ready-made.
        UnsupportedError: `suspend` where it cannot be, with the reason.
    """

    def __init__(self, source: Create | Mapping[str, Any], *, mode: str = "auto") -> None:
        self._create = None if isinstance(source, Mapping) else source
        self._made = 0
        self._groups: dict[str, Any] = {}
        self._asleep_since: CommsMode | None = None
        if isinstance(source, Mapping):
            self._groups = dict(source)
        else:
            self._make()
        self._facts = {name: _Facts.of(group) for name, group in self._members()}
        self.mode, self.reason = self._choose(mode)

    def __getitem__(self, name: str) -> Any:
        """The group of this name as it is now.

        Raises:
            AsleepError: it sleeps.
            UsageError: there is none.
        """
        if self._asleep_since is not None:
            raise AsleepError(f"process group '{name}'", COMPONENT, "use", f"Call wake('{COMPONENT}') first.")
        if name not in self._groups:
            raise UsageError(f"no process group '{name}'; there are {sorted(self._groups)}", name=name)
        return self._groups[name]

    @property
    def names(self) -> list[str]:
        """In the order they were made."""
        return list(self._groups)

    @property
    def is_asleep(self) -> bool:
        """Whether they are suspended or destroyed."""
        return self._asleep_since is not None

    def sleep(self, agreed: Round, stopwatch: Stopwatch) -> list[Row]:
        """Give their device memory back, on all ranks that agree or on none. Nothing to do if asleep or kept.

        Raises:
            MemoryBackendError: NCCL would not suspend. They are awake.
            RankError: another rank could not.
        """
        if self._asleep_since is not None:
            return []
        before = _free_bytes()
        with self._undone_by(self._rise), agreed.stage(COMPONENT), stopwatch.stage(COMPONENT):
            self._fall()
        return [self._row(max(0, _free_bytes() - before))]

    def wake(self, agreed: Round, stopwatch: Stopwatch) -> list[Row]:
        """Make them usable again. A collective call of all their ranks. Nothing to do if awake.

        Raises:
            StateError: `create` made other groups than the first time.
            MemoryBackendError: NCCL would not resume. They are asleep.
            RankError: another rank could not.
        """
        if self._asleep_since is None:
            return []
        before = _free_bytes()
        with self._undone_by(self._fall), agreed.stage(COMPONENT), stopwatch.stage(COMPONENT):
            self._rise()
        return [self._row(max(0, before - _free_bytes()))]

    # ---------------------------------------------------------------- inside

    def _fall(self) -> None:
        if self.mode is CommsMode.SUSPEND:
            self._on_each_backend("suspend", "resume")
        elif self.mode is CommsMode.REBUILD:
            self._destroy()
        if self.mode is not CommsMode.KEEP:
            self._asleep_since = self.mode

    def _rise(self) -> None:
        if self.mode is CommsMode.SUSPEND:
            self._on_each_backend("resume", "suspend")
        elif self.mode is CommsMode.REBUILD:
            self._make()
            self._compare()
        self._asleep_since = None

    @contextmanager
    def _undone_by(self, undo: Callable[[], None]) -> Iterator[None]:
        """If this rank did its part and another could not: undo it, unless that needs a rank that is gone."""
        before = self._asleep_since
        try:
            yield
        except RankError as error:
            if self._asleep_since is not before:
                if error.kind in (LATE, ENDED, NO_STORE):
                    error.add_note(f"the process groups of this rank are {'asleep' if self.is_asleep else 'awake'}")
                else:
                    undo()
            raise

    def _members(self) -> Iterator[tuple[str, dist.ProcessGroup]]:
        """Groups that this rank is in, in the order they were made."""
        return ((name, group) for name, group in self._groups.items() if isinstance(group, dist.ProcessGroup))

    def _make(self) -> None:
        if self._create is None:
            raise UsageError("these groups were given ready-made; hand over a function that makes them")
        self._groups = dict(self._create(self._made))
        self._made += 1

    def _destroy(self) -> None:
        """The last made first; the world last of all, because it takes every other with it."""
        groups = [group for _, group in self._members()][::-1]
        world = dist.group.WORLD
        for group in groups:
            if group is not world:
                dist.destroy_process_group(group)
        if any(group is world for group in groups):
            dist.destroy_process_group()
        self._groups = dict.fromkeys(self._groups)

    def _compare(self) -> None:
        facts = {name: _Facts.of(group) for name, group in self._members()}
        if facts != self._facts:
            differ = sorted(
                name for name in facts.keys() | self._facts.keys() if facts.get(name) != self._facts.get(name)
            )
            shown = "; ".join(f"'{name}' was {self._facts.get(name)}, is {facts.get(name)}" for name in differ)
            self._destroy()
            raise StateError(f"create() made other process groups than at first: {shown}", names=differ)

    def _on_each_backend(self, action: str, undo: str) -> None:
        done: list[Any] = []
        for name, group in self._members():
            for backend in _nccl_backends(group):
                try:
                    getattr(backend, action)()
                except RuntimeError as error:  # torch has no narrower type for what NCCL refuses
                    if _NOT_CONNECTED in str(error):
                        continue
                    for other in reversed(done):
                        getattr(other, undo)()
                    raise MemoryBackendError(f"process group '{name}': {action}: {error}", name=name) from error
                done.append(backend)

    def _choose(self, mode: str) -> tuple[CommsMode, str]:
        if mode not in (*CommsMode, "auto"):
            raise UsageError(f"mode={mode!r}: unknown; there are 'auto', {', '.join(map(repr, map(str, CommsMode)))}")
        if mode == CommsMode.KEEP:
            return CommsMode.KEEP, "asked for"
        obstacle = suspend_obstacle()
        if mode == CommsMode.REBUILD and self._create is None:
            raise UsageError("mode='rebuild' needs a function that makes the groups, these were given ready-made")
        if mode == CommsMode.SUSPEND and obstacle:
            raise UnsupportedError(f"process groups cannot be suspended: {obstacle}. Use mode='rebuild' or 'keep'")
        if mode != "auto":
            return CommsMode(mode), _SAID[CommsMode(mode)]
        if not any(_nccl_backends(group) for _, group in self._members()):
            return CommsMode.KEEP, "no device memory in them"
        if not obstacle:
            return CommsMode.SUSPEND, _SAID[CommsMode.SUSPEND]
        if self._create is not None:
            return CommsMode.REBUILD, f"{_SAID[CommsMode.REBUILD]}; {obstacle}"
        return CommsMode.KEEP, f"somebody else holds the groups, so they cannot be made again; {obstacle}"

    def _row(self, nbytes: int) -> Row:
        fate = Fate.KEPT if self.mode is CommsMode.KEEP else Fate.DROPPED
        reason = f"{len(self._groups)} process groups: {self.reason}"
        return Row(COMPONENT, Role.WORKSPACE, fate, len(self._groups), nbytes, freed_bytes=nbytes, reason=reason)


_SAID = {
    CommsMode.SUSPEND: "suspended: NCCL gives its buffers back",
    CommsMode.REBUILD: "destroyed; made again at wake",
}


def suspend_obstacle() -> str:
    """Why NCCL communicators cannot be suspended here; empty if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if "suspend" not in vars(Backend):
        return f"torch {torch.__version__} has no Backend.suspend (2.13 has)"
    version = tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    if version < _NCCL_WITH_SUSPEND:
        return f"NCCL {'.'.join(map(str, version))} is loaded, 2.29.7 is needed"
    return ""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What must be the same after a rebuild."""

    ranks: tuple[int, ...]
    backend: str
    timeout: timedelta
    description: str

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> _Facts:
        backend: Any = group._get_backend(group._device_types[0])
        return cls(
            ranks=tuple(dist.get_process_group_ranks(group)),
            backend=dist.get_backend_config(group),
            timeout=backend.options._timeout,
            description=group.group_desc,
        )


def _nccl_backends(group: dist.ProcessGroup) -> list[Any]:
    backends: list[Any] = [group._get_backend(device) for device in group._device_types if device.type == "cuda"]
    return [backend for backend in backends if backend.name() == "nccl"]


def _free_bytes() -> int:
    """Free memory of the current GPU by the driver's count; 0 where none is in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])

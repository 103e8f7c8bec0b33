"""Every error Torpor raises, in one tree.

    TorporError
    ├── UsageError (ValueError)              a call or an option that cannot be
    ├── StateError (RuntimeError)            the right call at the wrong moment
    │   ├── AsleepError                      computing with, or reading through, what is asleep
    │   └── ClosedError                      a sleeper, store or engine that was closed
    ├── NotEnoughMemoryError (MemoryError)   a wake that does not fit; both numbers inside
    ├── StoreError (OSError)                 where bytes wait
    │   ├── StoreFullError                   no room; nothing was freed
    │   └── UnsafeStoreError                 a directory or file that must not be trusted
    ├── CorruptError (RuntimeError)          bytes came back different
    ├── MemoryBackendError (RuntimeError)    memory could not be given back or taken again
    │   └── DriverError                      the CUDA driver refused; its code inside
    ├── RankError (RuntimeError)             another rank cannot, is late or has ended; names it
    │   └── DesyncError (ValueError)         ranks made different calls
    └── UnsupportedError (RuntimeError)      this version, device or setting cannot do it

Each class also is the built-in it stands for, carries its culprit and numbers as attributes, and
pickles, so that an error of one rank can be raised on another.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from typing import Any

GIB = 1024**3


def gib(nbytes: int) -> str:
    """Bytes as a text in GiB (1024**3 bytes), for messages."""
    return f"{nbytes / GIB:.3f} GiB"


class TorporError(Exception):
    """Root of the tree. Keyword attributes survive pickling."""

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(message)
        for name, value in attributes.items():
            setattr(self, name, value)  # not by __dict__: OSError keeps `errno` elsewhere
        self._attributes = attributes

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self.args[0]), self._attributes)


def _rebuild(cls: type[TorporError], message: str, attributes: dict[str, Any]) -> TorporError:
    error = cls.__new__(cls)
    TorporError.__init__(error, message, **attributes)
    return error


class UsageError(TorporError, ValueError):
    """A call or an option that cannot be; the message names the value, the limit and the way out."""


class StateError(TorporError, RuntimeError):
    """The right call at the wrong moment."""


class AsleepError(StateError):
    """Something computed with, or read through, a component that is asleep."""

    component: str
    name: str

    def __init__(self, name: str, component: str, operation: str, remedy: str) -> None:
        super().__init__(
            f"{operation} of {name}: its component '{component}' is asleep. {remedy}",
            name=name,
            component=component,
        )


class ClosedError(StateError):
    """A sleeper, store or engine was used after its `close()`."""


class NotEnoughMemoryError(TorporError, MemoryError):
    """A wake needs more memory than is free. Everything is still asleep and intact."""

    needed_bytes: int
    free_bytes: int
    device: str

    def __init__(self, needed_bytes: int, free_bytes: int, device: str, remedy: str) -> None:
        super().__init__(
            f"waking needs {needed_bytes} bytes ({gib(needed_bytes)}) on {device}, "
            f"{free_bytes} bytes ({gib(free_bytes)}) are free. Everything is still asleep. {remedy}",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
            device=device,
        )


class StoreError(TorporError, OSError):
    """A store could not take or give bytes; `errno` is the system's, where it was the system that refused."""


class StoreFullError(StoreError):
    """A store has no room for what a sleep would put there. Nothing was freed. `errno` is ENOSPC."""

    needed_bytes: int
    free_bytes: int
    store: str

    def __init__(self, needed_bytes: int, free_bytes: int, store: str, remedy: str) -> None:
        super().__init__(
            f"the store {store} needs {needed_bytes} bytes ({gib(needed_bytes)}) more, "
            f"{free_bytes} bytes ({gib(free_bytes)}) are free. Nothing was freed. {remedy}",
            errno=errno.ENOSPC,
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
            store=store,
        )


class UnsafeStoreError(StoreError):
    """A directory or file that must not be trusted: a link, a foreign owner, wrong permissions, tmpfs."""

    path: str

    def __init__(self, path: str, reason: str, remedy: str) -> None:
        super().__init__(f"{path}: {reason}. {remedy}", path=path)


class CorruptError(TorporError, RuntimeError):
    """Bytes came back different from what went to sleep."""

    names: list[str]

    def __init__(self, names: Sequence[str], detail: str) -> None:
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        super().__init__(f"{detail}: {shown}", names=list(names))


class MemoryBackendError(TorporError, RuntimeError):
    """A memory backend could not give memory back or take it again; the message has the cause."""


class DriverError(MemoryBackendError):
    """The CUDA driver refused."""

    code: int
    """The driver's; negative ones are of `_vmm.c` itself."""
    call: str
    """The function that failed."""
    device: str


class RankError(TorporError, RuntimeError):
    """Not all ranks could: each of them gets this error and stays as it was before the call.

    Raised from the original exception on the rank that met one.
    """

    rank: int
    """The first culprit."""
    failures: dict[int, str]
    """Rank -> its reason."""
    stage: str
    kind: str
    """The type of the first culprit's exception; `"late"`, `"ended"` or `"no store"` where there was none."""

    def __init__(self, failures: Mapping[int, str], stage: str, kind: str) -> None:
        shown = "; ".join(f"rank {rank}: {reason}" for rank, reason in list(failures.items())[:4])
        more = f"; and {len(failures) - 4} more ranks" if len(failures) > 4 else ""
        super().__init__(
            f"{shown}{more} (at '{stage}'). No rank goes on alone: each stays as it was",
            rank=next(iter(failures)),
            failures=dict(failures),
            stage=stage,
            kind=kind,
        )


class DesyncError(RankError, ValueError):
    """Ranks made different calls where all must make the same. Nothing was moved."""

    calls: dict[int, str]
    """Rank -> its call."""

    def __init__(self, calls: Mapping[int, str]) -> None:
        ranks_by_call: dict[str, list[int]] = {}
        for rank, call in calls.items():
            ranks_by_call.setdefault(call, []).append(rank)
        shown = ", ".join(f"ranks {ranks} call {call}" for call, ranks in ranks_by_call.items())
        TorporError.__init__(
            self,
            f"{shown}: every rank must make the same call with the same components",
            rank=min(ranks_by_call.values(), key=len)[0],
            failures=dict(calls),
            calls=dict(calls),
            stage="begin",
            kind="desync",
        )


class UnsupportedError(TorporError, RuntimeError):
    """This version, device or setting cannot do what was asked; the message says what can."""

"""The account of one sleep or wake: every byte under one fate, seconds by stage, memory before and after."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torpor.errors import GIB
from torpor.kinds import Fate, Role

#: Lines of `table()` for tensors that stayed on the device; all of them are in `leftovers`.
_MAX_LEFTOVERS = 8
#: What a GPU's account may leave unexplained: kernels that the driver loads on first use take tens of MiB.
TOLERANCE_BYTES = 64 * 1024**2


@dataclass(slots=True)
class Row:
    """Storages of one component, role, fate and reason, added up.

    Example: `Row("params", Role.PARAM, Fate.MOVED, storages=272, nbytes=538_060_032, copied_bytes=538_060_032,
    freed_bytes=536_870_912, reason="")`.
    """

    component: str
    role: Role
    fate: Fate
    storages: int
    nbytes: int
    copied_bytes: int = 0
    """Bytes written to the store (sleep) or read from it (wake)."""
    freed_bytes: int = 0
    """Bytes of device memory given back (sleep) or taken again (wake)."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A tensor on the device that no component knows: whoever holds it keeps its memory awake."""

    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    device: str
    holder: str


@dataclass(frozen=True, slots=True)
class DeviceAccount:
    """Every byte of a GPU's memory that the driver counts, under one line, when the call was over.

    Example: `DeviceAccount("cuda:0", 900, True, {"storages awake": 300, "context, kernels and libraries": 500})`
    leaves 100 bytes unexplained.
    """

    device: str
    used_bytes: int
    """What the driver counts."""
    is_own: bool
    """Whether that is this process alone; else it is all processes on the device together."""
    lines: dict[str, int]
    """Bytes by what they are. What torch's allocator does not know is taken for what it was at the first account."""

    @property
    def unexplained_bytes(self) -> int:
        """What no line holds: kernels loaded since the first account, communicators, memory of other libraries."""
        return self.used_bytes - sum(self.lines.values())

    @property
    def closes(self) -> bool:
        """Whether no more than `TOLERANCE_BYTES` are unexplained."""
        return abs(self.unexplained_bytes) <= TOLERANCE_BYTES

    def text(self) -> str:
        """For a person, in GiB."""
        judge = "of this process" if self.is_own else "of all processes"
        lines = ", ".join(f"{name} {nbytes / GIB:.3f}" for name, nbytes in self.lines.items())
        verdict = "" if self.closes else f": more than the {TOLERANCE_BYTES / GIB:.3f} that kernels may take"
        return (
            f"{self.device}, {judge}: {self.used_bytes / GIB:.3f} GiB = {lines}, "
            f"unexplained {self.unexplained_bytes / GIB:.3f}{verdict}"
        )


@dataclass(slots=True)
class Ledger:
    """What one call did. Bytes are bytes, seconds are seconds; GiB (1024**3) appear in `table()` only."""

    kind: Literal["sleep", "wake"]
    store: str
    rows: list[Row] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds by stage; stages that overlap are timed once, by the stage that waits."""
    used_before_bytes: int = 0
    """Device memory of this process before the call, as kernel or driver counts it (CPU: resident memory)."""
    used_after_bytes: int = 0
    store_bytes: int = 0
    """Bytes the store holds after the call, padding included."""
    host_before_bytes: int = 0
    """Bytes of host memory the store held before the call."""
    host_bytes: int = 0
    """Bytes of host memory the store holds after the call."""
    counts_host: bool = True
    """Whether `used_before_bytes` and `used_after_bytes` are host memory, which the store's own is a part of."""
    leftovers: list[Leftover] = field(default_factory=list)
    devices: list[DeviceAccount] = field(default_factory=list)
    """One account for each GPU, where leftovers are looked for."""

    @property
    def nbytes(self) -> int:
        """Bytes of all storages in the account."""
        return sum(row.nbytes for row in self.rows)

    @property
    def copied_bytes(self) -> int:
        """Bytes that crossed to the store (sleep) or came back from it (wake)."""
        return sum(row.copied_bytes for row in self.rows)

    @property
    def freed_bytes(self) -> int:
        """Bytes of device memory given back by a sleep; 0 for a wake."""
        return sum(row.freed_bytes for row in self.rows) if self.kind == "sleep" else 0

    @property
    def taken_bytes(self) -> int:
        """Bytes of device memory taken again by a wake; 0 for a sleep."""
        return sum(row.freed_bytes for row in self.rows) if self.kind == "wake" else 0

    @property
    def unexplained_bytes(self) -> int:
        """How far the kernel's difference is from ours, the store's own host memory taken out: positive if more
        memory is in use after the call than the account says. Other threads of the process move it too.

        Of GPUs: what is under no line of `devices`. Without those, cached blocks that the driver got back as well
        make it negative.
        """
        if self.devices:
            return sum(account.unexplained_bytes for account in self.devices)
        used = self.used_after_bytes - self.used_before_bytes
        own = self.host_bytes - self.host_before_bytes if self.counts_host else 0
        return used - own + self.freed_bytes - self.taken_bytes

    @property
    def seconds(self) -> float:
        """Seconds of the whole call."""
        return sum(self.stages.values())

    @property
    def bytes_per_s(self) -> float:
        """Copied bytes over the seconds of the copying stage; 0.0 if nothing was copied."""
        seconds = self.stages.get("copy", 0.0)
        return self.copied_bytes / seconds if seconds else 0.0

    def bytes_by_fate(self) -> dict[Fate, int]:
        """Bytes of storages for each fate that occurs."""
        return self._sum(lambda row: row.fate)

    def bytes_by_component(self) -> dict[str, int]:
        """Bytes of storages for each component that occurs."""
        return self._sum(lambda row: row.component)

    def _sum(self, key: Any) -> dict[Any, int]:
        sums: dict[Any, int] = {}
        for row in self.rows:
            sums[key(row)] = sums.get(key(row), 0) + row.nbytes
        return sums

    def to_json(self) -> dict[str, Any]:
        """The ledger as plain JSON values, with its totals."""
        plain = asdict(self)
        for account, entry in zip(self.devices, plain["devices"], strict=True):
            entry |= {"unexplained_bytes": account.unexplained_bytes, "closes": account.closes}
        plain["totals"] = {
            "nbytes": self.nbytes,
            "copied_bytes": self.copied_bytes,
            "freed_bytes": self.freed_bytes,
            "taken_bytes": self.taken_bytes,
            "unexplained_bytes": self.unexplained_bytes,
            "seconds": self.seconds,
            "by_fate": {str(fate): nbytes for fate, nbytes in self.bytes_by_fate().items()},
        }
        return plain

    def table(self) -> str:
        """The account for a person: rows, totals, memory, rate and stages. GiB are 1024**3 bytes."""
        return "\n".join([*_table(self.rows, self.kind), *self._footer()])

    def _footer(self) -> Iterator[str]:
        verb = "freed" if self.kind == "sleep" else "taken"
        yield (
            f"{self.kind}: {self.copied_bytes / GIB:.3f} GiB copied, "
            f"{(self.freed_bytes + self.taken_bytes) / GIB:.3f} GiB {verb}, {self.seconds:.3f} s; "
            f"in use {self.used_before_bytes / GIB:.3f} -> {self.used_after_bytes / GIB:.3f} GiB; store: {self.store}"
        )
        if self.bytes_per_s:
            yield f"rate: {self.bytes_per_s / 1e9:.2f} GB/s"
        if self.stages:
            yield "seconds: " + ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in self.stages.items())
        for account in self.devices:
            yield account.text()
        for left in self.leftovers[:_MAX_LEFTOVERS]:
            yield (
                f"left on {left.device}: {left.nbytes / GIB:.3f} GiB, {left.dtype} {list(left.shape)}, "
                f"held by {left.holder}"
            )
        if len(self.leftovers) > _MAX_LEFTOVERS:
            rest = self.leftovers[_MAX_LEFTOVERS:]
            yield f"and {len(rest)} more tensors left, {sum(left.nbytes for left in rest) / GIB:.3f} GiB"


def _table(rows: Iterable[Row], kind: str) -> Iterator[str]:
    moved, memory = ("written", "freed") if kind == "sleep" else ("read", "taken")
    line = "{:<12} {:<15} {:<8} {:>8} {:>10} {:>10} {:>10}  {}"
    yield line.format("component", "role", "fate", "storages", "GiB", moved, memory, "why").rstrip()
    for row in rows:
        yield line.format(
            row.component,
            row.role,
            row.fate,
            row.storages,
            *(f"{n / GIB:.3f}" for n in (row.nbytes, row.copied_bytes, row.freed_bytes)),
            row.reason,
        ).rstrip()


def add_up(rows: Iterable[Row]) -> list[Row]:
    """Rows of one component, role, fate and reason in one row, in the order of first appearance."""
    sums = Sums()
    for row in rows:
        total = sums.row(row.component, row.role, row.fate, row.reason)
        total.storages += row.storages
        total.nbytes += row.nbytes
        total.copied_bytes += row.copied_bytes
        total.freed_bytes += row.freed_bytes
    return sums.rows()


class Sums:
    """Rows that are being added up: whoever has storages adds them without making a row of each."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, Role, Fate, str], Row] = {}

    def row(self, component: str, role: Role, fate: Fate, reason: str) -> Row:
        """The one row of these, to be added to."""
        key = component, role, fate, reason
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = Row(component, role, fate, 0, 0, reason=reason)
        return row

    def rows(self) -> list[Row]:
        """All of them, in the order of first appearance."""
        return list(self._rows.values())


class Stopwatch:
    """Adds up seconds by stage."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block under `name`; an exception is timed too."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - start


def fates_in_words(by_fate: Mapping[Fate, int]) -> str:
    """Example: `moved 1.002 GiB, clean 0.250 GiB`."""
    return ", ".join(f"{fate} {nbytes / GIB:.3f} GiB" for fate, nbytes in by_fate.items() if nbytes)

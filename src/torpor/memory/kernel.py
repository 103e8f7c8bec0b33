"""What Linux says about memory and mounts, and the three calls that Python does not offer. One file asks the kernel."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

PAGE_BYTES = mmap.PAGESIZE
MADV_DONTNEED = 4
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23  # Linux 5.14

#: What one entry of the second page-table level maps, on x86-64 and on arm64 with pages of 4 KiB.
HUGE_PAGE_BYTES = 2 * 1024**2

#: `f_type` of statfs(2) for filesystems that live in memory. Source: linux/magic.h.
_MEMORY_FILESYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_libc.statfs.argtypes = [ctypes.c_char_p, ctypes.c_void_p]


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of /proc/self/maps. Example: `Mapping(0x7f00, 0x8f00, "rw-p", "")`."""

    begin: int
    end: int
    permissions: str
    path: str
    """The mapped file, a kernel's name in brackets, or empty for anonymous memory."""
    locked: bool = False
    """Whether mlock(2) holds its pages in memory."""

    def continued_by(self, other: Mapping) -> bool:
        """Whether `other` begins where this one ends and is of the same kind."""
        return (self.end, self.permissions, self.path, self.locked) == (
            other.begin,
            other.permissions,
            other.path,
            other.locked,
        )


class Mappings:
    """The process's memory map at one moment; adjacent mappings of one kind are joined."""

    def __init__(self) -> None:
        self._mappings: list[Mapping] = []
        for mapping in _locked_or_not() if _process_locks_memory() else _mappings():
            if self._mappings and self._mappings[-1].continued_by(mapping):
                self._mappings[-1] = replace(self._mappings[-1], end=mapping.end)
            else:
                self._mappings.append(mapping)
        self._begins = [mapping.begin for mapping in self._mappings]

    def covering(self, address: int, nbytes: int) -> Mapping | None:
        """The one mapping that contains `nbytes` bytes from `address`; None if they are spread or unmapped."""
        position = bisect_right(self._begins, address) - 1
        if position < 0:
            return None
        mapping = self._mappings[position]
        return mapping if address + nbytes <= mapping.end else None


def _mappings() -> Iterator[Mapping]:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            yield _parse(line)


def _locked_or_not() -> Iterator[Mapping]:
    """As `_mappings`, with what only the much slower /proc/self/smaps tells: whether pages are locked."""
    with open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            if not line[0].isupper():  # addresses are in lower case, the fields below each line of them are not
                mapping = _parse(line)
            elif line.startswith("VmFlags:"):
                yield replace(mapping, locked="lo" in line.split())


def _parse(line: str) -> Mapping:
    span, permissions, _, _, _, *path = line.rstrip("\n").split(maxsplit=5)
    begin, end = (int(bound, 16) for bound in span.split("-"))
    return Mapping(begin, end, permissions, path[0] if path else "")


def _process_locks_memory() -> bool:
    return any(
        line.startswith("VmLck:") and line.split()[1] != "0"
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    )


def whole_pages(address: int, nbytes: int, page_bytes: int = PAGE_BYTES) -> tuple[int, int]:
    """Start and length in bytes of the pages that lie entirely inside `nbytes` bytes from `address`."""
    begin = -(-address // page_bytes) * page_bytes
    end = (address + nbytes) // page_bytes * page_bytes
    return begin, max(0, end - begin)


def madvise(address: int, nbytes: int, advice: int) -> int:
    """madvise(2) on whole pages; 0, or the errno."""
    return 0 if _libc.madvise(address, nbytes, advice) == 0 else ctypes.get_errno()


def populate(address: int, nbytes: int) -> None:
    """Have the pages touched by `nbytes` bytes from `address` in memory now, contents unchanged; not before Linux 5.14.

    Raises:
        OSError: the kernel has no room for them, or they may not be written.
    """
    begin = address // PAGE_BYTES * PAGE_BYTES
    code = madvise(begin, address + nbytes - begin, MADV_POPULATE_WRITE)
    if code not in (0, errno.EINVAL):
        raise OSError(code, os.strerror(code))


def trim_heap() -> None:
    """Have glibc return freed heap pages to the kernel; nothing where the C library has no `malloc_trim`."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes(address: int, nbytes: int) -> int:
    """Bytes of the pages touched by `nbytes` bytes from `address` that are in memory, by mincore(2)."""
    begin = address // PAGE_BYTES * PAGE_BYTES
    pages = -(-(address + nbytes - begin) // PAGE_BYTES)
    flags = ctypes.create_string_buffer(pages)
    if nbytes and _libc.mincore(begin, pages * PAGE_BYTES, flags) != 0:
        raise OSError(ctypes.get_errno(), f"mincore of {nbytes} bytes at {address:#x}")
    return sum(flag & 1 for flag in flags.raw) * PAGE_BYTES if nbytes else 0


def process_resident_bytes() -> int:
    """Resident memory of this process. Source: /proc/self/statm, second field, in pages."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES


def available_bytes() -> int:
    """Memory this process could still take: what the kernel calls available, and what its control groups allow."""
    return min([_mem_available_bytes(), *_cgroup_rooms_bytes()])


def _mem_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("no MemAvailable in /proc/meminfo: Linux 3.14 or newer is needed")


def _cgroup_rooms_bytes() -> list[int]:
    """Limit minus usage of each memory control group above this process, version 1 and 2; file pages count as room."""
    rooms = []
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = (
                Path("/sys/fs/cgroup/memory"),
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        group = root / path.lstrip("/")
        for level in (group, *group.parents):
            room = _room_bytes(level, limit, usage)
            if room is not None:
                rooms.append(room)
            if level == root:
                break
    return rooms


def _room_bytes(group: Path, limit: str, usage: str) -> int | None:
    try:
        text = (group / limit).read_text(encoding="ascii").strip()
        if text == "max":
            return None
        reclaimable = dict(line.split()[:2] for line in (group / "memory.stat").read_text("ascii").splitlines())
        used = int((group / usage).read_text(encoding="ascii")) - int(reclaimable.get("inactive_file", 0))
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        return None  # a level without a memory controller, or outside this container's view
    return max(0, int(text) - used)


def memory_filesystem(path: str | os.PathLike[str]) -> str | None:
    """ "tmpfs" or "ramfs" if `path` lies on one, else None."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        raise OSError(ctypes.get_errno(), f"statfs of {os.fspath(path)}")
    kind = ctypes.c_long.from_buffer(buffer).value
    return _MEMORY_FILESYSTEMS.get(kind & 0xFFFFFFFF)

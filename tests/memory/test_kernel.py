"""What the kernel is asked, against memory and files whose answers are known."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torpor.memory import kernel
from torpor.memory.kernel import PAGE_BYTES, Mapping, Mappings

MIB = 1024**2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = _libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@contextmanager
def locked(address: int, nbytes: int) -> Iterator[None]:
    """Whole pages, locked in memory by mlock(2)."""
    if _libc.mlock(address, nbytes):
        pytest.skip(f"mlock is not allowed here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        _libc.munlock(address, nbytes)


def anonymous(nbytes: int, flags: int = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, fd: int = -1) -> torch.Tensor:
    """`uint8` over a mapping of its own, which lives as long as the tensor."""
    return torch.frombuffer(mmap.mmap(fd, nbytes, flags=flags), dtype=torch.uint8)


def test_private_anonymous_memory() -> None:
    block = anonymous(MIB)
    mapping = Mappings().covering(block.data_ptr(), MIB)
    assert mapping is not None
    assert (mapping.permissions, mapping.path, mapping.locked) == ("rw-p", "", False)
    assert mapping.begin <= block.data_ptr()
    assert mapping.end >= block.data_ptr() + MIB


def test_shared_and_file_mapped_memory(tmp_path: Path) -> None:
    path = tmp_path / "a name with spaces"
    path.write_bytes(bytes(MIB))
    with path.open("r+b") as file:
        shared, private = (
            anonymous(MIB, mmap.MAP_SHARED, file.fileno()),
            anonymous(MIB, mmap.MAP_PRIVATE, file.fileno()),
        )
    found = [Mappings().covering(block.data_ptr(), MIB) for block in (shared, private)]
    assert [(m.permissions, m.path) for m in found if m] == [("rw-s", str(path)), ("rw-p", str(path))]


def test_memory_of_two_kinds_or_none_has_no_mapping() -> None:
    block = anonymous(4 * PAGE_BYTES)
    middle = block.data_ptr() + 2 * PAGE_BYTES
    assert _libc.mprotect(middle, 2 * PAGE_BYTES, mmap.PROT_READ) == 0
    mappings = Mappings()
    assert mappings.covering(block.data_ptr(), 4 * PAGE_BYTES) is None
    writable, readable = mappings.covering(middle - 1, 1), mappings.covering(middle, 1)
    assert writable is not None
    assert readable is not None
    assert (writable.permissions, readable.permissions) == ("rw-p", "r--p")
    assert mappings.covering(0, 1) is None
    assert mappings.covering(2**63, 1) is None


def test_neighbours_of_one_kind_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [
        Mapping(0x1000, 0x2000, "rw-p", ""),
        Mapping(0x2000, 0x3000, "rw-p", ""),
        Mapping(0x4000, 0x5000, "rw-p", ""),
        Mapping(0x5000, 0x6000, "rw-p", "", locked=True),
        Mapping(0x6000, 0x7000, "rw-p", "[heap]"),
    ]
    monkeypatch.setattr(kernel, "_mappings", lambda: parts)
    mappings = Mappings()
    assert mappings.covering(0x1000, 0x2000) == Mapping(0x1000, 0x3000, "rw-p", "")
    for address, nbytes in ((0x2000, 0x3000), (0x4000, 0x2000), (0x5000, 0x2000), (0x6000, 0x1001)):
        assert mappings.covering(address, nbytes) is None
    assert mappings.covering(0x6000, 0x1000) == parts[-1]


def test_locked_memory_is_told_apart() -> None:
    block = anonymous(MIB)
    middle = block.data_ptr() + MIB // 2
    with locked(middle, MIB // 2):
        mappings = Mappings()
        assert mappings.covering(block.data_ptr(), MIB) is None
        whole = mappings.covering(middle, MIB // 2)
        assert whole is not None
        assert whole.locked
    mapping = Mappings().covering(block.data_ptr(), MIB)
    assert mapping is not None
    assert not mapping.locked


@given(st.integers(0, 2**47), st.integers(0, 2**24), st.sampled_from([PAGE_BYTES, kernel.HUGE_PAGE_BYTES]))
def test_whole_pages_lie_inside_and_are_all(address: int, nbytes: int, page: int) -> None:
    begin, length = kernel.whole_pages(address, nbytes, page)
    assert begin % page == length % page == 0
    if length:
        assert address <= begin < address + page
        assert address + nbytes - page < begin + length <= address + nbytes
    else:
        assert nbytes < 2 * page - 1


def test_pages_come_and_go() -> None:
    block = anonymous(MIB)
    address = block.data_ptr()
    assert kernel.resident_bytes(address, MIB) == 0
    block[5 * PAGE_BYTES] = 1
    assert kernel.resident_bytes(address, MIB) == PAGE_BYTES
    kernel.populate(address + 10, MIB // 2)
    assert kernel.resident_bytes(address, MIB) == MIB // 2 + PAGE_BYTES
    assert int(block[5 * PAGE_BYTES]) == 1
    assert kernel.madvise(address, MIB, kernel.MADV_DONTNEED) == 0
    assert kernel.resident_bytes(address, MIB) == 0
    assert kernel.resident_bytes(address, 0) == 0


def test_pages_that_cannot_be_there_are_an_error() -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        kernel.populate(2**46, PAGE_BYTES)
    with pytest.raises(OSError, match="mincore"):
        kernel.resident_bytes(2**46, PAGE_BYTES)


def test_resident_memory_of_the_process_follows() -> None:
    before = kernel.process_resident_bytes()
    block = anonymous(64 * MIB)
    kernel.populate(block.data_ptr(), 64 * MIB)
    assert abs(kernel.process_resident_bytes() - before - 64 * MIB) < 8 * MIB
    del block
    assert abs(kernel.process_resident_bytes() - before) < 8 * MIB


def test_available_memory_is_bounded_by_every_control_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert 0 < kernel.available_bytes() <= os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES
    monkeypatch.setattr(kernel, "_cgroup_rooms_bytes", lambda: [5000, 12288])
    assert kernel.available_bytes() == 5000


def test_room_in_a_control_group(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 300000\n")
    room = kernel._room_bytes
    assert room(tmp_path, "memory.max", "memory.current") == 400_000, "file pages count as room"
    (tmp_path / "memory.current").write_text("2000000\n")
    assert room(tmp_path, "memory.max", "memory.current") == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert room(tmp_path, "memory.max", "memory.current") is None
    assert room(tmp_path / "elsewhere", "memory.max", "memory.current") is None


def test_filesystems_in_memory_are_known(tmp_path: Path) -> None:
    assert kernel.memory_filesystem("/var/tmp") is None
    with pytest.raises(OSError, match="statfs"):
        kernel.memory_filesystem(tmp_path / "missing")
    if any(line.split()[1:3] == ["/dev/shm", "tmpfs"] for line in Path("/proc/mounts").read_text().splitlines()):
        assert kernel.memory_filesystem("/dev/shm") == "tmpfs"


def test_trimming_the_heap_does_no_harm() -> None:
    blocks = [torch.ones(1000) for _ in range(100)]
    kernel.trim_heap()
    assert all(bool((block == 1).all()) for block in blocks)

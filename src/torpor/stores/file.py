"""Node-local disk: one private file a process, written past the page cache.

Room is allocated on the disk when it is reserved, so that a full disk is an error before anything is freed.
Blocks go out and come in as aligned direct I/O; a filesystem without it is synced and evicted block by block,
because bytes that stay in the page cache free nothing. Whether they came back whole is not this file's
business: the sleeper compares fingerprints.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from typing_extensions import Buffer

from torpor.errors import ClosedError, StoreError, StoreFullError, UsageError
from torpor.stores.base import BlockStore, Slot
from torpor.stores.private_dir import PrivateDirectory
from torpor.stores.slots import FreeList

#: Direct I/O wants multiples of the device's logical block: 512 or 4096 bytes everywhere.
_ALIGNMENT_BYTES = 4096
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileStore(BlockStore):
    """See the module's docstring.

    Args:
        directory: where the private directory `torpor-<uid>` is made; see `PrivateDirectory` for the default.
        rank: goes into the file's name. Default: the environment's RANK, else 0.
        chunk_bytes: size of one ring buffer and of the largest read or write; a multiple of 4096.
        ring: number of ring buffers; the host memory this store takes is `ring * chunk_bytes`.

    Raises:
        UnsafeStoreError: the directory must not be trusted.
        UsageError: a chunk size or ring that cannot be.
    """

    name = "file"
    alignment_bytes = _ALIGNMENT_BYTES

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        rank: int | None = None,
        chunk_bytes: int = 8 * 1024**2,
        ring: int = 4,
    ) -> None:
        if chunk_bytes < _ALIGNMENT_BYTES or chunk_bytes % _ALIGNMENT_BYTES:
            raise UsageError(f"chunk_bytes={chunk_bytes}: must be a positive multiple of {_ALIGNMENT_BYTES}")
        if ring < 2:
            raise UsageError(f"ring={ring}: at least 2 buffers are needed, one to fill while the other is written")
        self.chunk_bytes = chunk_bytes
        self._directory = PrivateDirectory(directory)
        self._directory.remove_dead()
        rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self._file_name, self._fd = self._directory.create(rank)
        self._direct = bool(fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_DIRECT)
        self._free = FreeList(_ALIGNMENT_BYTES)
        self._end = 0
        self._ring_size = ring
        self._ring: list[torch.Tensor] = []
        self._finalizer = weakref.finalize(self, _remove, self._directory, self._file_name, self._fd)

    @property
    def path(self) -> Path:
        """The file."""
        return self._directory.path / self._file_name

    def reserve(self, sizes_bytes: Sequence[int]) -> list[Slot]:
        self._require_open()
        slots = self._free.take(sizes_bytes)
        if slots is None:
            self._grow(sum(self._free.length(nbytes) for nbytes in sizes_bytes))
            slots = self._free.take(sizes_bytes)
        if slots is None:
            raise ValueError("an extent of the size asked for does not hold its slots")
        return slots

    def release(self, slots: Sequence[Slot]) -> None:
        self._free.give(slots)
        if self._free.extents and self._free.extents[-1][1] == self._end:
            begin, end = self._free.extents[-1]
            self._free.remove(begin, end)
            self._end = begin
            os.ftruncate(self._fd, begin)

    @property
    def reserved_bytes(self) -> int:
        return self._end

    @property
    def host_bytes(self) -> int:
        return len(self._ring) * self.chunk_bytes

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        return self._ring

    def buffers(self) -> Sequence[torch.Tensor]:
        if not self._ring:
            for _ in range(self._ring_size):
                self._ring.append(torch.frombuffer(mmap.mmap(-1, self.chunk_bytes), dtype=torch.uint8))
        return self._ring

    def write_block(self, offset: int, block: torch.Tensor) -> None:
        self._require_open()
        view = memoryview(cast(Buffer, block.numpy()))
        done = 0
        while done < len(view):
            with _as_store_error(self, f"writing {len(view)} bytes at {offset}"):
                done += os.pwrite(self._fd, view[done:], offset + done)
        if not self._direct:
            self._evict(offset, len(view))

    def read_block(self, offset: int, block: torch.Tensor) -> None:
        self._require_open()
        view = memoryview(cast(Buffer, block.numpy()))
        done = 0
        while done < len(view):
            with _as_store_error(self, f"reading {len(view)} bytes at {offset}"):
                count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                raise StoreError(f"{self.path}: the file ends at {offset + done}, {len(view) - done} bytes are missing")
            done += count
        if not self._direct:
            os.posix_fadvise(self._fd, offset, len(view), os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        self._require_open()
        with _as_store_error(self, "syncing"):
            os.fdatasync(self._fd)

    def close(self) -> None:
        self._finalizer()
        self._ring.clear()

    def describe(self) -> str:
        return f"file {self.path} ({'direct' if self._direct else 'buffered, evicted'} I/O)"

    def _grow(self, nbytes: int) -> None:
        """Allocate disk blocks for `nbytes` more, less what is free at the end of the file."""
        tail = self._free.extents[-1] if self._free.extents else (self._end, self._end)
        begin = tail[0] if tail[1] == self._end else self._end
        grown = begin + nbytes
        try:
            os.posix_fallocate(self._fd, self._end, grown - self._end)
        except OSError as error:
            os.ftruncate(self._fd, self._end)
            if error.errno not in _NO_SPACE:
                raise StoreError(f"{self.path}: reserving {nbytes} bytes: {error.strerror}") from error
            facts = os.fstatvfs(self._fd)
            raise StoreFullError(
                nbytes,
                facts.f_bavail * facts.f_frsize,
                str(self.path),
                "Free disk space, or name another store_dir.",
            ) from error
        self._free.add(self._end, grown)
        self._end = grown

    def _evict(self, offset: int, nbytes: int) -> None:
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("this store was closed; make a new one")


class _as_store_error:
    """Turn the system's refusal into a `StoreError` with the path and what was going on."""

    def __init__(self, store: FileStore, what: str) -> None:
        self._store, self._what = store, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, StoreError):
            raise StoreError(f"{self._store.path}: {self._what}: {error.strerror}", errno=error.errno) from error


def _remove(directory: PrivateDirectory, name: str, fd: int) -> None:
    directory.remove(name)
    os.close(fd)
    directory.close()

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from typing_extensions import Buffer

from torpor.errors import ClosedError, StoreError, StoreFullError, UsageError
from torpor.memory import kernel
from torpor.stores.base import BlockStore, Slot
from torpor.stores.batch import Batch
from torpor.stores.pages import huge_pages
from torpor.stores.private_dir import PrivateDirectory
from torpor.stores.slots import FreeList

#: Direct I/O wants multiples of the device's logical block: 512 or 4096 bytes everywhere.
_ALIGNMENT_BYTES = 4096
#: Blocks of one call of C: enough for Python not to count, few enough for several buffers to have some.
_BATCH_BLOCKS = 4
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: What `posix_fallocate` says on a filesystem that cannot allocate ahead; EINVAL where glibc tries to imitate it.
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL)


class FileStore(BlockStore):
    """See the module's docstring.

    Args:
        directory: where the private directory `torpor-<uid>` is made; see `PrivateDirectory` for the default.
        rank: goes into the file's name. Default: the environment's RANK, else 0.
        chunk_bytes: size of one ring buffer and of the largest read or write; a multiple of 4096.
        ring: number of ring buffers, as many blocks are under way at most, those that are copied included; the host
            memory this store takes is `ring * chunk_bytes`. The defaults keep the device busy while blocks are copied:
            of rings of 8 MiB, 8 buffers of 1 MiB were faster than 16 of half a MiB where it was measured.

    Raises:
        UnsafeStoreError: the directory must not be trusted.
        UsageError: a chunk size, ring or rank that cannot be.
        StoreError: the directory or the file cannot be made.
    """

    name = "file"
    alignment_bytes = _ALIGNMENT_BYTES

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        rank: int | None = None,
        chunk_bytes: int = kernel.HUGE_PAGE_BYTES // 2,
        ring: int = 8,
    ) -> None:
        super().__init__()
        if chunk_bytes < _ALIGNMENT_BYTES or chunk_bytes % _ALIGNMENT_BYTES:
            raise UsageError(f"chunk_bytes={chunk_bytes}: must be a positive multiple of {_ALIGNMENT_BYTES}")
        if ring < 2:
            raise UsageError(f"ring={ring}: at least 2 buffers are needed, one to fill while the other is written")
        rank = _rank_of_environment() if rank is None else rank
        if rank < 0:
            raise UsageError(f"rank={rank}: must be at least 0")
        self.chunk_bytes = chunk_bytes
        self._free = FreeList(_ALIGNMENT_BYTES)
        self._end = 0
        self._ring_size = ring
        self._ring: list[torch.Tensor] = []
        self._directory = PrivateDirectory(directory)
        with self._directory.closed_on_error():
            self._directory.remove_dead()
            self._file_name, self._fd = self._directory.create(rank)
        self._finalizer = weakref.finalize(self, _remove, self._directory, self._file_name, self._fd, os.getpid())
        self._direct = _is_direct(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)  # what is read ahead into the cache would stay there

    @property
    def path(self) -> Path:
        """The file."""
        return self._directory.path / self._file_name

    def reserve(self, sizes_bytes: Sequence[int]) -> list[Slot]:
        self._require_open()
        return self._free.take_or_grow(sizes_bytes, self._grow)

    def release(self, slots: Sequence[Slot]) -> None:
        self._require_open()
        self._free.give(slots)
        if self._free.extents and self._free.extents[-1][1] == self._end:
            begin, end = self._free.extents[-1]
            self._free.remove(begin, end)
            self._end = begin
            with self._refusing(f"giving back what lies behind {begin} bytes"):
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
            self._ring += huge_pages(self.chunk_bytes, self._ring_size)
        return self._ring

    def write_block(self, offset: int, block: torch.Tensor) -> None:
        self._require_open()
        view = memoryview(cast(Buffer, block.numpy()))
        with self._refusing(f"writing {len(view)} bytes at {offset}"):
            _write_all(self._fd, view, offset)
            if not self._direct:
                os.fdatasync(self._fd)  # a page that is not on the disk yet cannot be evicted
                self._evict(offset, len(view))

    def read_block(self, offset: int, block: torch.Tensor) -> None:
        self._require_open()
        view = memoryview(cast(Buffer, block.numpy()))
        done = 0
        with self._refusing(f"reading {len(view)} bytes at {offset}"):
            while done < len(view):
                count = os.preadv(self._fd, [view[done:]], offset + done)
                if count == 0:
                    raise StoreError(
                        f"{self.path}: the file ends at {offset + done}, {len(view) - done} bytes are missing"
                    )
                done += count
            self._evict(offset, len(view))

    @property
    def batch_blocks(self) -> int:
        return _BATCH_BLOCKS if self._in_one_call else 1

    def write_blocks(self, batch: Batch, first: int, buffer: torch.Tensor) -> int:
        self._require_open()
        return batch.write(self._fd, first, buffer) if self._in_one_call else first

    def read_blocks(self, batch: Batch, first: int, buffer: torch.Tensor) -> int:
        self._require_open()
        return batch.read(self._fd, first, buffer) if self._in_one_call else first

    @property
    def _in_one_call(self) -> bool:
        """Whether a block is no more than one request; not if somebody put other methods in the place of ours."""
        ours = (FileStore.write_block, FileStore.read_block)
        methods = (self.write_block, self.read_block)
        return self._direct and ours == tuple(getattr(method, "__func__", None) for method in methods)

    def sync(self) -> None:
        self._require_open()
        with self._refusing("syncing"):
            os.fdatasync(self._fd)
            self._evict(0, 0)

    def close(self) -> None:
        self._finalizer()
        self._ring.clear()
        self._end = 0

    def describe(self) -> str:
        return f"file {self.path} ({'direct' if self._direct else 'buffered, evicted'} I/O)"

    def _grow(self, nbytes: int) -> None:
        """Allocate disk blocks for `nbytes` more, less what is free at the end of the file."""
        tail = self._free.extents[-1] if self._free.extents else (self._end, self._end)
        begin = tail[0] if tail[1] == self._end else self._end
        grown = begin + nbytes
        try:
            self._allocate(self._end, grown)
        except OSError as error:
            os.ftruncate(self._fd, self._end)
            if error.errno not in _NO_SPACE:
                raise StoreError(
                    f"{self.path}: reserving {nbytes} bytes: {error.strerror}", errno=error.errno
                ) from error
            facts = os.fstatvfs(self._fd)
            raise StoreFullError(
                grown - self._end,
                facts.f_bavail * facts.f_frsize,
                str(self.path),
                f"The system said: {error.strerror}. Free disk space, or name another store_dir.",
            ) from error
        self._free.add(self._end, grown)
        self._end = grown

    def _allocate(self, begin: int, end: int) -> None:
        try:
            os.posix_fallocate(self._fd, begin, end - begin)
        except OSError as error:
            if error.errno not in _CANNOT_ALLOCATE:
                raise
            with self.ring_lock:
                zeros = memoryview(cast(Buffer, self.buffers()[0].zero_().numpy()))
                for offset in range(begin, end, self.chunk_bytes):
                    _write_all(self._fd, zeros[: end - offset], offset)

    def _evict(self, offset: int, nbytes: int) -> None:
        """Nothing to do after direct I/O, unless the filesystem took it and went through its cache all the same."""
        os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("this store was closed; make a new one")

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """Turn the system's refusal into a `StoreError` with the path and what was going on."""
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"{self.path}: {what}: {error.strerror}", errno=error.errno) from error


def _rank_of_environment() -> int:
    text = os.environ.get("RANK", "0")
    if not text.isdecimal():
        raise UsageError(f"RANK={text!r} in the environment: must be a number; or pass rank=")
    return int(text)


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def _is_direct(fd: int) -> bool:
    """Whether direct I/O of our alignment works; some filesystems take the flag and refuse the write."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    try:
        os.pwrite(fd, mmap.mmap(-1, _ALIGNMENT_BYTES), 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            return False
        # any other trouble is for the first reserve to tell
    else:
        os.ftruncate(fd, 0)
    return True


def _remove(directory: PrivateDirectory, name: str, fd: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child that drops its copy of the store must not take the parent's file away
        directory.remove(name)
    os.close(fd)
    directory.close()

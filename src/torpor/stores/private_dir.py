"""A directory of files that only this user and, each, only one live process may use.

Every path is opened relative to a directory descriptor, links are never followed, and a file belongs to the
process that holds its lock: files without one are what a killed run left, and are removed. Creating and
removing happen under a lock of the directory, so that a file just created is never taken for a dead one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torpor.errors import StoreError, UnsafeStoreError
from torpor.memory import kernel

_NAME = re.compile(r"rank\d+-pid\d+-[0-9a-f]{8}\.torpor")
_MODE_DIRECTORY = 0o700
_MODE_FILE = 0o600


class PrivateDirectory:
    """`<parent>/torpor-<uid>`, mode 0700, on a disk.

    Args:
        parent: where to make it. None: the environment's TORPOR_DIR, else the system's directory for
            temporary files if it is on a disk, else /var/tmp.

    Raises:
        UnsafeStoreError: the directory is a link, another user's, open to others, or on tmpfs (host memory).
        StoreError: it cannot be made.
    """

    def __init__(self, parent: str | os.PathLike[str] | None = None) -> None:
        root = Path(parent) if parent is not None else _default_parent()
        self.path = root / f"torpor-{os.getuid()}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.path.mkdir(mode=_MODE_DIRECTORY)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be made: {error.strerror}", errno=error.errno) from error
        self._fd = _open_directory(self.path)
        with self.closed_on_error():
            _check_directory(self.path, self._fd)

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close if the block raises; what the system refused in it becomes a `StoreError`."""
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, StoreError):
                raise StoreError(f"{self.path}: {error.strerror}", errno=error.errno) from error
            raise

    def create(self, rank: int) -> tuple[str, int]:
        """A new locked file, and its name. Flags ask for direct I/O where the filesystem has it."""
        name = f"rank{rank}-pid{os.getpid()}-{secrets.token_hex(4)}.torpor"
        with self._locked():
            try:
                fd = self._open_new(name)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(fd)
                    raise
            except OSError:
                self.remove(name)
                raise
        return name, fd

    def _open_new(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(name, flags | os.O_DIRECT, _MODE_FILE, dir_fd=self._fd)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.remove(name)  # a filesystem without direct I/O may have created the file all the same
            return os.open(name, flags, _MODE_FILE, dir_fd=self._fd)

    def remove(self, name: str) -> None:
        """Delete one of our files; none is an error no more."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def remove_dead(self) -> int:
        """Delete the files of processes that are gone; how many bytes that gave back."""
        freed_bytes = 0
        with self._locked():
            for name in os.listdir(self._fd):
                if _NAME.fullmatch(name):
                    freed_bytes += self._remove_if_dead(name)
        return freed_bytes

    def close(self) -> None:
        """Let go of the directory. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _remove_if_dead(self, name: str) -> int:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._fd)
        except OSError:  # a link, or gone by now
            return 0
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_nlink != 1:
                return 0
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0  # its process lives
        else:
            os.unlink(name, dir_fd=self._fd)
            return facts.st_blocks * 512
        finally:
            os.close(fd)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)


def _default_parent() -> Path:
    asked = os.environ.get("TORPOR_DIR")
    if asked:
        return Path(asked)
    temporary = Path(tempfile.gettempdir())
    return temporary if kernel.memory_filesystem(temporary) is None else Path("/var/tmp")


def _open_directory(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UnsafeStoreError(
            str(path),
            f"not a directory of its own ({error.strerror})",
            "Remove it, or name another store_dir.",
        ) from error


def _check_directory(path: Path, fd: int) -> None:
    facts = os.fstat(fd)
    if facts.st_uid != os.getuid():
        raise UnsafeStoreError(
            str(path),
            f"belongs to user {facts.st_uid}, this is user {os.getuid()}",
            "Name another store_dir.",
        )
    if stat.S_IMODE(facts.st_mode) & 0o077:
        mode = f"{stat.S_IMODE(facts.st_mode):04o}"
        raise UnsafeStoreError(str(path), f"mode {mode} lets others in", f"Run: chmod 700 {path}")
    kind = kernel.memory_filesystem(f"/proc/self/fd/{fd}")  # of what was opened, whatever the path says by now
    if kind is not None:
        raise UnsafeStoreError(
            str(path),
            f"lies on {kind}, which is host memory: sleeping there frees nothing",
            "Name a store_dir on a disk.",
        )

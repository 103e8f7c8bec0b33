"""The private directory: only ours, only on a disk; dead files go, live ones stay."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.store_contract import open_files
from torpor.errors import StoreError, UnsafeStoreError
from torpor.memory import kernel
from torpor.stores.private_dir import PrivateDirectory

_AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    before = open_files()
    yield
    assert open_files() == before


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[PrivateDirectory]:
    directory = PrivateDirectory(tmp_path)
    yield directory
    directory.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def place(parent: Path) -> Path:
    return parent / f"torpor-{os.getuid()}"


def make_dead(directory: PrivateDirectory, nbytes: int = 8192) -> str:
    """A file whose process is gone: nobody holds its lock."""
    name, fd = directory.create(3)
    os.posix_fallocate(fd, 0, nbytes)
    os.close(fd)
    return name


def test_directory_and_file_are_for_the_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        directory = PrivateDirectory(tmp_path / "made" / "on the way")
        name, fd = directory.create(7)
    finally:
        os.umask(before)
    assert directory.path == place(tmp_path / "made" / "on the way")
    assert mode(directory.path) == 0o700
    assert mode(directory.path / name) == 0o600
    assert name.startswith(f"rank7-pid{os.getpid()}-")
    os.close(fd)
    directory.close()
    directory.close()


def test_it_is_found_again(directory: PrivateDirectory, tmp_path: Path) -> None:
    again = PrivateDirectory(tmp_path)
    assert again.path == directory.path
    again.close()


@pytest.mark.parametrize("bits", [0o710, 0o720, 0o701, 0o750, 0o777])
def test_open_to_others_is_refused_and_the_way_out_works(tmp_path: Path, bits: int) -> None:
    place(tmp_path).mkdir()
    place(tmp_path).chmod(bits)
    with pytest.raises(UnsafeStoreError, match=f"mode {bits:04o} lets others in.*chmod 700") as caught:
        PrivateDirectory(tmp_path)
    assert caught.value.path == str(place(tmp_path))
    place(tmp_path).chmod(0o700)
    PrivateDirectory(tmp_path).close()


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place(tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeStoreError, match="not a directory of its own"):
        PrivateDirectory(tmp_path)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    place(tmp_path).write_text("somebody's")
    with pytest.raises(UnsafeStoreError, match="not a directory of its own"):
        PrivateDirectory(tmp_path)
    assert place(tmp_path).read_text() == "somebody's"


@_AS_ROOT
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    place(tmp_path).mkdir(mode=0o700)
    os.chown(place(tmp_path), 65534, 65534)
    with pytest.raises(UnsafeStoreError, match="belongs to user 65534, this is user 0"):
        PrivateDirectory(tmp_path)


@pytest.mark.skipif(kernel.memory_filesystem("/dev/shm") is None, reason="/dev/shm is no tmpfs here")
def test_host_memory_is_refused_and_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = Path("/dev/shm") / f"torpor-test-{os.getpid()}"
    try:
        with pytest.raises(UnsafeStoreError, match="lies on tmpfs, which is host memory"):
            PrivateDirectory(parent)
    finally:
        place(parent).rmdir()
        parent.rmdir()
    monkeypatch.delenv("TORPOR_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", "/dev/shm")
    directory = PrivateDirectory()
    assert directory.path == place(Path("/var/tmp"))
    directory.close()


def test_the_environment_names_the_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORPOR_DIR", str(tmp_path / "asked"))
    directory = PrivateDirectory()
    assert directory.path == place(tmp_path / "asked")
    directory.close()


def test_a_parent_that_cannot_be_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be made") as caught:
        PrivateDirectory(tmp_path / "file" / "below")
    assert caught.value.errno == errno.ENOTDIR


def test_dead_files_go_and_their_bytes_are_told(directory: PrivateDirectory) -> None:
    names = [make_dead(directory), make_dead(directory, 4096)]
    assert directory.remove_dead() == 12288
    assert not any((directory.path / name).exists() for name in names)
    assert directory.remove_dead() == 0


def test_live_files_stay_whoever_looks(directory: PrivateDirectory, tmp_path: Path) -> None:
    name, fd = directory.create(0)
    other = PrivateDirectory(tmp_path)
    for looking in (directory, other):
        assert looking.remove_dead() == 0
        assert (directory.path / name).exists()
    other.close()
    os.close(fd)
    assert directory.remove_dead() == 0  # dead now, and empty
    assert not (directory.path / name).exists()


def test_what_is_not_a_file_of_ours_is_never_removed(directory: PrivateDirectory, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    ours = directory.path
    (ours / "rank0-pid1-0000000a.torpor").symlink_to(victim)
    os.link(victim, ours / "rank0-pid1-0000000b.torpor")
    os.mkfifo(ours / "rank0-pid1-0000000c.torpor")
    (ours / "rank0-pid1-0000000d.torpor").mkdir()
    (ours / "notes.txt").write_text("somebody's")
    (ours / "rank0-pid1-0000000e.torpor.bak").write_text("somebody's")
    before = sorted(ours.iterdir())
    assert directory.remove_dead() == 0
    assert sorted(ours.iterdir()) == before
    assert victim.read_text() == "precious"


@_AS_ROOT
def test_another_users_file_is_left(directory: PrivateDirectory) -> None:
    name = make_dead(directory)
    os.chown(directory.path / name, 65534, 65534)
    assert directory.remove_dead() == 0
    assert (directory.path / name).exists()


def test_removing_what_is_gone_is_no_error(directory: PrivateDirectory) -> None:
    name = make_dead(directory)
    directory.remove(name)
    directory.remove(name)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EMFILE, errno.EACCES])
def test_a_file_that_cannot_be_made_leaves_nothing(
    directory: PrivateDirectory, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError) as caught:
        directory.create(0)
    monkeypatch.undo()
    assert caught.value.errno == error
    assert list(directory.path.iterdir()) == []


def test_without_direct_io_the_file_is_opened_all_the_same(
    directory: PrivateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def without_direct(path: str, flags: int, *args: int, **kwargs: int) -> int:
        fd = real(path, flags & ~os.O_DIRECT, *args, **kwargs)
        if flags & os.O_DIRECT:  # the kernel makes the file, then refuses the flag
            os.close(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return fd

    monkeypatch.setattr(os, "open", without_direct)
    name, fd = directory.create(0)
    assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
    assert [path.name for path in directory.path.iterdir()] == [name]
    os.close(fd)


def test_a_file_that_cannot_be_locked_leaves_nothing(
    directory: PrivateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock

    def no_locks(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX | fcntl.LOCK_NB:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(OSError):
        directory.create(0)
    assert list(directory.path.iterdir()) == []

"""The file store: room first, past the page cache, private, and nothing left behind."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from contracts.store_contract import MIB, StoreContract, fetch, keep, open_files, same
from torpor.compiled import copy_library
from torpor.errors import ClosedError, StoreError, StoreFullError, UnsafeStoreError, UsageError
from torpor.memory import kernel
from torpor.stores import batch
from torpor.stores.base import Slot
from torpor.stores.file import FileStore
from torpor.transfer import Piece, load, save

_CHUNK = 64 * 1024


@pytest.fixture
def block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the package was installed without a C compiler."""
    monkeypatch.setattr(batch, "copy_library", lambda: None)


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `nbytes` (EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class TestFileStore(StoreContract):
    def make_store(self, directory: Path) -> FileStore:
        return FileStore(directory, chunk_bytes=_CHUNK)

    @contextmanager
    def room_for(self, nbytes: int, directory: Path) -> Iterator[FileStore]:
        store = FileStore(directory)
        with file_size_limit(nbytes):
            yield store
        store.close()


class TestFileStoreWithSmallestRing(StoreContract):
    def make_store(self, directory: Path) -> FileStore:
        return FileStore(directory, chunk_bytes=4096, ring=2)

    @contextmanager
    def room_for(self, nbytes: int, directory: Path) -> Iterator[FileStore]:
        store = self.make_store(directory)
        with file_size_limit(nbytes):
            yield store
        store.close()


class TestFileStoreWithoutTheLibrary(TestFileStore):
    @pytest.fixture(autouse=True)
    def _one_by_one(self, block_by_block: None) -> None:
        """Blocks go by calls of Python."""


class BufferedFileStore(FileStore):
    """On a filesystem that knows no direct I/O."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, chunk_bytes=_CHUNK)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self._direct = False


class TestBufferedFileStore(StoreContract):
    def make_store(self, directory: Path) -> FileStore:
        return BufferedFileStore(directory)

    @contextmanager
    def room_for(self, nbytes: int, directory: Path) -> Iterator[FileStore]:
        store = BufferedFileStore(directory)
        with file_size_limit(nbytes):
            yield store
        store.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    store = FileStore(tmp_path, chunk_bytes=_CHUNK)
    yield store
    store.close()


def cached_bytes(path: Path) -> int:
    """Bytes of the file that are in the page cache."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as window:
        view = torch.frombuffer(window, dtype=torch.uint8)
        resident = kernel.resident_bytes(view.data_ptr(), view.numel())
        del view  # the map cannot be closed while somebody looks through it
    return resident


@pytest.mark.parametrize("make", [FileStore, BufferedFileStore])
def test_nothing_stays_in_the_page_cache(make: type[FileStore], tmp_path: Path) -> None:
    store = make(tmp_path)
    slots = store.reserve([3 * MIB, 100, 2 * MIB])
    keep(store, slots)
    assert cached_bytes(store.path) == 0
    fetch(store, slots)
    assert cached_bytes(store.path) == 0
    with store.path.open("rb") as file:
        file.read()
    assert cached_bytes(store.path) > 0, "the test can see cached pages"
    store.close()


def test_a_cache_that_direct_io_went_through_is_emptied_all_the_same(store: FileStore) -> None:
    """Some filesystems take O_DIRECT and go through their cache when it suits them."""
    slots = store.reserve([MIB])
    fcntl.fcntl(store._fd, fcntl.F_SETFL, fcntl.fcntl(store._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    keep(store, slots)
    assert cached_bytes(store.path) == 0
    fetch(store, slots)
    assert cached_bytes(store.path) == 0


def test_it_says_how_it_writes(store: FileStore, tmp_path: Path) -> None:
    assert store.describe() == f"file {store.path} (direct I/O)"
    buffered = BufferedFileStore(tmp_path)
    assert "buffered, evicted" in buffered.describe()
    buffered.close()


def test_a_refused_direct_write_means_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def refuse_direct(fd: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse_direct)
    store = FileStore(tmp_path)
    slots = store.reserve([5000, 300])
    contents = keep(store, slots)
    assert same(fetch(store, slots), contents)
    assert "buffered" in store.describe()
    store.close()


def test_the_disk_blocks_are_there_before_a_byte_is_written(store: FileStore) -> None:
    store.reserve([2 * MIB, 5000])
    facts = store.path.stat()
    assert facts.st_size == store.reserved_bytes == 2 * MIB + 8192
    assert facts.st_blocks * 512 >= facts.st_size


def test_a_filesystem_that_cannot_allocate_ahead_is_filled_with_zeros(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    kept = store.reserve([_CHUNK + 5])
    contents = keep(store, kept)
    store.reserve([3 * _CHUNK + 5])
    facts = store.path.stat()
    assert facts.st_blocks * 512 >= facts.st_size == store.reserved_bytes
    assert same(fetch(store, kept), contents)
    with file_size_limit(facts.st_size + _CHUNK), pytest.raises(StoreFullError):
        store.reserve([2 * _CHUNK])
    assert store.path.stat().st_size == store.reserved_bytes == facts.st_size


@pytest.mark.parametrize("code", [errno.EIO, errno.EBADF])
def test_another_refusal_to_allocate_is_told_as_it_is(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StoreError, match=r"reserving 4096 bytes: " + os.strerror(code)) as caught:
        store.reserve([4096])
    assert caught.value.errno == code
    assert not isinstance(caught.value, StoreFullError)
    assert store.path.stat().st_size == store.reserved_bytes == 0


def test_the_file_shrinks_with_what_is_released_at_its_end(store: FileStore) -> None:
    slots = store.reserve([MIB] * 4)
    store.release(slots[1:2])
    assert store.path.stat().st_size == 4 * MIB
    store.release(slots[2:])
    assert store.path.stat().st_size == store.reserved_bytes == MIB
    store.release(slots[:1])
    assert store.path.stat().st_size == store.reserved_bytes == 0


def test_growth_takes_what_is_free_at_the_end_into_account(store: FileStore) -> None:
    low, high = store.reserve([MIB]), store.reserve([MIB])
    store.release(low)
    assert store.reserve([2 * MIB])[0].offset == 2 * MIB
    store.release(high)
    assert store.reserve([2 * MIB])[0].offset == 0


def _mount_is_possible() -> bool:
    return os.getuid() == 0 and shutil.which("mkfs.ext4") is not None and Path("/dev/loop-control").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 16 MiB."""
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(16 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, disk], capture_output=True, check=False).returncode:
        pytest.skip("mounting a loop device is not allowed here")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)  # lazy: a failed test may hold a file open


@pytest.mark.skipif(not _mount_is_possible(), reason="needs root and mkfs.ext4")
def test_a_full_disk_is_found_out_before_anything_is_written(small_disk: Path) -> None:
    store = FileStore(small_disk)
    kept = store.reserve([4 * MIB])
    contents = keep(store, kept)
    with pytest.raises(StoreFullError, match="No space left on device") as caught:
        store.reserve([8 * MIB, 8 * MIB])
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.needed_bytes == 16 * MIB
    assert 0 < caught.value.free_bytes < 12 * MIB
    assert store.path.stat().st_blocks * 512 <= 4 * MIB + 8192, "what was allocated on the way is given back"
    more = store.reserve([8 * MIB])
    (small_disk / "greedy").write_bytes(b"x" * shutil.disk_usage(small_disk).free)
    contents += keep(store, more, first_seed=5)  # reserved is reserved, whoever fills the disk since
    assert same(fetch(store, [*kept, *more]), contents)
    store.close()
    assert list((small_disk / f"torpor-{os.getuid()}").iterdir()) == []


def test_a_write_that_breaks_off_is_a_store_error_with_the_reason(store: FileStore) -> None:
    slots = store.reserve([4 * _CHUNK])
    threads = threading.active_count()
    with file_size_limit(2 * _CHUNK), pytest.raises(StoreError, match="File too large") as caught:
        keep(store, slots)
    assert caught.value.errno == errno.EFBIG
    assert str(store.path) in str(caught.value)
    assert threading.active_count() == threads
    contents = keep(store, slots)
    assert same(fetch(store, slots), contents)


class FailingFileStore(FileStore):
    """The `at`-th write or read of a block fails, and every one after it."""

    at, calls = 0, 0

    def _tick(self, what: str) -> None:
        self.calls += 1
        if self.at and self.calls >= self.at:
            raise StoreError(f"{what} {self.calls}: Input/output error", errno=errno.EIO)

    def write_block(self, offset: int, block: torch.Tensor) -> None:
        super().write_block(offset, block)
        self._tick("write")

    def read_block(self, offset: int, block: torch.Tensor) -> None:
        super().read_block(offset, block)
        self._tick("read")


@pytest.mark.parametrize("at", range(1, 11))
@pytest.mark.parametrize("direction", [save, load])
def test_the_kth_failure_is_raised_once_and_leaves_no_thread(tmp_path: Path, direction: type, at: int) -> None:
    store = FailingFileStore(tmp_path, chunk_bytes=_CHUNK, ring=4)
    slots = store.reserve([5 * _CHUNK, 5 * _CHUNK])
    contents = keep(store, slots)
    pieces = [Piece(content.clone(), slot) for content, slot in zip(contents, slots, strict=True)]
    files, threads = open_files(), threading.active_count()
    store.at, store.calls = at, 0
    with pytest.raises(StoreError, match="Input/output error") as caught:
        direction(pieces, store)
    assert caught.value.errno == errno.EIO
    assert caught.value.__context__ is None
    assert store.calls <= at + 2 * 4, "what was not begun is not begun any more"
    assert (open_files(), threading.active_count()) == (files, threads)
    store.at = 0
    assert same(fetch(store, slots), contents)
    store.close()


@pytest.mark.usefixtures("block_by_block")
def test_the_systems_read_error_comes_with_path_and_place(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = store.reserve([5000])
    keep(store, slots)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for call, what in (("preadv", "reading 8192 bytes at 0"), ("pwrite", "writing 8192"), ("fdatasync", "syncing")):
        use = fetch if call == "preadv" else keep
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(StoreError, match=what) as caught:
                use(store, slots)
        assert caught.value.errno == errno.EIO
        assert isinstance(caught.value.__cause__, OSError)
        assert str(store.path) in str(caught.value)


@pytest.mark.usefixtures("block_by_block")
def test_short_writes_and_reads_go_on(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:4096], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: read(fd, [views[0][:8192]], offset))
    slots = store.reserve([100_000])
    contents = keep(store, slots)
    assert same(fetch(store, slots), contents)


@pytest.mark.skipif(copy_library() is None, reason="installed without a C compiler")
def test_blocks_do_not_go_through_python_where_the_library_is(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pwrite")
    monkeypatch.delattr(os, "preadv")
    slots = store.reserve([100, 3 * _CHUNK + 5, 20 * _CHUNK, 7])
    contents = keep(store, slots)
    assert same(fetch(store, slots), contents)


@pytest.mark.parametrize("name", ["write_block", "read_block"])
def test_who_replaces_a_method_is_asked(store: FileStore, name: str) -> None:
    slots = store.reserve([10 * _CHUNK])
    asked, original = [], getattr(store, name)

    def instead(offset: int, block: torch.Tensor) -> None:
        asked.append(offset)
        original(offset, block)

    setattr(store, name, instead)
    contents = keep(store, slots)
    assert same(fetch(store, slots), contents)
    assert sorted(asked) == [i * _CHUNK for i in range(10)]


def test_a_file_cut_short_is_an_error_not_data(store: FileStore) -> None:
    slots = store.reserve([3 * _CHUNK])
    keep(store, slots)
    os.truncate(store.path, _CHUNK)
    with pytest.raises(StoreError, match=f"the file ends at {_CHUNK}, {_CHUNK} bytes are missing"):
        fetch(store, slots)


def test_a_link_in_place_of_the_file_is_not_followed(store: FileStore, tmp_path: Path) -> None:
    """The file is a descriptor, not a path: who swaps the path changes nothing."""
    slots = store.reserve([5000])
    contents = keep(store, slots)
    (tmp_path / "victim").write_text("precious")
    store.path.unlink()
    store.path.symlink_to(tmp_path / "victim")
    assert same(fetch(store, slots), contents)
    keep(store, slots, first_seed=3)
    store.close()
    assert (tmp_path / "victim").read_text() == "precious"


def test_file_and_directory_modes(store: FileStore) -> None:
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700


def test_a_start_removes_dead_files_and_spares_live_ones(store: FileStore, tmp_path: Path) -> None:
    slots = store.reserve([5000])
    contents = keep(store, slots)
    dead = store.path.with_name("rank0-pid1-00000000.torpor")
    dead.write_bytes(b"x" * 5000)
    other = FileStore(tmp_path)
    assert not dead.exists()
    assert same(fetch(store, slots), contents)
    other.close()
    assert store.path.exists()


def test_a_child_that_drops_its_copy_leaves_the_file(store: FileStore) -> None:
    slots = store.reserve([5000])
    contents = keep(store, slots)
    pid = os.fork()
    if pid == 0:
        try:
            store.close()
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.path.exists()
    assert same(fetch(store, slots), contents)


def test_a_closed_store_leaves_other_files_alone(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    slots = store.reserve([5000])
    store.close()
    other = tmp_path / "other"
    other.write_bytes(b"precious" * 4096)
    with other.open("r+b") as file:
        assert file.fileno() >= 0  # likely the number that the store's file had
        for call in (lambda: store.release(slots), lambda: store.reserve([1]), store.sync):
            with pytest.raises(ClosedError):
                call()
    assert other.stat().st_size == 32768


def test_a_store_that_nobody_closed_is_removed_with_its_object(tmp_path: Path) -> None:
    files = open_files()
    store = FileStore(tmp_path)
    path = store.path
    store.reserve([5000])
    del store
    assert not path.exists()
    assert open_files() == files


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes=0"),
        ({"chunk_bytes": 5000}, "chunk_bytes=5000"),
        ({"ring": 1}, "ring=1"),
        ({"rank": -1}, "rank=-1"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: dict[str, int], word: str) -> None:
    files = open_files()
    with pytest.raises(UsageError, match=word):
        FileStore(tmp_path, **options)
    assert open_files() == files
    assert list(tmp_path.iterdir()) == []


def test_the_rank_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "12")
    store = FileStore(tmp_path)
    assert store.path.name.startswith("rank12-")
    store.close()
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(UsageError, match="RANK='first'"):
        FileStore(tmp_path)


def test_a_start_that_fails_leaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = open_files()

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for call in ("remove_dead", "create"):
        with monkeypatch.context() as patch:
            patch.setattr(f"torpor.stores.private_dir.PrivateDirectory.{call}", refuse)
            with pytest.raises(StoreError) as caught:
                FileStore(tmp_path)
        assert caught.value.errno == errno.ENOSPC
        assert open_files() == files
    (tmp_path / f"torpor-{os.getuid()}").chmod(0o770)
    with pytest.raises(UnsafeStoreError):
        FileStore(tmp_path)
    assert open_files() == files


def test_the_host_memory_it_takes_is_its_ring(store: FileStore) -> None:
    assert store.host_bytes == 0
    keep(store, store.reserve([5 * MIB]))
    assert store.host_bytes == 8 * _CHUNK
    ring = [buffer.data_ptr() for buffer in store.buffers()]
    keep(store, [Slot(0, 5 * MIB)])
    assert [buffer.data_ptr() for buffer in store.buffers()] == ring
    assert all(address % 4096 == 0 for address in ring)

"""madvise: pages go and the address stays; nothing outside a storage is touched, nothing foreign is taken."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from test_kernel import anonymous, locked

from contracts.memory_contract import MemoryContract
from torpor.errors import MemoryBackendError
from torpor.memory import kernel
from torpor.memory.base import byte_view
from torpor.memory.kernel import PAGE_BYTES
from torpor.memory.madvise import MadviseBackend

MIB = 1024**2


class TestMadvise(MemoryContract):
    def make_backend(self) -> MadviseBackend:
        return MadviseBackend()


@pytest.fixture
def backend() -> MadviseBackend:
    return MadviseBackend()


def refusal(tensor: torch.Tensor) -> str | None:
    """What a backend that has just looked says."""
    return MadviseBackend().refusal(tensor.untyped_storage())


def test_the_pages_are_gone_and_come_back_on_touch(backend: MadviseBackend) -> None:
    tensor = torch.full((8 * MIB,), 7, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    begin, nbytes = kernel.whole_pages(storage.data_ptr(), storage.nbytes())
    assert kernel.resident_bytes(begin, nbytes) == nbytes
    assert backend.release([storage]) == nbytes
    assert kernel.resident_bytes(begin, nbytes) == 0
    backend.restore([storage])
    byte_view(storage).fill_(9)
    assert bool((tensor == 9).all())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5 * PAGE_BYTES), min_size=1, max_size=12))
def test_never_a_byte_outside(sizes: list[int]) -> None:
    """Storages packed one behind the other into one mapping, every second one released."""
    memory = mmap.mmap(-1, sum(sizes) + 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    whole.random_(1, 256)
    before = whole.clone()
    storages, offset = [], 0
    for nbytes in sizes:
        part = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()
        storages.append((part, offset))
        offset += nbytes
    backend = MadviseBackend()
    backend.release([storage for storage, _ in storages[::2]])
    for storage, offset in storages[1::2]:
        assert torch.equal(whole[offset : offset + storage.nbytes()], before[offset : offset + storage.nbytes()])
    for storage, offset in storages[::2]:
        gone = int((whole[offset : offset + storage.nbytes()] == 0).sum())
        assert gone == backend.releasable_bytes(storage)
    assert int(whole[-1]) == int(before[-1])


def test_memory_of_numpy_is_treated_like_any_other(backend: MadviseBackend) -> None:
    array = np.arange(MIB, dtype=np.int64)
    tensor = torch.from_numpy(array)
    saved = tensor.clone()
    backend.refresh()
    assert backend.refusal(tensor.untyped_storage()) is None
    backend.release([tensor.untyped_storage()])
    backend.restore([tensor.untyped_storage()])
    byte_view(tensor.untyped_storage()).copy_(saved.view(torch.uint8))
    assert bool((array == np.arange(MIB)).all())


def test_shared_memory_is_refused() -> None:
    assert "shared memory" in (refusal(torch.zeros(MIB).share_memory_()) or "")
    assert "shared memory" in (refusal(anonymous(MIB, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)) or "")


def test_files_mapped_by_safetensors_and_torch_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.randn(MIB)}, tmp_path / "model.safetensors")
    torch.save({"w": torch.randn(MIB)}, tmp_path / "model.pt")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        from_safetensors = file.get_tensor("w")
    from_torch = torch.load(tmp_path / "model.pt", mmap=True)["w"]
    for tensor, name in ((from_torch, "model.pt"), (from_safetensors, "model.safetensors")):
        reason = refusal(tensor)
        if reason is None:  # this version of safetensors copies
            assert Path("/proc/self/maps").read_text().count(name) == 0
        else:
            assert reason.startswith(f"mapped from the file {tmp_path / name}")


def test_a_private_map_of_a_file_that_was_written_to_is_refused(tmp_path: Path) -> None:
    """Its changed pages are nowhere but in memory; dropping them would bring the file's contents back."""
    (tmp_path / "file").write_bytes(b"\1" * MIB)
    with (tmp_path / "file").open("r+b") as file:
        tensor = anonymous(MIB, mmap.MAP_PRIVATE, file.fileno())
    tensor.fill_(2)
    assert "mapped from the file" in (refusal(tensor) or "")


def test_read_only_memory_is_refused() -> None:
    tensor = anonymous(MIB)
    libc = ctypes.CDLL(None)
    libc.mprotect(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(MIB), mmap.PROT_READ)
    assert refusal(tensor) == "read-only memory"
    libc.mprotect(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(MIB), mmap.PROT_READ | mmap.PROT_WRITE)


def test_locked_memory_is_refused_and_an_attempt_harms_nothing(backend: MadviseBackend) -> None:
    tensor = anonymous(MIB).fill_(5)
    with locked(tensor.data_ptr(), MIB):
        assert refusal(tensor) == "locked in memory (mlock)"
        with pytest.raises(MemoryBackendError, match="Invalid argument"):
            backend.release([tensor.untyped_storage()])  # locked since the map was read
        assert bool((tensor == 5).all())
    assert refusal(tensor) is None


def test_memory_of_two_kinds_is_refused() -> None:
    tensor = anonymous(MIB)
    with locked(tensor.data_ptr(), PAGE_BYTES):
        assert refusal(tensor) == "spread over memory of several kinds"


def test_the_map_is_read_anew_on_refresh(tmp_path: Path, backend: MadviseBackend) -> None:
    (tmp_path / "file").write_bytes(bytes(MIB))
    fresh = anonymous(64 * MIB)
    address = fresh.data_ptr()
    backend.refresh()
    assert backend.refusal(fresh.untyped_storage()) is None
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]]
    with (tmp_path / "file").open("r+b") as file:  # another kind of memory at an address that was looked at
        flags = mmap.MAP_PRIVATE | 0x10  # MAP_FIXED
        assert libc.mmap(address, MIB, mmap.PROT_READ | mmap.PROT_WRITE, flags, file.fileno(), 0) == address
    window = torch.frombuffer((ctypes.c_char * MIB).from_address(address), dtype=torch.uint8)
    assert backend.refusal(window.untyped_storage()) is None, "the old map"
    backend.refresh()
    assert "mapped from the file" in (backend.refusal(window.untyped_storage()) or "")


def huge_page_spans() -> list[tuple[int, int]]:
    """Where the kernel was told that huge pages are welcome."""
    spans, span = [], (0, 0)
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        if not line[0].isupper():
            begin, end = line.split()[0].split("-")
            span = int(begin, 16), int(end, 16)
        elif line.startswith("VmFlags:") and "hg" in line.split():
            spans.append(span)
    return spans


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_huge_pages_are_asked_for_inside_a_storage_only(backend: MadviseBackend) -> None:
    memory = mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    large = torch.frombuffer(memory, dtype=torch.uint8, count=8 * MIB, offset=MIB + 100)
    small = torch.frombuffer(memory, dtype=torch.uint8, count=MIB, offset=14 * MIB)
    before = huge_page_spans()
    backend.release([large.untyped_storage(), small.untyped_storage()])
    backend.restore([large.untyped_storage(), small.untyped_storage()])
    (begin, end), *others = [span for span in huge_page_spans() if span not in before]
    assert not others
    assert large.data_ptr() <= begin < large.data_ptr() + kernel.HUGE_PAGE_BYTES
    assert large.data_ptr() + large.nbytes - kernel.HUGE_PAGE_BYTES < end <= large.data_ptr() + large.nbytes
    assert MadviseBackend().refusal(large.untyped_storage()) is None, "still one kind of memory"


def test_too_small_or_empty_gives_nothing(backend: MadviseBackend) -> None:
    for nbytes in (0, 1, PAGE_BYTES - 1):
        storage = torch.ones(nbytes, dtype=torch.uint8).untyped_storage()
        assert backend.releasable_bytes(storage) == 0
        assert backend.release([storage]) == 0


def test_a_failure_half_way_leaves_all_memory_usable(backend: MadviseBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.full((MIB,), 3, dtype=torch.uint8) for _ in range(4)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    real, calls = kernel.madvise, []

    def third_fails(*arguments: int) -> int:
        calls.append(arguments)
        return 12 if len(calls) == 3 else real(*arguments)

    monkeypatch.setattr(kernel, "madvise", third_fails)
    with pytest.raises(MemoryBackendError, match="Cannot allocate memory"):
        backend.release(storages)
    monkeypatch.undo()
    assert bool((tensors[3] == 3).all())
    backend.restore(storages)
    for tensor in tensors:
        assert bool((tensor.fill_(4) == 4).all())

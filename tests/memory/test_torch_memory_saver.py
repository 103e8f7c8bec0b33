"""The backend over a stand-in of the library that ends the process wherever the library does."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from fake_saver import FakeSaver

from contracts.memory_contract import MemoryContract
from torpor.errors import MemoryBackendError, NotEnoughMemoryError, StateError, UnsupportedError
from torpor.memory import allocator, cuda, open_backends
from torpor.memory.saver_library import SaverLibrary
from torpor.memory.torch_memory_saver import MARGIN_BYTES, TorchMemorySaverBackend

KIB = 1024


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> FakeSaver:
    saver = FakeSaver()
    connect(saver, monkeypatch)
    return saver


def connect(saver: FakeSaver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_snapshot", saver.snapshot)
    monkeypatch.setattr(cuda, "free_bytes", saver.free_bytes)
    monkeypatch.setattr(cuda, "used_bytes", lambda device: 1)
    for call in ("empty_cache", "ipc_collect"):
        monkeypatch.setattr(torch.cuda, call, lambda: None)


def backend_of(saver: FakeSaver) -> TorchMemorySaverBackend:
    return TorchMemorySaverBackend(SaverLibrary(saver), saver.has_pages)


def storages(*tensors: torch.Tensor) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tensors]


def in_region(saver: FakeSaver, tag: str, *sizes: int) -> list[torch.Tensor]:
    with saver.region(tag):
        return [saver.allocate(nbytes) for nbytes in sizes]


class TestContract(MemoryContract):
    @pytest.fixture(autouse=True)
    def library(self, saver: FakeSaver) -> None:
        self.saver = saver

    def make_backend(self) -> TorchMemorySaverBackend:
        return backend_of(self.saver)

    def make_tensors(self, backend: TorchMemorySaverBackend) -> list[torch.Tensor]:
        return in_region(self.saver, "actor", 100_003, 4096 * 5, 1_000_001, 300_000)


def test_a_region_goes_with_the_last_of_its_storages_and_is_paused_once(saver: FakeSaver) -> None:
    first, second = in_region(saver, "actor", 5 * KIB, 7 * KIB)
    backend = backend_of(saver)
    backend.refresh()
    assert [backend.release([s]) for s in storages(first, second)] == [0, 12 * KIB]
    assert backend.release(storages(first, second)) == 0
    assert backend.needed_bytes(storages(first)) == 12 * KIB
    backend.restore(storages(second))
    backend.restore(storages(second, first))
    assert saver.events == [("pause", "actor"), ("resume", "actor")]
    assert backend.needed_bytes(storages(first)) == 0


def test_the_regions_of_others_are_left_alone(saver: FakeSaver) -> None:
    (mine,), (theirs,) = in_region(saver, "actor", KIB), in_region(saver, "kv_cache", 2 * KIB)
    backend = backend_of(saver)
    backend.refresh()
    assert backend.strays(storages(mine)) == []
    assert backend.release(storages(mine)) == KIB
    saver.pause("kv_cache")
    saver.resume("kv_cache")
    assert saver.has_pages(theirs.data_ptr())


def test_what_is_alive_in_the_region_and_unknown_holds_it_until_it_is_moved(
    saver: FakeSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, hidden, gone = in_region(saver, "actor", KIB, 3 * KIB, 5 * KIB)
    saver.give_up(gone)
    lent = {hidden.data_ptr(): hidden.untyped_storage()}
    monkeypatch.setattr(allocator, "borrow", lambda address, nbytes, device: lent[address])
    backend = backend_of(saver)
    backend.refresh()
    strays = backend.strays(storages(known))
    assert strays == storages(hidden)
    assert backend.release(storages(known)) == 0
    assert backend.release(strays) == 9 * KIB, "the cached block goes too"
    backend.refresh()
    assert backend.strays(storages(known)) == [], "what sleeps is no stray"
    backend.restore([*storages(known), *strays])


def test_a_wake_without_room_is_refused_before_the_library_is_asked(saver: FakeSaver) -> None:
    (x,) = in_region(saver, "actor", 100 * KIB)
    backend = backend_of(saver)
    backend.refresh()
    backend.release(storages(x))
    saver.capacity_bytes = 99 * KIB + MARGIN_BYTES
    with pytest.raises(NotEnoughMemoryError) as caught:
        backend.restore(storages(x))
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (100 * KIB, 99 * KIB)
    assert saver.events == [("pause", "actor")]
    saver.capacity_bytes += KIB
    backend.restore(storages(x))
    assert saver.has_pages(x.data_ptr())


def test_several_regions_come_back_together_or_not_at_all(saver: FakeSaver) -> None:
    tensors = [*in_region(saver, "params", 60 * KIB), *in_region(saver, "optimizer", 60 * KIB)]
    backend = backend_of(saver)
    backend.refresh()
    assert backend.release(storages(*tensors)) == 120 * KIB
    saver.capacity_bytes = 100 * KIB + MARGIN_BYTES
    with pytest.raises(NotEnoughMemoryError):
        backend.restore(storages(*tensors))
    assert [a.active for a in saver.allocations] == [False, False]
    backend.restore(storages(tensors[0]))
    assert [a.active for a in saver.allocations] == [True, False]


def test_what_somebody_else_paused_is_not_paused_again(saver: FakeSaver) -> None:
    (x,), (y,) = in_region(saver, "actor", KIB), in_region(saver, "other", KIB)
    backend = backend_of(saver)
    backend.refresh()
    saver.pause("actor")
    with pytest.raises(MemoryBackendError, match="somebody else paused the region 'actor'"):
        backend.release(storages(y, x))
    assert saver.has_pages(y.data_ptr()), "nothing was paused"
    backend.refresh()
    assert "somebody else paused" in (backend.refusal(x.untyped_storage()) or ""), "it cannot be read either"
    assert backend.strays(storages(x)) == []
    saver.resume("actor")
    backend.refresh()
    assert backend.release(storages(y, x)) == 2 * KIB


def test_memory_allocated_in_a_region_that_sleeps_is_an_error_and_not_the_end(saver: FakeSaver) -> None:
    (x,) = in_region(saver, "actor", KIB)
    backend = backend_of(saver)
    backend.refresh()
    with saver.region("actor"):  # a thread is inside when another calls sleep
        backend.release(storages(x))
        saver.allocate(7 * KIB)
    with pytest.raises(MemoryBackendError, match=f"{7 * KIB} bytes were allocated in the region 'actor'"):
        backend.restore(storages(x))
    assert saver.events == [("pause", "actor")]


def test_memory_allocated_in_a_region_after_the_look_at_it_is_not_lost(saver: FakeSaver) -> None:
    (x,) = in_region(saver, "actor", KIB)
    backend = backend_of(saver)
    backend.refresh()
    (late,) = in_region(saver, "actor", 7 * KIB)
    (theirs,) = in_region(saver, "kv_cache", KIB)
    with pytest.raises(MemoryBackendError, match=f"{7 * KIB} bytes were allocated in the region 'actor'"):
        backend.release(storages(x))
    assert saver.events == []
    saver.give_up(late)
    assert backend.release(storages(x)) >= KIB
    assert saver.has_pages(theirs.data_ptr())


def test_calls_of_the_library_that_would_end_the_process_raise_while_a_region_sleeps(saver: FakeSaver) -> None:
    (x,) = in_region(saver, "actor", KIB)
    in_region(saver, "kv_cache", KIB)
    backend = backend_of(saver)
    backend.refresh()
    backend.release(storages(x))
    calls = [
        lambda: saver.pause(),
        lambda: saver.resume(),
        lambda: saver.pause("actor"),
        lambda: saver.resume(tag="actor"),
        lambda: saver.region("actor"),
        lambda: saver.region(tag="actor", enable_cpu_backup=True),
        lambda: saver.cuda_graph(None, tag="actor"),
    ]
    for call in calls:
        with pytest.raises(StateError, match=r"\['actor'\] sleep"):
            call()
    saver.pause("kv_cache")
    saver.resume("kv_cache")
    with saver.region("kv_cache"):
        saver.allocate(KIB)
    backend.restore(storages(x))
    assert "pause" not in vars(saver), "the checks are gone"
    saver.pause()
    saver.resume()


def test_a_region_with_a_backup_of_its_own_is_refused(saver: FakeSaver) -> None:
    with saver.region("actor", enable_cpu_backup=True):
        x = saver.allocate(KIB)
    backend = backend_of(saver)
    backend.refresh()
    assert "enable_cpu_backup=False" in (backend.refusal(x.untyped_storage()) or "")
    with pytest.raises(MemoryBackendError, match="keeps a backup of its own"):
        backend.release(storages(x))
    assert saver.events == []


def test_outside_all_regions_and_parts_are_refused(saver: FakeSaver) -> None:
    outside = saver.allocate(KIB)
    (x,) = in_region(saver, "actor", KIB)
    backend = backend_of(saver)
    backend.refresh()
    assert "outside the regions" in (backend.refusal(outside.untyped_storage()) or "")
    assert backend.releasable_bytes(outside.untyped_storage()) == 0
    part = SimpleNamespace(data_ptr=x.data_ptr, nbytes=lambda: 5)
    assert "a part of a block" in (backend.refusal(part) or "")
    with pytest.raises(MemoryBackendError, match="outside the regions"):
        backend.release(storages(outside))


def test_with_preloading_memory_that_is_the_librarys_outside_regions_keeps_its_tag_awake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saver = FakeSaver(mode="preload")
    connect(saver, monkeypatch)
    (x,), (y,) = in_region(saver, "default", KIB), in_region(saver, "actor", KIB)
    backend = backend_of(saver)
    backend.refresh()
    assert backend.refusal(x.untyped_storage()) is None
    saver._current = ("default", (0, 0))  # TMS_INIT_ENABLE
    saver.allocate(5 * KIB)
    backend.refresh()
    assert f"{5 * KIB} bytes outside its regions" in (backend.refusal(x.untyped_storage()) or "")
    assert backend.refusal(y.untyped_storage()) is None
    saver._current = ("actor", (1, 0))  # a graph that was captured with that tag
    saver.allocate(KIB)
    backend.refresh()
    assert "or a captured graph" in (backend.refusal(y.untyped_storage()) or "")
    assert backend.graphs_may_live()


def test_versions_that_keep_their_pools_in_another_way_are_named(
    saver: FakeSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    saver._impl._mem_pools["actor"] = SimpleNamespace(id=(0, 1))
    with pytest.raises(UnsupportedError, match=r"version 9\.9"):
        backend_of(saver)
    saver._impl = SimpleNamespace()
    with pytest.raises(UnsupportedError, match=r"version 9\.9"):
        backend_of(saver)
    saver._impl = None
    assert backend_of(saver).strays([]) == []


def test_it_is_opened_by_name_and_its_absence_has_a_remedy(saver: FakeSaver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    with pytest.raises(UnsupportedError, match="pip install torch_memory_saver"):
        open_backends("torch_memory_saver")
    monkeypatch.setitem(sys.modules, "torch_memory_saver", SimpleNamespace(torch_memory_saver=saver))
    (backend,) = open_backends("torch_memory_saver")["cuda"]
    assert isinstance(backend, TorchMemorySaverBackend)

"""The page-locked store and its arena, here on ordinary memory: sizes, reuse, budget, and giving back."""

import os
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from contracts.store_contract import StoreContract
from torpor.errors import ClosedError, StoreFullError, UsageError
from torpor.memory import kernel
from torpor.stores import arena as arena_module
from torpor.stores.arena import HUGE_PAGE_BYTES, Arena
from torpor.stores.pinned import PinnedStore

MIB = 1024**2


@pytest.fixture
def store():
    store = PinnedStore()
    yield store
    store.close()


@pytest.fixture(autouse=True)
def small_registrations(monkeypatch):
    """Several registrations in tests of a few MiB."""
    monkeypatch.setattr(arena_module, "REGISTRATION_BYTES", 4 * MIB)
    monkeypatch.setattr(arena_module, "_FAULT_BYTES", 1 * MIB)


class TestPinnedStore(StoreContract):
    def make_store(self, directory):
        return PinnedStore()

    @contextmanager
    def room_for(self, nbytes, directory):
        store = PinnedStore(budget_bytes=nbytes)
        yield store
        store.close()


def fill(store, slots):
    for i, slot in enumerate(slots):
        store.tensor(slot).fill_(i % 251)


def intact(store, slots):
    return all(bool((store.tensor(slot) == i % 251).all()) for i, slot in enumerate(slots))


def test_it_holds_no_more_than_it_was_asked_for(store):
    sizes = [1, 63, 64, 65, 3 * MIB, 0, 5 * MIB, 1000]
    store.reserve(sizes)
    assert store.host_bytes <= sum(sizes) + 64 * len(sizes) + kernel.PAGE_BYTES


def test_it_begins_at_a_huge_page_and_is_really_there():
    arena = Arena()
    arena.take(6 * MIB)
    tensor = arena.tensor(0, 6 * MIB)
    assert tensor.data_ptr() % HUGE_PAGE_BYTES == 0
    assert kernel.resident_bytes(tensor.data_ptr(), 6 * MIB) == 6 * MIB
    assert arena.seconds > 0
    arena.close()


def test_growth_takes_only_what_is_missing_and_moves_nothing(store):
    first = store.reserve([3 * MIB])
    fill(store, first)
    address = store.tensor(first[0]).data_ptr()
    gone = store.reserve([2 * MIB])
    store.release(gone)
    more = store.reserve([7 * MIB])
    assert store.host_bytes == 10 * MIB
    assert more[0].offset == 3 * MIB
    assert store.tensor(first[0]).data_ptr() == address
    assert intact(store, first)


def test_a_budget_too_small_is_refused_before_anything_is_taken():
    store = PinnedStore(budget_bytes=4 * MIB)
    kept = store.reserve([MIB])
    with pytest.raises(StoreFullError, match=r"budget 4194304") as caught:
        store.reserve([2 * MIB, 2 * MIB])
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (4 * MIB, 3 * MIB)
    assert store.host_bytes == MIB
    store.reserve([3 * MIB])
    store.release(kept)
    with pytest.raises(UsageError, match="budget_bytes=0"):
        PinnedStore(budget_bytes=0)
    store.close()


def test_within_a_budget_free_memory_elsewhere_makes_room():
    store = PinnedStore(budget_bytes=12 * MIB)
    low, high = store.reserve([4 * MIB]), store.reserve([4 * MIB])
    fill(store, high)
    store.release(low)
    wide = store.reserve([8 * MIB])
    assert store.host_bytes == 12 * MIB
    assert wide[0].offset == 8 * MIB
    assert intact(store, high)
    store.close()


def test_giving_back_returns_pages_to_the_system_and_keeps_what_is_used(store):
    slots = store.reserve([4 * MIB, 4 * MIB, 2 * MIB])
    fill(store, slots)
    address = store.tensor(slots[1]).data_ptr()
    store.release([slots[1]])
    assert store.host_bytes == 10 * MIB, "retained"
    assert store.give_back() == 4 * MIB
    assert store.host_bytes == 6 * MIB
    assert kernel.resident_bytes(address, 4 * MIB) == 0
    assert intact(store, [slots[0]])
    assert bool((store.tensor(slots[2]) == 2).all())
    again = store.reserve([4 * MIB])
    assert again[0].offset == 10 * MIB


def test_retain_false_gives_back_at_once():
    store = PinnedStore(retain=False)
    slots = store.reserve([4 * MIB, 4 * MIB])
    store.release(slots[1:])
    assert store.host_bytes == 4 * MIB
    store.release(slots[:1])
    assert store.host_bytes == 0
    assert store.reserve([MIB])[0].offset == 0
    store.close()


def test_prewarmed_memory_is_what_the_reserve_finds(store):
    store.prewarm(9 * MIB)
    slots = store.reserve([8 * MIB, MIB])
    assert store.host_bytes == 9 * MIB
    assert [slot.offset for slot in slots] == [0, 8 * MIB]


def test_what_prewarming_cannot_have_is_said():
    store = PinnedStore(budget_bytes=2 * MIB)
    with pytest.raises(StoreFullError):
        store.prewarm(3 * MIB).wait()
    store.prewarm(3 * MIB)
    assert len(store.reserve([MIB])) == 1, "a smaller need is met all the same"
    store.close()


@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_refusal_half_way_leaves_nothing(monkeypatch, nth):
    arena = Arena()
    arena.take(2 * MIB)
    calls = iter(range(10))

    def refuse(self, begin, end):
        if next(calls) == nth:
            raise StoreFullError(end - begin, 0, "test", "refused")

    monkeypatch.setattr(Arena, "_register", refuse)
    before = arena.ranges()
    with pytest.raises(StoreFullError):
        arena.take(12 * MIB)
    assert arena.ranges() == before
    monkeypatch.undo()
    assert kernel.resident_bytes(arena._address + 2 * MIB, 12 * MIB) == 0
    arena.close()


@pytest.mark.parametrize(("says", "expected"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None), (None, None)])
def test_the_node_of_a_gpu_is_what_the_machine_says(monkeypatch, tmp_path, says, expected):
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=6)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(arena_module, "_PCI_DEVICES", tmp_path)
    if says is not None:
        (tmp_path / "0000:c1:06.0").mkdir()
        (tmp_path / "0000:c1:06.0" / "numa_node").write_text(says)
    assert arena_module.numa_node(torch.device("cuda", 3)) == expected


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="needs a kernel that knows NUMA nodes")
def test_pages_are_asked_for_on_the_node_of_the_gpu():
    arena = Arena()
    arena.node = 0  # every machine has that one
    arena.take(4 * MIB)
    begin = f"{arena.tensor(0, 1).data_ptr():x} "
    (line,) = [line for line in Path("/proc/self/numa_maps").read_text().splitlines() if line.startswith(begin)]
    assert line.split()[1] == "prefer:0"
    assert "on NUMA node 0" in arena.describe()
    arena.close()


def test_a_node_that_does_not_exist_is_no_obstacle():
    arena = Arena()
    arena.node = 63
    arena.take(2 * MIB)
    assert int(arena.tensor(0, 2 * MIB).fill_(1).sum()) == 2 * MIB
    arena.close()


def test_closed_is_closed_and_tensors_that_are_held_do_not_crash():
    store = PinnedStore()
    slots = store.reserve([MIB])
    tensor = store.tensor(slots[0]).fill_(7)
    store.close()
    store.close()
    assert int(tensor.sum()) == 0, "the pages are gone, the addresses are not"
    for call in (lambda: store.reserve([1]), lambda: store.tensor(slots[0]), lambda: store.prewarm(1)):
        with pytest.raises(ClosedError):
            call()


def test_a_forked_child_does_not_inherit_it():
    script = textwrap.dedent(
        """
        import os, sys
        from torpor.stores.arena import Arena
        arena = Arena(); arena.take(1 << 20); address = arena.tensor(0, 1).data_ptr()
        pid = os.fork()
        if pid == 0:
            spans = [line.split()[0].split("-") for line in open("/proc/self/maps")]
            os._exit(any(int(b, 16) <= address < int(e, 16) for b, e in spans))
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    )
    assert subprocess.run([sys.executable, "-c", script], env=os.environ, check=False).returncode == 0


def test_few_addresses_will_do():
    script = textwrap.dedent(
        """
        import resource
        from torpor.stores.arena import Arena
        resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))
        arena = Arena(); arena.take(1 << 20); arena.tensor(0, 1 << 20).fill_(1)
        """
    )
    subprocess.run([sys.executable, "-c", script], check=True)

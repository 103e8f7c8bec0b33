"""Page-locked memory and transfers on a GPU."""

import random

import pytest
import torch

from gpu import DEVICE, MIB, bits, same
from torpor import transfer_cuda
from torpor.stores import arena as arena_module
from torpor.stores.pinned import PinnedStore
from torpor.transfer import Piece
from torpor.transfer_cuda import PART_BYTES, SMALL_BYTES, load_to_cuda, save_from_cuda


def pieces_of(tensors, store):
    homes = [torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(t.untyped_storage()) for t in tensors]
    return [Piece(h, slot) for h, slot in zip(homes, store.reserve([h.numel() for h in homes]), strict=True)]


def round_trip(tensors, store):
    before = [bits(t) for t in tensors]
    pieces = pieces_of(tensors, store)
    save_from_cuda(pieces, store)
    assert all(torch.equal(store.tensor(p.slot), b) for p, b in zip(pieces, before, strict=True))
    for tensor in tensors:
        tensor.untyped_storage().fill_(7)
    load_to_cuda(pieces, store)
    assert same(before, tensors)


def test_the_memory_is_page_locked_and_exact():
    store = PinnedStore()
    slot = store.reserve([300 * MIB + 5])[0]
    assert store.tensor(slot).is_pinned()
    assert store.host_bytes <= 300 * MIB + 4096 + 64
    assert "page-locked" in store.describe()
    assert store.page_lock_s > 0
    store.release([slot])
    assert store.give_back() == 300 * MIB + 4096
    assert store.host_bytes == 0
    store.close()


@pytest.mark.parametrize("shape", ["two large", "mixed", "tiny", "around the limits"])
def test_bits_survive_the_way_out_and_back(shape):
    random.seed(1)
    sizes = {
        "two large": [100 * MIB + 3, 64 * MIB],
        "mixed": [random.choice([1, 5, 512, 1000, MIB, 9 * MIB, SMALL_BYTES, 40 * MIB]) for _ in range(300)],
        "tiny": [random.randrange(1, 200) for _ in range(20_000)],
        "around the limits": [SMALL_BYTES - 1, SMALL_BYTES, SMALL_BYTES - 1, 1] * 4 + [PART_BYTES // 16] * 40,
    }[shape]
    store = PinnedStore()
    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8, device=DEVICE) for n in sizes]
    round_trip(tensors, store)
    store.close()


def test_slots_across_registrations():
    arena_module.REGISTRATION_BYTES = 4 * MIB
    store = PinnedStore()
    round_trip([torch.randint(0, 256, (n,), dtype=torch.uint8, device=DEVICE) for n in (30 * MIB, 13, 6 * MIB)], store)
    store.close()


def test_scattered_slots():
    store = PinnedStore()
    tensors = [torch.randint(0, 256, (10_000 + i,), dtype=torch.uint8, device=DEVICE) for i in range(100)]
    pieces = pieces_of(tensors, store)
    store.release([p.slot for p in pieces[::2]])
    again = pieces_of(tensors[::2], store)
    every = again + pieces[1::2]
    random.shuffle(every)
    before = [bits(p.home) for p in every]
    save_from_cuda(every, store)
    for p in every:
        p.home.zero_()
    load_to_cuda(every, store)
    assert same(before, [p.home for p in every])


def test_what_other_streams_wrote_before_is_what_is_saved():
    """The copy stream waits for the current one; the caller for all others."""
    store = PinnedStore()
    x = torch.zeros(64 * MIB, dtype=torch.uint8, device=DEVICE)
    small = torch.zeros(MIB, dtype=torch.uint8, device=DEVICE)
    pieces = pieces_of([x, small], store)
    torch.cuda._sleep(200_000_000)
    x.fill_(3)
    small.fill_(4)
    save_from_cuda(pieces, store)
    assert bool((store.tensor(pieces[0].slot) == 3).all())
    assert bool((store.tensor(pieces[1].slot) == 4).all())
    store.close()


@pytest.mark.parametrize("shape", ["two large", "tiny"])
def test_kernels_take_over_where_the_engine_is_slow(shape):
    transfer_cuda._best_rates[0] = 1e12  # whatever the engine does, it is slow
    transfer_cuda._JUDGED_BYTES = 0
    # No more storages than needed: to see each one's bits takes a turn on a GPU that other tests share.
    sizes = {"two large": [600 * MIB + 5, 64 * MIB], "tiny": [random.randrange(1, 240_000) for _ in range(5000)]}[shape]
    ways = []
    takes_engine = transfer_cuda._Pace.takes_engine

    def watched(self, nbytes):
        ways.append(takes_engine(self, nbytes))
        return ways[-1]

    transfer_cuda._Pace.takes_engine = watched
    store = PinnedStore()
    round_trip([torch.randint(0, 256, (n,), dtype=torch.uint8, device=DEVICE) for n in sizes], store)
    assert ways[:4] == [True] * 4
    assert not any(ways[4:])
    assert len(ways) > 5
    store.close()


@pytest.mark.parametrize("way", ["save", "load"])
def test_after_a_failure_no_copy_is_under_way(way):
    store = PinnedStore()
    pieces = pieces_of([torch.zeros(512 * MIB, dtype=torch.uint8, device=DEVICE)], store)
    move = {"save": save_from_cuda, "load": load_to_cuda}[way]
    move(pieces, store)

    def failing():
        yield from pieces
        raise RuntimeError("no more pieces")

    with pytest.raises(RuntimeError, match="no more pieces"):
        move(failing(), store)
    assert transfer_cuda._own_stream(DEVICE, way).query()
    store.close()


@pytest.mark.parametrize("shape", ["two large", "tiny"])
def test_a_device_without_room_for_staging_is_no_obstacle(shape):
    sizes = {"two large": [100 * MIB + 3, 64 * MIB], "tiny": [random.randrange(1, 9000) for _ in range(5000)]}[shape]
    store = PinnedStore()
    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8, device=DEVICE) for n in sizes]
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(DEVICE)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 32 * MIB) / total)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(PART_BYTES, dtype=torch.uint8, device=DEVICE)
    round_trip(tensors, store)
    store.close()


def test_a_store_that_nobody_closed_leaves_no_registration_behind():
    for _ in range(4):
        store = PinnedStore()
        slot = store.reserve([40 * MIB])[0]
        address = store.tensor(slot).data_ptr()
        assert store.tensor(slot).is_pinned()
        del store
    assert int(torch.cuda.cudart().cudaHostUnregister(address)) != 0, "nothing is registered there"

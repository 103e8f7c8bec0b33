"""memory/vmm on a GPU, judged by the driver's numbers."""

import gc
import inspect
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from faults import faulty_backend

import zoo
from contracts.memory_contract import MemoryContract
from gpu import DEVICE, GIB, MIB, Actor, CapturedStep, bits, on_gpu, poison, same, storages, used_bytes
from torpor.errors import DriverError, NotEnoughMemoryError, StateError
from torpor.memory import cuda
from torpor.memory.base import byte_view
from torpor.memory.cuda import self_test
from torpor.memory.vmm import pool, vmm_backend
from torpor.memory.vmm_library import vmm_library


def animals() -> list[torch.Tensor]:
    """The zoo, something large, and what shares extents."""
    tensors = [t for t in on_gpu(zoo.zoo).live.values() if t.numel()]
    with pool():
        return [*tensors, *[torch.randn(n, device=DEVICE) for n in (64 * MIB, *(3 * MIB // 4 + i for i in range(20)))]]


def test_bits_and_addresses_are_kept_and_the_driver_has_the_memory_in_between():
    tensors = animals()
    before, pointers = [bits(t) for t in tensors], [t.data_ptr() for t in tensors]
    payload = sum(s.nbytes() for s in storages(tensors))
    actor = Actor(tensors)
    for _ in range(3):
        torch.cuda.empty_cache()
        used = used_bytes()
        freed = actor.sleep()
        assert used - used_bytes() == freed
        assert freed >= payload
        poison()
        actor.wake()
        assert used_bytes() == used
        assert same(before, tensors)
        assert pointers == [t.data_ptr() for t in tensors]


def test_twenty_cycles_leave_a_flat_line():
    tensors = animals()
    actor = Actor(tensors)
    asleep, awake = [], []
    for _ in range(20):
        actor.sleep()
        asleep.append(used_bytes())
        actor.wake()
        awake.append(used_bytes())
    assert len(set(asleep[1:])) == 1
    assert len(set(awake[1:])) == 1


def test_releasing_twice_and_restoring_twice_move_nothing():
    with pool():
        x = torch.randn(64 * MIB, device=DEVICE)
    backend = vmm_backend()
    assert backend.releasable_bytes(x.untyped_storage()) == 256 * MIB
    assert backend.needed_bytes([x.untyped_storage()]) == 0
    assert [backend.release([x.untyped_storage()]) for _ in range(2)] == [256 * MIB, 0]
    assert backend.needed_bytes([x.untyped_storage()]) == 256 * MIB
    used = used_bytes()
    backend.restore([x.untyped_storage()])
    backend.restore([x.untyped_storage()])
    assert used_bytes() - used == 256 * MIB


def test_a_graph_captured_before_replays_right_after():
    step = CapturedStep("pool")
    held = step.tensors()
    state = [bits(t) for t in held]
    step.graph.replay()
    expected = [bits(t) for t in held]
    for tensor, saved in zip(held, state, strict=True):
        byte_view(tensor.untyped_storage())[: saved.numel()].copy_(saved)
    actor = Actor(held)
    for _ in range(2):
        actor.sleep()
        poison()
        actor.wake()
    assert same(state, held)
    step.graph.replay()
    assert same(expected, held)


def test_a_graph_captured_inside_the_pool_keeps_its_own_memory():
    with pool():
        x = torch.randn(1 << 20, device=DEVICE)
        w = torch.randn(1 << 20, device=DEVICE)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ((x * w).relu() + 1).exp2()
    graph.replay()
    expected = bits(y)
    assert "outside" in vmm_backend().refusal(y.untyped_storage())
    actor = Actor([x, w])
    actor.sleep()
    poison()
    actor.wake()
    y.zero_()
    graph.replay()
    assert same([expected], [y])


def test_components_allocated_in_turn_sleep_apart():
    with pool():
        first = [torch.randn(MIB // 8, device=DEVICE) for _ in range(400)]
        second = [torch.randn(MIB // 8, device=DEVICE) for _ in range(400)]
    before = [bits(t) for t in second]
    backend = vmm_backend()
    torch.cuda.synchronize()
    freed = backend.release(storages(first))
    assert 0.8 * 200 * MIB < freed <= 200 * MIB
    assert same(before, second)
    assert freed + backend.release(storages(second)) >= 400 * MIB


def test_live_blocks_that_nobody_knows_are_found_and_survive_cached_ones_are_not_copied():
    with pool():
        known = [torch.randn(MIB, device=DEVICE) for _ in range(3)]
        hidden = torch.randn(MIB, device=DEVICE)
        gone = torch.randn(64 * MIB, device=DEVICE)
    before = bits(hidden)
    del gone
    backend = vmm_backend()
    backend.refresh()
    strays = backend.strays(storages(known))
    assert [s.data_ptr() for s in strays] == [hidden.data_ptr()]
    assert [s._cdata for s in backend.strays(storages(known))] == [strays[0]._cdata], "the same object again"
    assert backend.release(storages(known)) == 256 * MIB, "the hidden block holds the extent of all four back"
    assert backend.release(strays) == 20 * MIB
    backend.restore(storages(known) + strays)
    byte_view(strays[0])[: before.numel()].copy_(before)
    actor = Actor(known)
    used = used_bytes()
    actor.sleep()
    assert used - used_bytes() >= 20 * MIB + 256 * MIB
    poison()
    actor.wake()
    assert same([before], [hidden])


def test_what_lies_outside_or_is_a_part_is_refused():
    outside = torch.randn(MIB, device=DEVICE)
    with pool():
        inside = torch.randn(MIB, device=DEVICE)
    backend = vmm_backend()
    assert backend.refusal(inside.untyped_storage()) is None
    assert "outside torpor.pool()" in backend.refusal(outside.untyped_storage())
    assert backend.releasable_bytes(outside.untyped_storage()) == 0
    part = torch._C._construct_storage_from_data_pointer(inside.data_ptr(), DEVICE, 512)
    assert "a part of a block" in backend.refusal(part)


@pytest.mark.exclusive
def test_a_wake_without_room_fails_whole_and_can_be_tried_again():
    with pool():
        tensors = [torch.randn(1 << 28, device=DEVICE) for _ in range(8)]
    before = [bits(t[: 1 << 20]) for t in tensors]
    actor = Actor(tensors)
    actor.sleep()
    free, _ = torch.cuda.mem_get_info(DEVICE)
    thief = torch.empty(free - 4 * GIB, dtype=torch.uint8, device=DEVICE)
    used = used_bytes()
    with pytest.raises(NotEnoughMemoryError, match=r"8\.000 GiB") as caught:
        actor.wake()
    assert caught.value.needed_bytes == 8 * GIB
    assert caught.value.free_bytes < 8 * GIB
    assert used_bytes() == used
    del thief
    torch.cuda.empty_cache()
    actor.wake()
    assert same(before, [t[: 1 << 20] for t in tensors])


def test_the_pool_can_be_used_while_it_sleeps():
    with pool():
        first = [torch.randn(MIB // 2, device=DEVICE) for _ in range(9)]
        scratch = [torch.randn(MIB // 2, device=DEVICE) for _ in range(9)]
    del scratch  # cached blocks, some in extents that are about to lose their pages
    before = [bits(t) for t in first]
    actor = Actor(first)
    actor.sleep()
    with pool():
        second = [torch.randn(MIB // 2, device=DEVICE) for _ in range(40)]
    torch.cuda.synchronize()
    seconds = [bits(t) for t in second]
    actor.wake()
    assert same(before, first)
    assert same(seconds, second)
    both = Actor(first + second)
    both.sleep()
    poison()
    both.wake()
    assert same(before + seconds, first + second)


def test_sleeping_inside_an_open_pool():
    with pool():
        first = torch.randn(MIB, device=DEVICE)
        actor = Actor([first])
        before = bits(first)
        actor.sleep()
        second = torch.randn(MIB, device=DEVICE)
        torch.cuda.synchronize()
        actor.wake()
        third = torch.randn(MIB, device=DEVICE)
    assert same([before], [first])
    all_of_it = Actor([first, second, third])
    copies = [bits(t) for t in all_of_it.tensors]
    all_of_it.sleep()
    poison()
    all_of_it.wake()
    assert same(copies, all_of_it.tensors)


def test_tensors_that_die_asleep_leave_nothing():
    used = used_bytes()
    for _ in range(3):
        with pool():
            tensors = [torch.randn(4 * MIB, device=DEVICE) for _ in range(6)]
        actor = Actor(tensors)
        actor.sleep()
        del tensors, actor
        gc.collect()
        torch.cuda.empty_cache()
    with pool():
        torch.empty(1, device=DEVICE)
    backend = vmm_backend()
    assert len(backend._library.extents()) <= 2
    assert used_bytes() - used <= 4 * MIB


def test_gradients_of_the_autograd_threads_go_into_a_pool_of_all_threads():
    with pool(all_threads=True):
        w = torch.randn(2048, 2048, device=DEVICE, requires_grad=True)
        (w @ w).sum().backward()
    assert vmm_backend().refusal(w.grad.untyped_storage()) is None
    outside = torch.randn(MIB, device=DEVICE)
    assert vmm_backend().refusal(outside.untyped_storage()) is not None


def test_threads_allocate_while_others_sleep_and_wake():
    with pool():
        mine = [torch.randn(MIB, device=DEVICE) for _ in range(8)]
    before = [bits(t) for t in mine]
    actor = Actor(mine)
    stop = threading.Event()
    failures: list[str] = []

    def allocate(seed: int) -> None:
        while not stop.is_set():
            x = torch.full((3 * MIB,), float(seed), device=DEVICE)
            y = x + 1
            if not bool((y == seed + 1).all()):
                failures.append(f"thread {seed}")
            del x, y
            torch.cuda.empty_cache()

    threads = [threading.Thread(target=allocate, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(15):
        actor.sleep()
        actor.wake()
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert same(before, mine)


def test_a_sleep_while_another_thread_allocates_in_the_pool_is_refused():
    with pool():
        x = torch.randn(MIB, device=DEVICE)
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with pool():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait()
    with pytest.raises(StateError, match="another thread"):
        Actor([x]).sleep()
    leave.set()
    thread.join()
    Actor([x]).sleep()


def test_several_calls_add_up_to_the_extent():
    with pool():
        tensors = [torch.randn(MIB // 2, device=DEVICE) for _ in range(10)]  # 2 MiB each, one extent of 20
    backend = vmm_backend()
    assert [backend.release(storages([t])) for t in tensors] == [0] * 9 + [20 * MIB]
    backend.restore(storages(tensors[:1]))
    assert byte_view(tensors[0].untyped_storage()).fill_(1).sum().item() == 2 * MIB
    assert backend.release(storages(tensors[:1])) == 20 * MIB


def test_the_self_test_passes_here_and_fails_where_nothing_is_freed():
    with pool():
        x = torch.empty(64 * MIB, dtype=torch.uint8, device=DEVICE)
        kept = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
    self_test(vmm_backend(), x.untyped_storage())
    assert kept.numel() == MIB


SETTINGS = {
    "plain": {},
    "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "expandable, new name": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    "async": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_under_every_allocator_setting_it_works_or_says_why_not(setting):
    script = textwrap.dedent(
        """
        import sys, torch
        from torpor.errors import UnsupportedError
        from torpor.memory.allocator import settings as allocator_settings
        from torpor.memory.cuda import self_test
        from torpor.memory.vmm import pool, vmm_backend
        try:
            with pool():
                x = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
            self_test(vmm_backend(), x.untyped_storage())
            print("works", allocator_settings())
        except UnsupportedError as error:
            print("refused", error)
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **SETTINGS[setting]},
        capture_output=True,
        text=True,
        check=False,
    )
    print(setting, result.stdout, result.stderr[-300:])
    assert result.returncode == 0, result.stderr
    if setting == "async":
        assert "refused" in result.stdout
        assert "cudaMallocAsync" in result.stdout
    else:
        assert result.stdout.startswith("works"), result.stdout


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"])
def test_every_driver_call_failing_in_turn(call):
    backend, fail = faulty_backend()
    torch.cuda.init()
    with backend.pools.use(0, False):
        tensors = [torch.randn(10 * MIB, device=DEVICE) for _ in range(3)]  # an extent each
    before = [bits(t) for t in tensors]
    torch.cuda.empty_cache()
    used = used_bytes()
    for nth in (1,) if call == "cuMemSetAccess" else (1, 2, 3):  # neighbours share that one
        fail(call, nth)
        if call in ("cuMemUnmap", "cuMemRelease"):
            with pytest.raises(DriverError, match=call):
                backend.release(storages(tensors))
            lost = 40 * MIB if call == "cuMemRelease" else 0  # a handle the driver would not take back
            assert used_bytes() - used == lost * nth
        else:
            backend.release(storages(tensors))
            asleep = used_bytes()
            with pytest.raises(DriverError, match=call):
                backend.restore(storages(tensors))
            assert used_bytes() == asleep
            backend.restore(storages(tensors))
            assert used_bytes() == used
        if call == "cuMemUnmap":
            assert same(before, tensors), "not a byte was lost"
        for tensor, saved in zip(tensors, before, strict=True):
            byte_view(tensor.untyped_storage()).copy_(saved)
        assert same(before, tensors)


class Contract(MemoryContract):
    """Extents are given back whole, so `release` gives more than the storages have, never less."""

    def make_backend(self):
        return vmm_backend()

    def make_tensors(self, backend):
        with pool():
            return super().make_tensors(backend)


CONTRACT = sorted(
    name
    for name in dir(MemoryContract)
    if name.startswith("test_") and name not in ("test_it_gives_what_it_said", "test_it_takes_ordinary_storages")
)


@pytest.mark.parametrize("name", CONTRACT)
def test_the_contract_of_memory_backends(name):
    contract = Contract()
    backend = contract.make_backend()
    arguments = {"backend": backend, "tensors": contract.make_tensors(backend)}
    backend.refresh()
    test = getattr(contract, name)
    test(**{key: arguments[key] for key in inspect.signature(test).parameters})


def test_the_driver_counts_what_this_process_holds():
    torch.zeros(1, device=DEVICE)
    assert cuda.tells_processes_apart(DEVICE), "NVML sees this process"
    before = cuda.used_bytes(DEVICE)
    script = "import torch; x = torch.empty(1 << 30, dtype=torch.uint8, device='cuda'); print('ready'); input()"
    command = [sys.executable, "-uc", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "ready\n"
        assert cuda.used_bytes(DEVICE) == before, "what another process takes is not ours"
        x = torch.empty(GIB, dtype=torch.uint8, device=DEVICE)
        assert cuda.used_bytes(DEVICE) - before == x.numel()
        other.communicate("\n")


def test_the_library_of_this_process_is_one():
    assert vmm_library() is vmm_library()
    assert vmm_backend() is vmm_backend()

"""What `test_torch_memory_saver_cuda` runs: `saver_cases.py MODE CASE`, in a process that the library may end.

With `hook_mode="torch"` the library ends every process that used it with code 1, when the interpreter lets go of its
pools. So a case that went well leaves before that.
"""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch_memory_saver import torch_memory_saver as saver

import torpor
from gpu import DEVICE, GIB, MIB, bits, cycle, poison, same, used_bytes
from torpor.errors import MemoryBackendError, NotEnoughMemoryError, StateError
from torpor.kinds import Fate, State


def sleeper_of(*args: object, **options: object) -> torpor.Sleeper:
    return torpor.Sleeper(*args, memory="torch_memory_saver", **options)


def bits_addresses_and_the_drivers_memory() -> None:
    with saver.region("actor"):
        tensors = [torch.randn(n, device=DEVICE) for n in (64 * MIB, 3 * MIB, *range(1000, 1040))]
        hidden = torch.randn(2 * MIB, device=DEVICE)
    with saver.region("kv_cache"):
        theirs = torch.randn(MIB, device=DEVICE)
    every = [*tensors, hidden, theirs]
    before, addresses = [bits(t) for t in every], [t.data_ptr() for t in every]
    sleeper = sleeper_of(extra=tensors)
    sleeper.prewarm()
    line = []
    for _ in range(4):
        torch.cuda.empty_cache()
        used = used_bytes()
        ledger = sleeper.sleep()
        line.append(used_bytes())
        freed = used - line[-1]
        assert freed >= sum(t.nbytes for t in tensors) + hidden.nbytes
        assert freed - 32 * MIB <= ledger.freed_bytes <= freed
        assert ledger.devices[0].closes, ledger.table()
        assert same(before[-1:], [theirs])
        poison()
        sleeper.wake()
        assert same(before, every)
        assert addresses == [t.data_ptr() for t in every]
    assert len(set(line[1:])) == 1
    saver.pause()
    saver.resume()


def training_goes_on() -> None:
    def run(sleeps: bool) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        with saver.region(f"actor {sleeps}"):
            model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to(DEVICE)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        sleeper = sleeper_of(model, optimizer=optimizer)
        losses = []
        for _ in range(4):
            if sleeps:
                cycle(sleeper)
            x = torch.full((64, 512), 0.5, device=DEVICE)
            loss = (model(x) - x).square().mean()
            loss.backward()
            with saver.region(f"actor {sleeps}"):
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [bits(p) for p in model.parameters()]

    (losses, weights), (expected, others) = run(True), run(False)
    assert losses == expected
    assert all(map(torch.equal, weights, others))


def components_in_regions_of_their_own() -> None:
    with saver.region("params"):
        params = [torch.randn(16 * MIB, device=DEVICE)]
    with saver.region("optimizer"):
        moments = [torch.randn(32 * MIB, device=DEVICE)]
    before = [bits(t) for t in (*params, *moments)]
    sleeper = sleeper_of(extra={"params": params, "moments": moments})
    sleeper.prewarm()
    torch.cuda.empty_cache()
    used = used_bytes()
    sleeper.sleep("moments")
    assert used - used_bytes() == 128 * MIB
    assert same(before[:1], params)
    sleeper.sleep()
    assert used - used_bytes() == 192 * MIB
    poison()
    sleeper.wake("params")
    assert same(before[:1], params)
    sleeper.wake()
    assert same(before, [*params, *moments])


def a_thief_and_a_second_try() -> None:
    with saver.region("actor"):
        tensors = [torch.randn(1 << 28, device=DEVICE) for _ in range(4)]
    before = [bits(t[: 1 << 20]) for t in tensors]
    sleeper = sleeper_of(extra=tensors)
    sleeper.sleep()
    script = """
import torch
free, _ = torch.cuda.mem_get_info()
x = torch.empty(free - (3 << 30), dtype=torch.uint8, device="cuda")
print("taken", flush=True)
input()
"""
    command = [sys.executable, "-c", script]
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as thief:
        assert thief.stdout.readline() == "taken\n"
        with pytest.raises(NotEnoughMemoryError) as caught:
            sleeper.wake()
        assert caught.value.needed_bytes >= 4 * GIB > caught.value.free_bytes
        assert set(sleeper.components().values()) == {State.ASLEEP}
        thief.stdin.write("\n")
        thief.stdin.flush()
        sleeper.wake(wait_s=30)
    assert same(before, [t[: 1 << 20] for t in tensors])


def calls_that_would_end_the_process() -> None:
    with saver.region("actor"):
        x = torch.randn(4 * MIB, device=DEVICE)
    before = bits(x)
    sleeper = sleeper_of(extra=[x])
    sleeper.sleep()
    calls: list[Callable[[], object]] = [
        saver.pause,
        saver.resume,
        lambda: saver.pause("actor"),
        lambda: saver.resume("actor"),
        lambda: saver.region("actor").__enter__(),
    ]
    for call in calls:
        with pytest.raises(StateError, match="sleep by Torpor's doing"):
            call()
    sleeper.wake()
    saver.pause("actor")
    (row,) = sleeper.sleep().rows
    assert row.fate is Fate.KEPT
    assert "somebody else paused" in row.reason
    saver.resume("actor")
    x.copy_(before.view(torch.float32))
    cycle(sleeper)
    assert same([before], [x])


def allocated_while_it_slept() -> None:
    with saver.region("actor"):
        x = torch.randn(4 * MIB, device=DEVICE)
        before = bits(x)
        sleeper = sleeper_of(extra={"x": x})
        sleeper.sleep()
        torch.empty(64 * MIB, device=DEVICE)
    with pytest.raises(MemoryBackendError, match="were allocated in the region 'actor' while it slept"):
        sleeper.wake()
    assert torch.equal(sleeper.read(x).view(torch.uint8), before), "its bytes can be read"


def backups_of_its_own_are_refused() -> None:
    with saver.region("actor", enable_cpu_backup=True):
        x = torch.randn(4 * MIB, device=DEVICE)
    sleeper = sleeper_of(extra=[x])
    (row,) = sleeper.sleep().rows
    assert row.fate is Fate.KEPT
    assert "enable_cpu_backup=False" in row.reason
    saver.pause()
    saver.resume()


def everything_hooked() -> None:
    """With TMS_INIT_ENABLE all memory is the library's, of the tag "default"."""
    x = torch.randn(4 * MIB, device=DEVICE)
    with saver.region():
        y = torch.randn(4 * MIB, device=DEVICE)
    with saver.region("actor"):
        z = torch.randn(4 * MIB, device=DEVICE)
    before = [bits(t) for t in (x, y, z)]
    sleeper = sleeper_of(extra={"x": x, "y": y, "z": z})
    rows = {row.component: row for row in sleeper.sleep().rows}
    assert "outside the regions" in rows["x"].reason
    assert "a tag of its own" in rows["y"].reason
    assert rows["z"].fate is Fate.MOVED
    sleeper.wake()
    assert same(before, [x, y, z])


if __name__ == "__main__":
    mode, case = sys.argv[1:]
    saver.hook_mode = mode
    globals()[case]()
    print("went well", flush=True)
    os._exit(0)

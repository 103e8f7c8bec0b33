"""FSDP2, process groups and checkpoints on a GPU, in a world of one rank over NCCL."""

from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import torpor
from gpu import DEVICE, GIB, MIB, PLACES, bits, poison, used_bytes
from torpor.checkpoint import load_checkpoint, save_checkpoint
from torpor.comms import CommsMode, Groups, suspend_obstacle
from torpor.errors import UnsupportedError
from torpor.kinds import Fate
from torpor.ledger import Ledger

WIDTH, LAYERS = 1024, 4


def start_world(backend: str = "nccl") -> None:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)


class Actor:
    def __init__(self, reshard: bool) -> None:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
        ]
        self.model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1001)).to(DEVICE)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cuda", (1,))
        for block in self.model:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(self.model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def forward(self, k: int) -> torch.Tensor:
        generator = torch.Generator(DEVICE).manual_seed(k)
        return self.model(torch.randn(64, WIDTH, device=DEVICE, generator=generator)).float().square().mean()

    def step(self, k: int) -> float:
        self.optimizer.zero_grad()
        loss = self.forward(k)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def bits(self) -> list[torch.Tensor]:
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        return [bits(t.to_local() if isinstance(t, DTensor) else t) for t in (*self.model.parameters(), *state)]


def train(place: str, sleeps: bool, reshard: bool) -> tuple[list[float], list[torch.Tensor], list[Ledger]]:
    """Steps in `place`, some right after an evaluation, with a sleep between any two outside of it."""
    with PLACES[place]():
        actor = Actor(reshard)
    sleeper = torpor.Sleeper(actor.model, optimizer=actor.optimizer, group=dist.group.WORLD) if sleeps else None
    seen, ledgers = [], []
    for k in range(4):
        if k % 2:
            with PLACES[place](), torch.no_grad():
                seen.append(actor.forward(100 + k).item())
        if sleeper is not None:
            before = used_bytes()
            ledgers.append(sleeper.sleep())
            freed = before - used_bytes()
            poison(0.2)
            assert freed >= 0.9 * ledgers[-1].freed_bytes - 64 * MIB, (freed, ledgers[-1].table())
            sleeper.wake()
        with PLACES[place]():
            seen.append(actor.step(k))
    return seen, actor.bits(), ledgers


@pytest.mark.parametrize("place", PLACES)
def test_sleeping_between_all_steps_changes_no_bit(place):
    start_world()
    for reshard in (True, False):
        seen, expected, _ = train(place, False, reshard)
        got_seen, got, ledgers = train(place, True, reshard)
        print(ledgers[-1].table())
        assert got_seen == seen
        assert len(got) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        fates = {fate for ledger in ledgers for fate in ledger.bytes_by_fate()}
        assert {Fate.MOVED, Fate.ZEROED} <= fates
        assert (Fate.DROPPED in fates) != reshard
        kept = sum(row.nbytes for row in ledgers[-1].rows if row.fate is Fate.KEPT)
        assert kept < MIB, ledgers[-1].table()
    dist.destroy_process_group()


def test_a_checkpoint_taken_asleep_from_the_gpu_is_resumed_to_the_bit():
    start_world("cpu:gloo,cuda:nccl")
    host = dist.new_group([0], backend="gloo")
    actor = Actor(True)
    for k in range(2):
        actor.step(k)
    expected = actor.bits()
    with TemporaryDirectory() as root, torpor.Sleeper(actor.model, optimizer=actor.optimizer) as sleeper:
        sleeper.sleep()
        used = used_bytes()
        path = save_checkpoint(Path(root), 2, sleeper, group=host)
        state = sleeper.state_dict()
        assert used_bytes() - used < 64 * MIB
        assert all(isinstance(t, DTensor) and t.to_local().is_cpu for t in state.values())
        sleeper.wake()
        ahead = [actor.step(k) for k in range(2, 4)]
        other = Actor(True)
        with torpor.Sleeper(other.model, optimizer=other.optimizer) as fresh:
            load_checkpoint(path, fresh, group=host)
            assert all(torch.equal(a, b) for a, b in zip(expected, other.bits(), strict=True))
            steps = [values["step"].device.type for values in other.optimizer.state.values()]
            assert set(steps) == {"cuda"}  # a fused optimizer counts on the device
            assert [other.step(k) for k in range(2, 4)] == ahead
    dist.destroy_process_group()


def test_groups_over_nccl_are_rebuilt_and_their_memory_is_the_drivers_word():
    store, minutes = dist.HashStore(), timedelta(minutes=90)

    def create(number: int):
        fresh = dist.PrefixStore(f"world-{number}", store)
        dist.init_process_group("nccl", store=fresh, rank=0, world_size=1, timeout=minutes, device_id=DEVICE)
        return {"world": dist.group.WORLD, "sub": dist.new_group([0], timeout=minutes)}

    groups = Groups(create)
    obstacle = suspend_obstacle()
    print(f"NCCL {torch.cuda.nccl.version()}, torch {torch.__version__}: {obstacle or 'suspend is there'}")
    assert groups.mode is (CommsMode.REBUILD if obstacle else CommsMode.SUSPEND)
    x = torch.ones(1 << 20, device=DEVICE)
    with torpor.Sleeper(extra=[x], comms=groups, group=groups["world"]) as sleeper:
        for k in range(3):
            x.fill_(k)
            dist.all_reduce(x, group=groups["sub"])
            dist.all_reduce(x, group=groups["world"])
            ledger = sleeper.sleep()
            [row] = [row for row in ledger.rows if row.component == "comms"]
            print(row)
            assert row.fate is Fate.DROPPED
            woken = sleeper.wake()
            print(woken.table())
            assert bool((x == k).all())
            assert groups["sub"]._get_backend(DEVICE).options._timeout == minutes
        dist.all_reduce(x, group=groups["sub"])
    dist.destroy_process_group()


def test_suspend_is_refused_where_it_cannot_be_and_works_where_it_can():
    start_world()
    x = torch.ones(1 << 20, device=DEVICE)
    dist.all_reduce(x)
    if suspend_obstacle():
        with pytest.raises(UnsupportedError, match="process groups cannot be suspended: "):
            Groups({"world": dist.group.WORLD}, mode="suspend")
        kept = Groups({"world": dist.group.WORLD})
        assert kept.mode is CommsMode.KEEP
        assert suspend_obstacle() in kept.reason
    else:
        with torpor.Sleeper(extra=[x], comms=Groups({"world": dist.group.WORLD}, mode="suspend")) as sleeper:
            for _ in range(3):
                sleeper.sleep()
                sleeper.wake()
                dist.all_reduce(x)
        assert bool((x == 1).all())
    dist.destroy_process_group()


def test_an_agreement_costs_little_beside_the_copy():
    start_world()
    with torpor.pool():
        tensors = [torch.randn(1 << 28, device=DEVICE) for _ in range(4)]
    sleeper = torpor.Sleeper(extra=tensors, group=dist.group.WORLD)
    sleeper.prewarm()
    for _ in range(3):
        for tensor in tensors:
            tensor.add_(1)
        down, up = sleeper.sleep(), sleeper.wake()
    print(down.table(), up.table(), sep="\n")
    assert down.copied_bytes >= 4 * GIB
    assert down.stages["agree"] + up.stages["agree"] < 0.1
    dist.destroy_process_group()

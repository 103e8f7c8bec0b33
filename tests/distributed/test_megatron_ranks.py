"""Megatron-Core's sharded masters in two processes: parameters come back by a cast and a gather, or not at all."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from stand_ins import megatron as mc
from torpor import Sleeper
from torpor.kinds import Fate

WIDTH = 100


class Actor:
    def __init__(self) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).bfloat16()
        self.ddp = mc.DistributedDataParallel(net, group=dist.group.WORLD)
        self.optimizer = mc.DistributedOptimizer(partial(torch.optim.AdamW, lr=1e-2), self.ddp)

    def step(self, seed: int) -> float:
        self.ddp.zero_grad_buffer()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))
        loss = self.ddp(x.bfloat16()).float().square().mean()
        loss.backward()
        self.ddp.finish_grad_sync()
        self.optimizer.step()
        return loss.item()

    def bits(self) -> list[bytes]:
        inner = self.optimizer.optimizer
        tensors = [*self.ddp.parameters(), *inner.param_groups[0]["params"]]
        tensors += [value for values in inner.state.values() for value in values.values()]
        return [t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def _sleeper(actor: Actor) -> Sleeper:
    return Sleeper(
        actor.ddp,
        optimizer=actor.optimizer,
        store="pageable",
        report_leftovers=False,
        rematerialize_param_from_master_weight=True,
    )


def _train_asleep_and_awake() -> tuple[bool, list[Fate], list[bool]]:
    with pytest.MonkeyPatch.context() as patch, mc.imported(patch):
        awake, slept = Actor(), Actor()
        fates, read = [], []
        with _sleeper(slept) as sleeper:
            for seed in range(3):
                awake.step(seed)
                slept.step(seed)
                ledger = sleeper.sleep()
                fates += [row.fate for row in ledger.rows if row.component == "params"]
                state = sleeper.state_dict()
                read += [torch.equal(state[name], value) for name, value in awake.ddp.state_dict().items()]
                sleeper.wake("params")
                sleeper.wake()
        return awake.bits() == slept.bits(), fates, read


def test_training_goes_on_bit_for_bit_and_parameters_are_never_copied() -> None:
    for alike, fates, read in run_ranks(_train_asleep_and_awake):
        assert alike
        assert fates == [Fate.REBUILT] * 3
        assert all(read)


def _desync_one_rank() -> tuple[list[Fate], bool]:
    with pytest.MonkeyPatch.context() as patch, mc.imported(patch):
        actor = Actor()
        with _sleeper(actor) as sleeper:
            actor.step(0)
            if dist.get_rank() == 1:
                actor.ddp.buffers[0].param_data[5] += 1
            before = actor.bits()
            fates = [row.fate for row in sleeper.sleep().rows if row.component == "params"]
            sleeper.wake()
        return fates, actor.bits() == before


def test_one_rank_whose_parameters_differ_keeps_all_of_them_from_rebuilding() -> None:
    for fates, alike in run_ranks(_desync_one_rank):
        assert fates == [Fate.MOVED]
        assert alike

"""N steps with a sleep between any two give the bits of N steps without, for every optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_actor import SmallActor
from torch import nn

from torpor import Sleeper

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in params if p.ndim == 2], lr=1e-2)


def _adam_8bit(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    import bitsandbytes as bnb

    made: torch.optim.Optimizer = bnb.optim.AdamW8bit(params, lr=1e-2, min_8bit_size=1024)
    return made


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9),
    "muon": _muon,
    "adamw-8bit": _adam_8bit,
}


def _run(make: Make, store_dir: Path, memory: str | None, steps: int = 5) -> tuple[list[float], list[bytes], int]:
    actor = SmallActor(make)
    schedule = torch.optim.lr_scheduler.LambdaLR(actor.optimizer, lambda k: 0.9**k)
    losses = []
    sleeper = Sleeper(actor.model, optimizer=actor.optimizer, store_dir=store_dir, memory=memory) if memory else None
    for k in range(steps):
        if sleeper is not None:
            sleeper.sleep()
            sleeper.wake()
        losses.append(actor.step(k))
        schedule.step()
    if sleeper is not None:
        sleeper.close()
    return losses, actor.bits(), len(actor.optimizer.state)


@pytest.mark.parametrize("memory", ["madvise", "resize"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sleeping_between_steps_changes_no_bit(name: str, memory: str, tmp_path: Path) -> None:
    assert _run(OPTIMIZERS[name], tmp_path, memory) == _run(OPTIMIZERS[name], tmp_path, None)


def test_a_sleep_before_the_first_step_creates_no_state(actor: SmallActor, tmp_path: Path) -> None:
    with Sleeper(actor.model, optimizer=actor.optimizer, store_dir=tmp_path) as sleeper:
        sleeper.sleep()
        sleeper.wake()
    assert len(actor.optimizer.state) == 0


def test_gradients_survive_a_sleep_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    def run(sleepy: bool) -> list[bytes]:
        actor = SmallActor()
        with Sleeper(actor.model, optimizer=actor.optimizer, store_dir=tmp_path) as sleeper:
            actor.step(0)
            actor.optimizer.zero_grad()
            for k in range(3):
                actor.backward(k)
                if sleepy:
                    with sleeper.asleep():
                        pass
            actor.optimizer.step()
        return actor.bits()

    assert run(True) == run(False)


def test_gradients_are_zeroed_after_the_step_unless_told_otherwise(tmp_path: Path) -> None:
    for dead in (True, False):
        actor = SmallActor()
        with Sleeper(actor.model, optimizer=actor.optimizer, store_dir=tmp_path, dead_grads_after_step=dead) as sleeper:
            actor.step(0)
            before = actor.model[0].weight.grad
            assert before is not None
            kept = before.clone()
            with sleeper.asleep():
                pass
            after = actor.model[0].weight.grad
            assert after is before
            assert torch.equal(after, torch.zeros_like(kept) if dead else kept)


def test_a_live_autograd_graph_survives(actor: SmallActor, tmp_path: Path) -> None:
    loss = actor.model(torch.ones(2, 128)).square().mean()
    with Sleeper(actor.model, optimizer=actor.optimizer, store_dir=tmp_path) as sleeper, sleeper.asleep():
        pass
    loss.backward()
    slept = [p.grad.clone() for p in actor.model.parameters() if p.grad is not None]
    twin = SmallActor()
    twin.model(torch.ones(2, 128)).square().mean().backward()
    assert all(
        torch.equal(a, p.grad) for a, p in zip(slept, twin.model.parameters(), strict=True) if p.grad is not None
    )

"""The sharded backend against the whole model: the same learning, the same weights, the same bits asleep or not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_actors import VOCABULARY, make_rollouts
from torch.distributed.device_mesh import init_device_mesh

from distributed.ranks import run_ranks
from torpor.rl.actor import REFERENCE, Actor
from torpor.rl.backends.base import Backend
from torpor.rl.backends.fsdp import FsdpBackend
from torpor.rl.backends.local import LocalBackend
from torpor.rl.batch import Batch, make_batch
from torpor.rl.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from torpor.rl.models import tiny_model

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.5)
KL = AlgorithmConfig(kl_coefficient=0.1, old_log_probs="actor")


def options(algorithm: AlgorithmConfig) -> dict[str, Any]:
    snapshots = {REFERENCE: tiny_model(VOCABULARY, hidden_size=32, seed=3)} if algorithm.kl_coefficient else {}
    return {"optimizer": OPTIMIZER, "temperature": 1.0, "logit_chunk_tokens": 4, "snapshots": snapshots}


def make(backend: Backend, algorithm: AlgorithmConfig, directory: Path, microbatch_tokens: int = 8) -> Actor:
    return Actor(
        backend,
        algorithm=algorithm,
        trainer=TrainerConfig(microbatch_tokens=microbatch_tokens),
        max_answer_tokens=6,
        optimizer=OPTIMIZER,
        total_updates=4,
        store="file",
        store_dir=directory,
    )


def batch_of(version: int, algorithm: AlgorithmConfig) -> Batch:
    rollouts = make_rollouts(tiny_model(VOCABULARY, hidden_size=32, seed=7), version)
    return make_batch(rollouts, (1, 0, 0, 0, 1, 0), 3, normalize_std=algorithm.normalize_std)


def learn(
    actor: Actor, algorithm: AlgorithmConfig, shares: slice, *, sleeps: bool, versions: Sequence[int] = range(3)
) -> dict[str, torch.Tensor]:
    losses = []
    for version in versions:
        batch = batch_of(version, algorithm)
        if sleeps:
            actor.sleep()
        losses.append(actor.train(Batch(batch.groups[shares], version)).values()["policy/loss"])
    if sleeps:
        actor.sleep()
    weights = {name: tensor.clone() for name, tensor in actor.backend.weights(actor.sleeper)}
    return weights | {"losses": torch.tensor(losses)}


def on_one_rank(algorithm: AlgorithmConfig, deal: str, sleeps: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    backend = FsdpBackend(tiny_model(VOCABULARY, hidden_size=32), mesh, **options(algorithm))
    # "uneven": the first rank learns from everything, the others compute idle passes.
    rank, size = dist.get_rank(), dist.get_world_size()
    share = slice(rank, None, size) if deal == "even" else slice(None) if rank == 0 else slice(0)
    with make(backend, algorithm, Path(os.environ["TORPOR_DIR"])) as actor:
        learned = learn(actor, algorithm, share, sleeps=sleeps)
    return {name: tensor.numpy() for name, tensor in learned.items()}  # a tensor would wait in this process


@pytest.mark.parametrize("algorithm", [AlgorithmConfig(), KL], ids=["plain", "kl"])
@pytest.mark.parametrize("deal", ["even", "uneven"])
def test_two_ranks_learn_what_one_process_learns(tmp_path: Path, algorithm: AlgorithmConfig, deal: str) -> None:
    with make(LocalBackend(tiny_model(VOCABULARY, hidden_size=32), **options(algorithm)), algorithm, tmp_path) as actor:
        expected = learn(actor, algorithm, slice(None), sleeps=False)
    for found in run_ranks(on_one_rank, algorithm, deal, False):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(torch.from_numpy(found[name]), tensor, rtol=1e-4, atol=2e-5, msg=name)


def test_sleep_changes_no_bit() -> None:
    awake = run_ranks(on_one_rank, KL, "even", False)
    asleep = run_ranks(on_one_rank, KL, "even", True)
    for before, after in zip(awake, asleep, strict=True):
        for name, values in before.items():
            assert values.tobytes() == after[name].tobytes(), name


def save_on_one_rank(directory: Path) -> dict[str, Any]:
    """Two steps, a checkpoint taken asleep, a third step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    share = slice(dist.get_rank(), None, dist.get_world_size())
    backend = FsdpBackend(tiny_model(VOCABULARY, hidden_size=32), mesh, **options(KL))
    with make(backend, KL, Path(os.environ["TORPOR_DIR"])) as actor:
        learn(actor, KL, share, sleeps=True, versions=range(2))
        assert actor.is_asleep
        actor.save(directory)
        assert actor.is_asleep
        learned = learn(actor, KL, share, sleeps=False, versions=[2])
    return {name: tensor.numpy() for name, tensor in learned.items()}


def load_on_one_rank(directory: Path) -> dict[str, Any]:
    """A fresh actor with other weights and another reference takes the checkpoint and does the third step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    share = slice(dist.get_rank(), None, dist.get_world_size())
    other = {"snapshots": {REFERENCE: tiny_model(VOCABULARY, hidden_size=32, seed=8)}}
    backend = FsdpBackend(tiny_model(VOCABULARY, hidden_size=32, seed=9), mesh, **{**options(KL), **other})
    with make(backend, KL, Path(os.environ["TORPOR_DIR"])) as actor:
        actor.load(directory)
        learned = learn(actor, KL, share, sleeps=False, versions=[2])
    return {name: tensor.numpy() for name, tensor in learned.items()}


def test_a_resumed_run_has_the_bits_of_the_unbroken_one_and_any_number_of_ranks_can_go_on(tmp_path: Path) -> None:
    unbroken = run_ranks(save_on_one_rank, tmp_path)
    for before, after in zip(unbroken, run_ranks(load_on_one_rank, tmp_path), strict=True):
        for name, values in before.items():
            assert values.tobytes() == after[name].tobytes(), name
    (alone,) = run_ranks(load_on_one_rank, tmp_path, world_size=1)
    for name, values in unbroken[0].items():
        torch.testing.assert_close(
            torch.from_numpy(alone[name]), torch.from_numpy(values), rtol=1e-4, atol=2e-5, msg=name
        )

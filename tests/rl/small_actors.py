"""An actor and batches that are small enough for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torpor.rl.actor import Actor
from torpor.rl.backends.local import LocalBackend, LocalCriticBackend
from torpor.rl.batch import Batch, make_batch
from torpor.rl.config import AlgorithmConfig, CriticConfig, OptimizerConfig, TrainerConfig
from torpor.rl.critic import Critic
from torpor.rl.models import ValueModel, tiny_model, value_model
from torpor.rl.rollout.base import FinishReason, Rollout

VOCABULARY = 24


def make_actor(
    tmp_path: Path, *, microbatch_tokens: int = 2048, seed: int = 0, hidden_size: int = 32, **options: Any
) -> Actor:
    optimizer = options.pop("optimizer", OptimizerConfig(name="sgd", learning_rate=0.1, betas=(0.0, 0.0)))
    backend = LocalBackend(
        tiny_model(VOCABULARY, hidden_size=hidden_size, seed=seed),
        optimizer=optimizer,
        temperature=1.0,
        logit_chunk_tokens=4,
        snapshots=options.pop("snapshots", None),
    )
    return Actor(
        backend,
        algorithm=options.pop("algorithm", AlgorithmConfig()),
        optimizer=optimizer,
        trainer=TrainerConfig(microbatch_tokens=microbatch_tokens, logit_chunk_tokens=4),
        max_answer_tokens=6,
        total_updates=4,
        store="file",
        store_dir=tmp_path,
        report_leftovers=False,
        **options,
    )


def make_critic(tmp_path: Path, *, microbatch_tokens: int = 2048, seed: int = 0, **options: Any) -> Critic:
    """A critic on the backbone of the policy that `make_actor` makes; SGD without clipping by default."""
    plain = OptimizerConfig(name="sgd", learning_rate=0.1, betas=(0.0, 0.0), max_grad_norm=None)
    config = options.pop("config", CriticConfig(optimizer=plain, value_clip=None))
    policy = tiny_model(VOCABULARY, hidden_size=32, seed=seed)
    return Critic(
        LocalCriticBackend(value_model(policy), optimizer=config.optimizer),
        algorithm=options.pop("algorithm", AlgorithmConfig(advantages="gae", normalize_std=False)),
        config=config,
        trainer=TrainerConfig(microbatch_tokens=microbatch_tokens),
        total_updates=4,
        store="file",
        store_dir=tmp_path,
        report_leftovers=False,
        **options,
    )


def value_model_of(critic: Critic) -> ValueModel:
    """The model of a critic that `make_critic` made."""
    assert isinstance(critic.backend, LocalCriticBackend)
    assert isinstance(critic.backend.model, ValueModel)
    return critic.backend.model


def model_of(actor: Actor) -> Any:
    """The policy of an actor that `make_actor` made."""
    assert isinstance(actor.backend, LocalBackend)
    return actor.backend.model


def make_rollouts(model: Any, version: int = 0) -> list[Rollout]:
    """Two prompts with three answers each, of unequal lengths, with the model's own log-probabilities."""
    generator = torch.Generator().manual_seed(1)
    rollouts = []
    for prompt_index in range(2):
        prompt = tuple(torch.randint(3, VOCABULARY, (3 + prompt_index,), generator=generator).tolist())
        for sample_index, length in enumerate((2, 5, 3)):
            ids = tuple(torch.randint(3, VOCABULARY, (length,), generator=generator).tolist())
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            log_probs = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)
            rollouts.append(
                Rollout(
                    prompt_index,
                    sample_index,
                    prompt,
                    ids,
                    tuple(log_probs.tolist()),
                    FinishReason.LENGTH,
                    version,
                )
            )
    return rollouts


def batch_for(
    actor: Actor,
    rewards: tuple[float, ...] = (1, 0, 0, 0, 1, 0),
    version: int = 0,
    *,
    normalize_std: bool = True,
) -> Batch:
    actor.wake_up()  # the test computes with its model
    rollouts = make_rollouts(model_of(actor), version)
    return make_batch(rollouts, rewards, 3, normalize_std=normalize_std)

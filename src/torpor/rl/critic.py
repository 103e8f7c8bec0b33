"""The judging side of a colocated step with PPO: what was to be expected of an answer, token by token.

    critic.sleep()                       its memory is free; a second call moves nothing
    appraisal = critic.appraise(batch)   wakes by itself: values, and from them advantages and returns
    critic.train(appraisal)              the values are fitted to the returns
    critic.sleep()                       before the actor, with `appraisal.batch`, has its turn

Letter: `T` answer tokens of one group, one answer after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torpor.report.metrics import Mean, Metrics
from torpor.rl.advantages import EPSILON, generalized_advantages
from torpor.rl.backends.base import Backend, Score, World
from torpor.rl.batch import Batch, RolloutGroup, deal
from torpor.rl.config import AlgorithmConfig, CriticConfig
from torpor.rl.learner import Learner, Progress
from torpor.rl.losses import value_terms


@dataclass(frozen=True, slots=True)
class Judged:
    """One group, what was expected of it, and what came. Tensors are fp32, shape `[T]`."""

    group: RolloutGroup
    value_T: Tensor
    return_T: Tensor


@dataclass(frozen=True, slots=True)
class Appraisal:
    """A batch as the critic saw it before it learned from it."""

    batch: Batch
    """With the advantages that the actor learns from."""
    judged: tuple[Judged, ...]


class Critic(Learner):
    """A value model that sleeps while the actor trains, and the other way round.

    Args:
        backend: model and optimizer; scores are values.
        algorithm: whether advantages are normalised, and the weight of a KL penalty in the rewards.
        config: the critic's own choices.
        options: see `Learner`: `trainer`, `total_updates`, `on_ledger`, `offload`, `lazy_wake` and the sleeper's.
    """

    metrics_path = "critic"

    def __init__(
        self,
        backend: Backend,
        *,
        algorithm: AlgorithmConfig,
        config: CriticConfig,
        **options: Any,
    ) -> None:
        self._algorithm, self._config = algorithm, config
        super().__init__(backend, optimizer=config.optimizer, **options)

    def appraise(self, batch: Batch, gaps: Sequence[Tensor] | None = None) -> Appraisal:
        """Advantages by generalised advantage estimation, and the returns to fit. Wakes the critic if it sleeps.

        Args:
            batch: rollouts with one reward an answer, which comes with the answer's last token.
            gaps: see `Actor.reference_gaps`; times the KL coefficient they are taken off each token's reward.
        """
        self.wake_up()
        values = [value_T.cpu() for (value_T,) in self._scores(batch.groups)]
        rewards = [self._token_rewards(group, gaps[i] if gaps else None) for i, group in enumerate(batch.groups)]
        estimates = [
            self._estimate(group, reward_T, value_T)
            for group, reward_T, value_T in zip(batch.groups, rewards, values, strict=True)
        ]
        judged = tuple(
            Judged(group, value_T, value_T + estimate_T)
            for group, value_T, estimate_T in zip(batch.groups, values, estimates, strict=True)
        )
        if self._algorithm.normalize_std:
            estimates = standardize(estimates, self.backend.world)
        groups = (
            group.with_advantages([answer_T.tolist() for answer_T in torch.split(estimate_T, group.lengths)])
            for group, estimate_T in zip(batch.groups, estimates, strict=True)
        )
        return Appraisal(Batch(tuple(groups), batch.weight_version), judged)

    def train(self, appraisal: Appraisal, progress: Progress = lambda _: None) -> Metrics:
        """Fit the values to the returns of one rollout. Wakes the critic if it sleeps."""
        self.wake_up()
        metrics = Metrics()
        _describe(appraisal.judged, metrics)
        for _ in range(self._config.epochs_per_rollout):
            for share in deal(appraisal.judged, self._config.updates_per_rollout):
                self._update(share, metrics, progress)
        self.weight_version += 1
        return metrics

    def _token_rewards(self, group: RolloutGroup, gap_T: Tensor | None) -> Tensor:
        outcomes = (
            [0.0] * (length - 1) + [reward] for length, reward in zip(group.lengths, group.rewards, strict=True)
        )
        reward_T = torch.tensor([reward for answer in outcomes for reward in answer])
        return reward_T if gap_T is None else reward_T - self._algorithm.kl_coefficient * gap_T

    def _estimate(self, group: RolloutGroup, reward_T: Tensor, value_T: Tensor) -> Tensor:
        answers = zip(torch.split(reward_T, group.lengths), torch.split(value_T, group.lengths), strict=True)
        advantages = (
            generalized_advantages(
                rewards.tolist(),
                values.tolist(),
                discount=self._config.discount,
                gae_lambda=self._config.gae_lambda,
            )
            for rewards, values in answers
        )
        return torch.tensor([advantage for answer in advantages for advantage in answer])

    def _update(self, share: Sequence[Judged], metrics: Metrics, progress: Progress) -> None:
        """One optimizer step over the mean of all tokens of `share` on all ranks, however it is split."""
        (num_tokens,) = self.backend.world.sum([sum(len(item.value_T) for item in share)])

        def loss_of(part: Sequence[Judged], scores: Sequence[Score]) -> Tensor:
            return self._loss(part, scores, metrics) / num_tokens

        loss = self._accumulate(share, [item.group for item in share], loss_of, progress)
        metrics.record("critic/loss", Mean(loss))
        self._step(metrics)

    def _loss(self, part: Sequence[Judged], scores: Sequence[Score], metrics: Metrics) -> Tensor:
        """The summed loss of one microbatch's tokens."""
        losses = []
        for item, (value_T,) in zip(part, scores, strict=True):
            terms = value_terms(
                value_T,
                item.value_T.to(value_T.device),
                item.return_T.to(value_T.device),
                clip=self._config.value_clip,
            )
            losses.append(terms.loss_T.sum())
            metrics.record("critic/clip_fraction", Mean(terms.clipped_T.sum().item(), len(value_T)))
        return torch.stack(losses).sum()


def standardize(values: Sequence[Tensor], world: World) -> list[Tensor]:
    """All of `values`, on all ranks, brought to mean 0 and standard deviation 1 together."""
    every = torch.cat(list(values)).double()
    total, count = world.sum([every.sum().item(), len(every)])
    mean = total / count
    (squares,) = world.sum([(every - mean).square().sum().item()])
    deviation = (squares / count) ** 0.5
    return [(value_T - mean) / (deviation + EPSILON) for value_T in values]


def _describe(judged: Sequence[Judged], metrics: Metrics) -> None:
    """How well the values foretold the returns: 1 - Var(return - value) / Var(return)."""
    values = torch.cat([item.value_T for item in judged]).double()
    returns = torch.cat([item.return_T for item in judged]).double()
    spread = returns.var(correction=0).item()
    unexplained = (returns - values).var(correction=0).item()
    metrics.record("critic/value", Mean(values.sum().item(), len(values)))
    metrics.record("critic/return", Mean(returns.sum().item(), len(returns)))
    metrics.record("critic/explained_variance", Mean(1.0 - unexplained / spread if spread else 0.0))

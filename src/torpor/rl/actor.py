"""The training side of a colocated step.

    actor = Actor(model, ...)       awake
    actor.sleep()                   its memory is free; a second call moves nothing
    actor.update_weights(engine)    from the store, while the actor sleeps
    actor.save(directory)           likewise
    actor.train(batch)              wakes by itself; the weights then have the next version
    actor.close()                   awake, hooks gone, store removed

With `offload=False` the same calls do the same arithmetic, and `sleep` does nothing.

Letter: `T` answer tokens of one group, one answer after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from torpor.errors import StateError, UsageError
from torpor.report.metrics import Last, Max, Mean, Metrics, Sum
from torpor.rl import checkpoint
from torpor.rl.batch import Batch, RolloutGroup, microbatches
from torpor.rl.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from torpor.rl.losses import policy_terms, sequence_weights
from torpor.rl.optimizers import build_optimizer, set_learning_rate
from torpor.rl.rollout.base import LoadReport, RolloutEngine
from torpor.rl.schedules import learning_rate_factor
from torpor.rl.scoring import Scorer
from torpor.sleeper import Sleeper

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from torpor.ledger import Ledger
    from torpor.stores.base import Store

Progress = Callable[[int], None]
"""Called with the number of groups that are done."""


@dataclass(frozen=True, slots=True)
class _Scored:
    """A group with what the loss needs from before the update. Tensors are fp32, shape `[T]`."""

    group: RolloutGroup
    old_log_prob_T: Tensor
    importance_T: Tensor | None = None
    reference_log_prob_T: Tensor | None = None


class Actor:
    """A model, its optimizer and, with a KL penalty, its frozen reference; they sleep and wake together.

    Args:
        model: the policy, trained in place.
        reference: the frozen first policy; needed if `algorithm.kl_coefficient` is above 0.
        temperature: what rollouts are sampled with.
        max_answer_tokens: what `length_normalization = constant` divides by.
        total_updates: optimizer steps of the whole run, for the schedule.
        on_ledger: called with the ledger of every sleep and wake.
        offload: False: `sleep` does nothing.
        lazy_wake: the optimizer's state comes back behind the forward and backward passes.
        store, store_dir, verify, report_leftovers: see `Sleeper`.

    Raises:
        UsageError: a KL penalty without a reference.
        UnsupportedError: the optimizer needs a package that is not installed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        reference: PreTrainedModel | None = None,
        algorithm: AlgorithmConfig,
        optimizer: OptimizerConfig,
        trainer: TrainerConfig,
        temperature: float = 1.0,
        max_answer_tokens: int,
        total_updates: int,
        on_ledger: Callable[[Ledger], None] = lambda _: None,
        offload: bool = True,
        lazy_wake: bool = True,
        store: str | Store = "file",
        store_dir: Path | None = None,
        verify: bool = True,
        report_leftovers: bool = False,
    ) -> None:
        if algorithm.kl_coefficient > 0 and reference is None:
            raise UsageError(f"kl_coefficient is {algorithm.kl_coefficient}, and there is no reference model")
        self.model = model.train()
        self._algorithm, self._optimizer_config, self._trainer = algorithm, optimizer, trainer
        self._max_answer_tokens, self._total_updates = max_answer_tokens, total_updates
        self._on_ledger, self._offload, self._lazy_wake = on_ledger, offload, lazy_wake
        self._is_awake = True
        self.optimizer = build_optimizer(optimizer, model.parameters())
        self._score = Scorer(model, temperature, trainer.logit_chunk_tokens)
        self._score_reference = (
            Scorer(reference.train(False).requires_grad_(False), temperature, trainer.logit_chunk_tokens)
            if reference is not None
            else None
        )
        extra = {"reference": dict(reference.named_parameters())} if reference is not None else None
        self.sleeper = Sleeper(
            model,
            optimizer=self.optimizer,
            extra=extra,
            store=store,
            store_dir=store_dir,
            verify=verify,
            report_leftovers=report_leftovers,
        )
        self._weight_names = frozenset(name for name, _ in model.named_parameters())
        self.weight_version = 0
        """Counts the batches learned from; what the engine must have before it generates."""
        self.num_updates = 0
        """Optimizer steps so far."""

    # --- memory ----------------------------------------------------------------------------------------

    @property
    def is_asleep(self) -> bool:
        """Whether `train` would have to wake it."""
        return not self._is_awake

    def sleep(self) -> None:
        """Free the actor's memory. Idempotent; nothing with `offload=False`."""
        if self._offload:
            self._finish_waking()
            self._on_ledger(self.sleeper.sleep())
            self._is_awake = False

    def wake_up(self) -> None:
        """Bring everything back; with `lazy_wake` the optimizer's state follows behind the first pass. Idempotent."""
        if not self._is_awake:
            self._on_ledger(self.sleeper.wake(lazy=self._lazy_wake))
            self._is_awake = True

    def _finish_waking(self) -> None:
        """What a lazy wake left for later is here when this returns."""
        ledger = self.sleeper.finish()
        if ledger is not None:
            self._on_ledger(ledger)

    def close(self) -> None:
        """Wake, and give the store back. Idempotent."""
        self.sleeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- weights and state -------------------------------------------------------------------------------

    def update_weights(self, engine: RolloutEngine) -> LoadReport:
        """Fill the engine with the weights as they are, from the store if the actor sleeps.

        Raises:
            StateError: the engine says afterwards that it has another version.
        """
        weights = ((name, tensor) for name, tensor in self.sleeper.stream() if name in self._weight_names)
        report = engine.load_weights(weights, version=self.weight_version)
        if engine.weight_version != self.weight_version:
            raise StateError(
                f"the engine has weight version {engine.weight_version} after an update to {self.weight_version}"
            )
        return report

    def save(self, directory: Path) -> None:
        """Write model, optimizer and random state into `directory`, asleep or awake. Wakes nothing."""
        model = self.sleeper.state_dict()
        untied = _first_names(self.model)
        checkpoint.write_tensors(
            directory / "model.safetensors", {name: model[name] for name in model if name in untied}
        )
        del model  # one of the two copies at a time
        tensors, plain = checkpoint.split_optimizer_state(self.sleeper.optimizer_state_dict())
        checkpoint.write_tensors(
            directory / "optimizer.safetensors", {**tensors, "random_state": torch.get_rng_state()}
        )
        checkpoint.write_json(
            directory / "state.json",
            {"weight_version": self.weight_version, "num_updates": self.num_updates, "optimizer": plain},
        )

    def load(self, directory: Path) -> None:
        """Take everything that `save` wrote, to the bit.

        Raises:
            UsageError: the checkpoint is of another model.
        """
        self.wake_up()
        self._finish_waking()
        state = checkpoint.read_json(directory / "state.json")
        weights = checkpoint.read_tensors(directory / "model.safetensors")
        wanted = self.model.state_dict().keys() & _first_names(self.model)
        if weights.keys() != wanted:
            raise UsageError(
                f"{directory} is of another model: missing {sorted(wanted - weights.keys())}, "
                f"unexpected {sorted(weights.keys() - wanted)}"
            )
        self.model.load_state_dict(weights, strict=False)  # ties are in the file once
        tensors = checkpoint.read_tensors(directory / "optimizer.safetensors")
        torch.set_rng_state(tensors.pop("random_state"))
        self.optimizer.load_state_dict(checkpoint.join_optimizer_state(tensors, state["optimizer"]))
        self.weight_version, self.num_updates = state["weight_version"], state["num_updates"]

    # --- learning ------------------------------------------------------------------------------------------

    def train(self, batch: Batch, progress: Progress = lambda _: None) -> Metrics:
        """Learn from one rollout; the weights have the next version afterwards. Wakes the actor if it sleeps.

        Raises:
            StateError: the batch was generated with other weights than the actor has.
        """
        if batch.weight_version != self.weight_version:
            raise StateError(
                f"the batch was generated by weight version {batch.weight_version}, the actor has "
                f"{self.weight_version}: update the engine's weights before each rollout"
            )
        self.wake_up()
        metrics = Metrics()
        scored = self._look_back(batch.groups)
        for _ in range(self._algorithm.epochs_per_rollout):
            for share in _deal(scored, self._algorithm.updates_per_rollout):
                self._update(share, metrics, progress)
        self.weight_version += 1
        return metrics

    def _look_back(self, groups: Sequence[RolloutGroup]) -> list[_Scored]:
        """Log-probabilities of the policy before the update and of the reference, as far as they are wanted."""
        scored = [_Scored(group, group.rollout_log_prob_T()) for group in groups]
        if self._algorithm.old_log_probs == "actor":
            scored = [
                replace(item, old_log_prob_T=ours_T, importance_T=self._importance(ours_T, item.old_log_prob_T))
                for item, ours_T in zip(scored, self._log_probs(self._score, groups), strict=True)
            ]
        if self._score_reference is not None:
            references = self._log_probs(self._score_reference, groups)
            scored = [
                replace(item, reference_log_prob_T=reference_T)
                for item, reference_T in zip(scored, references, strict=True)
            ]
        return scored

    def _importance(self, ours_T: Tensor, rollout_T: Tensor) -> Tensor | None:
        cap = self._algorithm.importance_cap
        return None if cap is None else (ours_T - rollout_T).exp().clamp(max=cap)

    @torch.no_grad()
    def _log_probs(self, score: Scorer, groups: Sequence[RolloutGroup]) -> Iterator[Tensor]:
        for run in self._microbatches(groups):
            for log_prob_T, _ in score([group.tokens for group in groups[run]]):
                yield log_prob_T

    def _microbatches(self, groups: Sequence[RolloutGroup]) -> Iterator[slice]:
        return microbatches([group.tokens.num_tokens for group in groups], self._trainer.microbatch_tokens)

    def _update(self, scored: Sequence[_Scored], metrics: Metrics, progress: Progress) -> None:
        """One optimizer step; the loss is normalised over all of `scored`, however it is split.

        A group whose rewards are all equal has advantage 0: without a KL penalty its loss and gradient are
        exactly zero, so it counts in the normalisation and is not computed.
        """
        lengths = [length for item in scored for length in item.group.lengths]
        weights = iter(sequence_weights(lengths, self._algorithm.length_normalization, self._max_answer_tokens))
        weighted = [(item, [next(weights) for _ in item.group.lengths]) for item in scored]
        teaching = [(item, weight) for item, weight in weighted if self._teaches(item)]
        progress(len(weighted) - len(teaching))
        loss = 0.0
        for run in self._microbatches([item.group for item, _ in teaching]):
            loss += self._accumulate(teaching[run], metrics)
            progress(run.stop - run.start)
        metrics.record("policy/loss", Mean(loss))
        metrics.record("policy/teaching_groups", Mean(len(teaching), len(scored)))
        metrics.record("train/tokens", Sum(sum(sum(item.group.lengths) for item, _ in teaching)))
        self._step(metrics)

    def _teaches(self, item: _Scored) -> bool:
        return self._score_reference is not None or any(item.group.advantages)

    def _accumulate(self, weighted: Sequence[tuple[_Scored, list[float]]], metrics: Metrics) -> float:
        """Forward and backward of one microbatch; its share of the loss."""
        algorithm = self._algorithm
        losses = []
        scores = self._score([item.group.tokens for item, _ in weighted])
        for (item, weights), (log_prob_T, entropy_T) in zip(weighted, scores, strict=True):
            terms = policy_terms(
                log_prob_T,
                item.old_log_prob_T,
                item.group.per_token(item.group.advantages),
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
                importance_T=item.importance_T,
                reference_log_prob_T=item.reference_log_prob_T,
                kl_coefficient=algorithm.kl_coefficient,
            )
            losses.append((item.group.per_token(weights) * terms.loss_T).sum())
            rollout_ratio_T = (log_prob_T.detach() - item.group.rollout_log_prob_T()).exp()
            _record(metrics, "policy/entropy", entropy_T)
            _record(metrics, "policy/clip_fraction", terms.clipped_T)
            _record(metrics, "policy/kl_reference", terms.kl_T)
            _record(metrics, "policy/ratio", terms.ratio_T)
            _record(metrics, "rollout/ratio", rollout_ratio_T)
            metrics.record("rollout/ratio_max", Max(rollout_ratio_T.max().item()))
        loss = torch.stack(losses).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def _step(self, metrics: Metrics) -> None:
        self._finish_waking()
        config = self._optimizer_config
        factor = learning_rate_factor(
            config.schedule,
            self.num_updates,
            total_steps=self._total_updates,
            warmup_steps=config.warmup_steps,
            final_factor=config.final_factor,
        )
        set_learning_rate(self.optimizer, factor * config.learning_rate)
        limit = float("inf") if config.max_grad_norm is None else config.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_updates += 1
        metrics.record("optimizer/grad_norm", Mean(norm.item()))
        metrics.record("optimizer/learning_rate", Last(factor * config.learning_rate))


def _record(metrics: Metrics, key: str, value_T: Tensor) -> None:
    metrics.record(key, Mean(value_T.sum().item(), value_T.numel()))


def _deal(scored: Sequence[_Scored], num_shares: int) -> Iterator[Sequence[_Scored]]:
    """Neighbouring groups in `num_shares` equal shares."""
    size = len(scored) // num_shares
    return (scored[start : start + size] for start in range(0, size * num_shares, size))


def _first_names(model: torch.nn.Module) -> frozenset[str]:
    """The names in the model's state of parameters and buffers, the first one of each that is tied."""
    seen: dict[int, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        seen.setdefault(id(tensor), name)
    return frozenset(seen.values())

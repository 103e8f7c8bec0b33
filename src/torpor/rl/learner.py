"""A model that learns when its turn comes and sleeps in between: what actor and critic have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from torch import Tensor

from torpor.report.metrics import Last, Mean, Metrics
from torpor.rl import checkpoint
from torpor.rl.backends.base import Backend, Score
from torpor.rl.batch import RolloutGroup, in_runs
from torpor.rl.config import OptimizerConfig, TrainerConfig
from torpor.rl.schedules import learning_rate_factor

if TYPE_CHECKING:
    from torpor.ledger import Ledger

Progress = Callable[[int], None]
"""Called with the number of groups that are done."""
Item = TypeVar("Item")
_STATE = "state.json"


class Learner:
    """A backend with its sleeper, its schedule and its counters.

    A subclass says under which `metrics_path` its optimizer's figures go.

    Args:
        backend: the model and its optimizer.
        optimizer: schedule and clipping.
        trainer: how a step is cut up.
        total_updates: optimizer steps of the whole run, for the schedule.
        on_ledger: called with the ledger of every sleep and wake.
        offload: False: `sleep` does nothing.
        lazy_wake: the optimizer's state comes back behind the forward and backward passes.
        sleeper_options: see `Sleeper`: `store`, `store_dir`, `verify`, `report_leftovers` and others.
    """

    metrics_path = "optimizer"
    resting: frozenset[str] = frozenset()
    """Components that learning does not need: they sleep on when the rest wakes."""

    def __init__(
        self,
        backend: Backend,
        *,
        optimizer: OptimizerConfig,
        trainer: TrainerConfig,
        total_updates: int,
        on_ledger: Callable[[Ledger], None] = lambda _: None,
        offload: bool = True,
        lazy_wake: bool = True,
        **sleeper_options: Any,
    ) -> None:
        self.backend = backend
        self._optimizer_config, self._total_updates, self._trainer = optimizer, total_updates, trainer
        self._on_ledger, self._offload, self._lazy_wake = on_ledger, offload, lazy_wake
        self._is_awake = True
        self.sleeper = backend.open_sleeper(**sleeper_options)
        self.weight_version = 0
        """Counts the batches learned from."""
        self.num_updates = 0
        """Optimizer steps so far."""

    # --- memory ----------------------------------------------------------------------------------------

    @property
    def is_asleep(self) -> bool:
        """Whether learning would have to wake it."""
        return not self._is_awake

    def sleep(self) -> None:
        """Free the model's memory. Idempotent; nothing with `offload=False`."""
        if self._offload:
            self._finish_waking()
            self._on_ledger(self.sleeper.sleep())
            self._is_awake = False

    def wake_up(self) -> None:
        """Bring back what learns; with `lazy_wake` the optimizer's state follows behind the first pass. Idempotent."""
        if not self._is_awake:
            needed = set(self.sleeper.components()) - self.resting if self.resting else None
            self._on_ledger(self.sleeper.wake(needed, lazy=self._lazy_wake))
            self._is_awake = True

    def _finish_waking(self) -> None:
        """What a lazy wake left for later is here when this returns."""
        ledger = self.sleeper.finish()
        if ledger is not None:
            self._on_ledger(ledger)

    def close(self) -> None:
        """Wake, and give the store back. Idempotent."""
        self.sleeper.close()

    def release(self) -> None:
        """`close`, and give the memory up for good: for a learner that nobody needs any more."""
        self.close()
        self.backend.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- state -----------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write model, optimizer, random state and counters into `directory`, asleep or awake. Wakes nothing."""
        self.backend.save(self.sleeper, directory)
        if self.backend.world.rank == 0:
            counters = {"weight_version": self.weight_version, "num_updates": self.num_updates}
            checkpoint.write_json(directory / _STATE, counters)

    def load(self, directory: Path) -> None:
        """Take everything that `save` wrote, to the bit.

        Raises:
            UsageError: the checkpoint is of another model.
        """
        self.wake_up()
        self._finish_waking()
        self.sleeper.wake(self.resting)
        self.backend.load(directory)
        state = checkpoint.read_json(directory / _STATE)
        self.weight_version, self.num_updates = state["weight_version"], state["num_updates"]

    # --- learning --------------------------------------------------------------------------------------

    def _scores(self, groups: Sequence[RolloutGroup], snapshot: str | None = None) -> Iterator[Score]:
        """What the weights, or frozen ones, say of each group, without gradients."""
        runs = in_runs([group.tokens for group in groups], self._trainer.microbatch_tokens)
        return self.backend.score(runs, snapshot=snapshot)

    def _accumulate(
        self,
        items: Sequence[Item],
        groups: Sequence[RolloutGroup],
        loss_of: Callable[[Sequence[Item], list[Score]], Tensor],
        progress: Progress,
    ) -> float:
        """Gradients of one optimizer step, microbatch by microbatch; the loss of all ranks.

        Args:
            items: what `loss_of` needs to know of each of `groups`.
            loss_of: from a microbatch's items and scores to its share of the loss, a scalar.
        """
        runs = in_runs([group.tokens for group in groups], self._trainer.microbatch_tokens)
        rest = iter(items)
        parts = [[next(rest) for _ in run] for run in runs]

        def loss_of_run(index: int, scores: list[Score]) -> Tensor:
            progress(len(parts[index]))
            return loss_of(parts[index], scores)

        return self.backend.world.sum([self.backend.accumulate(runs, loss_of_run)])[0]

    def _step(self, metrics: Metrics) -> None:
        """One optimizer step with the learning rate that its number has."""
        self._finish_waking()
        config = self._optimizer_config
        factor = learning_rate_factor(
            config.schedule,
            self.num_updates,
            total_steps=self._total_updates,
            warmup_steps=config.warmup_steps,
            final_factor=config.final_factor,
        )
        norm = self.backend.step(factor * config.learning_rate, config.max_grad_norm)
        self.num_updates += 1
        metrics.record(f"{self.metrics_path}/grad_norm", Mean(norm))
        metrics.record(f"{self.metrics_path}/learning_rate", Last(factor * config.learning_rate))

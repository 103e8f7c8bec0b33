"""What a training framework does for an actor or a critic: score, accumulate, step, hand weights over, save.

A backend owns the model and its optimizer in one framework and knows nothing of rewards, losses or versions;
who learns what is the business of `Actor` and `Critic`. Its model may live in several processes, each with a
backend of its own: every rank then makes the same calls in the same order.

Letter: `T` answer tokens of one group, one answer after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torpor.rl.packing import Group
from torpor.sleeper import Sleeper

Score = tuple[Tensor, ...]
"""Of one group: `(log_prob_T, entropy_T)` in nats, or `(value_T,)` of a critic; fp32 on the backend's device."""
LossOf = Callable[[int, list[Score]], Tensor]
"""From the index of a microbatch and the scores of its groups to its share of the loss, a scalar."""


class World:
    """The ranks that learn from different data; this one is alone.

    Sums and maxima over ranks make a loss that is the same however the data is dealt out.
    """

    rank = 0
    size = 1

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value added up over the ranks."""
        return list(values)

    def gather(self, value: Any) -> list[Any]:
        """What every rank gave, in rank order, on every rank."""
        return [value]


class Backend(ABC):
    """A model with its optimizer, in one framework."""

    world: World
    device: torch.device
    snapshots: frozenset[str]
    """Names of the frozen weights that `score` knows."""

    @abstractmethod
    def open_sleeper(self, **options: Any) -> Sleeper:
        """A sleeper over everything this backend holds.

        Args:
            options: of `Sleeper`, but for what the backend itself fills in (model, optimizer, extra).
        """

    def release(self) -> None:  # noqa: B027 - not every backend can
        """Give up the memory of model and optimizer for good. Where a backend cannot, it goes with the backend."""

    @abstractmethod
    def score(self, runs: Sequence[Sequence[Group]], *, snapshot: str | None = None) -> Iterator[Score]:
        """Scores of all groups of all microbatches, in order, without gradients.

        Args:
            runs: microbatches; ranks may have different numbers of them.
            snapshot: the name of frozen weights to score with; None: the weights that learn.

        Raises:
            UsageError: no snapshot of that name.
        """

    @abstractmethod
    def accumulate(self, runs: Sequence[Sequence[Group]], loss_of: LossOf) -> float:
        """Forward and backward of all microbatches of one optimizer step; gradients add up.

        Returns:
            The sum of the microbatches' losses on this rank.
        """

    @abstractmethod
    def step(self, learning_rate: float, max_grad_norm: float | None) -> float:
        """Clip, step, clear the gradients; the global gradient norm before clipping.

        Raises:
            RuntimeError: the norm is not finite. Nothing was stepped.
        """

    @abstractmethod
    def weights(self, sleeper: Sleeper) -> Iterator[tuple[str, Tensor]]:
        """The weights under the names of the transformers checkpoint, whole, one after the other, asleep or awake."""

    @abstractmethod
    def save(self, sleeper: Sleeper, directory: Path) -> None:
        """Write model, optimizer and random state into `directory`, asleep or awake. Wakes nothing."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Take everything that `save` wrote, to the bit. All is awake.

        Raises:
            UsageError: the checkpoint is of another model.
        """

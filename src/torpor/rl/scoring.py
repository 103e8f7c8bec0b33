"""What a model thinks of answers: log-probability and entropy of each of their tokens, or the value before each.

Letters: `T` answer tokens of one group, `N` answer tokens of all groups of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from torpor.rl.losses import token_statistics
from torpor.rl.packing import Group, pack, predicting_hidden

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from torpor.rl.models import ValueModel


class Scoring(Protocol):
    """One forward pass over prompts, each with all its answers: for each group, tensors of shape `[T]`."""

    def __call__(self, groups: Sequence[Group]) -> Sequence[tuple[Tensor, ...]]: ...


class Scorer:
    """One forward pass over prompts, each with all its answers; differentiable unless under `no_grad`."""

    def __init__(self, model: PreTrainedModel, temperature: float, logit_chunk_tokens: int) -> None:
        self._model = model
        self._temperature = temperature
        self._logit_chunk_tokens = logit_chunk_tokens

    def __call__(self, groups: Sequence[Group]) -> list[tuple[Tensor, Tensor]]:
        """For each group `(log_prob_T, entropy_T)`, answer after answer, in nats.

        Raises:
            UsageError: no group, or an empty prompt or completion.
            UnsupportedError: the model's attention takes no mask of its own.
        """
        packed = pack(groups, self._model.device)
        head: Any = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
        log_prob_N, entropy_N = token_statistics(
            predicting_hidden(self._model, packed),
            head.weight,
            packed.target_N,
            temperature=self._temperature,
            chunk_tokens=self._logit_chunk_tokens,
        )
        return list(zip(_by_group(log_prob_N, groups), _by_group(entropy_N, groups), strict=True))


class ValueScorer:
    """The same pass for a critic: what it expects before each answer token."""

    def __init__(self, model: ValueModel) -> None:
        self._model = model

    def __call__(self, groups: Sequence[Group]) -> list[tuple[Tensor]]:
        """For each group `(value_T,)`, answer after answer, fp32.

        Raises:
            UsageError, UnsupportedError: see `Scorer`.
        """
        packed = pack(groups, self._model.device)
        value_N = self._model.values_of(predicting_hidden(self._model.backbone, packed))
        return [(value_T,) for value_T in _by_group(value_N, groups)]


def _by_group(values_N: Tensor, groups: Sequence[Group]) -> tuple[Tensor, ...]:
    return torch.split(values_N, [sum(map(len, group.completions)) for group in groups])

"""Answers laid out for attention that knows one mask, the causal one: each in a row of its own behind its prompt.

    p0 p1 p2 a0 a1 ..          completion a = a0 a1 a2; its last token predicts nothing and is left out
    p0 p1 p2 b0 .. ..          what follows on the right is padding: no token of an answer sees it

Letters: `B` rows (answers), `T` tokens of a row, `N` scored tokens of all answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torpor.errors import UsageError
from torpor.rl.packing import Group


@dataclass(frozen=True, slots=True)
class Rows:
    """Answers as the model sees them, and where the predictions of their tokens are."""

    token_ids_BT: Tensor
    position_ids_BT: Tensor
    predictor_N: Tensor
    """Where in the flattened `[T * B]` the hidden state lies that predicts each scored token."""
    target_N: Tensor
    lengths: tuple[int, ...]
    """Scored tokens of each group; they sum to N."""


def lay_out(groups: Sequence[Group], device: torch.device, multiple: int = 1) -> Rows:
    """Every answer of `groups` as a row, in order.

    Args:
        multiple: of which `B * T` has to be one, as low-precision matrix products want.

    Raises:
        UsageError: no group, or one without an answer, a prompt or a token.
    """
    answers = [(group.prompt_ids, answer) for group in groups for answer in group.completions]
    if not answers or not all(prompt and answer for prompt, answer in answers):
        raise UsageError("there is no group, or one has an empty prompt or completion")
    longest = max(len(prompt) + len(answer) - 1 for prompt, answer in answers)
    step = multiple // math.gcd(multiple, len(answers))
    length = -(-longest // step) * step
    rows = [[*prompt, *answer[:-1]] for prompt, answer in answers]
    return Rows(
        token_ids_BT=torch.tensor([row + [0] * (length - len(row)) for row in rows], device=device),
        position_ids_BT=torch.arange(length, device=device).expand(len(rows), -1),
        predictor_N=torch.tensor(
            [
                (len(prompt) - 1 + place) * len(rows) + index
                for index, (prompt, answer) in enumerate(answers)
                for place in range(len(answer))
            ],
            device=device,
        ),
        target_N=torch.tensor([token for _, answer in answers for token in answer], device=device),
        lengths=tuple(sum(map(len, group.completions)) for group in groups),
    )

"""One row for a prompt and all its completions, so that the prompt is computed once for its group.

    tokens      p0 p1 p2 | a0 a1 | b0 b1 b2          completions a = a0 a1 a2 and b = b0 b1 b2 b3
    positions    0  1  2 |  3  4 |  3  4  5
    predict            a0  a1 a2   b1 b2 b3          p2 predicts a0 and b0

Each completion sees its prompt and itself. Its last token predicts nothing and is left out, so a row has
`len(prompt) + sum(len(completion) - 1)` tokens. Rows of several groups are padded on the right to one length.

Letters: G groups (rows), T tokens of a row, N scored tokens (all tokens of all completions), D hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torpor.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROMPT, _PADDING = 0, -1
_MASKED_ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its completions, token ids. Example: `Group((5, 6), ((9, 2), (8, 8, 2)))`."""

    prompt_ids: Sequence[int]
    completions: Sequence[Sequence[int]]

    @property
    def num_tokens(self) -> int:
        """Tokens of its row, padding not counted."""
        return len(self.prompt_ids) + sum(len(completion) - 1 for completion in self.completions)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Groups as the model sees them, and where the predictions of their completions are."""

    token_ids_GT: Tensor
    position_ids_GT: Tensor
    mask_G1TT: Tensor
    """bool: may the query (third) see the key (fourth)? No row is all False."""
    predictor_N: Tensor
    """Where in the flattened `[G * T]` the hidden state lies that predicts each scored token."""
    target_N: Tensor
    """The scored tokens: all completions, group after group, in order."""
    lengths: tuple[int, ...]
    """Tokens of each completion; they sum to N."""

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model, padding included."""
        return self.token_ids_GT.numel()

    def split(self, values_N: Tensor) -> tuple[Tensor, ...]:
        """Values of scored tokens, cut into one tensor for each completion."""
        return torch.split(values_N, list(self.lengths))


def pack(groups: Sequence[Group], device: torch.device | None = None) -> PackedBatch:
    """Lay groups out as one batch.

    Raises:
        UsageError: no group, or an empty prompt or completion.
    """
    _check(groups)
    length = max(group.num_tokens for group in groups)
    rows = [_row(group, length, index * length) for index, group in enumerate(groups)]
    segment_GT = torch.tensor([row.segments for row in rows], device=device)
    return PackedBatch(
        token_ids_GT=torch.tensor([row.tokens for row in rows], device=device),
        position_ids_GT=torch.tensor([row.positions for row in rows], device=device),
        mask_G1TT=_mask(segment_GT),
        predictor_N=torch.tensor([place for row in rows for place in row.predictors], device=device),
        target_N=torch.tensor(
            [token for group in groups for completion in group.completions for token in completion],
            device=device,
        ),
        lengths=tuple(len(completion) for group in groups for completion in group.completions),
    )


def predicting_hidden(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """Last hidden states `[N, D]`, one for each scored token; times the output head they are its logits.

    Raises:
        UnsupportedError: the model's attention takes no mask of its own.
    """
    mask_G1TT = additive_mask(model, batch.mask_G1TT)
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    output = decoder(
        input_ids=batch.token_ids_GT,
        attention_mask=mask_G1TT,
        position_ids=batch.position_ids_GT,
        use_cache=False,
    )
    hidden_GTD: Tensor = output.last_hidden_state
    return hidden_GTD.flatten(0, 1)[batch.predictor_N]


def additive_mask(model: PreTrainedModel, mask: Tensor) -> Tensor:
    """A bool mask as 0 and -inf in the model's dtype. Eager attention would add a bool one as 0 and 1.

    Raises:
        UnsupportedError: the model's attention takes no mask of its own.
    """
    implementation = model.config._attn_implementation
    if implementation not in _MASKED_ATTENTION:
        raise UnsupportedError(
            f"attention {implementation!r} takes no mask of its own; "
            f"load the model with attn_implementation one of {', '.join(_MASKED_ATTENTION)}"
        )
    return torch.zeros(mask.shape, dtype=model.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


@dataclass(frozen=True, slots=True)
class _Row:
    tokens: list[int]
    positions: list[int]
    segments: list[int]
    """0 for the prompt, 1 and up for the completions, -1 for padding."""
    predictors: list[int]


def _row(group: Group, length: int, offset: int) -> _Row:
    """One group padded to `length`; `offset` is where its row starts in the flattened batch."""
    prompt_length = len(group.prompt_ids)
    tokens = list(group.prompt_ids)
    positions = list(range(prompt_length))
    segments = [_PROMPT] * prompt_length
    predictors: list[int] = []
    for number, completion in enumerate(group.completions, start=1):
        fed = completion[:-1]
        begin = offset + len(tokens)
        predictors += [offset + prompt_length - 1, *range(begin, begin + len(fed))]
        tokens += fed
        positions += range(prompt_length, prompt_length + len(fed))
        segments += [number] * len(fed)
    padding = length - len(tokens)
    return _Row(
        tokens + [0] * padding, positions + [0] * padding, segments + [_PADDING] * padding, predictors
    )


def _mask(segment_GT: Tensor) -> Tensor:
    """bool `[G, 1, T, T]`: causal, and the key is in the query's own segment or in the prompt."""
    num_tokens = segment_GT.shape[1]
    is_causal_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=segment_GT.device).tril()
    key_G1T, query_GT1 = segment_GT[:, None, :], segment_GT[:, :, None]
    sees_GTT = (key_G1T == query_GT1) | (key_G1T == _PROMPT)
    return (sees_GTT & is_causal_TT)[:, None]


def _check(groups: Sequence[Group]) -> None:
    if not groups:
        raise UsageError("there is no group to pack")
    for index, group in enumerate(groups):
        if not group.prompt_ids or not group.completions or not all(group.completions):
            raise UsageError(
                f"group {index} has an empty prompt, no completion, or an empty completion", group_index=index
            )

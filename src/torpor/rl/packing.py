"""A prompt and all its completions in one row, so that the prompt is computed once for its group.

    tokens      p0 p1 p2 | a0 a1 | b0 b1 b2          completions a = a0 a1 a2 and b = b0 b1 b2 b3
    positions    0  1  2 |  3  4 |  3  4  5
    predict            a0  a1 a2   b1 b2 b3          p2 predicts a0 and b0

Each completion sees its prompt and itself. Its last token predicts nothing and is left out, so a row has
`len(prompt) + sum(len(completion) - 1)` tokens. Rows of several groups are padded on the right to one length.

Where most of every prompt is the same (worked examples, a system prompt), all groups share one row, which
begins with what their prompts have in common:

    tokens      s0 s1 | p2 p3 | a0 | b0 b1 | q2 q3 q4 | c0 ...

Letters: G groups, B rows, T tokens of a row, N scored tokens (all tokens of all completions), D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torpor.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHARED, _PADDING = 0, -1
_MASKED_ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its completions, token ids. Example: `Group((5, 6), ((9, 2), (8, 8, 2)))`."""

    prompt_ids: Sequence[int]
    completions: Sequence[Sequence[int]]

    @property
    def num_tokens(self) -> int:
        """Tokens of a row of its own."""
        return len(self.prompt_ids) + sum(len(completion) - 1 for completion in self.completions)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Groups as the model sees them, and where the predictions of their completions are."""

    token_ids_BT: Tensor
    position_ids_BT: Tensor
    mask_B1TT: Tensor
    """bool: may the query (third) see the key (fourth)? No row is all False."""
    predictor_N: Tensor
    """Where in the flattened `[B * T]` the hidden state lies that predicts each scored token."""
    target_N: Tensor
    """The scored tokens: all completions, group after group, in order."""
    lengths: tuple[int, ...]
    """Tokens of each completion; they sum to N."""

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model, padding included."""
        return self.token_ids_BT.numel()

    def split(self, values_N: Tensor) -> tuple[Tensor, ...]:
        """Values of scored tokens, cut into one tensor for each completion."""
        return torch.split(values_N, list(self.lengths))


def pack(groups: Sequence[Group], device: torch.device | None = None) -> PackedBatch:
    """Lay groups out as one batch.

    Raises:
        UsageError: no group, or an empty prompt or completion.
    """
    _check(groups)
    rows = _lay_out(groups)
    length = max(len(row.tokens) for row in rows)

    def padded(lists: Iterable[list[int]], filler: int) -> Tensor:
        return torch.tensor([values + [filler] * (length - len(values)) for values in lists], device=device)

    predictors = [index * length + place for index, row in enumerate(rows) for place in row.predictors]
    completions = [completion for group in groups for completion in group.completions]
    return PackedBatch(
        token_ids_BT=padded((row.tokens for row in rows), 0),
        position_ids_BT=padded((row.positions for row in rows), 0),
        mask_B1TT=_mask(
            padded((row.segments for row in rows), _PADDING), padded((row.parents for row in rows), _PADDING)
        ),
        predictor_N=torch.tensor(predictors, device=device),
        target_N=torch.tensor([token for completion in completions for token in completion], device=device),
        lengths=tuple(map(len, completions)),
    )


def predicting_hidden(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """Last hidden states `[N, D]`, one for each scored token; times the output head they are its logits.

    Raises:
        UnsupportedError: the model's attention takes no mask of its own.
    """
    mask_B1TT = additive_mask(model, batch.mask_B1TT)
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    output = decoder(
        input_ids=batch.token_ids_BT,
        attention_mask=mask_B1TT,
        position_ids=batch.position_ids_BT,
        use_cache=False,
    )
    hidden_BTD: Tensor = output.last_hidden_state
    return hidden_BTD.flatten(0, 1)[batch.predictor_N]


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


@dataclass(slots=True)
class _Row:
    """A row while it grows. A token sees the shared segment, its parent segment and its own, up to itself."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    predictors: list[int] = field(default_factory=list)
    num_segments: int = _SHARED + 1

    def add_group(self, group: Group, num_shared: int) -> None:
        """Append a group whose first `num_shared` prompt tokens are the row's shared segment."""
        prompt_length = len(group.prompt_ids)
        prompt = self._next_segment()
        begin = self.add(group.prompt_ids[num_shared:], num_shared, prompt, _SHARED)
        last_of_prompt = begin - 1 + prompt_length - num_shared if prompt_length > num_shared else num_shared - 1
        for completion in group.completions:
            fed = completion[:-1]
            begin = self.add(fed, prompt_length, self._next_segment(), prompt)
            self.predictors += [last_of_prompt, *range(begin, begin + len(fed))]

    def add(self, tokens: Sequence[int], position: int, segment: int, parent: int) -> int:
        """Append tokens from `position` on; return the place of the first."""
        begin = len(self.tokens)
        self.tokens += tokens
        self.positions += range(position, position + len(tokens))
        self.segments += [segment] * len(tokens)
        self.parents += [parent] * len(tokens)
        return begin

    def _next_segment(self) -> int:
        self.num_segments += 1
        return self.num_segments - 1


def _lay_out(groups: Sequence[Group]) -> list[_Row]:
    """One row a group; one row for all if what their prompts share is at least half of the longest row.

    Attention in a row costs the square of its length, so a short common start is not worth a long row.
    """
    num_shared = common_prefix_length([group.prompt_ids for group in groups])
    if len(groups) > 1 and 2 * num_shared >= max(group.num_tokens for group in groups):
        row = _Row()
        row.add(groups[0].prompt_ids[:num_shared], 0, _SHARED, _SHARED)
        for group in groups:
            row.add_group(group, num_shared)
        return [row]
    rows = [_Row() for _ in groups]
    for row, group in zip(rows, groups, strict=True):
        row.add_group(group, 0)
    return rows


def common_prefix_length(sequences: Sequence[Sequence[int]]) -> int:
    """How many tokens all of `sequences` begin with together."""
    # The first and last in sorted order differ at least as early as any two others.
    first, last = min(map(list, sequences)), max(map(list, sequences))
    return next(
        (place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )


def _mask(segment_BT: Tensor, parent_BT: Tensor) -> Tensor:
    """bool `[B, 1, T, T]`: causal, and the key is in the query's own segment, in its parent, or shared."""
    num_tokens = segment_BT.shape[1]
    is_causal_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=segment_BT.device).tril()
    key_B1T = segment_BT[:, None, :]
    sees_BTT = (key_B1T == segment_BT[:, :, None]) | (key_B1T == parent_BT[:, :, None]) | (key_B1T == _SHARED)
    return (sees_BTT & is_causal_TT)[:, None]


def _check(groups: Sequence[Group]) -> None:
    if not groups:
        raise UsageError("there is no group to pack")
    for index, group in enumerate(groups):
        if not group.prompt_ids or not group.completions or not all(group.completions):
            raise UsageError(
                f"group {index} has an empty prompt, no completion, or an empty completion", group_index=index
            )

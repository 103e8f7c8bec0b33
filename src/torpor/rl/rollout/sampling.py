"""From logits to tokens and their log-probabilities."""

from __future__ import annotations

import torch

from torpor.rl.rollout.base import SamplingParams

_CHUNK_BYTES = 16 * 1024**2
"""Most fp32 bytes of logits looked at in one go. A chunk and its few temporaries stay near the processor."""


def uniforms(sampling: SamplingParams, num_sequences: int) -> torch.Tensor:
    """One number in [0, 1) for each token that may be sampled, fp32 `[max_new_tokens, num_sequences]`.

    A sequence's numbers do not depend on which other sequences run beside it, or on when those end.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    return torch.rand(sampling.max_new_tokens, num_sequences, generator=generator)


def sample(logits: torch.Tensor, noise: torch.Tensor, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row; see `Rollout.logprobs` for what the log-probabilities mean.

    Args:
        logits: `[B, V]` in the model's dtype.
        noise: `[B]` fp32 in [0, 1); not used by greedy decoding.

    Returns:
        tokens int64 `[B]`, log-probabilities fp32 `[B]`.
    """
    num_rows, vocab_size = logits.shape
    rows_per_chunk = max(1, _CHUNK_BYTES // (4 * vocab_size))
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    for start in range(0, num_rows, rows_per_chunk):
        rows = slice(start, start + rows_per_chunk)
        tokens[rows], logprobs[rows] = _sample_chunk(logits[rows].float(), noise[rows], sampling)
    return tokens, logprobs


def _sample_chunk(
    scores: torch.Tensor, noise: torch.Tensor, sampling: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    if sampling.temperature == 0:
        logprobs = scores.log_softmax(-1)
        tokens = scores.argmax(-1)
    else:
        scores = _truncate(scores / sampling.temperature, sampling.top_k, sampling.top_p)
        logprobs = scores.log_softmax(-1)
        tokens = _invert_cdf(logprobs.exp(), noise)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def _truncate(scores: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """`scores` with -inf where top-k and top-p leave nothing, top-k first."""
    if 0 < top_k < scores.shape[-1]:
        kept = scores.topk(top_k, dim=-1)
        scores = torch.full_like(scores, -torch.inf).scatter_(-1, kept.indices, kept.values)
    if top_p < 1:
        ranked = scores.sort(dim=-1, descending=True, stable=True)
        probabilities = ranked.values.softmax(-1)
        # A token goes if those before it already reach top_p; so the most probable one always stays.
        is_cut = probabilities.cumsum(-1) - probabilities >= top_p
        values = ranked.values.masked_fill(is_cut, -torch.inf)
        scores = torch.empty_like(scores).scatter_(-1, ranked.indices, values)
    return scores


def _invert_cdf(probabilities: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the noise, int64 `[B]`.

    One random number a row where the exponential race of `torch.multinomial` needs one for each token of
    the vocabulary, which at 49,152 tokens takes longer than the rest of sampling.
    """
    cumulative = probabilities.cumsum(-1)
    # Of the total, which rounding leaves near 1, so that a token with probability above 0 is always found.
    threshold = noise[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]

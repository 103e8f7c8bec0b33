"""Log-probabilities, entropy, the policy loss and the value loss.

Shapes: `T` scored tokens, `C` tokens of one chunk, `D` hidden width, `V` vocabulary, `S` sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torpor.rl.config import LengthNormalization


def token_statistics(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 256,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token, and the entropy of the distribution it was drawn from.

    The logits are computed `chunk_tokens` tokens at a time in the precision of the model, and once more in
    the backward pass, so the largest full-vocabulary tensor is `[chunk_tokens, V]`.

    Args:
        hidden_TD: last hidden states at the positions that predict the targets.
        weight_VD: weight of the output head; it may be the tied embedding.
        target_T: token ids, int64.
        temperature: the logits are divided by it, as the sampler does.
        chunk_tokens: tokens a chunk; one fp32 chunk takes `4 * chunk_tokens * V` bytes.

    Returns:
        `(log_prob_T, entropy_T)` in nats, fp32 (fp64 for an fp64 model). Only the first is differentiable.
    """
    log_prob_T, entropy_T = _TokenStatistics.apply(  # type: ignore[no-untyped-call]
        hidden_TD, weight_VD, target_T, temperature, chunk_tokens
    )
    return log_prob_T, entropy_T


class _TokenStatistics(torch.autograd.Function):
    """`d log p(y) / d logits = (onehot(y) - softmax(logits)) / temperature`, one chunk of tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        target_T: Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        log_prob_T, entropy_T, log_sum_T = (
            torch.empty(target_T.shape, dtype=dtype, device=hidden_TD.device) for _ in range(3)
        )
        for chunk in _chunks(len(target_T), chunk_tokens):
            logits_CV = _scaled_logits(hidden_TD[chunk], weight_VD, temperature)
            log_sum_T[chunk] = logits_CV.logsumexp(-1)
            log_prob_CV = logits_CV.sub_(log_sum_T[chunk, None])
            log_prob_T[chunk] = log_prob_CV.gather(-1, target_T[chunk, None]).squeeze(-1)
            entropy_T[chunk] = log_prob_CV.exp().mul_(log_prob_CV).sum(-1).neg_()
        ctx.save_for_backward(hidden_TD, weight_VD, target_T, log_sum_T)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.mark_non_differentiable(entropy_T)
        return log_prob_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_TD, weight_VD, target_T, log_sum_T = ctx.saved_tensors
        scale_T = grads[0] / ctx.temperature
        grad_hidden_TD = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=log_sum_T.dtype) if ctx.needs_input_grad[1] else None
        for chunk in _chunks(len(target_T), ctx.chunk_tokens):
            logits_CV = _scaled_logits(hidden_TD[chunk], weight_VD, ctx.temperature)
            grad_CV = logits_CV.sub_(log_sum_T[chunk, None]).exp_().mul_(-scale_T[chunk, None])
            grad_CV.scatter_add_(-1, target_T[chunk, None], scale_T[chunk, None])
            grad_CV = grad_CV.to(hidden_TD.dtype)
            if grad_hidden_TD is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_TD[chunk])
            if grad_weight_VD is not None:
                grad_weight_VD += grad_CV.T @ hidden_TD[chunk]
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_TD, grad_weight_VD, None, None, None


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens)]


def _scaled_logits(hidden_CD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    logits_CV = hidden_CD @ weight_VD.T
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)).div_(temperature)


def sequence_weights(
    length_S: Sequence[int],
    normalization: LengthNormalization,
    max_tokens: int,
    *,
    num_sequences: int | None = None,
    num_tokens: int | None = None,
) -> list[float]:
    """The weight of each token of each sequence, so that a batch's loss is the sum of `weight * token loss`.

    `token`: every token counts the same (the DAPO paper, arXiv:2503.14476). `sequence`: every sequence counts
    the same, as in GRPO (arXiv:2402.03300). `constant`: divided by `max_tokens`, so that a long answer is
    neither favoured nor punished (Dr. GRPO, arXiv:2503.20783). Taken over the whole batch of one optimizer step,
    these weights make gradient accumulation exact for any split into microbatches.

    Args:
        num_sequences, num_tokens: of the whole batch, where other ranks hold parts of it; None: of `length_S`.
    """
    num_sequences = len(length_S) if num_sequences is None else num_sequences
    num_tokens = sum(length_S) if num_tokens is None else num_tokens
    match normalization:
        case "token":
            return [1.0 / num_tokens for _ in length_S]
        case "sequence":
            return [1.0 / (num_sequences * length) for length in length_S]
        case "constant":
            return [1.0 / (num_sequences * max_tokens) for _ in length_S]


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """The policy loss, token by token. Only `loss_T` carries a gradient."""

    loss_T: Tensor
    ratio_T: Tensor
    """`pi / pi_old`."""
    clipped_T: Tensor
    """1.0 where the clip range cut the gradient off, else 0.0."""
    kl_T: Tensor
    """k3 estimate of KL(pi || reference); zero without a reference."""


def policy_terms(
    log_prob_T: Tensor,
    old_log_prob_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance_T: Tensor | None = None,
    reference_log_prob_T: Tensor | None = None,
    kl_coefficient: float = 0.0,
) -> PolicyTerms:
    """The clipped surrogate of PPO (arXiv:1707.06347) with GRPO's KL penalty (arXiv:2402.03300).

    `loss = -importance * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) + kl_coefficient * k3`,
    with `ratio = exp(log_prob - old_log_prob)` and `k3 = exp(d) - d - 1` for `d = reference - log_prob`
    (J. Schulman, "Approximating KL divergence", 2020).

    Args:
        importance_T: weight for a rollout that another implementation of the policy sampled; None is 1.
    """
    ratio_T = (log_prob_T - old_log_prob_T).exp()
    free_T = ratio_T * advantage_T
    bound_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage_T
    loss_T = -torch.minimum(free_T, bound_T)
    if importance_T is not None:
        loss_T = importance_T * loss_T
    kl_T = torch.zeros_like(ratio_T)
    if reference_log_prob_T is not None:
        difference_T = reference_log_prob_T - log_prob_T
        kl_T = difference_T.exp() - difference_T - 1.0
        loss_T = loss_T + kl_coefficient * kl_T
    clipped_T = (bound_T < free_T).to(ratio_T.dtype)
    return PolicyTerms(loss_T, ratio_T.detach(), clipped_T, kl_T.detach())


@dataclass(frozen=True, slots=True)
class ValueTerms:
    """The value loss, token by token. Only `loss_T` carries a gradient."""

    loss_T: Tensor
    clipped_T: Tensor
    """1.0 where the clip cut the gradient off, else 0.0."""


def value_terms(value_T: Tensor, old_value_T: Tensor, return_T: Tensor, *, clip: float | None) -> ValueTerms:
    """Half the squared error, or that of the value held within `clip` of the old one, whichever is larger.

    As in the code that came with PPO (arXiv:1707.06347): `0.5 * max((v - R)**2, (clamp(v, old - c, old + c) - R)**2)`.

    Args:
        old_value_T: the values before the update.
        return_T: what the values should have been.
        clip: None: the plain squared error.
    """
    free_T = (value_T - return_T).square()
    if clip is None:
        return ValueTerms(0.5 * free_T, torch.zeros_like(free_T))
    held_T = torch.minimum(torch.maximum(value_T, old_value_T - clip), old_value_T + clip)
    bound_T = (held_T - return_T).square()
    return ValueTerms(0.5 * torch.maximum(free_T, bound_T), (bound_T > free_T).to(free_T.dtype))

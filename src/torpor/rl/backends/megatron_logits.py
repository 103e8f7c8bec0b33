"""Log-probabilities and entropy where tensor parallelism shares the output head: each rank has some of the rows.

Letters: `T` scored tokens, `C` tokens of one chunk, `D` hidden width, `v` rows of the head on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torpor.rl.losses import token_statistics


def shared_token_statistics(
    hidden_TD: Tensor,
    weight_vD: Tensor,
    target_T: Tensor,
    group: dist.ProcessGroup,
    *,
    temperature: float,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """`token_statistics` of a head whose rows are cut over the ranks of `group`, the same on each.

    No rank sees the logits of another: what is exchanged are three numbers a token, and in the backward pass the
    gradient of the hidden states. Arguments and results as there.
    """
    if group.size() == 1:
        return token_statistics(hidden_TD, weight_vD, target_T, temperature=temperature, chunk_tokens=chunk_tokens)
    log_prob_T, entropy_T = _Shared.apply(  # type: ignore[no-untyped-call]
        hidden_TD, weight_vD, target_T, group, temperature, chunk_tokens
    )
    return log_prob_T, entropy_T


class _Shared(torch.autograd.Function):
    """`d log p(y) / d logits = (onehot(y) - softmax(logits)) / temperature`, on each rank for its rows."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_vD: Tensor,
        target_T: Tensor,
        group: dist.ProcessGroup,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        own_T, is_own_T = _own_targets(target_T, len(weight_vD), group)
        log_sums, log_probs, entropies = [], [], []
        for chunk in _chunks(len(target_T), chunk_tokens):
            logits_Cv = _scaled_logits(hidden_TD[chunk], weight_vD, temperature)
            highest_C = logits_Cv.amax(-1)
            dist.all_reduce(highest_C, dist.ReduceOp.MAX, group=group)
            shifted_Cv = logits_Cv.sub_(highest_C[:, None])
            target_C = shifted_Cv.gather(-1, own_T[chunk, None]).squeeze(-1) * is_own_T[chunk]
            weight_Cv = shifted_Cv.exp()
            sums_3C = torch.stack([weight_Cv.sum(-1), weight_Cv.mul_(shifted_Cv).sum(-1), target_C])
            dist.all_reduce(sums_3C, group=group)
            log_sum_C = sums_3C[0].log()
            log_sums.append(highest_C + log_sum_C)
            log_probs.append(sums_3C[2] - log_sum_C)
            entropies.append(log_sum_C - sums_3C[1] / sums_3C[0])
        ctx.save_for_backward(hidden_TD, weight_vD, own_T, is_own_T, torch.cat(log_sums))
        ctx.group, ctx.temperature, ctx.chunk_tokens = group, temperature, chunk_tokens
        log_prob_T, entropy_T = torch.cat(log_probs), torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_T)
        return log_prob_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_vD, own_T, is_own_T, log_sum_T = ctx.saved_tensors
        scale_T = grads[0] / ctx.temperature
        grad_hidden_TD = torch.empty_like(hidden_TD, dtype=log_sum_T.dtype)
        grad_weight_vD = torch.zeros_like(weight_vD, dtype=log_sum_T.dtype)
        for chunk in _chunks(len(own_T), ctx.chunk_tokens):
            logits_Cv = _scaled_logits(hidden_TD[chunk], weight_vD, ctx.temperature)
            grad_Cv = logits_Cv.sub_(log_sum_T[chunk, None]).exp_().mul_(-scale_T[chunk, None])
            grad_Cv.scatter_add_(-1, own_T[chunk, None], (scale_T * is_own_T)[chunk, None])
            grad_Cv = grad_Cv.to(hidden_TD.dtype)
            grad_hidden_TD[chunk] = grad_Cv @ weight_vD
            grad_weight_vD += grad_Cv.T @ hidden_TD[chunk]
        dist.all_reduce(grad_hidden_TD, group=ctx.group)
        return grad_hidden_TD.to(hidden_TD.dtype), grad_weight_vD.to(weight_vD.dtype), None, None, None, None


def _own_targets(target_T: Tensor, num_rows: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Rows of the targets on this rank (0 for those of other ranks), and which are its own."""
    row_T = target_T - group.rank() * num_rows
    is_own_T = (row_T >= 0) & (row_T < num_rows)
    return row_T * is_own_T, is_own_T


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens)]


def _scaled_logits(hidden_CD: Tensor, weight_vD: Tensor, temperature: float) -> Tensor:
    logits_Cv = hidden_CD @ weight_vD.T
    return logits_Cv.to(torch.promote_types(logits_Cv.dtype, torch.float32)).div_(temperature)

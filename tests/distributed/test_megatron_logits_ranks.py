"""An output head cut over two ranks gives what the whole head gives on one, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from torpor.rl.backends.megatron_logits import shared_token_statistics
from torpor.rl.losses import token_statistics

NUM_TOKENS, WIDTH, VOCABULARY = 37, 24, 50
OPTIONS = {"temperature": 0.7, "chunk_tokens": 8}


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(NUM_TOKENS, WIDTH, generator=generator)
    weight_VD = torch.randn(VOCABULARY, WIDTH, generator=generator)
    target_T = torch.randint(VOCABULARY, (NUM_TOKENS,), generator=generator)
    loss_weight_T = torch.randn(NUM_TOKENS, generator=generator)
    return hidden_TD.to(dtype), weight_VD.to(dtype), target_T, loss_weight_T


def on_a_rank(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    hidden_TD, weight_VD, target_T, loss_weight_T = inputs(dtype)
    weight_vD = weight_VD.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    hidden_TD.requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    log_prob_T, entropy_T = shared_token_statistics(hidden_TD, weight_vD, target_T, group, **OPTIONS)
    (log_prob_T * loss_weight_T.to(log_prob_T.dtype)).sum().backward()
    assert hidden_TD.grad is not None
    assert weight_vD.grad is not None
    return log_prob_T.detach(), entropy_T, hidden_TD.grad, weight_vD.grad


def whole(dtype: torch.dtype) -> list[torch.Tensor]:
    hidden_TD, weight_VD, target_T, loss_weight_T = inputs(dtype)
    hidden_TD.requires_grad_(), weight_VD.requires_grad_()
    log_prob_T, entropy_T = token_statistics(hidden_TD, weight_VD, target_T, **OPTIONS)
    (log_prob_T * loss_weight_T.to(log_prob_T.dtype)).sum().backward()
    return [log_prob_T.detach(), entropy_T, hidden_TD.grad, weight_VD.grad]


def joined(ranks: list[Any]) -> list[torch.Tensor]:
    for mine, other in zip(*(rank[:3] for rank in ranks), strict=True):
        assert torch.equal(mine, other)
    return [*ranks[0][:3], torch.cat([rank[3] for rank in ranks])]


def test_doubles_agree() -> None:
    for found, expected in zip(joined(run_ranks(on_a_rank, torch.float64)), whole(torch.float64), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_errs_no_more_than_the_whole_head(dtype: torch.dtype) -> None:
    truth, plain = whole(torch.float64), whole(dtype)
    for found, one, exact in zip(joined(run_ranks(on_a_rank, dtype)), plain, truth, strict=True):
        error, allowed = (found - exact).abs().max(), (one - exact).abs().max()
        assert error <= 2 * allowed + 1e-6, (error, allowed)

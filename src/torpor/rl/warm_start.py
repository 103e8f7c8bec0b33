"""Supervised steps on a task's demonstrations, before the first rollout.

They have an optimizer of their own, which is gone afterwards: the actor starts with an empty one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from torpor.rl.batch import microbatches
from torpor.rl.config import TrainerConfig, WarmStartConfig
from torpor.rl.optimizers import set_learning_rate
from torpor.rl.packing import Group
from torpor.rl.schedules import learning_rate_factor
from torpor.rl.scoring import Scorer
from torpor.rl.tasks.base import Task, Tokenizer, encode_prompt, encode_solution

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def warm_start(
    model: PreTrainedModel,
    task: Task,
    tokenizer: Tokenizer,
    config: WarmStartConfig,
    trainer: TrainerConfig,
    on_step: Callable[[float], None] = lambda _: None,
) -> list[float]:
    """Train `model` in place to continue each question with its solution.

    Questions are those of the training split from number 0 on.

    Returns:
        The mean loss of each step, nats a token; `on_step` is called with each.

    Raises:
        UsageError: a question has no solution.
    """
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, fused=True)
    score = Scorer(model.train(), 1.0, trainer.logit_chunk_tokens)
    losses = []
    for step in range(config.steps):
        first = step * config.batch_size
        groups = [demonstration(task, tokenizer, first + i) for i in range(config.batch_size)]
        num_tokens = sum(len(group.completions[0]) for group in groups)
        loss = 0.0
        for run in microbatches([group.num_tokens for group in groups], trainer.microbatch_tokens):
            share = -torch.cat([log_prob_T for log_prob_T, _ in score(groups[run])]).sum() / num_tokens
            share.backward()  # type: ignore[no-untyped-call]
            loss += share.item()
        factor = learning_rate_factor("cosine", step, total_steps=config.steps, warmup_steps=config.steps // 20)
        set_learning_rate(optimizer, factor * config.learning_rate)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss)
        on_step(loss)
    return losses


def demonstration(task: Task, tokenizer: Tokenizer, index: int) -> Group:
    """Training question `index` with its solution, as token ids.

    Raises:
        UsageError: the question has no solution.
    """
    question = task.sample(index)
    return Group(encode_prompt(tokenizer, question.prompt), [encode_solution(tokenizer, task, question)])

"""From rewards to advantages.

Shapes: `G` groups (prompts), `K` samples a group.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

EPSILON = 1e-6
"""Added to the standard deviation."""


def group_advantages(reward_GK: Tensor, *, normalize_std: bool) -> Tensor:
    """Reward minus the mean of its group, divided by the group's standard deviation if asked.

    With division: GRPO (arXiv:2402.03300), population standard deviation. Without: Dr. GRPO
    (arXiv:2503.20783), which does not weigh a question by how evenly its samples split. A group whose rewards
    are all equal gets exactly 0.

    Returns:
        Advantages, shape `[G, K]`, in the dtype of the rewards.
    """
    is_flat_G1 = reward_GK.amax(dim=1, keepdim=True) == reward_GK.amin(dim=1, keepdim=True)
    # The mean of equal numbers may differ from them by a rounding, which the division would blow up.
    centred_GK = (reward_GK - reward_GK.mean(dim=1, keepdim=True)).masked_fill(is_flat_G1, 0.0)
    if not normalize_std:
        return centred_GK
    return centred_GK / (reward_GK.std(dim=1, keepdim=True, correction=0) + EPSILON)


def generalized_advantages(
    rewards: Sequence[float], values: Sequence[float], *, discount: float, gae_lambda: float
) -> list[float]:
    """Generalised advantage estimates of one answer (arXiv:1506.02438, equation 16).

    `delta_t = rewards[t] + discount * values[t + 1] - values[t]`, and the advantage of token t is the sum of
    `(discount * gae_lambda) ** l * delta_(t + l)`. Nothing comes after the last token, whether the answer ended
    there or was cut: its next value is 0.

    Args:
        rewards: one a token.
        values: what was expected before each token.
    """
    advantages = [0.0] * len(rewards)
    next_value = next_advantage = 0.0
    for token in reversed(range(len(rewards))):
        delta = rewards[token] + discount * next_value - values[token]
        advantages[token] = delta + discount * gae_lambda * next_advantage
        next_value, next_advantage = values[token], advantages[token]
    return advantages

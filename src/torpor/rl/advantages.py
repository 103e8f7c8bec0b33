"""From rewards to advantages.

Shapes: `G` groups (prompts), `K` samples a group.
"""

from __future__ import annotations

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

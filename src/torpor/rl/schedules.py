"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from torpor.rl.config import ScheduleName


def learning_rate_factor(
    name: ScheduleName, step: int, *, total_steps: int, warmup_steps: int = 0, final_factor: float = 0.0
) -> float:
    """What the peak learning rate is multiplied by at optimizer step `step`, counted from 0.

    A linear warm-up reaches 1 at `warmup_steps`; the decay reaches `final_factor` at the last step.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    decay_steps = total_steps - 1 - warmup_steps
    progress = min(1.0, (step - warmup_steps) / decay_steps) if decay_steps > 0 else 0.0
    match name:
        case "constant":
            return 1.0
        case "linear":
            return final_factor + (1.0 - final_factor) * (1.0 - progress)
        case "cosine":
            return final_factor + (1.0 - final_factor) * 0.5 * (1.0 + math.cos(math.pi * progress))

"""One file for each library whose state Torpor knows."""

from __future__ import annotations

from torpor.rules.base import Rule
from torpor.rules.derived import DerivedRule
from torpor.rules.peft import PeftRule
from torpor.rules.tensors import TensorsRule
from torpor.rules.torch_nn import TorchNNRule
from torpor.rules.torch_optim import TorchOptimRule


def default_rules(*, dead_grads_after_step: bool) -> list[Rule]:
    """The rules every sleeper starts with. Their order decides nothing: claims are merged by role."""
    return [
        PeftRule(),
        TorchNNRule(),
        TorchOptimRule(dead_grads_after_step=dead_grads_after_step),
        TensorsRule(),
        DerivedRule(),
    ]

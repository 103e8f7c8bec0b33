"""The rules a sleeper asks when the user names none."""

from __future__ import annotations

from torpor.rules.base import Rule
from torpor.rules.derived import DerivedRule
from torpor.rules.peft import PeftRule
from torpor.rules.tensors import TensorsRule
from torpor.rules.torch_nn import TorchNNRule
from torpor.rules.torch_optim import TorchOptimRule


def standard_rules(*, dead_grads_after_step: bool = True) -> list[Rule]:
    """New instances of every rule, the most specific first.

    Args:
        dead_grads_after_step: as for `TorchOptimRule`.
    """
    return [
        DerivedRule(),
        PeftRule(),
        TorchNNRule(),
        TensorsRule(),
        TorchOptimRule(dead_grads_after_step=dead_grads_after_step),
    ]

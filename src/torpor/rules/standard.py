"""The rules a sleeper asks when the user names none."""

from __future__ import annotations

from collections.abc import Callable

from torpor.rules.base import Rule
from torpor.rules.derived import DerivedRule
from torpor.rules.fsdp import FSDPRule
from torpor.rules.megatron import MegatronRule
from torpor.rules.peft import PeftRule
from torpor.rules.steps import StepWatch
from torpor.rules.tensors import TensorsRule
from torpor.rules.torch_nn import TorchNNRule
from torpor.rules.torch_optim import TorchOptimRule
from torpor.rules.transformer_engine import TransformerEngineRule


def standard_rules(
    *,
    dead_grads_after_step: bool = True,
    clear_quantized_weight_workspaces: bool = True,
    requantize_under_cuda_graphs: bool = True,
    rematerialize_param_from_master_weight: bool = False,
    groups_sleep: bool = False,
    graphs_may_live: Callable[[], bool] = lambda: False,
) -> list[Rule]:
    """New instances of every rule, the most specific first.

    Args:
        dead_grads_after_step: as for `TorchOptimRule` and `MegatronRule`.
        clear_quantized_weight_workspaces, requantize_under_cuda_graphs: as for `TransformerEngineRule`.
        rematerialize_param_from_master_weight, groups_sleep: as for `MegatronRule`.
        graphs_may_live: as for both.
    """
    steps = StepWatch()
    return [
        DerivedRule(),
        PeftRule(),
        MegatronRule(
            dead_grads_after_step=dead_grads_after_step,
            rematerialize_params=rematerialize_param_from_master_weight,
            groups_sleep=groups_sleep,
            graphs_may_live=graphs_may_live,
            steps=steps,
        ),
        TransformerEngineRule(
            clear_workspaces=clear_quantized_weight_workspaces,
            requantize_under_graphs=requantize_under_cuda_graphs,
            graphs_may_live=graphs_may_live,
            steps=steps,
        ),
        FSDPRule(),
        TorchNNRule(),
        TensorsRule(),
        TorchOptimRule(dead_grads_after_step=dead_grads_after_step),
    ]

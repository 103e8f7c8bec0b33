"""Whether a CUDA graph may replay the address of a cache, as the libraries say that capture such graphs; and claims on
scratch memory of the whole process, which decide by that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torpor.kinds import Fate, Role
from torpor.rules.base import Claim, Standing
from torpor.rules.loaded import loaded

_GLOBAL_STATE = (
    ("transformer_engine.pytorch.quantization", "FP8GlobalStateManager"),
    ("transformer_engine.pytorch.fp8", "FP8GlobalStateManager"),
)
_MEGATRON_GRAPHS = ("megatron.core.transformer.cuda_graphs", "_CudagraphGlobalRecord")

GRAPHS = "a CUDA graph was captured: a replay reads the old address"
"""The reason in a ledger."""


def are_graphs_captured(graphs_may_live: Callable[[], bool]) -> bool:
    """Whether there is a graph by what TransformerEngine and Megatron-Core say, or by `graphs_may_live`."""
    return _te_captured() or _megatron_captured() or graphs_may_live()


def scratch_claim(
    name: str, tensor: torch.Tensor, drop: Callable[[], None], why_dropped: str, obstacle: str = ""
) -> Claim:
    """Scratch that `drop`, one object for all of an owner's, makes the owner forget: dropped, or kept where there is an
    obstacle."""
    fate, reason, used = (Fate.KEPT, obstacle, None) if obstacle else (Fate.DROPPED, why_dropped, drop)
    return Claim(name, tensor, Role.WORKSPACE, "caches", fate, reason, used, standing=Standing.DECLARED)


def te_global_state() -> Any:
    """TransformerEngine's state of the process; None without it. In older versions it is on the manager itself."""
    for place in _GLOBAL_STATE:
        manager = loaded(*place)
        if manager is not None:
            return vars(manager).get("quantization_state", manager)
    return None


def _te_captured() -> bool:
    """Whether the flag exists by which a captured graph skips the quantization of its weights."""
    state = te_global_state()
    return state is not None and state.skip_fp8_weight_update_tensor is not None


def _megatron_captured() -> bool:
    record = loaded(*_MEGATRON_GRAPHS)
    return record is not None and bool(record.cudagraph_created)

"""What Megatron-Core's data parallelism holds: the flat buffers behind parameters and gradients.

A gradient buffer is dead, and `zeroed`, from the end of a step to the beginning of the next. A parameter
buffer can be `rebuilt` from the fp32 masters, whose rounded values the step itself wrote there. The library is
never imported here: whoever hands over one of its models has imported it. Read in 0.19.2.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from torpor.kinds import Fate, Role
from torpor.rules.base import Actor, Claim, Rebuild, Standing
from torpor.rules.captures import GRAPHS, are_graphs_captured, scratch_claim
from torpor.rules.loaded import loaded
from torpor.rules.megatron_optim import (
    Piece,
    master_claims,
    offloaded_claims,
    pieces,
    scaling_claims,
)
from torpor.rules.megatron_rebuild import Uncovered, buffer_rebuild, parameter_rebuild
from torpor.rules.steps import StepWatch
from torpor.rules.walk import is_plain

_DDP = ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel")
_FULL_GRAPH = ("megatron.core.full_cuda_graph", "FullCudaGraphWrapper")
_NEEDED = frozenset({"params", "param_data", "grad_data", "param_index_map", "buckets", "data_parallel_group"})
"""What a buffer has in the versions that are known here."""
_SCRATCH = ("megatron.core.parallel_state", "_GLOBAL_MEMORY_BUFFER")
_ADAPTER = re.compile(r"(^|[._])(lora|adapter)")
"""How the adapters of Megatron-Bridge and of its relatives are named."""

_DEAD = "dead: every optimizer has stepped and nothing was accumulated since"
_STILL_ZERO = "all zeros: nothing was accumulated yet"
_ACCUMULATING = "in the middle of an accumulation"
_NO_STEP = "no step was seen"
_ASKED_TO_KEEP = "dead_grads_after_step is off"
_REPLAYED = "a CUDA graph of the whole iteration accumulates here unseen"
_REGISTERED = "registered with NCCL by its address"
_SHARED = "gathered parameters may wait in it: the parameter gather overlaps the next forward"
_MADE_AGAIN = "scratch: made again by whoever needs it next"
_REBUILT = "the rounded value of the fp32 masters"

_Pieces: TypeAlias = Mapping[int, Sequence[Piece]]
"""By `UntypedStorage._cdata` of the memory they lie in."""


class MegatronRule:
    """Claims the buffers of Megatron-Core's data parallelism, its optimizers' masters, and adapters."""

    name = "megatron"

    def __init__(
        self,
        *,
        dead_grads_after_step: bool = True,
        rematerialize_params: bool = False,
        groups_sleep: bool = False,
        graphs_may_live: Callable[[], bool] = lambda: False,
        steps: StepWatch | None = None,
    ) -> None:
        """
        Args:
            dead_grads_after_step: whether gradient buffers may be given up after a step.
            rematerialize_params: whether low-precision parameters are rebuilt from their masters.
            groups_sleep: whether process groups sleep too, so that no gather can be made at a wake.
            graphs_may_live: whether torch may hold a captured graph.
            steps: a watch to share; one of its own if None.
        """
        self._dead_grads_after_step = dead_grads_after_step
        self._rematerialize_params = rematerialize_params
        self._groups_sleep = groups_sleep
        self._graphs_may_live = graphs_may_live
        self._steps = steps or StepWatch()
        self._zero_when_attached = False

    def attach(self, actor: Actor) -> Callable[[], None]:
        """Watch the steps of the actor, if its models are wrapped in Megatron's data parallelism."""
        buffers = [buffer for _, ddp in ddp_modules(actor) for _, buffer in _buffers(ddp)]
        if not buffers:
            return lambda: None
        self._zero_when_attached = not any(bool(_bits(grads).any()) for b in buffers for _, grads in _gradients(b))
        return self._steps.attach(actor)

    def claims(self, actor: Actor) -> Iterator[Claim]:
        found = _by_storage(actor) if self._rematerialize_params else {}
        in_buffers: set[int] = set()
        for path, ddp in ddp_modules(actor):
            names = {id(parameter): name for name, parameter in ddp.named_parameters()}
            for name, buffer in _buffers(ddp):
                in_buffers.update(id(p) for p in buffer.params if buffer.param_data is not None)
                yield from self._parameters(f"{path}.{name}", buffer, names, found)
                yield from self._gradient_buffers(f"{path}.{name}", buffer)
            yield from self._loose_parameters(ddp, path, in_buffers, found)
        names = _parameter_names(actor) if actor.wrappers else {}
        for name, optimizer in actor.wrappers.items():
            yield from master_claims(name, optimizer, names)
            yield from scaling_claims(name, optimizer)
            yield from offloaded_claims(name, optimizer)
        if actor.wrappers or next(ddp_modules(actor), None) is not None:
            yield from self._scratch()

    def _scratch(self) -> Iterator[Claim]:
        """What gathered activations and attention scores are put in, one buffer a name for the whole process."""
        scratch = loaded(*_SCRATCH)
        held = vars(scratch).get("buffer") if scratch is not None else None
        if not isinstance(held, dict) or not held:
            return
        obstacle, drop = GRAPHS if are_graphs_captured(self._graphs_may_live) else "", held.clear
        for (name, dtype), tensor in held.items():
            yield scratch_claim(f"megatron.{name}.{dtype}", tensor, drop, _MADE_AGAIN, obstacle)

    def _parameters(self, name: str, buffer: Any, names: Mapping[int, str], found: _Pieces) -> Iterator[Claim]:
        """The flat buffer that the parameters are views of, unless gradients share it."""
        flat = buffer.param_data
        if flat is None or vars(buffer).get("shared_buffer") is not None:
            return
        adapters = all(_is_adapter(names.get(id(parameter), "")) for parameter in buffer.params)
        role, component = (Role.ADAPTER, "adapters") if adapters else (Role.PARAM, "params")
        claim = Claim(f"{name}.param_data", flat, role, component, standing=Standing.OWNED)
        if _is_registered(buffer):
            claim.fate, claim.reason = Fate.KEPT, _REGISTERED
        elif self._rematerialize_params and not adapters:
            here = found.get(flat.untyped_storage()._cdata, ())
            _set_rebuild(claim, buffer_rebuild(buffer, here, names, groups_sleep=self._groups_sleep))
        yield claim

    def _gradient_buffers(self, name: str, buffer: Any) -> Iterator[Claim]:
        fate, reason = self._judge_gradients(buffer)
        for part, tensor in _gradients(buffer):
            yield Claim(f"{name}.{part}", tensor, Role.GRAD, "grads", fate, reason, standing=Standing.OWNED)

    def _judge_gradients(self, buffer: Any) -> tuple[Fate, str]:
        if _is_registered(buffer):
            return Fate.KEPT, _REGISTERED
        why_alive = self._why_gradients_live(buffer)
        if why_alive:
            return Fate.MOVED, why_alive
        return Fate.ZEROED, _DEAD if self._steps.after_a_step else _STILL_ZERO

    def _why_gradients_live(self, buffer: Any) -> str:
        if not self._dead_grads_after_step:
            return _ASKED_TO_KEEP
        if _whole_iteration_is_captured():
            return _REPLAYED
        if self._steps.in_a_step:
            return _ACCUMULATING
        if vars(buffer).get("shared_buffer") is not None and buffer.ddp_config.overlap_param_gather:
            return _SHARED
        return "" if self._steps.after_a_step or self._zero_when_attached else _NO_STEP

    def _loose_parameters(self, ddp: nn.Module, path: str, in_buffers: set[int], found: _Pieces) -> Iterator[Claim]:
        """Parameters with memory of their own: frozen ones, and all without the distributed optimizer."""
        for name, parameter in ddp.named_parameters():
            if id(parameter) in in_buffers or not is_plain(parameter):
                continue
            if _is_adapter(name):
                yield Claim(f"{path}.{name}", parameter.detach(), Role.ADAPTER, "adapters")
            elif self._rematerialize_params:
                claim = Claim(f"{path}.{name}", parameter.detach(), Role.PARAM, "params", standing=Standing.OWNED)
                own = found.get(parameter.untyped_storage()._cdata, ())
                _set_rebuild(claim, parameter_rebuild(parameter, own))
                yield claim


def _is_adapter(name: str) -> bool:
    """Whether a parameter of this name, within its model, belongs to an adapter."""
    return _ADAPTER.search(name) is not None


def _set_rebuild(claim: Claim, rebuild: Rebuild | Uncovered) -> None:
    if isinstance(rebuild, Uncovered):
        claim.reason = rebuild.reason
    else:
        claim.fate, claim.reason, claim.rebuild = Fate.REBUILT, _REBUILT, rebuild


def _by_storage(actor: Actor) -> _Pieces:
    found: dict[int, list[Piece]] = {}
    for optimizer in actor.wrappers.values():
        for piece in pieces(optimizer):
            found.setdefault(piece.part.untyped_storage()._cdata, []).append(piece)
    return found


def _parameter_names(actor: Actor) -> dict[int, str]:
    return {
        id(parameter): name
        for model_name, model in actor.models.items()
        for name, parameter in model.named_parameters(prefix=model_name)
    }


def ddp_modules(actor: Actor) -> Iterator[tuple[str, Any]]:
    """Every `DistributedDataParallel` of Megatron-Core in the actor's models, by name."""
    kind = loaded(*_DDP)
    if kind is None:
        return
    for name, model in actor.models.items():
        for path, module in model.named_modules(prefix=name):
            if isinstance(module, kind):
                yield path, module


def _buffers(ddp: Any) -> Iterator[tuple[str, Any]]:
    """Its flat buffers, by name; none of a version whose buffers are not what is known here."""
    for key in ("buffers", "expert_parallel_buffers"):
        for index, buffer in enumerate(vars(ddp).get(key) or ()):
            if vars(buffer).keys() >= _NEEDED:
                yield f"{key}[{index}]", buffer
            else:
                _warn_of_unknown_version(sorted(_NEEDED - vars(buffer).keys()))


def _is_registered(buffer: Any) -> bool:
    return bool(vars(buffer).get("nccl_ub"))


def _warn_of_unknown_version(missing: list[str]) -> None:
    version = getattr(sys.modules.get("megatron.core"), "__version__", "unknown")
    warnings.warn(
        f"the buffers of Megatron-Core {version} have no {', '.join(missing)}: their memory is moved as that of any "
        "module is, gradients too, and nothing is rebuilt",
        stacklevel=2,
    )


def _gradients(buffer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole gradient memory, and fp32 gradients of single parameters beside it."""
    if buffer.grad_data is not None:
        yield "grad_data", buffer.grad_data
    for index, tensor in enumerate(vars(buffer).get("extra_main_grads") or ()):
        yield f"extra_main_grads[{index}]", tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: of floats -0.0 would pass for zero."""
    return tensor.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def _whole_iteration_is_captured() -> bool:
    wrapper = loaded(*_FULL_GRAPH)
    return wrapper is not None and wrapper.cuda_graph["training"] is not None

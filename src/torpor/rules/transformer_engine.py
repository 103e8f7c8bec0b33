"""What TransformerEngine holds: quantized copies of weights, primary quantized weights, scaling state.

A copy of a weight (`module._fp8_workspaces`) is a pure function of the weight and its quantizer, made anew by the
next forward of a first microbatch: it is `dropped` through the module that owns it. Where a captured CUDA graph
replays its address it is `rebuilt` in its place instead, if quantizing again changes no state, or moved.
Primary quantized weights are state and are moved. So are the `scale` and `amax_history` of delayed scaling until
their module has run: from then on every step of any model in the process writes to them, and they are `kept`.

The library is never imported here: a model that uses it has imported it.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from torpor.kinds import Fate, Role
from torpor.rules.base import Actor, Claim, Gate, Rebuild, Standing
from torpor.rules.captures import GRAPHS, are_graphs_captured, scratch_claim, te_global_state
from torpor.rules.loaded import loaded
from torpor.rules.steps import StepWatch
from torpor.rules.walk import leaves

_MODULE = ("transformer_engine.pytorch.module.base", "TransformerEngineBaseModule")
_TENSOR = ("transformer_engine.pytorch.quantized_tensor", "QuantizedTensor")
_STAND_INS = ("transformer_engine.pytorch.module.base", "_dummy_wgrads")
_PRODUCTS = "transformer_engine.pytorch.cpp_extensions.gemm"
_SCRATCH = ("get_cublas_workspace", "_get_grouped_cublas_workspace")
"""Functions of `_PRODUCTS` that make scratch memory for matrix products once, and remember it."""
_WORKSPACES = "_fp8_workspaces"

_RERUNNABLE = frozenset({"Float8CurrentScalingQuantizer", "Float8BlockQuantizer", "MXFP8Quantizer"})
"""Quantizers that give the same bits twice, for TransformerEngine before `is_requantization_safe()` (2.19)."""
_STATELESS_UNLESS_STOCHASTIC = "NVFP4Quantizer"

_DROPPED = "quantized again by the next forward of a first microbatch"
_IN_PLACE = "quantized again at wake, in its place: a CUDA graph reads this address"
_OPTION_OFF = "clear_quantized_weight_workspaces is off"
_NOT_RERUNNABLE = "quantizing again would change the scaling state, and a CUDA graph reads this address"
_NO_SOURCE = "its weight is not a parameter of the module under the same name, and a CUDA graph reads this address"
_NOT_ITS_DATA = "its padding is not written by the quantizer, and a CUDA graph reads this address"
_MID_STEP = "in the middle of a step: quantizing again would write its largest value to the amax history anew"
_NEVER_READ = "nobody reads what it holds"
_UPDATED_BY_ALL = "TransformerEngine updates it in the steps of all models of the process"
_MADE_AGAIN = "scratch: made again by the next matrix product"
_INVALID = "an invalid transpose: it is written anew before it is read"
_DATA = frozenset({"_data", "_transpose", "_rowwise_data", "_columnwise_data"})
"""Inner tensors that the quantizer writes to the last byte; scales are padded."""


class TransformerEngineRule:
    """Claims workspaces, scaling state and quantized parameters of the actor's TransformerEngine modules."""

    name = "transformer_engine"

    def __init__(
        self,
        *,
        clear_workspaces: bool = True,
        requantize_under_graphs: bool = True,
        graphs_may_live: Callable[[], bool] = lambda: False,
        steps: StepWatch | None = None,
    ) -> None:
        """
        Args:
            clear_workspaces: whether quantized copies of weights may be dropped or quantized again at all.
            requantize_under_graphs: whether they are quantized again in their place where a CUDA graph was
                captured; otherwise they are moved there.
            graphs_may_live: whether torch may hold a captured graph.
            steps: a watch to share; one of its own if None.
        """
        self._clear_workspaces = clear_workspaces
        self._requantize_under_graphs = requantize_under_graphs
        self._graphs_may_live = graphs_may_live
        self._steps = steps or StepWatch()
        self._option = Gate(lambda: clear_workspaces, _OPTION_OFF)
        self._between_steps = Gate(lambda: not self._steps.in_a_step, _MID_STEP)

    def attach(self, actor: Actor) -> Callable[[], None]:
        """Watch the steps of the actor, if it has modules of TransformerEngine."""
        if next(_te_modules(actor), None) is None:
            return lambda: None
        return self._steps.attach(actor)

    def claims(self, actor: Actor) -> Iterator[Claim]:
        modules = list(_te_modules(actor))
        if not modules:
            return
        graphs = are_graphs_captured(self._graphs_may_live)
        for path, module in modules:
            yield from self._workspaces(path, module, self._clear_workspaces and graphs)
            yield from _scaling_state(path, module)
        yield from _quantized_parameters(actor)
        yield from _global_buffers()
        yield from _stand_ins_of_gradients(graphs)
        yield from _scratch_of_products(GRAPHS if graphs else "" if self._clear_workspaces else _OPTION_OFF)

    def _workspaces(self, path: str, module: nn.Module, graphs: bool) -> Iterator[Claim]:
        held = vars(module).get(_WORKSPACES)
        if not isinstance(held, dict):
            _warn_of_unknown_version(module)
            return
        for key, workspace in held.items():
            name = f"{path}.{_WORKSPACES}.{key}"
            if graphs:
                yield from self._kept_in_place(name, workspace, module._parameters.get(key))
                continue
            gates = self._gates(workspace)
            for attribute, tensor in inner_tensors(workspace):
                yield Claim(
                    f"{name}.{attribute}",
                    tensor,
                    Role.QUANTIZED_CACHE,
                    "caches",
                    Fate.DROPPED,
                    _DROPPED,
                    drop=held.clear,
                    gates=gates,
                    standing=Standing.DECLARED,
                )

    def _gates(self, workspace: Any) -> tuple[Gate, ...]:
        return (self._option,) if can_quantize_again(workspace) else (self._option, self._between_steps)

    def _kept_in_place(self, name: str, workspace: Any, weight: torch.Tensor | None) -> Iterator[Claim]:
        """Claims under CUDA graphs: same tensors, same addresses, with new contents at wake or a copy of the old."""
        rebuilds = self._rebuilds(workspace, weight)
        for attribute, tensor in inner_tensors(workspace):
            claim = Claim(f"{name}.{attribute}", tensor, Role.QUANTIZED_CACHE, "caches", standing=Standing.DECLARED)
            if isinstance(rebuilds, str):
                claim.reason = rebuilds
            elif attribute not in rebuilds:
                claim.reason = _NOT_ITS_DATA
            else:
                claim.fate, claim.reason, claim.rebuild = Fate.REBUILT, _IN_PLACE, rebuilds[attribute]
            yield claim

    def _rebuilds(self, workspace: Any, weight: torch.Tensor | None) -> dict[str, Rebuild] | str:
        """How to quantize again, by inner tensor; or why not."""
        if not self._requantize_under_graphs:
            return GRAPHS
        if not can_quantize_again(workspace):
            return _NOT_RERUNNABLE
        if weight is None:
            return _NO_SOURCE
        again = _Quantization(workspace)
        refresh = None if self._steps.in_a_step else partial(again.refresh, workspace)
        present = [attribute for attribute, _ in inner_tensors(workspace) if attribute in _DATA]
        return {name: Rebuild(partial(again.write, name), (weight,), refresh=refresh) for name in present}


def inner_tensors(quantized: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with memory behind a quantized tensor, by attribute; `quantized` itself if it is a plain one."""
    if not _is_quantized(quantized):
        if isinstance(quantized, torch.Tensor):
            yield "tensor", quantized
        return
    parts = {id(part) for part in quantized.get_metadata().values()}
    for attribute, value in vars(quantized).items():
        if id(value) not in parts:
            continue
        if _is_quantized(value):
            for inner, tensor in inner_tensors(value):
                yield f"{attribute}.{inner}", tensor
        elif isinstance(value, torch.Tensor):
            yield attribute, value


def _is_quantized(value: object) -> bool:
    """Whether `value` is one of the library's quantized tensors or their bare storages."""
    return hasattr(type(value), "get_metadata")


def can_quantize_again(quantized: Any) -> bool:
    """Whether quantizing the same weight again gives the same bits and changes no state."""
    quantizer = vars(quantized).get("_quantizer")
    if quantizer is None:
        return False
    if hasattr(type(quantizer), "is_requantization_safe"):
        return bool(quantizer.is_requantization_safe())
    kind = type(quantizer).__name__
    return kind in _RERUNNABLE or (kind == _STATELESS_UNLESS_STOCHASTIC and not quantizer.stochastic_rounding)


class _Quantization:
    """Quantizes a weight as one workspace has it now: same quantizer, same directions. Does not hold the workspace."""

    def __init__(self, workspace: Any) -> None:
        self._device, self._dtype = workspace.device, workspace.dtype
        self._quantizer = workspace._quantizer
        self._present = {name for name, _ in inner_tensors(workspace)}

    def write(self, attribute: str, out: torch.Tensor, weight: torch.Tensor) -> None:
        """One inner tensor; the others are computed with it and let go."""
        with torch.no_grad():
            out.copy_(dict(inner_tensors(self._quantize(weight)))[attribute])

    def refresh(self, workspace: Any, weight: torch.Tensor) -> None:
        """All inner tensors in place, behind autograd's back as the library itself does it.

        After a step a copy is out of date, and the next forward of a first microbatch would write it anew.
        """
        fresh = dict(inner_tensors(self._quantize(weight)))
        for attribute, tensor in inner_tensors(workspace):
            tensor.data.copy_(fresh[attribute])

    def _quantize(self, weight: torch.Tensor) -> Any:
        quantizer = self._quantizer.copy()
        quantizer.internal = False
        quantizer.set_usage(
            rowwise=bool(self._present & {"_data", "_rowwise_data"}),
            columnwise=bool(self._present & {"_transpose", "_columnwise_data"}),
        )
        with torch.no_grad():
            return quantizer.quantize(weight.detach().to(self._device), dtype=self._dtype)


def _quantized_parameters(actor: Actor) -> Iterator[Claim]:
    """Primary quantized weights are state. A transpose that is marked invalid is dead."""
    kind = loaded(*_TENSOR)
    if kind is None:
        return
    for model_name, model in actor.models.items():
        for name, parameter in model.named_parameters(prefix=model_name):
            if not isinstance(parameter, kind):
                continue
            for attribute, tensor in inner_tensors(parameter):
                dead = attribute == "_transpose" and vars(parameter).get("_transpose_invalid") is True
                yield Claim(
                    f"{name}.{attribute}",
                    tensor,
                    Role.PARAM,
                    "params",
                    Fate.ZEROED if dead else Fate.MOVED,
                    _INVALID if dead else "",
                    standing=Standing.OWNED if dead else Standing.KNOWN,
                )


def _scaling_state(path: str, module: nn.Module) -> Iterator[Claim]:
    """`scale` and `amax_history` of delayed scaling: nothing gives them back."""
    for key, state in (vars(module).get("fp8_meta") or {}).items():
        if not key.startswith("scaling_"):
            continue
        for attribute in ("scale", "amax_history"):
            value = getattr(state, attribute, None)  # other recipes keep none
            if isinstance(value, torch.Tensor):
                yield Claim(f"{path}.fp8_meta.{key}.{attribute}", value, Role.BUFFER, "buffers")


def _global_buffers() -> Iterator[Claim]:
    """What delayed scaling keeps for the whole process: the tensors of all modules that ran, of other models too."""
    state = te_global_state()
    if state is None:
        return
    for key in ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer"):
        for name, leaf in leaves(f"transformer_engine.{key}", getattr(state, key)):
            if isinstance(leaf, torch.Tensor):
                yield Claim(name, leaf, Role.BUFFER, "buffers", Fate.KEPT, _UPDATED_BY_ALL)


def _stand_ins_of_gradients(graphs: bool) -> Iterator[Claim]:
    """What autograd gets in place of a gradient that was added to its buffer by the matrix product itself.

    One for each shape, for all models of the process: dropped, the next backward of any of them makes it anew.
    """
    held = loaded(*_STAND_INS) or {}
    fate, drop = (Fate.ZEROED, None) if graphs else (Fate.DROPPED, held.clear)
    for key, tensor in held.items():
        name = f"transformer_engine.{_STAND_INS[1]}[{key}]"
        yield Claim(name, tensor, Role.WORKSPACE, "caches", fate, _NEVER_READ, drop=drop, standing=Standing.DECLARED)


def _scratch_of_products(obstacle: str) -> Iterator[Claim]:
    """What all models of the process multiply with: dropped, or kept for the reason given."""
    for function_name in _SCRATCH:
        function = loaded(_PRODUCTS, function_name)
        if not hasattr(function, "cache_clear"):  # another version: nobody's memory, as far as the rules know
            continue
        drop = function.cache_clear
        remembered = [held for held in gc.get_referents(function) if type(held) is dict]
        for name, leaf in leaves(f"transformer_engine.{function_name}", remembered):
            if isinstance(leaf, torch.Tensor):
                yield scratch_claim(name, leaf, drop, _MADE_AGAIN, obstacle)


def _te_modules(actor: Actor) -> Iterator[tuple[str, nn.Module]]:
    kind = loaded(*_MODULE)
    if kind is None:
        return
    for name, model in actor.models.items():
        for path, module in model.named_modules(prefix=name):
            if isinstance(module, kind):
                yield path, module


def _warn_of_unknown_version(module: nn.Module) -> None:
    version = getattr(sys.modules.get("transformer_engine"), "__version__", "unknown")
    warnings.warn(
        f"{type(module).__name__} of TransformerEngine {version} has no dictionary {_WORKSPACES}: quantized copies of "
        "weights are moved with the rest, not dropped",
        stacklevel=2,
    )

"""TransformerEngine in small, on the CPU: the same attributes, the same life of a quantized weight.

A weight is quantized to 8-bit integers with one scale, and its transpose is kept beside it. The first microbatch
of a step refreshes the kept copy in place, the others use it as it is, and without one a fresh copy is made.
Delayed scaling takes the scale from a history that each quantization writes to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

WIDTH = 192
"""Of the layers: a quantized weight fills some pages."""


class QuantizedTensor(torch.Tensor):
    """A wrapper around the inner tensors, without memory of its own."""

    @staticmethod
    def __new__(cls, data, transpose, scale_inv, quantizer, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype)

    def __init__(self, data, transpose, scale_inv, quantizer, dtype):
        self._data = data
        self._transpose = transpose
        self._transpose_invalid = transpose is None
        self._scale_inv = scale_inv
        self._quantizer = quantizer.copy()

    def get_metadata(self) -> dict[str, Any]:
        return {
            "data": self._data,
            "data_transpose": self._transpose,
            "fp8_scale_inv": self._scale_inv,
            "quantizer": self._quantizer,
        }

    def __tensor_flatten__(self):
        return [key for key in ("_data", "_transpose", "_scale_inv") if getattr(self, key) is not None], None

    def dequantize(self) -> torch.Tensor:
        return self._data.to(self.dtype) * self._scale_inv

    def quantize_(self, weight: torch.Tensor) -> None:
        again = self._quantizer.quantize(weight)
        self._data.copy_(again._data)
        self._scale_inv.copy_(again._scale_inv)
        if self._transpose is not None:
            self._transpose.copy_(again._data.t())

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        unwrapped = tree_map(lambda x: x.dequantize() if isinstance(x, QuantizedTensor) else x, args)
        return func(*unwrapped, **(kwargs or {}))


class Quantizer:
    """One scale for the whole tensor, from its largest value now."""

    def __init__(self) -> None:
        self.rowwise_usage = self.columnwise_usage = True
        self.internal = False

    def copy(self) -> Quantizer:
        made = type(self).__new__(type(self))
        made.__dict__.update(vars(self))
        return made

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def scale_for(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.abs().max().clamp(min=1e-12) / 127

    def quantize(self, weight: torch.Tensor, dtype: torch.dtype | None = None) -> QuantizedTensor:
        weight = weight.detach()
        scale_inv = self.scale_for(weight)
        data = (weight / scale_inv).round().clamp(-128, 127).to(torch.int8)
        transpose = data.t().contiguous() if self.columnwise_usage else None
        return QuantizedTensor(data, transpose, scale_inv.reshape(1).clone(), self, dtype or weight.dtype)

    def is_requantization_safe(self) -> bool:
        return True


class Float8Quantizer(Quantizer):
    """Delayed scaling: the scale is the largest value of the history, and each use appends to it."""

    def __init__(self, state: SimpleNamespace) -> None:
        super().__init__()
        self.state = state

    def scale_for(self, weight: torch.Tensor) -> torch.Tensor:
        scale = self.state.scale.clone()
        self.state.amax_history.copy_(self.state.amax_history.roll(1))
        self.state.amax_history[0] = weight.abs().max()
        self.state.scale.copy_(self.state.amax_history.max() / 100)
        return scale[0]

    def is_requantization_safe(self) -> bool:
        return False


class TransformerEngineBaseModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._fp8_workspaces: dict[str, QuantizedTensor] = {}
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}


class Linear(TransformerEngineBaseModule):
    """`out = in @ quantized(weight).T`; gradients pass the quantization by."""

    def __init__(self, rows: int, cols: int, *, delayed: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, cols) / cols**0.5)
        if delayed:
            state = SimpleNamespace(scale=torch.full((1,), 0.01), amax_history=torch.zeros(3))
            self.fp8_meta["scaling_fwd"] = state
            self.quantizer: Quantizer = Float8Quantizer(state)
        else:
            self.quantizer = Quantizer()

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        quantized = self._quantized(is_first_microbatch).dequantize()
        return x @ (self.weight + (quantized - self.weight).detach()).t()

    def _quantized(self, is_first_microbatch: bool | None) -> QuantizedTensor:
        workspace = self._fp8_workspaces.get("weight") if is_first_microbatch is not None else None
        if workspace is None:
            self.quantizer.set_usage(columnwise=torch.is_grad_enabled())
            workspace = self.quantizer.quantize(self.weight)
            if is_first_microbatch is not None:
                self._fp8_workspaces["weight"] = workspace
        elif is_first_microbatch:
            workspace.quantize_(self.weight)
        return workspace


class Net(nn.Module):
    """Two quantized layers, and one that is not."""

    def __init__(self, width: int = WIDTH, *, delayed: bool = False) -> None:
        super().__init__()
        self.first = Linear(width, width, delayed=delayed)
        self.second = Linear(width, width, delayed=delayed)
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        hidden = torch.tanh(self.first(x, is_first_microbatch))
        return self.head(torch.tanh(self.second(hidden, is_first_microbatch)))


@contextmanager
def imported(monkeypatch: Any) -> Iterator[SimpleNamespace]:
    """As if a model had imported the library; its global state comes with it."""
    state = SimpleNamespace(
        global_amax_buffer={},
        global_amax_history_buffer={},
        global_scale_buffer={},
        skip_fp8_weight_update_tensor=None,
    )
    manager = type("FP8GlobalStateManager", (), {"quantization_state": state})
    for name, members in {
        "transformer_engine": {"__version__": "0.0-stand-in"},
        "transformer_engine.pytorch.module.base": {"TransformerEngineBaseModule": TransformerEngineBaseModule},
        "transformer_engine.pytorch.quantized_tensor": {"QuantizedTensor": QuantizedTensor},
        "transformer_engine.pytorch.quantization": {"FP8GlobalStateManager": manager},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    yield state

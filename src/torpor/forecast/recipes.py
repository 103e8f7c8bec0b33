"""Bytes of a quantized weight, and which of its two directions are there when the actor goes to sleep.

The one place for these formulas. A weight is `[N, K]`, N out features and K in features *on this rank*;
`up(x, m)` rounds x up to a multiple of m. "Row" is what the forward multiplies with, "column" what the
backward does.

| recipe | row data | row scales | column data | column scales |
|---|---|---|---|---|
| per-tensor FP8 on Hopper | NK | 4 (shared) | NK | - |
| per-tensor FP8 on Blackwell | NK | 4 | none | - |
| blockwise 128x128 | NK | 4 ceil(N/128) up(ceil(K/128), 4) | NK | 4 ceil(K/128) up(ceil(N/128), 4) |
| MXFP8 | NK | up(N, 128) up(K/32, 4) | NK | up(N/32, 4) up(K, 128) |
| NVFP4 | NK/2 | up(N, 128) up(ceil(K/16), 4) + 4 | NK/2 | up(K, 128) up(ceil(N/16), 4) + 4 |

Sources (TransformerEngine 2.20): `csrc/quantizer.cpp`, `create_tensor` and `get_scale_shape`;
their Python twins `tensor/{float8,float8_blockwise,mxfp8,nvfp4}_tensor.py`. Two-dimensional scaling, random
Hadamard transforms and pre-swizzled scales change no size.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torpor.errors import UsageError
from torpor.forecast.shapes import Layer, Module, Weight

BF16_BYTES = 2
FP32_BYTES = 4


class Format(StrEnum):
    """A precision recipe, under the name the command line has for it."""

    BF16 = "bf16"
    FP8_DELAYED = "fp8-delayed"
    FP8_CURRENT = "fp8-current"
    FP8_BLOCKWISE = "fp8-blockwise"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


class Architecture(StrEnum):
    """What the recipe runs on. Blackwell is sm100 to sm119 here: the ones with non-TN FP8 GEMMs."""

    HOPPER = "hopper"
    BLACKWELL = "blackwell"


class Scope(StrEnum):
    """Which linears the recipe quantizes."""

    ALL = "all"
    EXPERTS = "experts"


class Moment(StrEnum):
    """What ran last before the sleep."""

    INIT = "init"
    NO_GRAD = "no-grad"
    TRAIN = "train"


class Recompute(StrEnum):
    """Which linears run inside TransformerEngine's checkpoint: none, those of MLP or MoE block, or all."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Override(StrEnum):
    """`backward_override` of a recipe: the backward multiplies with something else than quantized columns."""

    NONE = "none"
    DEQUANTIZED = "dequantized"
    HIGH_PRECISION = "high_precision"


@dataclass(frozen=True, slots=True)
class Directions:
    """Which halves of a quantized weight exist."""

    row: bool
    column: bool


NOTHING, ROW, BOTH = Directions(False, False), Directions(True, False), Directions(True, True)

#: First release in which the recompute region no longer depends on the precision context at checkpoint entry
#: (`pytorch/distributed.py`, `activation_recompute_forward`): it undoes "row only" of a backward override.
REGION_AT_ENTRY_UNTIL = (2, 19)

_PER_TENSOR = (Format.FP8_DELAYED, Format.FP8_CURRENT)
_REFUSED_ON_HOPPER = (Format.MXFP8, Format.NVFP4)
_AMAX_TENSORS_PER_GEMM = 5
"""Delayed scaling keeps a history for input, weight, output, and the gradients of output and input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A precision recipe and everything that decides what its caches hold.

    Example: `Recipe(format=Format.NVFP4, scope=Scope.EXPERTS, architecture=Architecture.BLACKWELL)`.
    Raises `UsageError` for a format that the architecture does not have.
    """

    format: Format = Format.BF16
    architecture: Architecture = Architecture.HOPPER
    scope: Scope = Scope.ALL
    first_layers_bf16: int = 0
    last_layers_bf16: int = 0
    primary_weights: bool = False
    """The parameters themselves are quantized (`--fp8-param-gather`): state, and no cache."""
    cache: bool = True
    """False with `--disable-parameter-transpose-cache`: each microbatch quantizes anew."""
    moment: Moment = Moment.TRAIN
    recompute: Recompute = Recompute.NONE
    override: Override = Override.NONE
    te_version: tuple[int, int] = (2, 20)
    amax_history: int = 1
    """Length of the amax history of delayed scaling; Megatron's default is 1, TransformerEngine's 1024."""

    def __post_init__(self) -> None:
        if self.architecture is Architecture.HOPPER and self.format in _REFUSED_ON_HOPPER:
            raise UsageError(
                f"{self.format} needs compute capability 10.0, Hopper has 9.0. "
                "Plan with --architecture blackwell, or with --recipe fp8-blockwise.",
                format=self.format,
                architecture=self.architecture,
            )
        if self.first_layers_bf16 < 0 or self.last_layers_bf16 < 0:
            raise UsageError("the number of first or last bf16 layers is negative; 0 is the least.")
        if self.format is Format.FP8_DELAYED:
            self._check_delayed()

    def _check_delayed(self) -> None:
        """Under delayed scaling Megatron opens one precision context around all layers, and TransformerEngine
        has no backward override."""
        if self.first_layers_bf16 or self.last_layers_bf16:
            raise UsageError("fp8-delayed cannot leave single layers in bf16; use another recipe.")
        if self.override is not Override.NONE:
            raise UsageError(f"fp8-delayed has no backward override '{self.override}'; use another recipe.")

    @property
    def label(self) -> str:
        """A short name for tables: `nvfp4 (experts)`."""
        return f"{self.format} (experts)" if self.scope is Scope.EXPERTS else str(self.format)

    def quantizes(self, layer: Layer, weight: Weight, num_layers: int) -> bool:
        """Whether the weight is multiplied in this recipe's precision."""
        if self.format is Format.BF16 or weight.module is Module.PLAIN or weight.adapter:
            return False
        if self.scope is Scope.EXPERTS and not weight.expert:
            return False
        if layer.index is None:
            return True
        return self.first_layers_bf16 <= layer.index < num_layers - self.last_layers_bf16

    def directions(self, weight: Weight) -> Directions:
        """Which halves of a quantized weight exist at the moment of sleep.

        Source: TransformerEngine `module/linear.py`, `grouped_linear.py`, `layernorm_linear.py`, where each
        sets the usage of its weight quantizer. A forward without gradients quantizes rows only; a backward
        override too, except that a recompute region turns the columns on again, but not in `LayerNormLinear`.
        """
        if self.moment is Moment.INIT:
            return BOTH if self.primary_weights else NOTHING
        if self.moment is Moment.NO_GRAD and not self.primary_weights:
            return ROW
        if self.override is Override.NONE or self.primary_weights:
            return BOTH
        return BOTH if self._sees_recompute_region(weight) else ROW

    def _sees_recompute_region(self, weight: Weight) -> bool:
        """Whether the weight's module sees the recompute region in the forward, and heeds it.

        Full recompute enters the checkpoint before Megatron opens the precision context of a layer; selective
        recompute of a block enters it after (Megatron-Core `transformer_block.py`, `moe/moe_layer.py`).
        """
        if weight.module is Module.LAYERNORM_LINEAR or self.recompute is Recompute.NONE:
            return False
        if self.recompute is Recompute.SELECTIVE:
            return weight.name.startswith("mlp.")
        return self.te_version >= REGION_AT_ENTRY_UNTIL

    def tensors(self, rows: int, cols: int, directions: Directions) -> tuple[int, ...]:
        """Bytes of each tensor of one quantized weight `[rows, cols]`, in the order TransformerEngine makes
        them: row data, row scales, column data, column scales (and the amaxes of NVFP4)."""
        if not directions.row:
            return ()
        row, column = _TENSORS[self.format](rows, cols)
        if self.format in _PER_TENSOR and self.architecture is not Architecture.HOPPER:
            column = ()
        found = (*row, *column) if directions.column else row
        if self.format is Format.NVFP4:
            found += (FP32_BYTES,) * (2 if directions.column else 1)
        return found

    def weight_bytes(self, rows: int, cols: int, directions: Directions) -> int:
        """Bytes of one quantized weight `[rows, cols]`."""
        return sum(self.tensors(rows, cols, directions))

    def check_shape(self, rows: int, cols: int, *, layer: str, weight: str) -> None:
        """Raises `UsageError`, naming layer and weight, for a shape on this rank that the recipe refuses.

        MXFP8 needs multiples of 32, NVFP4 of 16, in both dimensions (their quantizers raise); the FP8 GEMMs
        need K % 16 = 0 and N % 8 = 0 (TransformerEngine `utils.py`, `assert_dim_for_fp8_exec`).
        """
        need_rows, need_cols = _MULTIPLES[self.format]
        if rows % need_rows == 0 and cols % need_cols == 0:
            return
        raise UsageError(
            f"{layer}: {weight} is [{rows}, {cols}] on a rank, {self.format} needs multiples of "
            f"{need_rows} x {need_cols}. Split it over fewer ranks, or keep the layer in bf16.",
            layer=layer,
            weight=weight,
            rows=rows,
            cols=cols,
        )

    def scaling_state_bytes(self, gemms: int) -> int:
        """Bytes of delayed scaling's `scale` and `amax_history` for a number of matrix products; else 0.

        They are state: nothing rebuilds them.
        """
        if self.format is not Format.FP8_DELAYED:
            return 0
        return gemms * _AMAX_TENSORS_PER_GEMM * FP32_BYTES * (self.amax_history + 1)


_Halves = tuple[tuple[int, ...], tuple[int, ...]]


def _per_tensor(rows: int, cols: int) -> _Halves:
    return (rows * cols, FP32_BYTES), (rows * cols,)


def _blockwise(rows: int, cols: int) -> _Halves:
    row_blocks, col_blocks = ceil_div(rows, 128), ceil_div(cols, 128)
    return (
        (rows * cols, FP32_BYTES * row_blocks * round_up(col_blocks, 4)),
        (rows * cols, FP32_BYTES * col_blocks * round_up(row_blocks, 4)),
    )


def _mxfp8(rows: int, cols: int) -> _Halves:
    return (
        (rows * cols, round_up(rows, 128) * round_up(cols // 32, 4)),
        (rows * cols, round_up(rows // 32, 4) * round_up(cols, 128)),
    )


def _nvfp4(rows: int, cols: int) -> _Halves:
    return (
        (rows * cols // 2, round_up(rows, 128) * round_up(ceil_div(cols, 16), 4)),
        (rows * cols // 2, round_up(cols, 128) * round_up(ceil_div(rows, 16), 4)),
    )


_TENSORS = {
    Format.FP8_DELAYED: _per_tensor,
    Format.FP8_CURRENT: _per_tensor,
    Format.FP8_BLOCKWISE: _blockwise,
    Format.MXFP8: _mxfp8,
    Format.NVFP4: _nvfp4,
}

_MULTIPLES = {
    Format.FP8_DELAYED: (8, 16),
    Format.FP8_CURRENT: (8, 16),
    Format.FP8_BLOCKWISE: (8, 16),
    Format.MXFP8: (32, 32),
    Format.NVFP4: (16, 16),
}


def round_up(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return ceil_div(value, multiple) * multiple


def ceil_div(value: int, divisor: int) -> int:
    """`value / divisor`, rounded up."""
    return -(-value // divisor)

"""What is trained: LoRA adapters beside frozen weights, or everything but some frozen parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch

from torpor.errors import UsageError
from torpor.forecast.shapes import Layer, Model, Module, Split, Weight

#: What Megatron-Bridge adapts unless told otherwise.
LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def freeze(model: Model, patterns: Sequence[str]) -> Model:
    """The model with every weight frozen whose `layer.weight` name matches one of the shell patterns.

    Example: `freeze(model, ["*router*", "*indexer*"])`. Raises `UsageError` where a pattern matches nothing.
    """
    for pattern in patterns:
        if not any(fnmatch(_full_name(layer, weight), pattern) for layer, weight in model.weights()):
            raise UsageError(f"--freeze {pattern}: no weight of {model.name} matches.", pattern=pattern)

    def change(layer: Layer, weight: Weight) -> tuple[Weight, ...]:
        frozen = any(fnmatch(_full_name(layer, weight), pattern) for pattern in patterns)
        return (replace(weight, trainable=False) if frozen else weight,)

    return model.map_weights(change)


def add_lora(model: Model, rank: int, targets: Sequence[str] = LORA_TARGETS) -> Model:
    """The model frozen, with low-rank adapters of `rank` on the linears whose last name part is in `targets`.

    Each adapter is A `[rank, K]` and B `[N, rank]` in bf16. Where the base is split by rows, B is too; where
    it is split by columns, A is; the other one is duplicated over TP (PEFT `tuners/lora/tp_layer.py`). Each
    expert has an adapter of its own. Raises `UsageError` for a rank under 1 and a target that no linear has.
    """
    if rank < 1:
        raise UsageError(f"a LoRA rank of {rank} has no adapter; the least is 1.", rank=rank)
    linears = {_leaf(weight) for _, weight in model.weights() if weight.module is not Module.PLAIN}
    missing = sorted(set(targets) - linears)
    if missing:
        raise UsageError(
            f"{model.name} has no linear called {', '.join(missing)}. It has: {', '.join(sorted(linears))}.",
            missing=missing,
            known=sorted(linears),
        )

    def change(layer: Layer, weight: Weight) -> tuple[Weight, ...]:
        frozen = replace(weight, trainable=False)
        if weight.module is Module.PLAIN or _leaf(weight) not in targets:
            return (frozen,)
        return (frozen, *_adapter(weight, rank))

    return model.map_weights(change)


def _adapter(base: Weight, rank: int) -> tuple[Weight, Weight]:
    down_split = Split.COLS if base.split is Split.COLS else Split.NONE
    up_split = Split.ROWS if base.split is Split.ROWS else Split.NONE

    def half(side: str, rows: int, cols: int, split: Split) -> Weight:
        name = f"{base.name}.adapter.{side}"
        return Weight(name, rows, cols, split, count=base.count, expert=base.expert, adapter=True)

    return half("linear_in", rank, base.cols, down_split), half("linear_out", base.rows, rank, up_split)


def _leaf(weight: Weight) -> str:
    return weight.name.rsplit(".", 1)[-1]


def _full_name(layer: Layer, weight: Weight) -> str:
    return f"{layer.name}.{weight.name}"

"""Bytes of optimizer state, and which data-parallel rank holds which part.

Sources: Megatron-Core 0.19 `optimizer/distrib_optimizer.py`, `layer_wise_optimizer.py`,
`optimizer_config.py`, `cpu_offloading/hybrid_optimizer.py`; TransformerEngine `optimizers/fused_adam.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from torpor.errors import UsageError
from torpor.forecast.layout import Layout, Shard
from torpor.forecast.recipes import BF16_BYTES, FP32_BYTES, Format, Recipe, ceil_div


class Kind(StrEnum):
    """An optimizer, under the name the command line has for it."""

    ADAM = "adam"
    PRECISION_AWARE_ADAM = "precision-aware-adam"
    MUON = "muon"
    SGD = "sgd"


@dataclass(frozen=True, slots=True)
class Owned:
    """Elements whose optimizer state one rank holds."""

    matrix: int = 0
    """Weights that Muon orthogonalizes."""
    other: int = 0
    """Embeddings, output layer, norms, biases."""
    fp32: int = 0
    """Part of `other` or `matrix` that is fp32 in the model and so needs no master."""

    def __add__(self, more: Owned) -> Owned:
        return Owned(self.matrix + more.matrix, self.other + more.other, self.fp32 + more.fp32)

    @property
    def elements(self) -> int:
        """All of them."""
        return self.matrix + self.other


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of optimizer state of one rank: on the device, and on the host where the optimizer runs there."""

    master_bytes: int
    moment_bytes: int
    host_bytes: int = 0
    host_params_bytes: int = 0
    """bf16 bytes that cross the link when parameters are rebuilt from masters on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An optimizer and the widths of its state; example: `Optimizer(kind=Kind.ADAM, grad_bytes=4)`.

    Raises `UsageError` for widths and fractions that cannot be.
    """

    kind: Kind = Kind.ADAM
    grad_bytes: int = FP32_BYTES
    """Bytes of a gradient element: 4 with `grad_reduce_in_fp32`, 2 without."""
    exp_avg_bytes: int = FP32_BYTES
    """Bytes of a first-moment element; under 4 only with precision-aware Adam."""
    exp_avg_sq_bytes: int = FP32_BYTES
    param_remainders: bool = True
    """Precision-aware Adam keeps the low 16 bits of the master beside the bf16 parameter."""
    sgd_momentum: bool = True
    cpu_offload: float = 0.0
    """Fraction of the state that lives and steps on the host (`--optimizer-offload-fraction`)."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.cpu_offload <= 1.0:
            raise UsageError(f"the offloaded fraction is {self.cpu_offload}; it lies between 0 and 1.")
        if self.grad_bytes not in (2, 4):
            raise UsageError(f"a gradient element of {self.grad_bytes} bytes; 2 (bf16) and 4 (fp32) are known.")
        narrow = self.exp_avg_bytes < FP32_BYTES or self.exp_avg_sq_bytes < FP32_BYTES
        if narrow and self.kind is not Kind.PRECISION_AWARE_ADAM:
            raise UsageError(f"moments narrower than fp32 need precision-aware-adam, not {self.kind}.")
        if self.cpu_offload and self.kind is Kind.MUON:
            raise UsageError("muon has no CPU offload; use adam or sgd.")

    @property
    def label(self) -> str:
        """A short name for tables."""
        return f"{self.kind}, {self.cpu_offload:.0%} on CPU" if self.cpu_offload else str(self.kind)

    def stores_remainders(self, recipe: Recipe) -> bool:
        """Whether the bf16 parameter is the upper half of the master, so that it cannot be rebuilt.

        Megatron-Core keeps fp32 masters of its own under any other FP8 recipe than delayed scaling, and the
        CPU optimizer always has fp32 ones (`optimizer_config.py`, `hybrid_optimizer.py`).
        """
        if self.kind is not Kind.PRECISION_AWARE_ADAM or not self.param_remainders or self.cpu_offload:
            return False
        return recipe.format in (Format.BF16, Format.FP8_DELAYED, Format.NVFP4)

    def state(self, owned: Owned, recipe: Recipe) -> State:
        """Bytes of the state of `owned`. On the host, master, gradient and moments of an element are fp32."""
        on_host = round(owned.elements * self.cpu_offload)
        kept = owned.elements - on_host
        share = kept / owned.elements if owned.elements else 0.0
        master = 2 if self.stores_remainders(recipe) else FP32_BYTES
        masters = master * (kept - round(owned.fp32 * share))
        moments = self._moments(owned) if not on_host else round(self._moments(owned) * share)
        host = on_host * 2 * FP32_BYTES + (self._moments(owned) - moments)
        return State(masters, moments, host if on_host else 0, BF16_BYTES * on_host)

    def _moments(self, owned: Owned) -> int:
        adam = self.exp_avg_bytes + self.exp_avg_sq_bytes
        match self.kind:
            case Kind.MUON:
                return FP32_BYTES * owned.matrix + adam * owned.other
            case Kind.SGD:
                return FP32_BYTES * owned.elements if self.sgd_momentum else 0
            case Kind.ADAM | Kind.PRECISION_AWARE_ADAM:
                return adam * owned.elements

    def ownership(self, held: Iterable[Shard], layout: Layout) -> list[tuple[int, Owned]]:
        """How many ranks of a stage own how much, for the trainable shards that each of them holds.

        Adam's flat buffers are cut into equal parts. Muon's matrices stay whole: each goes to the rank
        with the least so far, largest first (`_compute_per_buffer_param_layout`).
        """
        trainable = [shard for shard in held if shard.weight.trainable]
        whole = self.kind is Kind.MUON
        dense = _owned_by_rank(trainable, layout, expert=False, whole_matrices=whole)
        experts = _owned_by_rank(trainable, layout, expert=True, whole_matrices=whole)
        counts: dict[Owned, int] = {}
        dense_stride = layout.ranks_per_stage // len(dense)
        expert_stride = layout.ranks_per_stage // len(experts)
        if len(set(dense)) == 1 and len(set(experts)) == 1:
            return [(layout.ranks_per_stage, dense[0] + experts[0])]
        for rank in range(layout.ranks_per_stage):
            owned = dense[rank // dense_stride] + experts[rank // expert_stride]
            counts[owned] = counts.get(owned, 0) + 1
        return [(count, owned) for owned, count in counts.items()]


def _owned_by_rank(shards: list[Shard], layout: Layout, *, expert: bool, whole_matrices: bool) -> list[Owned]:
    """What each part of a data-parallel group owns."""
    group = [shard for shard in shards if shard.weight.expert == expert]
    ways = layout.optimizer_shards(expert=expert)
    matrices = [shard for shard in group if shard.weight.is_matrix]
    others = sum(shard.elements for shard in group if not shard.weight.is_matrix)
    fp32 = sum(shard.elements for shard in group if shard.weight.fp32)
    if whole_matrices:
        loads = _least_loaded(matrices, ways)
    else:
        loads = [ceil_div(sum(shard.elements for shard in matrices), ways)] * ways
    return [Owned(load, ceil_div(others, ways), ceil_div(fp32, ways)) for load in loads]


def _least_loaded(matrices: list[Shard], ways: int) -> list[int]:
    loads = [0] * ways
    sizes = sorted((shard.rows * shard.cols for shard in matrices for _ in range(shard.count)), reverse=True)
    for size in sizes:
        heapq.heapreplace(loads, loads[0] + size)
    return loads

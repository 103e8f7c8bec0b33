"""What one sleep does with each byte of a rank, and why: options, lines of the account, rules for a fate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torpor.forecast.layout import Shard
from torpor.forecast.optimizers import Optimizer, State
from torpor.forecast.recipes import BF16_BYTES, FP32_BYTES, Recipe
from torpor.forecast.shapes import Layer, Model
from torpor.kinds import Fate, Role

#: TransformerEngine's cuBLAS workspace on compute capability 9.0 and newer (`cpp_extensions/gemm.py`).
WORKSPACE_BYTES = 32 * 1024**2 + 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a sleep may leave out of the copy. All on by default; `Options.off()` copies everything."""

    drop_caches: bool = True
    """Clear quantized weight caches and workspaces; their owner makes them again."""
    zero_grads: bool = True
    """Gradients are dead after the step: give the memory back, zero-fill at wake."""
    rebuild_params: bool = True
    """Cast bf16 parameters from their fp32 masters at wake, and gather them."""
    keep_unchanged: bool = True
    """From the second sleep on, copy nothing whose bytes the store already has (frozen weights)."""
    cuda_graphs: bool = False
    """CUDA graphs were captured over the training step: they hold the caches' addresses, which closes the
    gate of `drop_caches`."""

    @classmethod
    def off(cls) -> Options:
        """Everything is copied."""
        return cls(drop_caches=False, zero_grads=False, rebuild_params=False, keep_unchanged=False)

    def only(self, name: str) -> Options:
        """One saving alone."""
        return replace(Options.off(), **{name: True}, cuda_graphs=self.cuda_graphs)


#: The savings, by the name of their option, with the words for a table.
SAVINGS = {
    "drop_caches": "drop quantized caches and workspaces",
    "zero_grads": "zero gradients instead of copying them",
    "rebuild_params": "rebuild bf16 parameters from the masters",
    "keep_unchanged": "leave unchanged frozen weights in the store",
}


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes of one rank under one component, role and fate.

    Example: `Line("caches", Role.QUANTIZED_CACHE, Fate.DROPPED, 3_490_713_600)`.
    """

    component: str
    role: Role
    fate: Fate
    nbytes: int
    reason: str = ""

    @property
    def copied_bytes(self) -> int:
        """Bytes that a sleep writes to the store."""
        return self.nbytes if self.fate is Fate.MOVED else 0

    @property
    def restored_bytes(self) -> int:
        """Bytes that a wake reads from the store."""
        return self.nbytes if self.fate in (Fate.MOVED, Fate.CLEAN) else 0


def add_up(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Lines of the same component, role, fate and reason as one, empty ones left out."""
    sums: dict[tuple[str, Role, Fate, str], int] = {}
    for line in lines:
        key = (line.component, line.role, line.fate, line.reason)
        sums[key] = sums.get(key, 0) + line.nbytes
    return tuple(Line(*key[:3], nbytes, key[3]) for key, nbytes in sums.items() if nbytes)


@dataclass(frozen=True, slots=True)
class RankLedger:
    """Makes the lines of one rank from the shards that it holds."""

    model: Model
    recipe: Recipe
    optimizer: Optimizer
    options: Options

    def quantizes(self, shard: Shard) -> bool:
        """Whether the shard is multiplied in the recipe's precision."""
        return self.recipe.quantizes(shard.layer, shard.weight, len(self.model.layers))

    def params(self, held: list[Shard]) -> Iterator[Line]:
        """Parameters: rebuilt where a master has all their bits, else moved, or clean where nothing changes them."""
        for shard in held:
            if self.recipe.primary_weights and self.quantizes(shard):
                yield self._primary(shard)
            elif shard.weight.trainable:
                yield self._trainable(shard)
            else:
                yield self._frozen(shard)

    def _primary(self, shard: Shard) -> Line:
        nbytes = self._quantized_bytes(shard)
        if not shard.weight.trainable:
            return self._unchanged(nbytes)
        return Line("params", Role.PARAM, Fate.MOVED, nbytes, "quantized parameters are state, not a cache")

    def _trainable(self, shard: Shard) -> Line:
        role = Role.ADAPTER if shard.weight.adapter else Role.PARAM
        if shard.weight.fp32:
            nbytes = FP32_BYTES * shard.elements
            return Line("params", role, Fate.MOVED, nbytes, "fp32 parameter: its own master")
        nbytes = BF16_BYTES * shard.elements
        if self.optimizer.stores_remainders(self.recipe):
            return Line("params", role, Fate.MOVED, nbytes, "upper half of the master (param remainders)")
        if self.options.rebuild_params:
            return Line("params", role, Fate.REBUILT, nbytes, "cast of the fp32 master")
        return Line("params", role, Fate.MOVED, nbytes)

    def _frozen(self, shard: Shard) -> Line:
        return self._unchanged((FP32_BYTES if shard.weight.fp32 else BF16_BYTES) * shard.elements)

    def _unchanged(self, nbytes: int) -> Line:
        if self.options.keep_unchanged:
            return Line("params", Role.PARAM, Fate.CLEAN, nbytes, "frozen: moved by the first sleep only")
        return Line("params", Role.PARAM, Fate.MOVED, nbytes, "frozen: no master to rebuild from")

    def grads(self, held: list[Shard]) -> Iterator[Line]:
        """The gradient buffer of what is trained."""
        fate = Fate.ZEROED if self.options.zero_grads else Fate.MOVED
        reason = "dead after the step" if self.options.zero_grads else ""
        for shard in held:
            if shard.weight.trainable:
                width = FP32_BYTES if shard.weight.fp32 else self.optimizer.grad_bytes
                yield Line("grads", Role.GRAD, fate, width * shard.elements, reason)

    def caches(self, held: list[Shard]) -> Iterator[Line]:
        """Caches of quantized weights, which data parallelism does not shard, and cuBLAS scratch.

        Raises `UsageError`, with the layer, for a shape that the recipe refuses.
        """
        fate, reason = self._cache_fate()
        for shard in held:
            if not self.quantizes(shard):
                continue
            self.recipe.check_shape(shard.rows, shard.cols, layer=shard.layer.name, weight=shard.weight.name)
            if self.recipe.cache and not self.recipe.primary_weights:
                nbytes = self._quantized_bytes(shard)
                yield Line("caches", Role.QUANTIZED_CACHE, fate, nbytes, reason)
        scratch = Fate.KEPT if self.options.drop_caches and self.options.cuda_graphs else fate
        yield Line("caches", Role.WORKSPACE, scratch, WORKSPACE_BYTES, "cuBLAS scratch")

    def _cache_fate(self) -> tuple[Fate, str]:
        if not self.options.drop_caches:
            return Fate.MOVED, ""
        if self.options.cuda_graphs:
            return Fate.MOVED, "a CUDA graph has its address"
        return Fate.DROPPED, "made again by the first microbatch"

    def _quantized_bytes(self, shard: Shard) -> int:
        directions = self.recipe.directions(shard.weight)
        return shard.count * self.recipe.weight_bytes(shard.rows, shard.cols, directions)

    def buffers(self, layers: list[Layer], held: list[Shard]) -> Iterator[Line]:
        """Buffers of the layers, and the state of delayed scaling."""
        for layer in layers:
            for buffer in layer.buffers:
                yield Line("buffers", Role.BUFFER, Fate.MOVED, buffer.nbytes)
        gemms = sum(shard.count for shard in held if self.quantizes(shard))
        scaling = self.recipe.scaling_state_bytes(gemms)
        yield Line("buffers", Role.BUFFER, Fate.KEPT, scaling, "scales and amax history: all models' steps update them")

    def optimizer_state(self, state: State) -> Iterator[Line]:
        """Masters and moments on the device: what a sleep cannot do without copying."""
        yield Line("optimizer", Role.MASTER, Fate.MOVED, state.master_bytes)
        yield Line("optimizer", Role.MOMENT, Fate.MOVED, state.moment_bytes)

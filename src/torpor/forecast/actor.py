"""The account of an actor before it runs: bytes by component, role and fate, for a rank and for the job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from torpor.forecast.layout import Layout, Shard, shards, stages
from torpor.forecast.optimizers import Optimizer, State
from torpor.forecast.recipes import BF16_BYTES, FP32_BYTES, Recipe
from torpor.forecast.shapes import Layer, Model
from torpor.kinds import Fate, Role

#: TransformerEngine's cuBLAS workspace on compute capability 9.0 and newer (`cpp_extensions/gemm.py`).
WORKSPACE_BYTES = 32 * 1024**2 + 1024

#: The host holds at most this many times the payload.
HOST_FACTOR = 1.03


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


@dataclass(frozen=True, slots=True)
class RankForecast:
    """The account of `ranks` equal ranks of one pipeline stage."""

    stage: int
    ranks: int
    lines: tuple[Line, ...]
    parameters: int
    """Parameters that each of these ranks holds."""
    optimizer_host_bytes: int
    """Optimizer state that lives on the host anyway (CPU offload)."""
    host_rebuilt_bytes: int
    """Parameters that a wake rebuilds from masters on the host: they cross the link, but need no store."""

    @property
    def awake_bytes(self) -> int:
        """Device memory of the actor while it trains, activations and communicators apart."""
        return sum(line.nbytes for line in self.lines)

    @property
    def copied_bytes(self) -> int:
        """Bytes that a sleep copies out."""
        return sum(line.copied_bytes for line in self.lines)

    @property
    def stored_bytes(self) -> int:
        """Bytes that the store holds while the actor sleeps."""
        return sum(line.restored_bytes for line in self.lines)

    @property
    def restored_bytes(self) -> int:
        """Bytes that a wake copies to the device."""
        return self.stored_bytes + self.host_rebuilt_bytes

    @property
    def freed_bytes(self) -> int:
        """Device memory that a sleep gives back."""
        return sum(line.nbytes for line in self.lines if line.fate not in (Fate.KEPT, Fate.LEFT))

    def bytes_of(self, role: Role) -> int:
        """Bytes under one role."""
        return sum(line.nbytes for line in self.lines if line.role is role)


@dataclass(frozen=True)
class Forecast:
    """The account of a whole job. Bytes are bytes; GB and GiB appear in the tables only."""

    model: Model
    layout: Layout
    recipe: Recipe
    optimizer: Optimizer
    options: Options
    ranks: tuple[RankForecast, ...] = field(repr=False)
    """Groups of equal ranks, in pipeline order; their `ranks` add up to the GPUs of the layout."""

    @cached_property
    def fullest(self) -> RankForecast:
        """The rank group with the most device memory."""
        return max(self.ranks, key=lambda rank: rank.awake_bytes)

    def most(self, role: Role) -> int:
        """Bytes of a role on the rank that has the most of it."""
        return max(rank.bytes_of(role) for rank in self.ranks)

    def total(self, role: Role) -> int:
        """Bytes of a role over all ranks."""
        return sum(rank.ranks * rank.bytes_of(role) for rank in self.ranks)

    @property
    def awake_bytes(self) -> int:
        """Device memory over all ranks."""
        return sum(rank.ranks * rank.awake_bytes for rank in self.ranks)

    @property
    def copied_bytes(self) -> int:
        """Bytes that a sleep copies, over all ranks."""
        return sum(rank.ranks * rank.copied_bytes for rank in self.ranks)

    @property
    def restored_bytes(self) -> int:
        """Bytes that a wake copies, over all ranks."""
        return sum(rank.ranks * rank.restored_bytes for rank in self.ranks)

    @property
    def most_copied_bytes(self) -> int:
        """Bytes that a sleep copies on the rank that copies the most: it decides how long a sleep takes."""
        return max(rank.copied_bytes for rank in self.ranks)

    @property
    def most_restored_bytes(self) -> int:
        """Bytes that a wake copies on the rank that copies the most."""
        return max(rank.restored_bytes for rank in self.ranks)

    def by_rank(self) -> Iterator[RankForecast]:
        """The account of every rank, in rank order within a stage's groups."""
        for group in self.ranks:
            for _ in range(group.ranks):
                yield group

    def host_bytes_by_node(self) -> list[int]:
        """Host memory that each node needs: `HOST_FACTOR` times what its ranks store, and what an optimizer
        on the host holds. Ranks fill nodes in order."""
        needs = [int(HOST_FACTOR * rank.stored_bytes) + rank.optimizer_host_bytes for rank in self.by_rank()]
        size = self.layout.gpus_per_node
        return [sum(needs[start : start + size]) for start in range(0, len(needs), size)]

    def with_options(self, options: Options) -> Forecast:
        """The same actor, put to sleep another way."""
        return forecast(self.model, self.layout, self.recipe, self.optimizer, options)

    def savings(self) -> list[Saving]:
        """What each option that is on and saves anything saves on its own, and all together."""
        nothing = self.with_options(Options.off())
        names = [item.name for item in fields(Options) if item.name in SAVINGS and getattr(self.options, item.name)]
        alone = [(SAVINGS[name], self.with_options(self.options.only(name))) for name in names]
        found = [_saving(words, nothing, other) for words, other in alone]
        return [*(saving for saving in found if saving.job_bytes), _saving("together", nothing, self)]


@dataclass(frozen=True, slots=True)
class Saving:
    """Bytes that one sleep does not copy, thanks to one option."""

    option: str
    rank_bytes: int
    """On the rank that copies the most without any option."""
    job_bytes: int
    share: float
    """Of everything that would be copied over the job."""


def _saving(words: str, before: Forecast, after: Forecast) -> Saving:
    worst = max(range(len(before.ranks)), key=lambda index: before.ranks[index].copied_bytes)
    saved = before.copied_bytes - after.copied_bytes
    rank_saved = before.ranks[worst].copied_bytes - after.ranks[worst].copied_bytes
    return Saving(words, rank_saved, saved, saved / before.copied_bytes)


def forecast(
    model: Model,
    layout: Layout | None = None,
    recipe: Recipe | None = None,
    optimizer: Optimizer | None = None,
    options: Options | None = None,
) -> Forecast:
    """The account of an actor: what it holds, and what one sleep does with it, in steady state.

    Raises `UsageError`, naming the layer, where a split does not divide or a recipe refuses a shape.
    """
    layout, recipe = layout or Layout(), recipe or Recipe()
    optimizer, options = optimizer or Optimizer(), options or Options()
    found: list[RankForecast] = []
    for stage, layers in enumerate(stages(model, layout)):
        held = shards(layers, layout)
        ledger = _Ledger(model, recipe, optimizer, options)
        fixed = [
            *ledger.params(held),
            *ledger.grads(held),
            *ledger.caches(held),
            *ledger.buffers(layers, held),
        ]
        parameters = sum(shard.elements for shard in held)
        for ranks, owned in optimizer.ownership(held, layout):
            state = optimizer.state(owned, recipe)
            lines = add_up([*fixed, *ledger.optimizer_state(state)])
            from_host = state.host_params_bytes if options.rebuild_params else 0
            found.append(RankForecast(stage, ranks, lines, parameters, state.host_bytes, from_host))
    return Forecast(model, layout, recipe, optimizer, options, tuple(found))


def add_up(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Lines of the same component, role, fate and reason as one, empty ones left out."""
    sums: dict[tuple[str, Role, Fate, str], int] = {}
    for line in lines:
        key = (line.component, line.role, line.fate, line.reason)
        sums[key] = sums.get(key, 0) + line.nbytes
    return tuple(Line(*key[:3], nbytes, key[3]) for key, nbytes in sums.items() if nbytes)


@dataclass(frozen=True, slots=True)
class _Ledger:
    """The lines of one rank."""

    model: Model
    recipe: Recipe
    optimizer: Optimizer
    options: Options

    def quantizes(self, shard: Shard) -> bool:
        return self.recipe.quantizes(shard.layer, shard.weight, len(self.model.layers))

    def params(self, held: list[Shard]) -> Iterator[Line]:
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
        fate = Fate.ZEROED if self.options.zero_grads else Fate.MOVED
        reason = "dead after the step" if self.options.zero_grads else ""
        for shard in held:
            if shard.weight.trainable:
                width = FP32_BYTES if shard.weight.fp32 else self.optimizer.grad_bytes
                yield Line("grads", Role.GRAD, fate, width * shard.elements, reason)

    def caches(self, held: list[Shard]) -> Iterator[Line]:
        """Caches of quantized weights; data parallelism does not shard them."""
        fate, reason = self._cache_fate()
        for shard in held:
            if not self.quantizes(shard):
                continue
            self.recipe.check_shape(shard.rows, shard.cols, layer=shard.layer.name, weight=shard.weight.name)
            if self.recipe.cache and not self.recipe.primary_weights:
                nbytes = self._quantized_bytes(shard)
                yield Line("caches", Role.QUANTIZED_CACHE, fate, nbytes, reason)
        workspace = Fate.DROPPED if self.options.drop_caches else Fate.MOVED
        yield Line("caches", Role.WORKSPACE, workspace, WORKSPACE_BYTES, "cuBLAS scratch")

    def _cache_fate(self) -> tuple[Fate, str]:
        if not self.options.drop_caches:
            return Fate.MOVED, ""
        if self.options.cuda_graphs:
            return Fate.MOVED, "a CUDA graph reads its address"
        return Fate.DROPPED, "made again by the first microbatch"

    def _quantized_bytes(self, shard: Shard) -> int:
        directions = self.recipe.directions(shard.weight)
        return shard.count * self.recipe.weight_bytes(shard.rows, shard.cols, directions)

    def buffers(self, layers: list[Layer], held: list[Shard]) -> Iterator[Line]:
        for layer in layers:
            for buffer in layer.buffers:
                yield Line("buffers", Role.BUFFER, Fate.MOVED, buffer.nbytes)
        gemms = sum(shard.count for shard in held if self.quantizes(shard))
        scaling = self.recipe.scaling_state_bytes(gemms)
        yield Line("buffers", Role.BUFFER, Fate.MOVED, scaling, "scales and amax history: nothing rebuilds them")

    def optimizer_state(self, state: State) -> Iterator[Line]:
        yield Line("optimizer", Role.MASTER, Fate.MOVED, state.master_bytes)
        yield Line("optimizer", Role.MOMENT, Fate.MOVED, state.moment_bytes)

"""The account of an actor before it runs: bytes by component, role and fate, for a rank and for the job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property

from torpor.forecast.fates import SAVINGS, Line, Options, RankLedger, add_up
from torpor.forecast.layout import Layout, shards, stages
from torpor.forecast.optimizers import Optimizer
from torpor.forecast.recipes import Recipe
from torpor.forecast.shapes import Model
from torpor.kinds import Fate, Role

#: The host holds at most this many times the payload.
HOST_FACTOR = 1.03


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
        ledger = RankLedger(model, recipe, optimizer, options)
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

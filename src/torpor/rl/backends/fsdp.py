"""FSDP2: a transformers model sharded over the ranks of a device mesh with `fully_shard`.

Each decoder block is a unit of its own; embedding, final norm and output head belong to the root. Every rank
learns from its own share of the rollouts, and gradients are summed over the ranks: the losses are weighed by
the whole batch already. With two mesh dimensions the first replicates.

Letter: `N` answer tokens of all groups of a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torpor.checkpoint import latest, load_checkpoint, save_checkpoint
from torpor.errors import StateError, UnsupportedError, UsageError
from torpor.rl.backends.base import Backend, LossOf, Score, World
from torpor.rl.checkpoint import random_state, restore_random_state
from torpor.rl.config import OptimizerConfig
from torpor.rl.optimizers import build_optimizer, set_learning_rate
from torpor.rl.packing import Group
from torpor.rl.scoring import Scorer, Scoring, ValueScorer
from torpor.sleeper import Sleeper

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from torpor.rl.models import ValueModel

_SHARDS = "shards"
_PREFIX = "model."
"""Of the names of a `ScoringModule`."""
_IDLE = (Group((0,), ((0,),)),)
"""What a rank with fewer microbatches than the others computes in their place: collectives need everybody."""


class ProcessWorld(World):
    """The ranks of a process group that moves host tensors."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def sum(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return total.tolist()

    def gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered


class ScoringModule(nn.Module):
    """A model whose forward pass is a scoring pass, so that the root's parameters are whole while it runs."""

    def __init__(self, model: nn.Module, scoring: Scoring) -> None:
        super().__init__()
        self.model = model
        self._scoring = scoring

    def forward(self, groups: Sequence[Group]) -> tuple[Tensor, ...]:
        """What a pass gives, of all groups in one: FSDP hangs hooks on outputs, and views lose them."""
        return tuple(torch.cat(parts) for parts in zip(*self._scoring(groups), strict=True))

    def by_group(self, groups: Sequence[Group]) -> list[Score]:
        """A forward pass, its results group by group."""
        lengths = [sum(map(len, group.completions)) for group in groups]
        return list(zip(*(whole_N.split(lengths) for whole_N in self(groups)), strict=True))


def shard(model: nn.Module, decoder: nn.Module, scoring: Scoring, mesh: DeviceMesh) -> ScoringModule:
    """`model` as a `ScoringModule` over `mesh`, one FSDP unit a block of `decoder` and one for the rest.

    Raises:
        UnsupportedError: the decoder has no list of blocks.
    """
    blocks = getattr(decoder, "layers", None)
    if not isinstance(blocks, nn.ModuleList):
        raise UnsupportedError(f"{type(decoder).__name__} has no `layers` to shard one by one")
    root = ScoringModule(model, scoring)
    for module in (*blocks, root):
        fully_shard(module, mesh=mesh)
    return root


class ShardedBackend(Backend):
    """Any model sharded over a mesh, its optimizer, and frozen models sharded alike.

    Args:
        root: trained in place; the same on every rank before it was sharded.
        mesh: what it is sharded over.
        optimizer: what steps it.
        frozen: models by name that only score.

    Raises:
        UnsupportedError: the optimizer needs a missing package, or is several.
    """

    def __init__(
        self,
        root: ScoringModule,
        mesh: DeviceMesh,
        *,
        optimizer: OptimizerConfig,
        frozen: Mapping[str, ScoringModule] | None = None,
    ) -> None:
        self.world = ProcessWorld()
        self.device = torch.device(mesh.device_type)
        self.root = root.train()
        self.optimizer = build_optimizer(optimizer, root.parameters())
        self._sleeper: Sleeper | None = None
        self._frozen = {name: module.train(False).requires_grad_(False) for name, module in (frozen or {}).items()}
        self.snapshots = frozenset(self._frozen)
        self._weight_names = frozenset(name for name, _ in root.named_parameters())

    def open_sleeper(self, **options: Any) -> Sleeper:
        self._sleeper = Sleeper(
            self.root, optimizer=self.optimizer, extra=self._frozen, group=dist.group.WORLD, **options
        )
        return self._sleeper

    @torch.no_grad()
    def score(self, runs: Sequence[Sequence[Group]], *, snapshot: str | None = None) -> Iterator[Score]:
        if snapshot is not None and snapshot not in self.snapshots:
            raise UsageError(f"snapshot {snapshot!r}: this backend has {sorted(self.snapshots)}")
        module = self.root if snapshot is None else self._frozen[snapshot]
        for run in self._as_many_everywhere(runs):
            scores = module.by_group(run or _IDLE)
            if run:
                yield from scores

    def accumulate(self, runs: Sequence[Sequence[Group]], loss_of: LossOf) -> float:
        total = 0.0
        for index, run in enumerate(self._as_many_everywhere(runs)):
            scores = self.root.by_group(run or _IDLE)
            loss = loss_of(index, scores) if run else 0.0 * scores[0][0].sum()
            (self.world.size * loss).backward()  # type: ignore[no-untyped-call] # FSDP takes the mean over the ranks; the losses want the sum
            total += loss.item()
        return total

    def _as_many_everywhere(self, runs: Sequence[Sequence[Group]]) -> list[Sequence[Group]]:
        """`runs`, with empty ones behind them until every rank has as many."""
        most = max(self.world.gather(len(runs)))
        return [*runs, *([()] * (most - len(runs)))]

    def step(self, learning_rate: float, max_grad_norm: float | None) -> float:
        set_learning_rate(self.optimizer, learning_rate)
        parameters = list(self.root.parameters())
        total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = total.full_tensor() if isinstance(total, DTensor) else total
        if not torch.isfinite(norm):
            raise RuntimeError(f"the gradient norm is {norm.item()}; nothing was stepped")
        if max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def weights(self, sleeper: Sleeper) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in sleeper.stream():
            if name in self._weight_names:
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                yield name.removeprefix(_PREFIX), whole

    def save(self, sleeper: Sleeper, directory: Path) -> None:
        """Each rank writes its own shards; any number of ranks can read them."""
        save_checkpoint(directory / _SHARDS, 0, sleeper, local=random_state(self.device), frozen=self._frozen)

    def load(self, directory: Path) -> None:
        """Random state comes back if the checkpoint has one for this rank; the rest with any number of ranks."""
        if self._sleeper is None:
            raise StateError("load() comes after open_sleeper()")
        loaded = load_checkpoint(latest(directory / _SHARDS), self._sleeper, frozen=self._frozen)
        if loaded.local:  # none where more ranks read than wrote
            restore_random_state(loaded.local, self.device)


class FsdpBackend(ShardedBackend):
    """A policy: a transformers model, its optimizer, and frozen snapshots.

    Args:
        model: the same on every rank; sharded in place.
        mesh: one dimension (fully sharded) or two (replicated over the first).
        optimizer: what steps it.
        temperature: logits are divided by it.
        logit_chunk_tokens: tokens whose logits exist at a time.
        snapshots: frozen models by name, such as the reference of a KL penalty.

    Raises:
        UnsupportedError: the model cannot be sharded block by block, or the optimizer needs a missing package.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: DeviceMesh,
        *,
        optimizer: OptimizerConfig,
        temperature: float,
        logit_chunk_tokens: int,
        snapshots: Mapping[str, PreTrainedModel] | None = None,
    ) -> None:
        def sharded(policy: PreTrainedModel) -> ScoringModule:
            decoder: nn.Module = policy.get_decoder()  # type: ignore[no-untyped-call]
            return shard(policy, decoder, Scorer(policy, temperature, logit_chunk_tokens), mesh)

        frozen = {name: sharded(snapshot) for name, snapshot in (snapshots or {}).items()}
        super().__init__(sharded(model), mesh, optimizer=optimizer, frozen=frozen)


class FsdpCriticBackend(ShardedBackend):
    """A critic: a backbone with a value head, sharded, and its optimizer.

    Args:
        model: the same on every rank; sharded in place.
        mesh, optimizer: see `FsdpBackend`.
    """

    def __init__(self, model: ValueModel, mesh: DeviceMesh, *, optimizer: OptimizerConfig) -> None:
        super().__init__(shard(model, model.backbone, ValueScorer(model), mesh), mesh, optimizer=optimizer)

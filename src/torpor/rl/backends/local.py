"""One process, plain PyTorch: a transformers model on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torpor.errors import UsageError
from torpor.rl import checkpoint
from torpor.rl.backends.base import Backend, LossOf, Score, World
from torpor.rl.config import OptimizerConfig
from torpor.rl.optimizers import build_optimizer, set_learning_rate
from torpor.rl.packing import Group
from torpor.rl.scoring import Scorer
from torpor.sleeper import Sleeper

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LocalBackend(Backend):
    """A transformers model, its optimizer, and frozen snapshots as models of their own.

    Args:
        model: trained in place.
        optimizer: what steps it.
        temperature: logits are divided by it.
        logit_chunk_tokens: tokens whose logits exist at a time.
        snapshots: frozen models by name, such as the reference of a KL penalty.

    Raises:
        UnsupportedError: the optimizer needs a package that is not installed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        optimizer: OptimizerConfig,
        temperature: float,
        logit_chunk_tokens: int,
        snapshots: Mapping[str, PreTrainedModel] | None = None,
    ) -> None:
        self.world = World()
        self.device = model.device
        self.model = model.train()
        self.optimizer = build_optimizer(optimizer, model.parameters())
        self._score = Scorer(model, temperature, logit_chunk_tokens)
        self._frozen = {name: frozen.train(False).requires_grad_(False) for name, frozen in (snapshots or {}).items()}
        self._score_frozen = {name: Scorer(m, temperature, logit_chunk_tokens) for name, m in self._frozen.items()}
        self.snapshots = frozenset(self._frozen)
        self._weight_names = frozenset(name for name, _ in model.named_parameters())

    def open_sleeper(self, **options: Any) -> Sleeper:
        extra = {name: dict(frozen.named_parameters()) for name, frozen in self._frozen.items()}
        return Sleeper(self.model, optimizer=self.optimizer, extra=extra, **options)

    @torch.no_grad()
    def score(self, runs: Sequence[Sequence[Group]], *, snapshot: str | None = None) -> Iterator[Score]:
        scorer = self._score if snapshot is None else self._scorer_of(snapshot)
        for run in runs:
            yield from scorer(run)

    def _scorer_of(self, snapshot: str) -> Scorer:
        if snapshot not in self.snapshots:
            raise UsageError(f"snapshot {snapshot!r}: this backend has {sorted(self.snapshots)}")
        return self._score_frozen[snapshot]

    def accumulate(self, runs: Sequence[Sequence[Group]], loss_of: LossOf) -> float:
        total = 0.0
        for index, run in enumerate(runs):
            loss = loss_of(index, self._score(run))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    def step(self, learning_rate: float, max_grad_norm: float | None) -> float:
        set_learning_rate(self.optimizer, learning_rate)
        limit = float("inf") if max_grad_norm is None else max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def weights(self, sleeper: Sleeper) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in sleeper.stream() if name in self._weight_names)

    def save(self, sleeper: Sleeper, directory: Path) -> None:
        model = sleeper.state_dict()
        untied = _first_names(self.model)
        checkpoint.write_tensors(
            directory / "model.safetensors", {name: model[name] for name in model if name in untied}
        )
        del model  # one of the two copies at a time
        tensors, plain = checkpoint.split_optimizer_state(sleeper.optimizer_state_dict())
        checkpoint.write_tensors(directory / "optimizer.safetensors", tensors)
        checkpoint.write_tensors(directory / "random.safetensors", checkpoint.random_state(self.device))
        checkpoint.write_json(directory / "optimizer.json", plain)

    def load(self, directory: Path) -> None:
        weights = checkpoint.read_tensors(directory / "model.safetensors")
        wanted = self.model.state_dict().keys() & _first_names(self.model)
        if weights.keys() != wanted:
            raise UsageError(
                f"{directory} is of another model: missing {sorted(wanted - weights.keys())}, "
                f"unexpected {sorted(weights.keys() - wanted)}"
            )
        self.model.load_state_dict(weights, strict=False)  # ties are in the file once
        tensors = checkpoint.read_tensors(directory / "optimizer.safetensors")
        plain = checkpoint.read_json(directory / "optimizer.json")
        self.optimizer.load_state_dict(checkpoint.join_optimizer_state(tensors, plain))
        checkpoint.restore_random_state(checkpoint.read_tensors(directory / "random.safetensors"), self.device)


def _first_names(model: torch.nn.Module) -> frozenset[str]:
    """The names in the model's state of parameters and buffers, the first one of each that is tied."""
    seen: dict[int, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        seen.setdefault(id(tensor), name)
    return frozenset(seen.values())

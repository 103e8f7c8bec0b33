"""One process, plain PyTorch: a policy or a critic on one device."""

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
from torpor.rl.optimizers import build_optimizers, set_learning_rate
from torpor.rl.packing import Group
from torpor.rl.scoring import Scorer, Scoring, ValueScorer
from torpor.sleeper import Sleeper

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from torpor.rl.models import ValueModel


class OneProcessBackend(Backend):
    """Any model on one device, and what scores with it.

    Args:
        model: trained in place.
        backbone: the part of `model` whose matrices Muon may step.
        score: a pass through `model`.
        optimizer: what steps it.
        frozen: models by name that only score, each with its pass.

    Raises:
        UnsupportedError: the optimizer needs a package that is not installed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        backbone: torch.nn.Module,
        score: Scoring,
        *,
        optimizer: OptimizerConfig,
        frozen: Mapping[str, tuple[torch.nn.Module, Scoring]] | None = None,
    ) -> None:
        self.world = World()
        self.device = next(model.parameters()).device
        self.model = model.train()
        self.optimizers = build_optimizers(optimizer, model, backbone)
        self._score, self._frozen = score, dict(frozen or {})
        for module, _ in self._frozen.values():
            module.train(False).requires_grad_(False)
        self.snapshots = frozenset(self._frozen)
        self._weight_names = frozenset(name for name, _ in model.named_parameters())

    def open_sleeper(self, **options: Any) -> Sleeper:
        extra = {name: dict(frozen.named_parameters()) for name, (frozen, _) in self._frozen.items()}
        return Sleeper(self.model, optimizer=self.optimizers, extra=extra, **options)

    def release(self) -> None:
        for module in (self.model, *(frozen for frozen, _ in self._frozen.values())):
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                tensor.grad = None
        for optimizer in self.optimizers.values():
            optimizer.state.clear()

    @torch.no_grad()
    def score(self, runs: Sequence[Sequence[Group]], *, snapshot: str | None = None) -> Iterator[Score]:
        score = self._score if snapshot is None else self._scoring_of(snapshot)
        for run in runs:
            yield from score(run)

    def _scoring_of(self, snapshot: str) -> Scoring:
        if snapshot not in self.snapshots:
            raise UsageError(f"snapshot {snapshot!r}: this backend has {sorted(self.snapshots)}")
        return self._frozen[snapshot][1]

    def accumulate(self, runs: Sequence[Sequence[Group]], loss_of: LossOf) -> float:
        total = 0.0
        for index, run in enumerate(runs):
            loss = loss_of(index, list(self._score(run)))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    def step(self, learning_rate: float, max_grad_norm: float | None) -> float:
        parameters = list(self.model.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not torch.isfinite(norm):
            raise RuntimeError(
                f"the gradient norm is {norm.item()}; nothing was stepped. "
                "Lower the learning rate or optimizer.max_grad_norm, and go on from the last checkpoint"
            )
        if max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        for optimizer in self.optimizers.values():
            set_learning_rate(optimizer, learning_rate)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def weights(self, sleeper: Sleeper) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in sleeper.stream() if name in self._weight_names)

    def save(self, sleeper: Sleeper, directory: Path) -> None:
        model = sleeper.state_dict()
        untied = _first_names(self.model)
        checkpoint.write_tensors(
            directory / "model.safetensors", {name: model[name] for name in model if name in untied}
        )
        del model  # one copy at a time
        for name, (frozen, _) in self._frozen.items():
            # A run that goes on cannot make them again: they may come from a warm start.
            state = sleeper.read(dict(frozen.named_parameters()))
            checkpoint.write_tensors(directory / f"frozen-{name}.safetensors", state)
            del state
        for name in self.optimizers:
            tensors, plain = checkpoint.split_optimizer_state(sleeper.optimizer_state_dict(name))
            checkpoint.write_tensors(directory / f"{name}.safetensors", tensors)
            checkpoint.write_json(directory / f"{name}.json", plain)
        checkpoint.write_tensors(directory / "random.safetensors", checkpoint.random_state(self.device))

    def load(self, directory: Path) -> None:
        weights = checkpoint.read_tensors(directory / "model.safetensors")
        wanted = self.model.state_dict().keys() & _first_names(self.model)
        if weights.keys() != wanted:
            raise UsageError(
                f"{directory} is of another model: missing {sorted(wanted - weights.keys())}, "
                f"unexpected {sorted(weights.keys() - wanted)}"
            )
        self.model.load_state_dict(weights, strict=False)  # ties are in the file once
        for name, (frozen, _) in self._frozen.items():
            state = checkpoint.read_tensors(directory / f"frozen-{name}.safetensors")
            frozen.load_state_dict(state, strict=False)
        for name, optimizer in self.optimizers.items():
            tensors = checkpoint.read_tensors(directory / f"{name}.safetensors")
            plain = checkpoint.read_json(directory / f"{name}.json")
            optimizer.load_state_dict(checkpoint.join_optimizer_state(tensors, plain))
        checkpoint.restore_random_state(checkpoint.read_tensors(directory / "random.safetensors"), self.device)


class LocalBackend(OneProcessBackend):
    """A policy: a transformers model, its optimizer, and frozen snapshots as models of their own.

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
        super().__init__(
            model,
            model.get_decoder(),  # type: ignore[no-untyped-call]
            Scorer(model, temperature, logit_chunk_tokens),
            optimizer=optimizer,
            frozen={
                name: (frozen, Scorer(frozen, temperature, logit_chunk_tokens))
                for name, frozen in (snapshots or {}).items()
            },
        )


class LocalCriticBackend(OneProcessBackend):
    """A critic: a backbone with a value head, and its optimizer.

    Args:
        model: trained in place.
        optimizer: what steps it.

    Raises:
        UnsupportedError: the optimizer needs a package that is not installed.
    """

    def __init__(self, model: ValueModel, *, optimizer: OptimizerConfig) -> None:
        super().__init__(model, model.backbone, ValueScorer(model), optimizer=optimizer)


def _first_names(model: torch.nn.Module) -> frozenset[str]:
    """The names in the model's state of parameters and buffers, the first one of each that is tied."""
    seen: dict[int, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        seen.setdefault(id(tensor), name)
    return frozenset(seen.values())

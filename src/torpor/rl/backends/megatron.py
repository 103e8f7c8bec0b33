"""Megatron-Core: a Llama-shaped model on TransformerEngine's layers, in bf16 or a low-precision recipe.

Each answer is a row of its own behind its prompt, because attention kernels of a low-precision stack know the causal
mask and no other. Passes go through Megatron-Core's own schedule, which marks the first microbatch, after which
quantized copies of weights are made anew, and ends gradients' accumulation. Frozen weights are host copies that
trade places with the live ones while they score.

Letters: `N` scored tokens of a microbatch, one answer after the other; `K` tensors of a score; `T`, `B` and `D` tokens
of a row, rows, hidden width.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torpor.errors import UnsupportedError, UsageError
from torpor.memory.vmm import pool
from torpor.rl.backends import megatron_checkpoint
from torpor.rl.backends.base import Backend, LossOf, Score, World
from torpor.rl.backends.fsdp import ProcessWorld
from torpor.rl.backends.megatron_logits import shared_token_statistics
from torpor.rl.backends.megatron_model import (
    Allocation,
    Parts,
    build,
    require_megatron,
    require_shapes,
    start_process_groups,
    token_multiple,
)
from torpor.rl.backends.megatron_rows import Rows, lay_out
from torpor.rl.backends.megatron_weights import Architecture, Parameter, parameters_of, to_megatron, to_transformers
from torpor.rl.config import MegatronConfig, OptimizerConfig
from torpor.rl.optimizers import set_learning_rate
from torpor.rl.packing import Group
from torpor.rules.megatron_optim import parts as optimizer_parts
from torpor.rules.megatron_optim import unwrapped
from torpor.sleeper import Sleeper

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_IDLE = (Group((0,), ((0,),)),)
"""What a rank with fewer microbatches than the others computes in their place: collectives need everybody."""


class GptBackend(Backend):
    """Megatron-Core's GPT decoder, its optimizer, and frozen weights on the host.

    A subclass says what the last hidden states are turned into. Initialises `torch.distributed` and Megatron's
    parallel state if nobody did; without a launcher this process is alone.

    Args:
        config: the model's shape, as transformers describes it.
        architecture: the same for Megatron-Core.
        megatron: precision, parallel layout and implementation.
        optimizer: what steps it.
        weights: initial weights under transformers' names; None: random ones.
        extend: adds to the decoder what the subclass needs.
        extra: the parameters that `extend` adds.
        seed: of Megatron's random number trackers, and of random weights.
        memory: what model and optimizer are allocated in; None: `torpor.pool()`, on a GPU.

    Raises:
        UnsupportedError: no GPU, a missing package, or a model, precision or layout that cannot run.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        architecture: Architecture,
        *,
        megatron: MegatronConfig,
        optimizer: OptimizerConfig,
        weights: Iterable[tuple[str, Tensor]] | None,
        extend: Callable[[Any], None] = lambda model: None,
        extra: Sequence[Parameter] = (),
        seed: int,
        memory: Allocation | None,
    ) -> None:
        self.device = _device()
        require_megatron()
        self._config = config
        start_process_groups(megatron, seed)
        require_shapes(architecture, megatron)
        self.world = _data_parallel_world()
        self._tensor_group = _tensor_parallel_group()
        fused_norms = megatron.transformer_impl == "transformer_engine"
        self._parameters = [*parameters_of(architecture, self._tensor_group.size(), fused_norms=fused_norms), *extra]
        self._multiple = token_multiple(megatron)
        self._memory: Allocation = memory if memory is not None else partial(pool, self.device)
        fill = None if weights is None else partial(self._fill, weights=dict(weights))
        self._parts: Parts = build(architecture, megatron, optimizer, self.device, self._memory, extend, fill, seed)
        self._parts.chunk.train()
        self.optimizers: Mapping[str, torch.optim.Optimizer]
        """Torch's optimizers inside Megatron-Core's, by name."""
        self.optimizers, _ = unwrapped({"optimizer": self._parts.optimizer})
        self._snapshots: dict[str, dict[str, Tensor]] = {}
        self.snapshots = frozenset()

    @abstractmethod
    def _results(self, hidden_ND: Tensor, target_N: Tensor, output_layer: Any, output_weight: Tensor | None) -> Tensor:
        """What the hidden states that predict `target_N` are turned into, fp32 `[K, N]`: K tensors of each score."""

    # --- memory ----------------------------------------------------------------------------------------

    @property
    def chunk(self) -> Any:
        """The model, in its `DistributedDataParallel`."""
        return self._parts.chunk

    @property
    def optimizer(self) -> Any:
        """The `MegatronOptimizer`."""
        return self._parts.optimizer

    def open_sleeper(self, **options: Any) -> Sleeper:
        ranks = dist.group.WORLD if dist.get_world_size() > 1 else None
        return Sleeper(self.chunk, optimizer=self.optimizer, group=ranks, **options)

    # --- frozen weights --------------------------------------------------------------------------------

    def take_snapshot(self, name: str) -> None:
        """Keep the weights as they are under `name`, in host memory; an older snapshot of that name is overwritten.

        All parameters are awake.
        """
        held = self._snapshots.setdefault(name, {})
        for key, parameter in self.chunk.named_parameters():
            if key not in held:
                held[key] = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=True)
            held[key].copy_(parameter.detach())
        self.snapshots = frozenset(self._snapshots)

    @torch.no_grad()
    def _trade_places(self, name: str) -> None:
        """Live and frozen weights change places, exactly; a second call puts them back."""
        frozen = self._snapshots[name]
        for key, parameter in self.chunk.named_parameters():
            live = parameter.detach().clone()
            parameter.copy_(frozen[key])
            frozen[key].copy_(live)

    # --- passes ----------------------------------------------------------------------------------------

    def score(self, runs: Sequence[Sequence[Group]], *, snapshot: str | None = None) -> Iterator[Score]:
        """Of frozen weights all scores are there before the first is given out, and the live weights back."""
        if snapshot is not None and snapshot not in self._snapshots:
            raise UsageError(f"snapshot {snapshot!r}: this backend has {sorted(self._snapshots)}")
        if not runs and self.world.size == 1:
            return iter(())
        if snapshot is None:
            return iter(self._scores(runs))
        self._trade_places(snapshot)
        try:
            return iter(self._scores(runs))
        finally:
            self._trade_places(snapshot)

    @torch.no_grad()
    def _scores(self, runs: Sequence[Sequence[Group]]) -> list[Score]:
        everywhere = self._as_many_everywhere(runs)

        def keep(index: int, scores: list[Score], output: Tensor, non_loss_data: bool = False) -> list[Score]:
            return scores if everywhere[index] else []

        found = self._run(everywhere, keep, forward_only=True, collect_non_loss_data=True)
        return [score for scores in found for score in scores]

    def accumulate(self, runs: Sequence[Sequence[Group]], loss_of: LossOf) -> float:
        everywhere = self._as_many_everywhere(runs)
        if not everywhere:
            return 0.0
        nothing = torch.zeros((), dtype=torch.int, device=self.device)

        def share(index: int, scores: list[Score], output: Tensor) -> tuple[Tensor, Tensor, float]:
            loss = loss_of(index, scores) if everywhere[index] else 0.0 * output.sum()
            return loss, nothing, loss.item()

        losses: list[float] = self._run(everywhere, share, forward_only=False)
        return sum(losses)

    def _as_many_everywhere(self, runs: Sequence[Sequence[Group]]) -> list[Sequence[Group]]:
        """`runs`, with empty ones behind them until every rank has as many."""
        most = max(self.world.gather(len(runs)))
        return [*runs, *([()] * (most - len(runs)))]

    def _run(self, runs: Sequence[Sequence[Group]], judge: Callable[..., Any], **options: Any) -> list[Any]:
        """Megatron-Core's schedule over `runs`; what `judge` gave of each."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(numbered: Iterator[tuple[int, Sequence[Group]]], chunk: nn.Module) -> tuple[Tensor, Any]:
            index, groups = next(numbered)
            rows = lay_out(groups or _IDLE, self.device, self._multiple)
            output_KN = chunk(
                rows.token_ids_BT,
                rows.position_ids_BT,
                None,
                output_processor=self._in_place_of_logits,
                output_processor_context=rows,
            )
            return output_KN, partial(judge, index, _by_group(output_KN, rows))

        found: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(enumerate(runs)),
            model=self.chunk,
            num_microbatches=len(runs),
            seq_length=1,  # read by pipeline parallelism alone, as is the next
            micro_batch_size=1,
            **options,
        )
        return found

    def _in_place_of_logits(
        self, *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, context: Rows, **_: Any
    ) -> Tensor:
        """Called by the model where it would compute its logits; hidden states are `[T, B, D]`."""
        hidden_ND = hidden_states.flatten(0, 1)[context.predictor_N]
        return self._results(hidden_ND, context.target_N, output_layer, output_weight)

    def step(self, learning_rate: float, max_grad_norm: float | None) -> float:
        optimizer = self.optimizer
        for part in optimizer_parts(optimizer):
            part.config.clip_grad = float("inf") if max_grad_norm is None else max_grad_norm
        for inner in self.optimizers.values():
            set_learning_rate(inner, learning_rate)
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        if not torch.isfinite(torch.tensor(norm)):
            raise RuntimeError(f"the gradient norm is {norm}; nothing was stepped")
        with self._memory():  # moments are made by the first step
            optimizer.step()
        self.chunk.zero_grad_buffer()
        optimizer.zero_grad()
        return norm

    # --- state -----------------------------------------------------------------------------------------

    def weights(self, sleeper: Sleeper) -> Iterator[tuple[str, Tensor]]:
        held = dict(self._parts.model.named_parameters())
        for parameter in self._parameters:
            yield from to_transformers(parameter, self._shards(parameter, sleeper.read(held[parameter.name].detach())))

    def _shards(self, parameter: Parameter, own: Tensor) -> list[Tensor]:
        """What the tensor-parallel ranks hold of a parameter."""
        ranks = self._tensor_group.size()
        if parameter.cut_dim is None or ranks == 1:
            return [own]
        shards = [torch.empty_like(own, device=self.device) for _ in range(ranks)]
        dist.all_gather(shards, own.to(self.device).contiguous(), group=self._tensor_group)
        return shards

    @torch.no_grad()
    def _fill(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Set the model's parameters, wrapped or not, to weights under transformers' names."""
        held = {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
        group = self._tensor_group
        for name, tensor in to_megatron(weights, self._parameters, rank=group.rank(), num_ranks=group.size()):
            if held[name].shape != tensor.shape:
                raise UsageError(f"{name} has shape {tuple(held[name].shape)}, the weights {tuple(tensor.shape)}")
            held[name].copy_(tensor)

    def save(self, sleeper: Sleeper, directory: Path) -> None:
        """A checkpoint that transformers loads, and beside it what a resume needs; each rank writes its own share."""
        rank = dist.get_rank()
        if self.world.rank == 0:
            weights = {name: tensor.cpu() for name, tensor in self.weights(sleeper)}  # all tensor-parallel ranks gather
            if rank == 0:
                self._config.save_pretrained(directory)
                megatron_checkpoint.write_model(directory, weights)
            megatron_checkpoint.write_snapshots(directory, self._snapshots, self._tensor_group.rank())
        megatron_checkpoint.write_training_state(
            directory, self.optimizers, self._parts.model, sleeper, self.device, rank
        )

    def load(self, directory: Path) -> None:
        weights = megatron_checkpoint.read_model(directory)
        wanted = {part for parameter in self._parameters for part in parameter.parts}
        if weights.keys() != wanted:
            raise UsageError(
                f"{directory} is of another model: missing {sorted(wanted - weights.keys())}, "
                f"unexpected {sorted(weights.keys() - wanted)}"
            )
        self._fill(self._parts.model, weights)
        megatron_checkpoint.read_snapshots(directory, self._snapshots, self._tensor_group.rank())
        with self._memory():
            megatron_checkpoint.read_training_state(
                directory, self.optimizers, self._parts.model, self.device, dist.get_rank()
            )


class MegatronBackend(GptBackend):
    """A policy.

    Args:
        config, megatron, optimizer, weights, seed, memory: see `GptBackend`.
        temperature: logits are divided by it.
        logit_chunk_tokens: tokens whose logits exist at a time.
        snapshots: names under which the initial weights stay as frozen ones.

    Raises:
        UnsupportedError: see `GptBackend`.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        megatron: MegatronConfig,
        optimizer: OptimizerConfig,
        temperature: float,
        logit_chunk_tokens: int,
        weights: Iterable[tuple[str, Tensor]] | None = None,
        snapshots: Collection[str] = (),
        seed: int = 0,
        memory: Allocation | None = None,
    ) -> None:
        architecture = Architecture.of(config)
        super().__init__(
            config,
            architecture,
            megatron=megatron,
            optimizer=optimizer,
            weights=weights,
            seed=seed,
            memory=memory,
        )
        self._temperature, self._logit_chunk_tokens = temperature, logit_chunk_tokens
        for name in snapshots:
            self.take_snapshot(name)

    def _results(self, hidden_ND: Tensor, target_N: Tensor, output_layer: Any, output_weight: Tensor | None) -> Tensor:
        """Log-probability and entropy, `[2, N]`."""
        statistics = shared_token_statistics(
            hidden_ND,
            output_layer.weight if output_weight is None else output_weight,
            target_N,
            self._tensor_group,
            temperature=self._temperature,
            chunk_tokens=self._logit_chunk_tokens,
        )
        return torch.stack(statistics)


class MegatronCriticBackend(GptBackend):
    """A critic: the decoder of a policy with a value head in fp32, zero before the first step.

    Args:
        config, megatron, optimizer, seed, memory: see `GptBackend`.
        weights: those of the policy.

    Raises:
        UnsupportedError: see `GptBackend`.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        megatron: MegatronConfig,
        optimizer: OptimizerConfig,
        weights: Iterable[tuple[str, Tensor]],
        seed: int = 0,
        memory: Allocation | None = None,
    ) -> None:
        head = {"value_head.weight": torch.zeros(1, config.hidden_size), "value_head.bias": torch.zeros(1)}
        super().__init__(
            config,
            replace(Architecture.of(config), ties_embeddings=True),  # so that there is no output head
            megatron=megatron,
            optimizer=optimizer,
            weights=[*weights, *head.items()],
            extend=self._add_head,
            extra=[Parameter(name, (name,)) for name in head],
            seed=seed,
            memory=memory,
        )

    def _add_head(self, model: Any) -> None:
        # fp32 whatever the decoder is: values are regressed on, and a bf16 head would round them to 3 digits.
        model.value_head = nn.Linear(model.config.hidden_size, 1, device=self.device, dtype=torch.float32)

    def _results(self, hidden_ND: Tensor, target_N: Tensor, output_layer: Any, output_weight: Tensor | None) -> Tensor:
        """Values, `[1, N]`."""
        values_N1: Tensor = self._parts.model.value_head(hidden_ND.float())
        return values_N1.T


def _device() -> torch.device:
    """This rank's GPU, from now on the current one."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "backend = megatron needs an NVIDIA GPU, and torch sees none here: Megatron-Core puts its buffers on one. "
            "Choose backend = local or fsdp, which run on the CPU too"
        )
    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device())


def _data_parallel_world() -> World:
    from megatron.core import parallel_state

    if parallel_state.get_data_parallel_world_size() == 1:
        return World()
    return ProcessWorld(parallel_state.get_data_parallel_group_gloo())


def _tensor_parallel_group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group


def _by_group(output_KN: Tensor, rows: Rows) -> list[Score]:
    return [tuple(part_KT) for part_KT in torch.split(output_KN, list(rows.lengths), 1)]

"""From a configuration and a model to the roles of a run: actor, critic, engine. Used wherever a role runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torpor.report.rundir import RunDirectory
from torpor.rl import config as cfg
from torpor.rl.actor import REFERENCE, Actor
from torpor.rl.backends.base import Backend
from torpor.rl.backends.fsdp import FsdpBackend, FsdpCriticBackend
from torpor.rl.backends.local import LocalBackend, LocalCriticBackend
from torpor.rl.backends.megatron import MegatronBackend, MegatronCriticBackend
from torpor.rl.critic import Critic
from torpor.rl.models import value_model
from torpor.rl.rollout.embedded import EmbeddedEngine
from torpor.stores.file import FileStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from torpor.ledger import Ledger

MIB = 1024**2


def build_actor(
    config: cfg.RunConfig, model: PreTrainedModel, run: RunDirectory, on_ledger: Callable[[Ledger], None]
) -> Actor:
    """The policy's side of the loop, awake. With `backend = fsdp` every rank calls this with the same model.

    Raises:
        UnsupportedError: what the backend or the optimizer needs is not installed.
    """
    algorithm = config.algorithm
    return Actor(
        _policy_backend(config, model),
        algorithm=algorithm,
        optimizer=config.optimizer,
        trainer=config.trainer,
        max_answer_tokens=config.rollout.max_new_tokens,
        total_updates=(
            max(0, config.steps - config.critic.warmup_steps)
            * algorithm.updates_per_rollout
            * algorithm.epochs_per_rollout
        ),
        on_ledger=on_ledger,
        **sleep_options(config.memory, run),
        **_rule_options(config),
    )


def build_critic(
    config: cfg.RunConfig, model: PreTrainedModel, run: RunDirectory, on_ledger: Callable[[Ledger], None]
) -> Critic:
    """The critic of PPO, awake; it begins with a copy of the policy's backbone.

    Raises:
        UnsupportedError: see `build_actor`.
    """
    return Critic(
        _critic_backend(config, model),
        algorithm=config.algorithm,
        config=config.critic,
        trainer=config.trainer,
        total_updates=config.steps * config.critic.updates_per_rollout * config.critic.epochs_per_rollout,
        on_ledger=on_ledger,
        **sleep_options(config.memory, run),
        **_rule_options(config),
    )


def build_engine(config: cfg.RunConfig, model: PreTrainedModel) -> EmbeddedEngine:
    """An engine that takes `model` over, asleep if it may be; its weights come with the first update."""
    if config.backend == "megatron":
        _move(model, torch.bfloat16)
    engine = EmbeddedEngine(model, kv_cache_bytes=config.rollout.kv_cache_mib * MIB, weight_version=None)
    if config.memory.engine_sleeps:
        engine.sleep()
    return engine


def sleep_options(memory: cfg.MemoryConfig, run: RunDirectory) -> dict[str, Any]:
    """How a learner sleeps: options of `Learner` and its sleeper."""
    return {
        "offload": memory.learners_sleep,
        "store": _file_store(memory, run) if memory.offload_train_target == "disk" else _host_store(),
        "verify": memory.verify,
        "lazy_wake": memory.lazy_wake,
        "report_leftovers": memory.report_leftovers,
    }


def _policy_backend(config: cfg.RunConfig, model: PreTrainedModel) -> Backend:
    options: dict[str, Any] = {
        "optimizer": config.optimizer,
        "temperature": config.rollout.temperature,
        "logit_chunk_tokens": config.trainer.logit_chunk_tokens,
        "snapshots": {REFERENCE: copy.deepcopy(model)} if config.algorithm.kl_coefficient > 0 else None,
    }
    match config.backend:
        case "local":
            return LocalBackend(model, **options)
        case "fsdp":
            return FsdpBackend(model, _all_ranks(model.device), **options)
        case "megatron":
            options["snapshots"] = tuple(options["snapshots"] or ())
            weights = model.named_parameters()
            return MegatronBackend(model.config, megatron=config.megatron, weights=weights, seed=config.seed, **options)


def _critic_backend(config: cfg.RunConfig, model: PreTrainedModel) -> Backend:
    optimizer = config.critic.optimizer
    match config.backend:
        case "local":
            return LocalCriticBackend(value_model(model), optimizer=optimizer)
        case "fsdp":
            return FsdpCriticBackend(value_model(model), _all_ranks(model.device), optimizer=optimizer)
        case "megatron":
            weights = model.named_parameters()
            return MegatronCriticBackend(
                model.config, megatron=config.megatron, optimizer=optimizer, weights=weights, seed=config.seed
            )


def _rule_options(config: cfg.RunConfig) -> dict[str, bool]:
    """What the sleeper's rules for Megatron-Core and TransformerEngine are told."""
    if config.backend != "megatron":
        return {}
    megatron = config.megatron
    return {
        "clear_quantized_weight_workspaces": megatron.clear_quantized_weight_workspaces_on_offload,
        "rematerialize_param_from_master_weight": megatron.rematerialize_param_from_master_weight,
    }


def _move(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Parameters and buffers to the GPU, if there is one; only parameters to `dtype`: rotary frequencies need fp32."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for parameter in module.parameters():
        parameter.data = parameter.data.to(device, dtype)
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, buffer.to(device))


def _host_store() -> str:
    """Page-locked memory where a GPU copies into it."""
    return "pinned" if torch.cuda.is_available() else "pageable"


def _all_ranks(device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (dist.get_world_size(),))


def _file_store(memory: cfg.MemoryConfig, run: RunDirectory) -> FileStore:
    directory, chunk_mb = memory.offload_train_disk_dir or run.store, memory.offload_train_disk_chunk_mb
    return FileStore(directory) if chunk_mb is None else FileStore(directory, chunk_bytes=chunk_mb * MIB)

"""From a configuration to everything a run consists of."""

from __future__ import annotations

import copy
import string
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from torpor.errors import UsageError
from torpor.report.recorder import Recorder
from torpor.report.rundir import RunDirectory
from torpor.rl import config as cfg
from torpor.rl.actor import REFERENCE, Actor
from torpor.rl.backends.local import LocalBackend, LocalCriticBackend
from torpor.rl.checkpoint import latest_checkpoint, step_of
from torpor.rl.config_cli import changed_for_resume, load_config, save_config
from torpor.rl.critic import Critic
from torpor.rl.loop import Job
from torpor.rl.models import char_tokenizer, load_model, load_tokenizer, smollm2_directory, tiny_model, value_model
from torpor.rl.rollout.embedded import EmbeddedEngine
from torpor.rl.tasks.base import Task, Tokenizer, stop_token_ids
from torpor.rl.tasks.jsonl import JsonlTask
from torpor.rl.tasks.reasoning_gym import ReasoningGymTask
from torpor.rl.tasks.strings import StringTask
from torpor.rl.warm_start import warm_start
from torpor.stores.file import FileStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIB = 1024**2


@contextmanager
def open_job(config: cfg.RunConfig) -> Iterator[Job]:
    """A job that is ready for `run_loop`; everything is closed at the end of the block.

    Raises:
        UsageError: the run directory is taken, or cannot be resumed with this configuration.
        UnsupportedError: a package that the configuration needs is not installed.
    """
    run = prepare_run_directory(config)
    checkpoint = latest_checkpoint(run.checkpoints) if config.resume else None
    first_step = step_of(checkpoint) if checkpoint is not None else 0
    save_config(config, run.config)
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    with _recorder(config, run, first_step) as recorder:
        with recorder.phase("build"):
            task = build_task(config.task, config.seed)
            model, tokenizer = build_model(config)
        if checkpoint is None:
            _warm_start(config, model, task, tokenizer, recorder)
        with (
            _build_critic(config, model, recorder, run) as critic,
            _build_actor(config, model, recorder, run) as actor,
            _build_engine(config, model) as engine,
        ):
            ending = stop_token_ids(tokenizer, task.stop)
            job = Job(config, task, tokenizer, actor, engine, recorder, ending, first_step, critic)
            if checkpoint is not None:
                job.load(checkpoint)
            yield job


def prepare_run_directory(config: cfg.RunConfig) -> RunDirectory:
    """The directory of the run, made if need be.

    Raises:
        UsageError: it holds another run, or the run in it was started with other settings.
    """
    run = RunDirectory(config.run_dir if config.run_dir is not None else _free_directory(config.name))
    if config.resume:
        changed = changed_for_resume(load_config(run.config), config)
        if changed:
            raise UsageError(
                f"{run.path} was started with another {', '.join(changed)}: resume with the same, or start anew",
                changed=changed,
            )
    elif run.has_begun:
        raise UsageError(f"{run.path} holds a run already: add --resume, or choose another --run-dir")
    else:
        run.clear()
    run.create()
    return run


def build_task(config: cfg.Task, seed: int) -> Task:
    """The task that `config` names.

    Raises:
        UsageError, UnsupportedError: see the tasks.
    """
    match config:
        case cfg.StringTask():
            return StringTask(config.operation, min_length=config.min_length, max_length=config.max_length, seed=seed)
        case cfg.ReasoningGymTask():
            return ReasoningGymTask(
                config.dataset,
                config.parameters,
                num_examples=config.num_examples,
                style=config.style,
                strict=config.strict,
                seed=seed,
            )
        case cfg.JsonlTask():
            return JsonlTask(config.path, config.reward, stop=config.stop, eval_share=config.eval_share, seed=seed)


def build_model(config: cfg.RunConfig) -> tuple[PreTrainedModel, Tokenizer]:
    """The policy and its tokenizer.

    Raises:
        UsageError, UnsupportedError: see `torpor.rl.models`.
    """
    model = config.model
    match model:
        case cfg.TinyModel():
            alphabet = StringTask.alphabet if isinstance(config.task, cfg.StringTask) else string.printable
            tokenizer = char_tokenizer(alphabet)
            policy = tiny_model(len(tokenizer), model.hidden_size, model.num_layers, model.num_heads, seed=config.seed)
            return policy, cast(Tokenizer, tokenizer)
        case cfg.SmolLM2Model():
            directory = smollm2_directory()
        case cfg.PretrainedModel():
            directory = model.path
    return load_model(directory), cast(Tokenizer, load_tokenizer(directory))


def _recorder(config: cfg.RunConfig, run: RunDirectory, first_step: int) -> Recorder:
    return Recorder(
        run,
        total_steps=config.steps,
        first_step=first_step,
        memory_interval_s=config.report.memory_interval_s,
        plot_interval_steps=config.report.plot_interval_steps,
        tensorboard=config.report.tensorboard,
    )


def _warm_start(
    config: cfg.RunConfig, model: PreTrainedModel, task: Task, tokenizer: Tokenizer, recorder: Recorder
) -> None:
    steps = config.warm_start.steps
    if not steps:
        return
    with recorder.phase("warm_start", steps, "steps") as counter:
        losses = warm_start(
            model, task, tokenizer, config.warm_start, config.trainer, on_step=lambda _: counter.advance()
        )
    recorder.console.say(f"warm start: {steps} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}")


def _build_actor(config: cfg.RunConfig, model: PreTrainedModel, recorder: Recorder, run: RunDirectory) -> Actor:
    algorithm = config.algorithm
    backend = LocalBackend(
        model,
        optimizer=config.optimizer,
        temperature=config.rollout.temperature,
        logit_chunk_tokens=config.trainer.logit_chunk_tokens,
        snapshots={REFERENCE: copy.deepcopy(model)} if algorithm.kl_coefficient > 0 else None,
    )
    return Actor(
        backend,
        algorithm=algorithm,
        optimizer=config.optimizer,
        trainer=config.trainer,
        max_answer_tokens=config.rollout.max_new_tokens,
        total_updates=(
            max(0, config.steps - config.critic.warmup_steps)
            * algorithm.updates_per_rollout
            * algorithm.epochs_per_rollout
        ),
        on_ledger=recorder.ledger,
        **sleep_options(config.memory, run),
    )


@contextmanager
def _build_critic(
    config: cfg.RunConfig, model: PreTrainedModel, recorder: Recorder, run: RunDirectory
) -> Iterator[Critic | None]:
    """The critic of PPO, asleep if it may be; None for an algorithm without one."""
    if config.algorithm.advantages != "gae":
        yield None
        return
    critic = Critic(
        LocalCriticBackend(value_model(model), optimizer=config.critic.optimizer),
        algorithm=config.algorithm,
        config=config.critic,
        trainer=config.trainer,
        total_updates=config.steps * config.critic.updates_per_rollout * config.critic.epochs_per_rollout,
        on_ledger=partial(recorder.ledger, learner="critic"),
        **sleep_options(config.memory, run),
    )
    with critic:
        critic.sleep()
        yield critic


def sleep_options(memory: cfg.MemoryConfig, run: RunDirectory) -> dict[str, Any]:
    """How a learner sleeps: options of `Learner` and its sleeper."""
    return {
        "offload": memory.learners_sleep,
        "store": _file_store(memory, run) if memory.offload_train_target == "disk" else "pageable",
        "verify": memory.verify,
        "lazy_wake": memory.lazy_wake,
        "report_leftovers": memory.report_leftovers,
    }


def _file_store(memory: cfg.MemoryConfig, run: RunDirectory) -> FileStore:
    directory, chunk_mb = memory.offload_train_disk_dir or run.store, memory.offload_train_disk_chunk_mb
    return FileStore(directory) if chunk_mb is None else FileStore(directory, chunk_bytes=chunk_mb * MIB)


def _build_engine(config: cfg.RunConfig, model: PreTrainedModel) -> EmbeddedEngine:
    """An engine with memory of its own, asleep if it may be; its weights come with the first update."""
    engine = EmbeddedEngine(copy.deepcopy(model), kv_cache_bytes=config.rollout.kv_cache_mib * MIB, weight_version=None)
    if config.memory.engine_sleeps:
        engine.sleep()
    return engine


def _free_directory(name: str) -> Path:
    """`runs/NAME`, or the first of `runs/NAME-2`, `runs/NAME-3`, ... that does not exist."""
    candidate, number = Path("runs") / name, 1
    while candidate.exists():
        number += 1
        candidate = Path("runs") / f"{name}-{number}"
    return candidate

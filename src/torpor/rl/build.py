"""From a configuration to everything a run consists of."""

from __future__ import annotations

import copy
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from torpor.errors import UsageError
from torpor.report.recorder import Recorder
from torpor.report.rundir import RunDirectory
from torpor.rl import config as cfg
from torpor.rl.checkpoint import latest_checkpoint, step_of
from torpor.rl.config_cli import changed_for_resume, load_config, save_config
from torpor.rl.critic import Critic
from torpor.rl.loop import Job, Roles
from torpor.rl.models import char_tokenizer, load_model, load_tokenizer, smollm2_directory, tiny_model
from torpor.rl.roles import build_actor, build_critic, build_engine
from torpor.rl.tasks.base import Task, Tokenizer, stop_token_ids
from torpor.rl.tasks.jsonl import JsonlTask
from torpor.rl.tasks.reasoning_gym import ReasoningGymTask
from torpor.rl.tasks.strings import StringTask
from torpor.rl.warm_start import warm_start

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    with _recorder(config, run, first_step) as recorder:
        task = build_task(config.task, config.seed)
        with _open_roles(config, run, recorder, task, is_fresh=checkpoint is None) as roles:
            ending = stop_token_ids(roles.tokenizer, task.stop)
            job = Job(
                config, task, roles.tokenizer, roles.actor, roles.engine, recorder, ending, first_step, roles.critic
            )
            if checkpoint is not None:
                job.load(checkpoint)
            yield job


def _open_roles(
    config: cfg.RunConfig, run: RunDirectory, recorder: Recorder, task: Task, *, is_fresh: bool
) -> AbstractContextManager[Roles]:
    """Everybody who has a turn, where the configuration says; warmed up if the run is fresh."""
    if config.runtime == "ray":
        from torpor.rl.runtimes.ray_runtime import open_on_ray  # Ray is not needed otherwise

        return open_on_ray(config, run, recorder, is_fresh=is_fresh)
    return _open_here(config, run, recorder, task, is_fresh=is_fresh)


@contextmanager
def _open_here(
    config: cfg.RunConfig, run: RunDirectory, recorder: Recorder, task: Task, *, is_fresh: bool
) -> Iterator[Roles]:
    """All roles in this process."""
    prepare_process(config)
    with recorder.phase("build"):
        model, tokenizer = build_model(config)
    if is_fresh and config.warm_start.steps:
        with recorder.phase("warm_start", config.warm_start.steps, "steps") as counter:
            losses = warm_up(config, model, task, tokenizer, on_step=lambda _: counter.advance())
        recorder.console.say(describe_warm_start(losses))
    with (
        _open_critic(config, model, recorder, run) as critic,
        build_actor(config, model, run, recorder.ledger) as actor,
        build_engine(config, copy.deepcopy(model)) as engine,
    ):
        yield Roles(tokenizer, actor, engine, critic)
        if critic is not None:
            critic.release()  # the actor wakes when it is closed, and the two may not fit side by side


def prepare_process(config: cfg.RunConfig) -> None:
    """Threads and random state of a process in which a role computes."""
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)


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
    model, tokenizer = config.model, build_tokenizer(config)
    if isinstance(model, cfg.TinyModel):
        policy = tiny_model(len(tokenizer), model.hidden_size, model.num_layers, model.num_heads, seed=config.seed)
        return policy, tokenizer
    return load_model(_model_directory(model)), tokenizer


def build_tokenizer(config: cfg.RunConfig) -> Tokenizer:
    """The policy's tokenizer.

    Raises:
        UsageError, UnsupportedError: see `torpor.rl.models`.
    """
    if isinstance(config.model, cfg.TinyModel):
        alphabet = StringTask.alphabet if isinstance(config.task, cfg.StringTask) else string.printable
        return cast(Tokenizer, char_tokenizer(alphabet))
    return cast(Tokenizer, load_tokenizer(_model_directory(config.model)))


def _model_directory(model: cfg.SmolLM2Model | cfg.PretrainedModel) -> Path:
    return model.path if isinstance(model, cfg.PretrainedModel) else smollm2_directory()


def _recorder(config: cfg.RunConfig, run: RunDirectory, first_step: int) -> Recorder:
    return Recorder(
        run,
        total_steps=config.steps,
        first_step=first_step,
        memory_interval_s=config.report.memory_interval_s,
        plot_interval_steps=config.report.plot_interval_steps if config.report.plots else None,
        tensorboard=config.report.tensorboard,
    )


def warm_up(
    config: cfg.RunConfig,
    model: PreTrainedModel,
    task: Task,
    tokenizer: Tokenizer,
    on_step: Callable[[float], None] = lambda _: None,
) -> list[float]:
    """The supervised steps before the first rollout; the loss of each."""
    return warm_start(model, task, tokenizer, config.warm_start, config.trainer, on_step=on_step)


def describe_warm_start(losses: Sequence[float]) -> str:
    """One line for the console."""
    return f"warm start: {len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}"


@contextmanager
def _open_critic(
    config: cfg.RunConfig, model: PreTrainedModel, recorder: Recorder, run: RunDirectory
) -> Iterator[Critic | None]:
    """The critic of PPO, asleep if it may be; None for an algorithm without one."""
    if config.algorithm.advantages != "gae":
        yield None
        return
    with build_critic(config, model, run, partial(recorder.ledger, learner="critic")) as critic:
        critic.sleep()
        yield critic


def _free_directory(name: str) -> Path:
    """`runs/NAME`, or the first of `runs/NAME-2`, `runs/NAME-3`, ... that does not exist."""
    candidate, number = Path("runs") / name, 1
    while candidate.exists():
        number += 1
        candidate = Path("runs") / f"{name}-{number}"
    return candidate

"""The colocated loop: actor, engine and, with PPO, a critic take turns with the memory.

engine.wake("weights")      the learners sleep
update_weights              from the sleeping actor's store
engine.wake("kv_cache")
generate, evaluate
engine.sleep()
critic.wake_up()            with PPO; actor and engine sleep
appraise, train
critic.sleep()
actor.wake_up()             engine and critic sleep
train
actor.sleep()
checkpoint                  from the stores
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from torpor.report.metrics import Mean, Metrics, Sum
from torpor.report.recorder import Recorder
from torpor.rl.batch import Batch, group_rollouts, make_batch
from torpor.rl.checkpoint import save_checkpoint
from torpor.rl.config import RunConfig
from torpor.rl.critic import Appraisal
from torpor.rl.learner import Progress
from torpor.rl.rollout.base import LoadReport, Rollout, RolloutEngine, SamplingParams, Tag
from torpor.rl.tasks.base import Question, Split, Task, Tokenizer, encode_prompt

CRITIC = "critic"
"""Directory of a checkpoint with what the critic saved."""


class Policy(Protocol):
    """What the loop asks of an actor: an `Actor`, or several ranks as one."""

    @property
    def is_asleep(self) -> bool: ...
    def sleep(self) -> None: ...
    def wake_up(self) -> None: ...
    def train(self, batch: Batch, progress: Progress = ...) -> Metrics: ...
    def reference_gaps(self, batch: Batch) -> Sequence[Tensor]: ...
    def update_weights(self, engine: RolloutEngine) -> LoadReport: ...
    def save(self, directory: Path) -> None: ...
    def load(self, directory: Path) -> None: ...


class Judge(Protocol):
    """What the loop asks of a critic: a `Critic`, or several ranks as one."""

    @property
    def is_asleep(self) -> bool: ...
    def sleep(self) -> None: ...
    def wake_up(self) -> None: ...
    def appraise(self, batch: Batch, gaps: Sequence[Tensor] | None = ...) -> Appraisal: ...
    def train(self, appraisal: Appraisal, progress: Progress = ...) -> Metrics: ...
    def save(self, directory: Path) -> None: ...
    def load(self, directory: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Roles:
    """Everybody who has a turn. The actor is awake, engine and critic are asleep if they may be."""

    tokenizer: Tokenizer
    actor: Policy
    engine: RolloutEngine
    critic: Judge | None = None
    """With PPO."""


@dataclass(slots=True)
class Job:
    """Everything a run consists of. The actor is awake, engine and critic asleep when the loop begins."""

    config: RunConfig
    task: Task
    tokenizer: Tokenizer
    actor: Policy
    engine: RolloutEngine
    recorder: Recorder
    stop_token_ids: tuple[int, ...]
    """What ends an answer."""
    first_step: int = 0
    critic: Judge | None = None
    """With PPO."""

    def save(self, directory: Path) -> None:
        """Write what both learners know into `directory`."""
        self.actor.save(directory)
        if self.critic is not None:
            (directory / CRITIC).mkdir()
            self.critic.save(directory / CRITIC)

    def load(self, directory: Path) -> None:
        """Take everything that `save` wrote, to the bit; the critic sleeps again before the actor has its turn.

        Raises:
            UsageError: the checkpoint is of another model.
        """
        if self.critic is not None:
            self.critic.load(directory / CRITIC)
            self.critic.sleep()
        self.actor.load(directory)


def run_loop(job: Job) -> None:
    """All steps, with an evaluation after the last. Step `s` sees the same questions and random numbers in
    every run with the same seed, resumed or not."""
    fall_asleep(job)
    job.recorder.summary(job.first_step)
    for step in range(job.first_step, job.config.steps):
        with job.recorder.step(step):
            run_step(job, step)
    if job.config.evaluation.interval_steps:
        wake_engine(job)
        evaluate(job)
        sleep_engine(job)
        values = job.recorder.summary(job.config.steps)
        job.recorder.console.say(f"held-out reward after {job.config.steps} steps: {values['eval/reward']:.3f}")


def run_step(job: Job, step: int) -> None:
    """One turn of each: engine, critic, actor."""
    wake_engine(job)
    if is_due(step, job.config.evaluation.interval_steps):
        evaluate(job)
    batch = roll_out(job, step)
    sleep_engine(job)
    if job.critic is not None:
        batch = judge(job, job.critic, batch)
    if step >= job.config.critic.warmup_steps:
        wake_actor(job)
        learn(job, batch)
        fall_asleep(job)
    save_if_due(job, step + 1)


def wake_engine(job: Job) -> None:
    """The engine awake, with the actor's weights."""
    with job.recorder.phase("engine_wake"):
        job.engine.wake([Tag.WEIGHTS])
    with job.recorder.phase("update_weights"):
        job.actor.update_weights(job.engine)
    with job.recorder.phase("engine_wake"):
        job.engine.wake([Tag.KV_CACHE])
    note_who_sleeps(job)


def sleep_engine(job: Job) -> None:
    """The engine's memory given back, if it may."""
    if job.config.memory.engine_sleeps:
        with job.recorder.phase("engine_sleep"):
            job.engine.sleep()
    note_who_sleeps(job)


def judge(job: Job, critic: Judge, batch: Batch) -> Batch:
    """The critic's turn: the advantages of `batch`, and one training step of the critic."""
    gaps = None
    if job.config.algorithm.kl_in == "reward":
        with job.recorder.phase("reference"):
            gaps = job.actor.reference_gaps(batch)
            job.recorder.metrics.record(
                "policy/kl_reward", Mean(sum(gap_T.sum().item() for gap_T in gaps), batch.num_answer_tokens)
            )
    with job.recorder.phase("critic_wake"):
        critic.wake_up()
    note_who_sleeps(job)
    with job.recorder.phase("values"):
        appraisal = critic.appraise(batch, gaps)
    total = len(batch.groups) * job.config.critic.epochs_per_rollout
    with job.recorder.phase("critic_train", total, "groups") as counter:
        job.recorder.metrics.update(critic.train(appraisal, progress=counter.advance))
    with job.recorder.phase("critic_sleep"):
        critic.sleep()
    note_who_sleeps(job)
    return appraisal.batch


def wake_actor(job: Job) -> None:
    """The actor awake."""
    with job.recorder.phase("actor_wake"):
        job.actor.wake_up()
    note_who_sleeps(job)


def fall_asleep(job: Job) -> None:
    """The actor's memory given back, if it may."""
    with job.recorder.phase("actor_sleep"):
        job.actor.sleep()
    note_who_sleeps(job)


def note_who_sleeps(job: Job) -> None:
    """Readings of memory say it from now on."""
    critic = {} if job.critic is None else {"critic": job.critic.is_asleep}
    job.recorder.asleep(actor=job.actor.is_asleep, engine=bool(job.engine.asleep), **critic)


def roll_out(job: Job, step: int) -> Batch:
    """Answers to the questions of `step`, scored and grouped; with advantages if no critic is to judge them."""
    config = job.config
    count = config.rollout.prompts_per_step
    questions = [job.task.sample(step * count + i) for i in range(count)]
    with job.recorder.phase("generate"):
        rollouts = job.engine.generate(
            [encode_prompt(job.tokenizer, question.prompt) for question in questions],
            sampling(job, num_samples=config.rollout.group_size, seed=config.seed * 1_000_003 + step),
        )
    if job.engine.last_generation is not None:
        job.recorder.metrics.record("rollout/tokens_per_s", Mean(job.engine.last_generation.tokens_per_s))
    rewards = [_reward(job, questions[rollout.prompt_index], rollout) for rollout in rollouts]
    _record_rollouts(job, questions, rollouts, rewards)
    if job.critic is not None:
        return group_rollouts(rollouts, rewards, config.rollout.group_size)
    return make_batch(rollouts, rewards, config.rollout.group_size, normalize_std=config.algorithm.normalize_std)


def learn(job: Job, batch: Batch) -> None:
    """One training step of the actor."""
    total = len(batch.groups) * job.config.algorithm.epochs_per_rollout
    with job.recorder.phase("train", total, "groups") as counter:
        job.recorder.metrics.update(job.actor.train(batch, progress=counter.advance))


def evaluate(job: Job) -> None:
    """Greedy answers to the held-out questions."""
    questions = [job.task.sample(i, Split.EVAL) for i in range(job.config.evaluation.num_questions)]
    prompts = [encode_prompt(job.tokenizer, question.prompt) for question in questions]
    with job.recorder.phase("evaluate"):
        rollouts = job.engine.generate(prompts, sampling(job, temperature=0.0))
    rewards = [_reward(job, questions[rollout.prompt_index], rollout) for rollout in rollouts]
    job.recorder.metrics.record("eval/reward", Mean(sum(rewards), len(rewards)))


def save_if_due(job: Job, steps_done: int) -> None:
    """A checkpoint every so many steps and after the last."""
    config = job.config.checkpoint
    if config.interval_steps and (is_due(steps_done, config.interval_steps) or steps_done == job.config.steps):
        with job.recorder.phase("checkpoint"):
            save_checkpoint(job.recorder.run.checkpoints, steps_done, job.save, keep=config.keep)


def is_due(step: int, interval_steps: int) -> bool:
    """Whether something that happens every `interval_steps` (0: never) happens at `step`."""
    return interval_steps > 0 and step % interval_steps == 0


def sampling(job: Job, *, num_samples: int = 1, temperature: float | None = None, seed: int = 0) -> SamplingParams:
    """Sampling parameters of the run; `temperature` None is that of its rollouts."""
    rollout = job.config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        num_samples=num_samples,
        temperature=rollout.temperature if temperature is None else temperature,
        stop_token_ids=job.stop_token_ids,
        seed=seed,
    )


def _reward(job: Job, question: Question, rollout: Rollout) -> float:
    return job.task.reward(question, _text(job, rollout))


def _text(job: Job, rollout: Rollout) -> str:
    return job.tokenizer.decode(rollout.token_ids, skip_special_tokens=True)


def _record_rollouts(
    job: Job, questions: Sequence[Question], rollouts: Sequence[Rollout], rewards: Sequence[float]
) -> None:
    metrics = job.recorder.metrics
    num_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    metrics.record("reward/mean", Mean(sum(rewards), len(rewards)))
    metrics.record("rollout/tokens", Sum(num_tokens))
    metrics.record("rollout/answer_tokens", Mean(num_tokens, len(rollouts)))
    stride = max(1, len(rollouts) // max(1, job.config.report.samples_per_step))
    shown = list(zip(rollouts, rewards, strict=True))[::stride][: job.config.report.samples_per_step]
    job.recorder.samples(
        [
            {
                "question": questions[rollout.prompt_index].prompt,
                "solution": questions[rollout.prompt_index].solution,
                "answer": _text(job, rollout),
                "reward": reward,
                "weight_version": rollout.weight_version,
            }
            for rollout, reward in shown
        ]
    )

"""The colocated loop for real: a tiny model, an embedded engine, a sleeping actor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_jobs import assert_same_tensors, run, small_config

from torpor.report.jsonl import read_jsonl
from torpor.report.rundir import RunDirectory
from torpor.rl.build import open_job
from torpor.rl.config import MemoryConfig
from torpor.rl.loop import (
    evaluate,
    fall_asleep,
    is_due,
    roll_out,
    run_loop,
    run_step,
    wake_engine,
)
from torpor.rl.roles import sleep_options
from torpor.rl.rollout.base import SamplingParams, Tag
from torpor.rl.tasks.base import Split

PPO: dict[str, Any] = {
    "algorithm": {"advantages": "gae"},
    "critic": {"optimizer": {"learning_rate": 1e-3}, "epochs_per_rollout": 2, "updates_per_rollout": 2},
}
KL = {"algorithm": {"kl_coefficient": 0.1}}
PPO_KL = {"advantages": "gae", "kl_coefficient": 0.1, "kl_in": "reward"}


def test_sleeping_changes_no_bit(tmp_path: Path) -> None:
    awake_curve, awake = run(small_config(tmp_path / "awake", memory={"offload_train": False}))
    asleep_curve, asleep = run(small_config(tmp_path / "asleep"))
    assert len(awake_curve) == 3
    assert all(record["policy/teaching_groups"] > 0 for record in awake_curve)
    assert awake_curve == asleep_curve
    assert_same_tensors(awake, asleep)
    assert not read_jsonl(tmp_path / "awake" / "ledgers.jsonl")
    assert read_jsonl(tmp_path / "asleep" / "ledgers.jsonl")


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": {"offload_train_target": "cpu"}},
        {"memory": {"offload_rollout": False, "lazy_wake": False}},
        {"memory": {"offload_train_disk_chunk_mb": 1}},
        {"optimizer": {"name": "sgd"}},
        {"algorithm": {"kl_coefficient": 0.1, "old_log_probs": "actor", "importance_cap": 2.0}},
        {"optimizer": {"name": "muon"}},
        PPO,
        {**PPO, "rollout": {"prompts_per_step": 32, "group_size": 1}, "algorithm": PPO_KL},
        {"algorithm": {"updates_per_rollout": 2, "epochs_per_rollout": 2, "length_normalization": "constant"}},
    ],
    ids=lambda changes: "-".join(f"{key}={value}" for key, value in next(iter(changes.values())).items())[:40],
)
def test_every_choice_sleeps_bit_for_bit(tmp_path: Path, changes: dict[str, dict[str, object]]) -> None:
    awake_memory = {"colocate": False}
    awake_curve, awake = run(small_config(tmp_path / "awake", **{**changes, "memory": awake_memory}, steps=2))
    assert awake_curve[0]["policy/teaching_groups"] > 0
    asleep_curve, asleep = run(small_config(tmp_path / "asleep", **changes, steps=2))
    assert awake_curve == asleep_curve
    assert_same_tensors(awake, asleep)


@pytest.mark.parametrize(
    ("optimizer", "changes"),
    [
        ("adamw", {}),
        ("rmsprop", {}),
        ("muon", {}),
        ("adamw", KL),
        ("sgd", PPO),
        ("adamw", {**PPO, "algorithm": PPO_KL}),
    ],
    ids=str,
)
def test_resumes_to_the_bit(tmp_path: Path, optimizer: str, changes: dict[str, Any]) -> None:
    options = {
        "optimizer": {"name": optimizer, "schedule": "linear"},
        "checkpoint": {"interval_steps": 2},
        **changes,
    }
    whole_curve, whole = run(small_config(tmp_path / "whole", steps=4, **options))
    with open_job(small_config(tmp_path / "parts", steps=4, **options)) as job:
        fall_asleep(job)
        for step in range(3):  # one step more than the checkpoint has: it must be done again
            with job.recorder.step(step):
                run_step(job, step)
    torch.rand(3)  # a new process has another random state
    with open_job(small_config(tmp_path / "parts", steps=4, resume=True, **options)) as job:
        assert job.critic is None or job.critic.is_asleep
    parts_curve, parts = run(small_config(tmp_path / "parts", steps=4, resume=True, **options))
    assert [record["step"] for record in parts_curve] == [0, 1, 2, 2, 3]
    assert parts_curve[:3] == whole_curve[:3]
    assert parts_curve[3:] == whole_curve[2:]
    assert_same_tensors(whole, parts)


@pytest.mark.parametrize("changes", [{}, PPO, {"optimizer": {"name": "muon"}}], ids=["grpo", "ppo", "muon"])
def test_learns_to_answer_in_lower_case(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The reward is the share of an answer's characters that are lower-case letters: a quarter, untrained."""
    (tmp_path / "questions.jsonl").write_text("".join(f'{{"prompt": "{i} "}}\n' for i in range(12)))
    (tmp_path / "rewards.py").write_text(
        "def score(answer, line):\n    return sum(map(str.islower, answer)) / max(1, len(answer))\n"
    )
    task = {"kind": "jsonl", "path": tmp_path / "questions.jsonl", "reward": f"{tmp_path}/rewards.py:score"}
    changes = {**changes, "optimizer": {"learning_rate": 3e-3, **changes.get("optimizer", {})}}
    rollout = {"prompts_per_step": 8, "max_new_tokens": 4}
    curve, _ = run(
        small_config(tmp_path / "run", steps=20, task=task, rollout=rollout, warm_start={"steps": 0}, **changes)
    )
    rewards = [record["reward/mean"] for record in curve]
    assert rewards[0] < 0.35
    assert sum(rewards[-3:]) / 3 > 0.7


class Event:
    """Records the order in which a step touches actor and engine."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def spy(self, owner: object, method: str, label: str) -> None:
        original = getattr(owner, method)

        def recorded(*args: object, **options: object) -> object:
            tags = "".join(map(str, args[0])) if label == "engine.wake" else ""
            self.names.append(f"{label}({tags})" if tags else label)
            return original(*args, **options)

        setattr(owner, method, recorded)


def test_a_step_keeps_the_order(tmp_path: Path) -> None:
    events = Event()
    with open_job(small_config(tmp_path, steps=1)) as job:
        for method in ("sleep", "wake_up", "update_weights", "train"):
            events.spy(job.actor, method, f"actor.{method}")
        for method in ("sleep", "wake", "generate"):
            events.spy(job.engine, method, f"engine.{method}")
        run_loop(job)
    assert events.names == [
        "actor.sleep",
        "engine.wake(weights)",
        "actor.update_weights",
        "engine.wake(kv_cache)",
        "engine.generate",
        "engine.sleep",
        "actor.wake_up",
        "actor.train",
        "actor.wake_up",
        "actor.sleep",
    ]


def test_with_a_critic_each_has_its_turn(tmp_path: Path) -> None:
    events = Event()
    with open_job(small_config(tmp_path, steps=2, **{**PPO, "critic": {"warmup_steps": 1}})) as job:
        assert job.critic is not None
        assert job.critic.is_asleep
        for method in ("sleep", "wake_up", "train"):
            events.spy(job.actor, method, f"actor.{method}")
        for method in ("sleep", "wake_up", "appraise", "train"):
            events.spy(job.critic, method, f"critic.{method}")
        for method in ("sleep", "generate"):
            events.spy(job.engine, method, f"engine.{method}")
        for owner, name in ((job.actor.sleeper, "actor.close"), (job.critic, "critic.release")):
            events.spy(owner, name.split(".")[1], name)
        run_loop(job)
        assert (job.critic.num_updates, job.actor.num_updates) == (2, 1)
    ours = ["critic.wake_up", "critic.appraise", "critic.wake_up", "critic.train", "critic.wake_up", "critic.sleep"]
    theirs = ["actor.wake_up", "actor.train", "actor.wake_up", "actor.sleep"]
    rollout = ["engine.generate", "engine.sleep"]
    ending = ["critic.release", "actor.close"]  # either wakes what it closes
    assert events.names == ["actor.sleep", *rollout, *ours, *rollout, *ours, *theirs, *ending]


def test_critic_actor_and_engine_are_never_awake_together(tmp_path: Path) -> None:
    changes = {**PPO, "algorithm": PPO_KL, "evaluation": {"interval_steps": 1}}
    run(small_config(tmp_path, steps=2, **changes))
    readings = [r for r in read_jsonl(tmp_path / "memory.jsonl") if r["step"] is not None]
    who = ("actor_asleep", "critic_asleep", "engine_asleep")
    during = {
        phase: {tuple(r[name] for name in who) for r in readings if r["phase"] == phase}
        for phase in ("generate", "reference", "values", "critic_train", "train", "actor_sleep")
    }
    assert during == {
        "generate": {(True, True, False)},
        "reference": {(True, True, True)},
        "values": {(True, False, True)},
        "critic_train": {(True, False, True)},
        "train": {(False, True, True)},
        "actor_sleep": {(False, True, True)},
    }
    learners = {ledger["learner"] for ledger in read_jsonl(tmp_path / "ledgers.jsonl")}
    assert learners == {"actor", "critic"}


def test_only_one_of_the_two_is_awake(tmp_path: Path) -> None:
    run(small_config(tmp_path, evaluation={"interval_steps": 1}))
    readings = read_jsonl(tmp_path / "memory.jsonl")
    during = {
        phase: {(r["actor_asleep"], r["engine_asleep"]) for r in readings if r["phase"] == phase}
        for phase in ("generate", "evaluate", "train")
    }
    assert during == {"generate": {(True, False)}, "evaluate": {(True, False)}, "train": {(False, True)}}


def test_engine_and_trainer_agree_on_log_probabilities(tmp_path: Path) -> None:
    """At another temperature than 1, with answers of unequal lengths, packed: the ratio of the first update is 1."""
    all_groups = {"kl_coefficient": 1e-6}
    curve, _ = run(small_config(tmp_path, steps=1, rollout={"temperature": 0.6}, algorithm=all_groups))
    assert curve[0]["rollout/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert curve[0]["rollout/ratio_max"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("colocate", [True, False])
def test_engine_and_critic_sleep_before_the_loop_if_they_may(tmp_path: Path, colocate: bool) -> None:
    with open_job(small_config(tmp_path, **PPO, memory={"colocate": colocate})) as job:
        assert job.engine.asleep == (set(Tag) if colocate else set())
        assert job.critic is not None
        assert job.critic.is_asleep is colocate


def test_the_file_store_writes_in_the_chunks_that_were_asked_for(tmp_path: Path) -> None:
    store = sleep_options(MemoryConfig(offload_train_disk_chunk_mb=3), RunDirectory(tmp_path))["store"]
    assert store.chunk_bytes == 3 * 1024**2
    assert store.path.is_relative_to(tmp_path / "store")
    store.close()


def test_evaluation_is_greedy_and_held_out(tmp_path: Path) -> None:
    calls: list[tuple[list[list[int]], SamplingParams]] = []
    with open_job(small_config(tmp_path)) as job:
        generate = job.engine.generate
        job.engine.generate = lambda *call: calls.append(call) or generate(*call)  # type: ignore[func-returns-value,method-assign]
        wake_engine(job)
        evaluate(job)
        held_out = [job.task.sample(i, Split.EVAL).prompt for i in range(4)]
        prompts, sampling = calls[0]
        assert [job.tokenizer.decode(prompt) for prompt in prompts] == held_out
    assert (sampling.temperature, sampling.num_samples) == (0.0, 1)


def test_each_step_samples_with_a_seed_of_its_own(tmp_path: Path) -> None:
    seeds = []
    with open_job(small_config(tmp_path, seed=1)) as job:
        generate = job.engine.generate
        job.engine.generate = lambda prompts, sampling: seeds.append(sampling.seed) or generate(prompts, sampling)  # type: ignore[func-returns-value,method-assign]
        wake_engine(job)
        batches = [roll_out(job, step) for step in (0, 1, 0)]
    assert len({*seeds, 0, 1}) == 4
    assert batches[0] == batches[2] != batches[1]
    prompts = [[group.tokens.prompt_ids for group in batch.groups] for batch in batches]
    assert prompts[0] != prompts[1]


def test_a_failing_step_leaves_no_store_behind(tmp_path: Path) -> None:
    def fail() -> None:
        with open_job(small_config(tmp_path)) as job:
            fall_asleep(job)
            assert list(tmp_path.glob("store/**/*.torpor"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list(tmp_path.glob("store/**/*.torpor"))


@pytest.mark.parametrize(("step", "interval", "due"), [(0, 0, False), (0, 3, True), (2, 3, False), (6, 3, True)])
def test_is_due(step: int, interval: int, due: bool) -> None:
    assert is_due(step, interval) is due

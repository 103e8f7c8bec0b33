"""A job that is small enough for tests: a tiny model, the reverse task, a few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torpor.report.jsonl import read_jsonl
from torpor.rl.backends.local import OneProcessBackend
from torpor.rl.build import open_job
from torpor.rl.checkpoint import split_optimizer_state
from torpor.rl.config import RunConfig
from torpor.rl.config_cli import config_from_mapping
from torpor.rl.learner import Learner
from torpor.rl.loop import run_loop

SMALL: dict[str, Any] = {
    "steps": 3,
    "model": {"kind": "tiny", "hidden_size": 64, "num_layers": 2},
    "task": {"kind": "string", "min_length": 1, "max_length": 3},
    "rollout": {"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 5, "kv_cache_mib": 8},
    "optimizer": {"learning_rate": 1e-3},
    "warm_start": {"steps": 10, "batch_size": 8, "learning_rate": 3e-3},
    "evaluation": {"interval_steps": 0, "num_questions": 4},
    "report": {"plots": False},
}


def small_config(run_dir: Path, **changes: Any) -> RunConfig:
    """`SMALL` with `run_dir` and `changes`: a table is merged into its section, or takes its place if it has a kind."""
    raw: dict[str, Any] = {**SMALL, "run_dir": run_dir}
    for key, value in changes.items():
        merges = isinstance(value, dict) and "kind" not in value
        raw[key] = {**raw.get(key, {}), **value} if merges else value
    return config_from_mapping(raw, "test")


def run(config: RunConfig) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Run a job; its metrics without the clock's, and all learners' tensors at the end."""
    with open_job(config) as job:
        run_loop(job)
        tensors = _tensors(job.actor)
        if job.critic is not None:
            tensors |= {f"critic {name}": tensor for name, tensor in _tensors(job.critic).items()}
    return learning_curve(job.recorder.run.metrics), tensors


def _tensors(learner: Learner) -> dict[str, torch.Tensor]:
    """Copies of a learner's weights and of the state of all its optimizers."""
    assert isinstance(learner.backend, OneProcessBackend)
    tensors = dict(learner.sleeper.state_dict())
    for name in learner.backend.optimizers:
        state, _ = split_optimizer_state(learner.sleeper.optimizer_state_dict(name))
        tensors |= {f"{name} {path}": tensor for path, tensor in state.items()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def learning_curve(metrics: Path) -> list[dict[str, Any]]:
    """The metrics of each step that must not depend on who slept."""
    varying = ("time/", "bytes/", "memory/", "rollout/tokens_per_s")
    return [
        {key: value for key, value in record.items() if not key.startswith(varying)}
        for record in read_jsonl(metrics)
        if "reward/mean" in record
    ]


def assert_same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Equal names, equal bits."""
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different

"""Small work for a Ray cluster: engines, a source of weights, and runs that can be meddled with."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import test_rollout_embedded as embedded
from torch import Tensor

from torpor.rl.build import open_job
from torpor.rl.config import RunConfig
from torpor.rl.config_cli import config_from_mapping
from torpor.rl.loop import Job, run_loop
from torpor.rl.rollout.base import RolloutEngine
from torpor.rl.rollout.embedded import EmbeddedEngine

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from torpor.rl.runtimes.ray_buckets import in_buckets  # noqa: E402
from torpor.rl.runtimes.ray_relays import node_id  # noqa: E402
from torpor.rl.runtimes.ray_workers import EngineWorker  # noqa: E402

MODULES = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
OPTIONS: dict[str, Any] = {"log_to_driver": False, "runtime_env": {"env_vars": {"PYTHONPATH": MODULES}}}
"""Of `ray.init`: workers find the modules of these tests."""
_STORE_BYTES = 200 * 2**20
_HEALTH_CHECKS = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}
"""Of nodes: one that is gone is noticed within seconds."""


class RenewableWorker(EngineWorker):
    """A process that outlives its engines: starting one takes seconds."""

    def renew(self, make: Callable[[], RolloutEngine]) -> None:
        self.__init__(make)  # type: ignore[misc]

    def num_loading(self) -> int:
        """Loads that still wait for weights."""
        return sum(thread.name == "torpor-load" for thread in threading.enumerate())

    def weights(self) -> dict[str, Tensor]:
        """What the engine computes with."""
        assert isinstance(self._engine, EmbeddedEngine)
        return {name: parameter.clone() for name, parameter in self._engine._model.named_parameters()}


class Weights:
    """A source of weights, as an actor's ranks are one."""

    def __init__(self, seed: int, version: int, before_each: Callable[[int], None] = lambda _: None) -> None:
        self.weights, self.weight_version = embedded.small_weights(seed), version
        self._before_each, self.num_sent = before_each, 0

    @property
    def node_id(self) -> str:
        return node_id()

    def buckets(self) -> Iterator[Any]:
        for bucket in in_buckets(self.weights.items(), bucket_bytes=10_000):
            self._before_each(self.num_sent)
            self.num_sent += 1
            yield ray.put(bucket)


@contextlib.contextmanager
def open_cluster(num_nodes: int, head_cpus: int = 1) -> Iterator[tuple[Cluster, list[Any]]]:
    """Nodes "n0", "n1" and so on of one CPU each, as resources name them. This process is on "n0"."""
    options = {"num_cpus": 1, "object_store_memory": _STORE_BYTES}
    head = {"num_cpus": head_cpus, "resources": {"n0": 100}, "_system_config": _HEALTH_CHECKS}
    cluster = Cluster(True, head_node_args=options | head)
    nodes = [cluster.head_node] + [cluster.add_node(**options, resources={f"n{i}": 100}) for i in range(1, num_nodes)]
    try:
        ray.init(address=cluster.address, **OPTIONS)
        yield cluster, nodes
    finally:
        ray.shutdown()
        cluster.shutdown()


def kill(process_id: int) -> None:
    os.kill(process_id, signal.SIGKILL)


def config(directory: Path, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "run_dir": directory,
        "steps": 4,
        "seed": 1,
        "threads": 1,
        "model": {"kind": "tiny", "hidden_size": 32, "num_layers": 2, "num_heads": 4},
        "task": {"kind": "string", "operation": "copy", "min_length": 1, "max_length": 2},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 4, "kv_cache_mib": 4},
        "optimizer": {"learning_rate": 1e-3},
        "warm_start": {"steps": 8, "batch_size": 8},
        "evaluation": {"interval_steps": 0},
        "checkpoint": {"interval_steps": 2},
        "report": {"plot_interval_steps": 0},
    }
    return config_from_mapping(values | changes, source="test")


def on_ray(directory: Path, *, ranks: int = 2, engines: int = 2, **changes: Any) -> RunConfig:
    settings = {"actor_ranks": ranks, "engines": engines, "cpus": 1.0, "start_timeout_s": 120.0} | changes.pop(
        "ray", {}
    )
    backend = "fsdp" if ranks > 1 else "local"
    return config(directory, runtime="ray", backend=backend, ray=settings, **changes)


def run(settings: RunConfig, meddle: Callable[[Job, int], None] = lambda _, __: None) -> list[dict[str, Any]]:
    """The metrics of every step; `meddle` is called with the number of each rollout before it."""
    with open_job(settings) as job:
        generate, rollouts = job.engine.generate, iter(range(100))

        def meddled(*arguments: Any) -> Any:
            meddle(job, next(rollouts))
            return generate(*arguments)

        job.engine.generate = meddled  # type: ignore[method-assign]
        run_loop(job)
        return metrics_of(settings)


def metrics_of(settings: RunConfig) -> list[dict[str, Any]]:
    assert settings.run_dir is not None
    lines = (settings.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def learned(steps: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What does not depend on the clock."""
    keys = ("step", "reward/mean", "policy/loss", "policy/entropy", "optimizer/grad_norm", "rollout/tokens")
    return [tuple(step.get(key) for key in keys) for step in steps if "reward/mean" in step]

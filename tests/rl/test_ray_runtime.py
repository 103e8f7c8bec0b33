"""The Ray runtime: the contract of engines, engines and ranks that are killed, and the bits of a resumed run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_rollout_embedded as embedded
import torch
from ray_jobs import OPTIONS, RenewableWorker, Weights, config, kill, learned, on_ray, run

from contracts.engine_contract import PROMPTS, SAMPLING
from torpor.errors import StateError, UsageError
from torpor.rl.build import open_job
from torpor.rl.loop import Job
from torpor.rl.rollout.base import RolloutEngine, Tag

ray = pytest.importorskip("ray")

from torpor.rl.runtimes.ray_engines import EngineGroup  # noqa: E402
from torpor.rl.runtimes.ray_learners import ActorGroup, LearnerLostError  # noqa: E402

NUM_ENGINES = 2


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, **OPTIONS)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def start(cluster: None) -> Iterator[Callable[[int], Any]]:
    """Starts engine workers; those that were stopped and live are used again."""
    idle: dict[int, Any] = {}

    def start_one(index: int) -> Any:
        worker = idle.get(index)
        with contextlib.suppress(ray.exceptions.RayActorError):
            if worker is not None:
                ray.get(worker.renew.remote(embedded.small_engine))
                return worker
        idle[index] = ray.remote(RenewableWorker).options(num_cpus=0.1).remote(embedded.small_engine)
        return idle[index]

    yield start_one
    for worker in idle.values():
        ray.kill(worker)


def group(start: Callable[[int], Any], **options: Any) -> EngineGroup:
    return EngineGroup(start, NUM_ENGINES, stop=lambda worker: None, weight_version=0, **options)


class TestRayEngines(embedded.TestEmbeddedEngine):
    """Two engines in processes of their own promise what one in this process does."""

    logprob_tolerance = 3e-5
    """Their seeds draw other answers, some of them less probable: fp32 logits over temperature 0.5 round to 2e-5."""

    @pytest.fixture(autouse=True)
    def _start(self, start: Callable[[int], Any]) -> None:
        self._start_one = start

    def make_engine(self) -> RolloutEngine:
        return group(self._start_one)


def test_a_dead_engine_is_started_again_with_the_current_weights(start: Callable[[int], Any]) -> None:
    restarts: list[tuple[int, str]] = []
    with group(start, on_restart=lambda i, reason: restarts.append((i, reason))) as engine:
        source = Weights(seed=5, version=7)
        assert engine.load_from(source).version == 7
        sent = source.num_sent
        before = engine.generate(PROMPTS, SAMPLING)
        assert {rollout.weight_version for rollout in before} == {7}
        kill(engine.process_ids()[1])
        assert engine.generate(PROMPTS, SAMPLING) == before
        assert restarts == [(1, "its process died")]
        assert source.num_sent == 2 * sent
        kill(engine.process_ids()[0])
        assert engine.check(timeout_s=60) == [0]
        assert engine.generate(PROMPTS, SAMPLING) == before


def test_an_engine_that_died_asleep_wakes_without_weights(start: Callable[[int], Any]) -> None:
    with group(start) as engine:
        engine.sleep()
        kill(engine.process_ids()[0])
        engine.wake([Tag.WEIGHTS])
        engine.wake([Tag.KV_CACHE])
        with pytest.raises(StateError, match="cannot generate"):
            engine.generate(PROMPTS, SAMPLING)
        engine.load_from(Weights(seed=5, version=3))
        assert {rollout.weight_version for rollout in engine.generate(PROMPTS, SAMPLING)} == {3}


def test_an_engine_that_dies_without_end_stops_the_run(start: Callable[[int], Any]) -> None:
    with group(start, max_restarts=0) as engine:
        engine.load_from(Weights(seed=5, version=1))
        kill(engine.process_ids()[0])
        with pytest.raises(StateError, match=r"engine 0 died again .*max_engine_restarts"):
            engine.generate(PROMPTS, SAMPLING)


def num_loading(engine: EngineGroup) -> list[int]:
    return [ray.get(worker.num_loading.remote()) for worker in engine._workers.values()]


def test_a_load_whose_source_fails_ends_in_every_engine(start: Callable[[int], Any]) -> None:
    def fail(num_sent: int) -> None:
        if num_sent == 2:
            raise OSError("the source failed")

    with group(start) as engine:
        with pytest.raises(OSError, match="the source failed"):
            engine.load_from(Weights(seed=5, version=1, before_each=fail))
        assert num_loading(engine) == [0, 0]
        with pytest.raises(StateError, match="cannot generate"):
            engine.generate(PROMPTS, SAMPLING)
        assert engine.load_from(Weights(seed=5, version=2)).version == 2
        assert {rollout.weight_version for rollout in engine.generate(PROMPTS, SAMPLING)} == {2}


def test_an_engine_that_dies_amid_a_load_leaves_no_load_in_the_others(start: Callable[[int], Any]) -> None:
    with group(start) as engine:
        victims = [engine.process_ids()[1]]
        source = Weights(seed=5, version=4, before_each=lambda sent: kill(victims.pop()) if sent == 2 else None)
        assert engine.load_from(source).version == 4
        assert not victims
        assert num_loading(engine) == [0, 0]
        assert {rollout.weight_version for rollout in engine.generate(PROMPTS, SAMPLING)} == {4}


def test_a_dead_engine_is_not_given_weights_of_another_version(start: Callable[[int], Any]) -> None:
    source = Weights(seed=5, version=1)
    with group(start) as engine:
        engine.load_from(source)
        source.weight_version = 2  # the actor has trained since
        kill(engine.process_ids()[0])
        with pytest.raises(StateError, match=r"needs weights of version 1; the actor has 2"):
            engine.generate(PROMPTS, SAMPLING)


# --- whole runs -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_rank_and_one_engine_do_what_the_local_runtime_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    local = run(config(tmp_path / "local"))
    assert learned(run(on_ray(tmp_path / "ray", ranks=1, engines=1))) == learned(local)
    assert len(learned(local)) == 4


@pytest.mark.slow
def test_killed_engines_and_ranks_and_a_resumed_run(tmp_path: Path) -> None:
    """An unbroken run; one with an engine killed half-way; one whose rank is killed, resumed from its checkpoint."""
    unbroken = learned(run(on_ray(tmp_path / "unbroken")))

    def kill_an_engine(job: Job, number: int) -> None:
        if number == 1:
            assert isinstance(job.engine, EngineGroup)
            kill(job.engine.process_ids()[1])

    assert learned(run(on_ray(tmp_path / "engine"), kill_an_engine)) == unbroken

    def kill_a_rank(job: Job, number: int) -> None:
        if number == 3:
            assert isinstance(job.actor, ActorGroup)
            kill(job.actor.process_ids()[1])

    with pytest.raises(LearnerLostError, match=r"rank 1 of the actor.*step-000002.*--resume") as lost:
        run(on_ray(tmp_path / "rank"), kill_a_rank)
    assert lost.value.checkpoint == tmp_path / "rank" / "checkpoints" / "step-000002"
    resumed = run(on_ray(tmp_path / "rank", resume=True))
    assert learned(resumed)[-2:] == unbroken[-2:]


@pytest.mark.slow
def test_a_critic_takes_its_turn_on_the_same_bundles(tmp_path: Path) -> None:
    steps = run(on_ray(tmp_path / "ppo", steps=2, algorithm={"advantages": "gae"}))
    assert sum(step.get("critic/loss", 0.0) for step in steps) > 0
    ledgers = [json.loads(line) for line in (tmp_path / "ppo" / "ledgers.jsonl").read_text().splitlines()]
    kinds = [(ledger["learner"], ledger["kind"]) for ledger in ledgers if ledger["step"] == 1]
    assert kinds.index(("critic", "sleep")) < kinds.index(("actor", "wake"))


@pytest.mark.slow
def test_a_penalty_in_the_reward_is_dealt_out_and_collected_in_order(tmp_path: Path) -> None:
    algorithm = {"advantages": "gae", "kl_in": "reward", "kl_coefficient": 0.5, "normalize_std": False}
    changes: dict[str, Any] = {"steps": 3, "algorithm": algorithm, "optimizer": {"learning_rate": 1e-2}}
    local = run(config(tmp_path / "local", **changes))
    for ranks in (1, 2):
        steps = run(on_ray(tmp_path / f"{ranks}", ranks=ranks, engines=1, **changes))
        for key in ("policy/kl_reward", "critic/loss", "policy/loss", "optimizer/grad_norm"):
            found, expected = ([step[key] for step in taken if key in step] for taken in (steps, local))
            assert found == (expected if ranks == 1 else pytest.approx(expected, rel=1e-3, abs=1e-5)), key
    assert sum(abs(step.get("policy/kl_reward", 0.0)) for step in local) > 0


def test_a_cluster_without_room_says_what_is_needed(tmp_path: Path) -> None:
    settings = on_ray(tmp_path / "run")
    settings = settings.model_copy(update={"ray": settings.ray.model_copy(update={"cpus": 64.0, "start_timeout_s": 1})})
    with pytest.raises(UsageError, match=r"need 2 bundles of \{'CPU': 64\.0"), open_job(settings):
        pass

"""Runs on several nodes of a Ray cluster, some of which are lost meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_jobs import config, learned, on_ray, open_cluster, run

from torpor.errors import StateError
from torpor.rl.config import RunConfig
from torpor.rl.loop import Job

pytest.importorskip("ray")

from ray.cluster_utils import Cluster

from torpor.rl.runtimes.ray_engines import EngineGroup
from torpor.rl.runtimes.ray_learners import ActorGroup, LearnerLostError

pytestmark = pytest.mark.slow


def lose(cluster: Cluster, nodes: list[Any], node: str) -> None:
    """That node is gone, with every process on it."""
    (lost,) = [each for each in nodes if each.node_id == node]
    cluster.remove_node(lost, allow_graceful=False)


def engine_node(job: Job) -> str:
    """Of a run with one rank and one engine, apart: where the relay is that receives."""
    assert isinstance(job.engine, EngineGroup)
    _, receiver = job.engine._relays.process_ids()
    return receiver


def rank_node(job: Job) -> str:
    assert isinstance(job.actor, ActorGroup)
    return job.actor.node_id


@pytest.fixture
def apart(tmp_path: Path) -> RunConfig:
    """One rank on one node, one engine on another, this process on a third."""
    ray_settings = {"placement": "apart", "start_timeout_s": 60.0}
    return on_ray(tmp_path / "ray", ranks=1, engines=1, ray=ray_settings)


def test_a_run_has_the_bits_of_one_process_though_an_engines_node_goes(tmp_path: Path, apart: RunConfig) -> None:
    local = learned(run(config(tmp_path / "local")))
    with open_cluster(4, head_cpus=0) as (cluster, nodes):

        def meddle(job: Job, number: int) -> None:
            if number == 2:
                lose(cluster, nodes, engine_node(job))

        assert learned(run(apart, meddle)) == local


def test_an_engine_without_a_node_to_start_on_stops_the_run(apart: RunConfig) -> None:
    apart = apart.model_copy(update={"ray": apart.ray.model_copy(update={"start_timeout_s": 25.0})})
    with open_cluster(3, head_cpus=0) as (cluster, nodes):

        def meddle(job: Job, number: int) -> None:
            if number == 2:
                lose(cluster, nodes, engine_node(job))

        with pytest.raises(StateError, match=r"engine 0 did not start again .*a node that is gone"):
            run(apart, meddle)


def test_a_rank_whose_node_is_gone_ends_the_run_with_its_checkpoint(apart: RunConfig) -> None:
    with open_cluster(3, head_cpus=0) as (cluster, nodes):

        def meddle(job: Job, number: int) -> None:
            if number == 2:
                lose(cluster, nodes, rank_node(job))

        with pytest.raises(LearnerLostError, match="rank 0 of the actor") as lost:
            run(apart, meddle)
    assert lost.value.checkpoint is not None


def test_weights_lost_with_the_node_of_their_rank_are_the_ranks_loss(apart: RunConfig) -> None:
    with open_cluster(3, head_cpus=0) as (cluster, nodes):

        def meddle(job: Job, number: int) -> None:
            assert isinstance(job.actor, ActorGroup)
            buckets, node = job.actor.buckets, rank_node(job)

            def lost_on_the_way() -> Iterator[Any]:
                for bucket in buckets():
                    lose(cluster, nodes, node)
                    yield bucket

            job.actor.buckets = lost_on_the_way  # type: ignore[method-assign]

        with pytest.raises(LearnerLostError, match="rank 0 of the actor"):
            run(apart, meddle)

"""Weights between the nodes of a Ray cluster, and relays and engines that are lost on the way."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import test_rollout_embedded as embedded
import torch
from ray_jobs import RenewableWorker, Weights, kill, open_cluster
from small_jobs import assert_same_tensors

from torpor.errors import StateError

ray = pytest.importorskip("ray")

from torpor.rl.runtimes.ray_buckets import in_buckets  # noqa: E402
from torpor.rl.runtimes.ray_engines import EngineGroup  # noqa: E402
from torpor.rl.runtimes.ray_relays import RelayError, Relays, node_id  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Any]]:
    """Starts an engine worker on a node; those that were stopped and live are used again."""
    idle: dict[tuple[int, int], Any] = {}

    def start_one(nodes: Sequence[int], index: int) -> Any:
        key = (nodes[index], index)
        with contextlib.suppress(ray.exceptions.RayActorError):
            if key in idle:
                ray.get(idle[key].renew.remote(embedded.small_engine))
                return idle[key]
        options = {"num_cpus": 0.01, "resources": {f"n{nodes[index]}": 1}}
        idle[key] = ray.remote(RenewableWorker).options(**options).remote(embedded.small_engine)
        return idle[key]

    with open_cluster(3):
        yield start_one


@contextlib.contextmanager
def engines_on(start: Callable[..., Any], nodes: Sequence[int], relays: Relays) -> Iterator[EngineGroup]:
    one = lambda index: start(nodes, index)  # noqa: E731
    with EngineGroup(one, len(nodes), stop=lambda worker: None, weight_version=0, relays=relays) as engine:
        yield engine


def assert_all_have(engine: EngineGroup, source: Weights) -> None:
    for worker in engine._workers.values():
        assert_same_tensors(ray.get(worker.weights.remote()), source.weights)


def test_engines_on_every_node_get_every_bit_by_the_same_relays(start: Callable[..., Any]) -> None:
    relays = Relays()
    with engines_on(start, [0, 1, 1, 2], relays) as engine:
        processes = []
        for version in (1, 2):
            source = Weights(seed=version, version=version)
            assert engine.load_from(source).version == version
            assert source.num_sent > 5
            assert_all_have(engine, source)
            processes.append(relays.process_ids())
        assert processes[0] == processes[1]
        assert len(processes[0]) == 3
        assert next(iter(processes[0])) == node_id()
    assert relays.process_ids() == {}


@pytest.mark.usefixtures("start")
def test_every_node_has_a_copy_of_its_own() -> None:
    (bucket,) = in_buckets([("weight", torch.arange(2**20))])
    nodes = {node["NodeID"] for node in ray.nodes()}
    relays = Relays()
    (copies,) = relays.spread([ray.put(bucket)], node_id(), nodes)
    where = ray.experimental.get_object_locations(list(copies.values()))
    assert {node: where[copy]["node_ids"] for node, copy in copies.items()} == {node: [node] for node in nodes}
    relays.close()


def test_weights_of_this_process_reach_other_nodes(start: Callable[..., Any]) -> None:
    relays = Relays()
    source = Weights(seed=3, version=1)
    with engines_on(start, [1, 2], relays) as engine:
        engine.load_weights(source.weights.items(), 1)
        assert_all_have(engine, source)
        assert len(relays.process_ids()) == 3


def test_one_node_needs_no_relay(start: Callable[..., Any]) -> None:
    relays = Relays()
    with engines_on(start, [0, 0], relays) as engine:
        source = Weights(seed=1, version=1)
        engine.load_from(source)
        assert_all_have(engine, source)
        assert relays.process_ids() == {}


def meddler(relays: Relays, do: Callable[[int], None], which: int) -> Callable[[int], None]:
    """Before the third bucket, once: `do` with the process of the relay on one node."""
    left = [which]

    def before_each(num_sent: int) -> None:
        if num_sent == 2 and left:
            do(list(relays.process_ids().values())[left.pop()])

    return before_each


@pytest.mark.parametrize("which", [0, 1])
def test_a_relay_that_dies_is_started_again(start: Callable[..., Any], which: int) -> None:
    reasons: list[str] = []
    relays = Relays(on_restart=reasons.append, timeout_s=60)
    with engines_on(start, [0, 1], relays) as engine:
        source = Weights(seed=4, version=1, before_each=meddler(relays, kill, which))
        assert engine.load_from(source).version == 1
        assert_all_have(engine, source)
        assert len(reasons) == 1
        assert "relay" in reasons[0]


def test_a_relay_that_hangs_is_not_waited_for(start: Callable[..., Any]) -> None:
    stopped: list[int] = []

    def stop(process_id: int) -> None:
        stopped.append(process_id)
        os.kill(process_id, signal.SIGSTOP)

    reasons: list[str] = []
    relays = Relays(on_restart=reasons.append, timeout_s=15)
    with engines_on(start, [0, 1], relays) as engine:
        source = Weights(seed=5, version=1, before_each=meddler(relays, stop, 1))
        engine.load_from(source)
        assert_all_have(engine, source)
    assert len(stopped) == len(reasons) == 1


def test_relays_that_die_without_end_stop_the_run(start: Callable[..., Any]) -> None:
    relays = Relays(max_restarts=1, timeout_s=60)
    with engines_on(start, [0, 1], relays) as engine:
        victim = lambda sent: kill(list(relays.process_ids().values())[1]) if sent >= 2 else None  # noqa: E731
        with pytest.raises(StateError, match=r"started 1 times before.*max_engine_restarts") as stopped:
            engine.load_from(Weights(seed=6, version=1, before_each=victim))
        assert isinstance(stopped.value.__cause__, RelayError)
        assert relays.process_ids() == {}
        source = Weights(seed=6, version=2)
        engine.load_from(source)
        assert_all_have(engine, source)


def test_an_engine_that_dies_amid_a_broadcast_is_not_the_relays_fault(start: Callable[..., Any]) -> None:
    reasons: list[str] = []
    relays = Relays(on_restart=reasons.append)
    with engines_on(start, [0, 1, 2], relays) as engine:
        victims = [engine.process_ids()[2]]
        source = Weights(seed=7, version=1, before_each=lambda sent: kill(victims.pop()) if sent == 2 else None)
        engine.load_from(source)
        assert_all_have(engine, source)
        assert not victims
        assert reasons == []


def test_one_engine_started_again_gets_its_weights_by_the_relays_there_are(start: Callable[..., Any]) -> None:
    relays = Relays()
    with engines_on(start, [0, 1, 2], relays) as engine:
        source = Weights(seed=8, version=1)
        engine.load_from(source)
        before = relays.process_ids()
        kill(engine.process_ids()[1])
        assert engine.check(timeout_s=60) == [1]
        assert_all_have(engine, source)
        assert relays.process_ids() == before


def test_a_source_that_fails_is_raised_as_what_it_is(start: Callable[..., Any]) -> None:
    def fail(num_sent: int) -> None:
        if num_sent == 2:
            raise OSError("the source failed")

    reasons: list[str] = []
    relays = Relays(on_restart=reasons.append)
    with engines_on(start, [0, 1], relays) as engine:
        with pytest.raises(OSError, match="the source failed"):
            engine.load_from(Weights(seed=9, version=1, before_each=fail))
        assert (relays.process_ids(), reasons) == ({}, [])
        source = Weights(seed=9, version=2)
        engine.load_from(source)
        assert_all_have(engine, source)

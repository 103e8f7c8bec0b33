"""`torpor train --runtime ray`: actor ranks, engines and a critic on a placement group of one machine or a cluster.

The command's own process drives: it holds questions, answers and metrics, and no tensor. Each bundle of resources
has `ray.cpus` CPUs and, where the cluster has GPUs, one of them:

    colocated   bundle i: rank i of the actor, rank i of the critic, engine i     they take turns
    apart       the ranks on the first bundles, the engines on the others
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torpor.errors import UnsupportedError, UsageError
from torpor.report.recorder import Recorder
from torpor.report.rundir import RunDirectory
from torpor.rl.build import build_model, build_tokenizer, describe_warm_start, prepare_process
from torpor.rl.config import RayConfig, RunConfig
from torpor.rl.loop import Roles
from torpor.rl.roles import build_engine
from torpor.rl.rollout.base import RolloutEngine

try:
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as missing:
    raise UnsupportedError("runtime = ray needs Ray, which is not installed: pip install 'torpor[ray]'") from missing

from torpor.rl.runtimes.ray_engines import EngineGroup
from torpor.rl.runtimes.ray_learners import ActorGroup, CriticGroup
from torpor.rl.runtimes.ray_relays import Relays
from torpor.rl.runtimes.ray_workers import ActorWorker, CriticWorker, EngineWorker, to_gpu_if_any

_ROLES_ON_A_BUNDLE = 3
"""Actor, critic and engine share what a bundle has; they take turns, so a share is only a place."""


@contextmanager
def open_on_ray(config: RunConfig, run: RunDirectory, recorder: Recorder, *, is_fresh: bool) -> Iterator[Roles]:
    """All roles in processes of a cluster, which is started here if none is named.

    Raises:
        UsageError: the cluster has too little for the bundles.
    """
    with _cluster(config.ray), _bundles(config.ray) as group:
        start = partial(_start, group, _has_gpus())
        settings = config.ray
        common: dict[str, Any] = {
            "checkpoints": run.checkpoints,
            "timeout_s": settings.start_timeout_s,
            "is_fresh": is_fresh,
        }

        def rank_of(worker: type) -> Callable[[int], Any]:
            return lambda rank: start(rank, worker, config, rank, settings.actor_ranks, run.path.absolute())

        def engine(index: int) -> Any:
            bundle = index if settings.placement == "colocated" else settings.actor_ranks + index
            return start(bundle, EngineWorker, partial(make_engine, config))

        with recorder.phase("build"):
            actor = ActorGroup(rank_of(ActorWorker), settings.actor_ranks, on_ledger=recorder.ledger, **common)
        if actor.warm_start_losses:
            recorder.console.say(describe_warm_start(actor.warm_start_losses))
        with actor, _critic(config, rank_of(CriticWorker), recorder, common) as critic:
            engines = EngineGroup(
                engine,
                settings.engines,
                timeout_s=settings.engine_timeout_s,
                start_timeout_s=settings.start_timeout_s,
                max_restarts=settings.max_engine_restarts,
                on_restart=lambda i, reason: recorder.console.say(f"engine {i} is started again: {reason}"),
                relays=_relays(settings, recorder),
            )
            with engines:
                if config.memory.engine_sleeps:
                    engines.sleep()
                yield Roles(build_tokenizer(config), actor, engines, critic)


@contextmanager
def _critic(
    config: RunConfig, start: Callable[[int], Any], recorder: Recorder, common: dict[str, Any]
) -> Iterator[CriticGroup | None]:
    """The critic's ranks, asleep if they may be; None for an algorithm without one."""
    if config.algorithm.advantages != "gae":
        yield None
        return
    on_ledger = partial(recorder.ledger, learner="critic")
    with CriticGroup(start, config.ray.actor_ranks, on_ledger=on_ledger, **common) as critic:
        critic.sleep()
        yield critic


def _relays(settings: RayConfig, recorder: Recorder) -> Relays:
    """What carries weights to engines on other nodes than the actor's rank 0."""
    return Relays(
        timeout_s=settings.start_timeout_s,
        max_restarts=settings.max_engine_restarts,
        on_restart=lambda reason: recorder.console.say(f"weights are sent again between nodes: {reason}"),
    )


def make_engine(config: RunConfig) -> RolloutEngine:
    """An engine in this process, awake, without weights."""
    prepare_process(config)
    model, _ = build_model(config)
    engine = build_engine(config, to_gpu_if_any(model))
    engine.wake()
    return engine


@contextmanager
def _cluster(settings: RayConfig) -> Iterator[None]:
    """A connection to the named cluster, to the one that is connected already, or to a new one on this machine."""
    if ray.is_initialized():
        yield
        return
    if settings.address is not None:
        ray.init(address=settings.address)
    else:
        # CPUs are places to Ray, not cores: on a small machine the roles still take turns.
        ray.init(num_cpus=max(1, round(_num_bundles(settings) * settings.cpus + 0.5)), include_dashboard=False)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _bundles(settings: RayConfig) -> Iterator[PlacementGroup]:
    """The resources of all roles, together or not at all.

    Raises:
        UsageError: the cluster does not have them within `ray.start_timeout_s`.
    """
    needed = {"CPU": settings.cpus} | ({"GPU": 1.0} if _has_gpus() else {})
    bundles = [dict(needed) for _ in range(_num_bundles(settings))]
    group = placement_group(bundles, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=settings.start_timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        remove_placement_group(group)
        raise UsageError(
            f"ray.actor_ranks = {settings.actor_ranks}, ray.engines = {settings.engines} and ray.placement = "
            f"{settings.placement} need {len(bundles)} bundles of {needed}; the cluster has {_resources()}, and "
            f"{settings.start_timeout_s} s brought no others"
        ) from error
    try:
        yield group
    finally:
        remove_placement_group(group)


def _start(group: PlacementGroup, has_gpus: bool, bundle: int, worker: type, *arguments: Any) -> Any:
    """A worker on one bundle."""
    share = 1.0 / _ROLES_ON_A_BUNDLE
    return (
        ray.remote(worker)
        .options(
            num_cpus=round(share * group.bundle_specs[bundle]["CPU"], 4) - 0.0001,
            num_gpus=round(share, 4) - 0.0001 if has_gpus else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        )
        .remote(*arguments)
    )


def _num_bundles(settings: RayConfig) -> int:
    ranks, engines = settings.actor_ranks, settings.engines
    return max(ranks, engines) if settings.placement == "colocated" else ranks + engines


def _has_gpus() -> bool:
    return _resources().get("GPU", 0.0) > 0


def _resources() -> dict[str, float]:
    """All of the cluster, busy or free."""
    found: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return found

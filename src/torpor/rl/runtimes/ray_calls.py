"""Calls to Ray workers: the first failure is raised at once, as what it was, with the worker that it came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError

from torpor.errors import StateError, TorporError

Key = TypeVar("Key")


class WorkerLostError(TorporError, RuntimeError):
    """A worker's process is gone, or did not answer within its deadline."""

    worker: Any
    """The key of the call that failed for it."""
    reason: str
    actor_id: str | None
    """Ray's name of the process that is gone: it may be another's than the one that was asked."""

    def __init__(self, worker: Any, reason: str, actor_id: str | None = None) -> None:
        super().__init__(f"{worker}: {reason}", worker=worker, reason=reason, actor_id=actor_id)


def results(calls: Mapping[Key, Any], timeout_s: float | None = None) -> dict[Key, Any]:
    """What each call returned, by the key of its worker.

    Whoever fails first is raised at once, whatever the others are still waiting for.

    Args:
        calls: pending results (`ObjectRef`).
        timeout_s: for all of them together; None waits for ever.

    Raises:
        WorkerLostError: a worker died, or did not answer in time; its key is in `worker`.
        Exception: what a worker raised.
    """
    found: dict[Key, Any] = {}
    waiting = {call: key for key, call in calls.items()}
    while waiting:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout_s)
        if not ready:
            raise WorkerLostError(next(iter(waiting.values())), f"no answer within {timeout_s} s")
        key = waiting.pop(ready[0])
        found[key] = result(ready[0], key)
    return {key: found[key] for key in calls}


def result(call: Any, worker: Any) -> Any:
    """What one call returned.

    Raises:
        WorkerLostError: the worker died.
        Exception: what it raised.
    """
    try:
        return ray.get(call)
    except RayActorError as error:
        if error.actor_init_failed:
            raise StateError(f"worker {worker} did not start: {error}") from error
        raise WorkerLostError(worker, "its process died", error.actor_id) from error
    except ActorUnschedulableError as error:
        raise WorkerLostError(worker, "its node is gone") from error
    except RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise

"""Several engines on a Ray cluster as one engine. One that dies is started again and gets the current weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Protocol

import ray
from torch import Tensor

from torpor.errors import StateError, UsageError
from torpor.rl.rollout.base import GenerationStats, LoadReport, Rollout, RolloutEngine, SamplingParams, Tag, WeightSpec
from torpor.rl.runtimes.ray_buckets import in_buckets
from torpor.rl.runtimes.ray_calls import WorkerLostError, results
from torpor.rl.runtimes.ray_relays import NodeId, RelayError, Relays, node_id

_UNDER_WAY = 2
"""Buckets of weights between actor and engines at a time."""


class WeightSource(Protocol):
    """Whoever has the current weights."""

    weight_version: int

    @property
    def node_id(self) -> NodeId:
        """Where its buckets are made."""

    def buckets(self) -> Iterator[Any]:
        """References to buckets of whole weights."""


class EngineGroup(RolloutEngine):
    """Prompts are dealt out to the engines in equal runs of neighbours; all sleep, wake and load together.

    Args:
        start: starts the worker with this number, on its own resources.
        num_engines: how many.
        timeout_s: for an answer of an engine; one that does not give it counts as dead. None waits for ever.
        start_timeout_s: for one that is started again; None waits for ever.
        max_restarts: of any one engine in the whole run.
        on_restart: called with the number of an engine that was started again, and why.
        stop: ends a worker.
        relays: bring weights to engines on other nodes than the one where they are made. Closed with the engines.
    """

    name: ClassVar[str] = "ray"

    def __init__(
        self,
        start: Callable[[int], Any],
        num_engines: int,
        *,
        timeout_s: float | None = None,
        start_timeout_s: float | None = None,
        max_restarts: int = 3,
        on_restart: Callable[[int, str], None] = lambda _, __: None,
        stop: Callable[[Any], None] = ray.kill,
        relays: Relays | None = None,
        weight_version: int | None = None,
    ) -> None:
        super().__init__(weight_version=weight_version)
        if num_engines < 1:
            raise UsageError(f"num_engines is {num_engines}, at least 1 is needed")
        self._start, self._stop, self._timeout_s, self._on_restart = start, stop, timeout_s, on_restart
        self._start_timeout_s, self._max_restarts, self._relays = start_timeout_s, max_restarts, relays or Relays()
        self._restarts = dict.fromkeys(range(num_engines), 0)
        self._workers = {index: start(index) for index in range(num_engines)}
        specs: tuple[dict[str, WeightSpec], int] = self._on_all("specs")[0]
        self._specs, self._vocab_size = specs
        self._source: WeightSource | None = None

    # --- what an engine implements -----------------------------------------------------------------

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        return self._specs

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, weight_version: int
    ) -> tuple[list[Rollout], GenerationStats]:
        start = time.perf_counter()
        num = len(self._workers)
        bounds = [round(len(prompts) * i / num) for i in range(num + 1)]
        arguments = {
            # Engines count samples from 0 on: with one seed they would all draw the same numbers.
            i: (prompts[bounds[i] : bounds[i + 1]], replace(sampling, seed=sampling.seed * num + i))
            for i in range(num)
            if bounds[i + 1] > bounds[i]
        }
        answers = self._retried("generate", arguments)
        rollouts = [
            replace(rollout, prompt_index=rollout.prompt_index + bounds[i])
            for i, (found, _) in answers.items()
            for rollout in found
        ]
        stale = {rollout.weight_version for rollout in rollouts} - {weight_version}
        if stale:
            raise StateError(f"engines generated with weight versions {sorted(stale)}, not {weight_version}")
        return rollouts, _together([stats for _, stats in answers.values()], time.perf_counter() - start)

    def _sleep(self, tag: Tag) -> None:
        self._retried("sleep", {i: ([tag],) for i in self._workers})

    def _wake(self, tag: Tag) -> None:
        self._retried("wake", {i: ([tag],) for i in self._workers})

    def _load_weights(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        raise NotImplementedError("every engine checks and loads for itself; see load_weights")

    def _held_bytes(self, tag: Tag) -> int:
        return sum(held[tag] for held in self._on_all("held_bytes").values()) if not self._is_closed else 0

    def _close(self) -> None:
        self._relays.close()
        for worker in self._workers.values():
            self._stop(worker)

    # --- weights -------------------------------------------------------------------------------------

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> LoadReport:
        """As every engine, from tensors of this process; `load_from` keeps them out of it, and survives an engine."""
        buckets = (ray.put(bucket) for bucket in in_buckets(stream))
        return self._fill("load_weights", None, version, lambda: self._send(self._workers, buckets, node_id(), version))

    def load_from(self, source: WeightSource) -> LoadReport:
        """Fill every engine with the source's weights; no tensor passes through this process.

        Raises:
            WeightStreamError, AsleepError, ClosedError: as `load_weights`.
            StateError: an engine, or what carries weights between nodes, failed too often.
        """
        return self._fill(
            "load_from", source, source.weight_version, partial(self._send_again, list(self._workers), source)
        )

    def _fill(
        self, operation: str, source: WeightSource | None, version: int, send: Callable[[], dict[int, LoadReport]]
    ) -> LoadReport:
        self._require_open(operation)
        self._require_awake(operation, (Tag.WEIGHTS,))
        self._weight_version, self._source = None, source
        reports = send()
        self._weight_version = version
        return reports[0]

    def _send(
        self, workers: Mapping[int, Any], buckets: Iterable[Any], home: NodeId, version: int
    ) -> dict[int, LoadReport]:
        """The same buckets, made on `home`, to all of `workers`; if that fails, none of them waits for more."""
        try:
            return self._send_all(workers, buckets, home, version)
        except BaseException:
            for worker in workers.values():
                worker.give_up_load.remote()  # comes before whatever is asked of it next; nobody waits for the dead
            raise

    def _send_all(
        self, workers: Mapping[int, Any], buckets: Iterable[Any], home: NodeId, version: int
    ) -> dict[int, LoadReport]:
        """At most `_UNDER_WAY` buckets are between here and there."""
        begun = {i: worker.begin_load.remote(version) for i, worker in workers.items()}
        nodes: dict[int, NodeId] = results(begun, self._timeout_s)
        under_way: list[dict[int, Any]] = []
        with closing(self._relays.spread(buckets, home, set(nodes.values()))) as spread:
            for copies in spread:
                under_way.append({i: worker.take.remote(copies[nodes[i]]) for i, worker in workers.items()})
                if len(under_way) >= _UNDER_WAY:
                    results(under_way.pop(0), self._timeout_s)
        for calls in under_way:
            results(calls, self._timeout_s)
        return results({i: worker.end_load.remote() for i, worker in workers.items()}, self._timeout_s)

    def _send_again(self, indices: Sequence[int], source: WeightSource) -> dict[int, LoadReport]:
        """What `source` has to these engines, from the beginning if one of them or a relay dies meanwhile."""
        while True:
            workers = {i: self._workers[i] for i in indices}
            try:
                return self._send(workers, source.buckets(), source.node_id, source.weight_version)
            except RelayError as error:
                self._relays.count_restart(error)
            except WorkerLostError as lost:
                if not self._is_mine(lost):
                    raise
                self._restart(lost.worker, lost.reason)

    def _is_mine(self, lost: WorkerLostError) -> bool:
        """Whether it was an engine: a call of an engine fails too if the rank that made its weights dies."""
        ids = {worker._actor_id.hex() for worker in self._workers.values()}
        return lost.worker in self._workers and (lost.actor_id is None or lost.actor_id in ids)

    # --- workers -------------------------------------------------------------------------------------

    def check(self, timeout_s: float) -> list[int]:
        """Engines that do not answer within `timeout_s`; they are started again with the current weights."""
        lost = []
        for i, worker in list(self._workers.items()):
            try:
                results({i: worker.process_id.remote()}, timeout_s)
            except WorkerLostError as error:
                lost.append(i)
                self._revive(i, error.reason)
        return lost

    def process_ids(self) -> dict[int, int]:
        """Of the engines, on their nodes."""
        return self._on_all("process_id")

    def _on_all(self, method: str) -> dict[int, Any]:
        return self._retried(method, dict.fromkeys(self._workers, ()))

    def _retried(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call `method` of engines; one that dies meanwhile is revived and asked again."""
        calls = {i: getattr(self._workers[i], method).remote(*values) for i, values in arguments.items()}
        answers = {}
        for i, call in calls.items():
            while True:
                try:
                    answers[i] = results({i: call}, self._timeout_s)[i]
                    break
                except WorkerLostError as lost:
                    self._revive(i, lost.reason)
                    call = getattr(self._workers[i], method).remote(*arguments[i])
        return answers

    def _revive(self, index: int, reason: str) -> None:
        """Start one engine again and bring it to where the others are."""
        self._restart(index, reason)
        if self._weight_version is None:
            return
        source = self._source
        if source is None or source.weight_version != self._weight_version:
            have = None if source is None else source.weight_version
            raise StateError(
                f"engine {index} died ({reason}) and needs weights of version {self._weight_version}; "
                f"the actor has {have}: update the weights"
            )
        self._send_again([index], source)

    def _restart(self, index: int, reason: str) -> None:
        """A new process, with what sleeps in the others asleep in it too, and without weights."""
        self._restarts[index] += 1
        if self._restarts[index] > self._max_restarts:
            raise StateError(
                f"engine {index} died again ({reason}); it was started {self._max_restarts} times before, "
                "which is the limit (ray.max_engine_restarts)"
            )
        self._stop(self._workers[index])
        self._on_restart(index, reason)
        self._workers[index] = self._start(index)
        try:
            results({index: self._workers[index].sleep.remote(sorted(self._asleep))}, self._start_timeout_s)
        except WorkerLostError as lost:
            if lost.actor_id is not None:
                return self._restart(index, lost.reason)
            raise StateError(
                f"engine {index} did not start again ({lost.reason}); the bundle that it needs may be on a node "
                "that is gone, and no other node has room"
            ) from lost


def _together(stats: Sequence[GenerationStats], total_s: float) -> GenerationStats:
    """Of engines that ran side by side: counts add up, the slowest decides the seconds."""
    slowest = max(stats, key=lambda s: s.total_s)
    return GenerationStats(
        num_prompts=sum(s.num_prompts for s in stats),
        num_completions=sum(s.num_completions for s in stats),
        num_prefilled_tokens=sum(s.num_prefilled_tokens for s in stats),
        num_generated_tokens=sum(s.num_generated_tokens for s in stats),
        prefill_s=slowest.prefill_s,
        decode_s=slowest.decode_s,
        total_s=total_s,
    )

"""Weights from one node of a Ray cluster to others: a broadcast between processes that are there for nothing else.

One relay a node. The one where the weights are made sends them out of its node's shared memory; each of the others
puts what it receives into its own node's, where every engine reads it without a copy. Engines and ranks have no part
in the collective: one that dies leaves it whole, and a relay that dies takes none of them along.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import ray
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # not in its __all__

from torpor.errors import StateError, TorporError, UsageError
from torpor.rl.runtimes.ray_buckets import Bucket, empty_bucket
from torpor.rl.runtimes.ray_calls import WorkerLostError, results

NodeId = str
"""Ray's name of a node."""


class RelayError(TorporError, RuntimeError):
    """Weights did not reach another node. The relays are gone, and new ones start with the next weights."""


def node_id() -> NodeId:
    """Where this process runs."""
    found: str = ray.get_runtime_context().get_node_id()
    return found


class Relays:
    """The relays of a run, started with the first weights for another node than their own.

    Args:
        timeout_s: for the relays to start and find each other, and for each bucket to arrive.
        max_restarts: of all of them together, in the whole run.
        on_restart: called with the reason.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 300.0,
        max_restarts: int = 3,
        on_restart: Callable[[str], None] = lambda _: None,
    ) -> None:
        if timeout_s <= 0:
            raise UsageError(f"timeout_s is {timeout_s}, it must be above 0")
        self._timeout_s, self._max_restarts, self._on_restart = timeout_s, max_restarts, on_restart
        self._num_restarts = 0
        self._members: dict[NodeId, Any] = {}  # the sender comes first

    def spread(
        self, buckets: Iterable[Any], home: NodeId, nodes: Set[NodeId]
    ) -> Generator[Mapping[NodeId, Any], None, None]:
        """For each bucket, a reference to it on every one of `nodes`. Close the iterator if you leave it early.

        Args:
            buckets: references (`ObjectRef`) to buckets that are there, on node `home`.
            home: node of whoever makes them.
            nodes: where they are wanted; those of them that are `home` cost nothing.

        Raises:
            RelayError: a relay died, failed or was late.
            Exception: what `buckets` raises.
        """
        if nodes <= {home}:
            yield from ({home: bucket} for bucket in buckets)
            return
        try:
            self._meet(home, nodes)
            for bucket in buckets:
                yield self._broadcast(home, bucket)
        except BaseException:
            self.close()  # some of them may wait for others for ever
            raise

    def count_restart(self, error: RelayError) -> None:
        """To be called before weights that failed with `error` are sent again.

        Raises:
            StateError: that was too often.
        """
        self._num_restarts += 1
        if self._num_restarts > self._max_restarts:
            raise StateError(
                f"weights did not reach another node again ({error}); their relays were started "
                f"{self._max_restarts} times before, which is the limit (ray.max_engine_restarts)"
            ) from error
        self._on_restart(str(error))

    def process_ids(self) -> dict[NodeId, int]:
        """Of the relays that run, on their nodes."""
        return self._results({node: relay.process_id.remote() for node, relay in self._members.items()})

    def close(self) -> None:
        """End all of them; they start again when needed. Idempotent."""
        members, self._members = self._members, {}
        for relay in members.values():
            ray.kill(relay)

    def _meet(self, home: NodeId, nodes: Set[NodeId]) -> None:
        """Relays on `home` and on all of `nodes`; those that are there stay if they suffice."""
        if next(iter(self._members), None) == home and nodes <= self._members.keys():
            return
        self.close()
        names = [home, *sorted(nodes - {home})]
        self._members = {node: _start(node) for node in names}
        opened = {home: self._members[home].open.remote(len(names), self._timeout_s)}
        host, port = self._results(opened)[home]
        self._results(
            {
                node: relay.join.remote(host, port, rank, len(names), self._timeout_s)
                for rank, (node, relay) in enumerate(self._members.items())
            }
        )

    def _broadcast(self, home: NodeId, bucket: Any) -> Mapping[NodeId, Any]:
        """`bucket` on every node."""
        sent = {home: self._members[home].send.remote(bucket)}
        received = {
            node: relay.receive.options(num_returns=2).remote() for node, relay in self._members.items() if node != home
        }
        self._results(sent | {node: done for node, (done, _) in received.items()})
        return {home: bucket} | {node: copy for node, (_, copy) in received.items()}

    def _results(self, calls: Mapping[NodeId, Any]) -> dict[NodeId, Any]:
        """What the relays answered; a failure of what they were given is raised as what it is."""
        ids = {relay._actor_id.hex() for relay in self._members.values()}
        try:
            return results(calls, self._timeout_s)
        except WorkerLostError as lost:
            if lost.actor_id is not None and lost.actor_id not in ids:
                raise
            raise RelayError(f"the relay on node {lost.worker}: {lost.reason}") from lost


class Relay:
    """One node's part in the broadcast."""

    _store: TCPStore | None = None

    def open(self, num_relays: int, timeout_s: float) -> tuple[str, int]:
        """Where the relays meet: host and port of a store in this process."""
        with _named("did not open a store"):
            host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            timeout = timedelta(seconds=timeout_s)
            self._store = TCPStore(host, 0, num_relays, True, timeout, wait_for_workers=False)
            return host, self._store.port

    def join(self, host: str, port: int, rank: int, num_relays: int, timeout_s: float) -> None:
        """Meet the others; rank 0 will send."""
        with _named(f"did not meet the others at {host}:{port}"):
            timeout = timedelta(seconds=timeout_s)
            store = self._store or TCPStore(host, port, num_relays, False, timeout, wait_for_workers=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=num_relays, timeout=timeout)

    def send(self, bucket: Bucket) -> None:
        """`bucket`, out of this node's shared memory, to all others."""
        with _named("did not send"):
            dist.broadcast_object_list([bucket.places], src=0)
            dist.broadcast(bucket.whole, src=0)

    def receive(self) -> tuple[None, Bucket]:
        """What rank 0 sends. The driver waits for the first, and never fetches the second."""
        with _named("did not receive"):
            places: list[Any] = [None]
            dist.broadcast_object_list(places, src=0)
            bucket = empty_bucket(places[0])
            dist.broadcast(bucket.whole, src=0)
            return None, bucket

    def process_id(self) -> int:
        """Answers while the process lives."""
        return os.getpid()


def _start(node: NodeId) -> Any:
    """A relay on `node` or nowhere. It takes no share of what the roles take turns with."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(Relay).options(num_cpus=0, scheduling_strategy=where).remote()


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Whatever a collective raises is a failure of the relays, not of the weights."""
    try:
        yield
    except Exception as error:
        raise RelayError(f"a relay {what}: {error}") from error

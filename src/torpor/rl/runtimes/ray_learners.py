"""The ranks of an actor, or of a critic, on a Ray cluster as one. If one of them dies the run ends, and its last
checkpoint is named: the others cannot go on without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import ray
from torch import Tensor

from torpor.errors import StateError, TorporError, UnsupportedError
from torpor.report.metrics import Metrics
from torpor.rl.batch import Batch
from torpor.rl.checkpoint import find_latest
from torpor.rl.critic import Appraisal
from torpor.rl.learner import Progress
from torpor.rl.rollout.base import LoadReport, RolloutEngine
from torpor.rl.runtimes.ray_calls import WorkerLostError, results
from torpor.rl.runtimes.ray_engines import EngineGroup
from torpor.rl.runtimes.ray_relays import NodeId

if TYPE_CHECKING:
    from torpor.ledger import Ledger

_T = TypeVar("_T")

_BACKPRESSURE = 2
"""Buckets of weights that rank 0 makes ahead of their use."""


class LearnerLostError(TorporError, RuntimeError):
    """A rank died; the run cannot go on. `checkpoint` is the newest one, None if there is none."""

    role: str
    rank: int
    checkpoint: Path | None

    def __init__(self, role: str, rank: int, reason: str, checkpoint: Path | None) -> None:
        remedy = (
            f"The last checkpoint is {checkpoint}; go on from it with --resume"
            if checkpoint is not None
            else "There is no checkpoint; --checkpoint.interval-steps makes them"
        )
        super().__init__(f"rank {rank} of the {role}: {reason}. {remedy}", role=role, rank=rank, checkpoint=checkpoint)


class LearnerGroup:
    """Each call goes to every rank.

    Args:
        start: starts the worker of a rank, on its own resources.
        num_ranks: how many.
        checkpoints: where the run's checkpoints are.
        timeout_s: for the ranks to find each other, and for each of their collectives.
        on_ledger: called with the ledgers of rank 0; the other ranks have the like.
        is_fresh: whether the model is warmed up; else a checkpoint comes next.
    """

    role = "learner"

    def __init__(
        self,
        start: Callable[[int], Any],
        num_ranks: int,
        *,
        checkpoints: Path,
        timeout_s: float,
        on_ledger: Callable[[Ledger], None] = lambda _: None,
        is_fresh: bool = True,
    ) -> None:
        self._checkpoints, self._on_ledger = checkpoints, on_ledger
        self._workers = {rank: start(rank) for rank in range(num_ranks)}
        self.weight_version, self.num_updates, self._is_asleep = 0, 0, False
        self._is_closed = False
        with self._named():
            host, port = results({0: self._workers[0].open_store.remote(timeout_s)})[0]
        self.warm_start_losses: list[float] = self._on_all("start", host, port, timeout_s, is_fresh=is_fresh)[0]

    # --- memory ------------------------------------------------------------------------------------------

    @property
    def is_asleep(self) -> bool:
        """Whether learning would have to wake it."""
        return self._is_asleep

    def sleep(self) -> None:
        """Free the memory of every rank, or of none. Idempotent."""
        self._account(self._on_all("sleep"))

    def wake_up(self) -> None:
        """Bring every rank back, or none. Idempotent."""
        self._account(self._on_all("wake_up"))

    def close(self) -> None:
        """Every rank wakes, leaves the others and ends. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._on_all("close")
        finally:
            self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._is_closed = True
            self._kill()  # ranks that wait for each other answer nobody
        self.close()

    # --- state -------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Every rank writes its part into `directory`, which all of them see. Wakes nothing."""
        self._on_all("save", directory.absolute())

    def load(self, directory: Path) -> None:
        """Every rank takes its part of a checkpoint."""
        self._account(self._on_all("load", directory.absolute()))

    def process_ids(self) -> dict[int, int]:
        """Of the ranks, on their nodes."""
        return self._on_all("process_id")

    # --- workers -----------------------------------------------------------------------------------------

    def _on_all(self, method: str, *arguments: Any, **options: Any) -> dict[int, Any]:
        with self._named():
            calls = {rank: getattr(w, method).remote(*arguments, **options) for rank, w in self._workers.items()}
            return results(calls)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """A rank that is lost ends the run; the others would wait for it."""
        try:
            yield
        except WorkerLostError as lost:
            ranks = {worker._actor_id.hex(): rank for rank, worker in self._workers.items()}
            if lost.actor_id is not None and lost.actor_id not in ranks:
                raise  # somebody else's
            self._kill()
            self._is_closed = True
            rank = ranks.get(str(lost.actor_id), lost.worker)
            raise LearnerLostError(self.role, rank, lost.reason, find_latest(self._checkpoints)) from lost

    def _kill(self) -> None:
        for worker in self._workers.values():
            ray.kill(worker)

    def _trained(self, answers: Mapping[int, tuple[Metrics, list[Ledger]]]) -> Metrics:
        """The metrics of all ranks as one."""
        metrics = Metrics()
        for found in self._accounted(answers).values():
            metrics.update(found)
        return metrics

    def _accounted(self, answers: Mapping[int, tuple[_T, list[Ledger]]]) -> dict[int, _T]:
        """What each rank answered, without the ledgers that came with it."""
        self._account({rank: ledgers for rank, (_, ledgers) in answers.items()})
        return {rank: found for rank, (found, _) in answers.items()}

    def _account(self, ledgers: Mapping[int, Sequence[Ledger]]) -> None:
        for ledger in ledgers[0]:
            self._on_ledger(ledger)
        counters = self._on_all("counters")
        if len(set(counters.values())) != 1:
            raise StateError(f"the ranks of the {self.role} disagree on (version, updates, asleep): {counters}")
        self.weight_version, self.num_updates, self._is_asleep = counters[0]


class ActorGroup(LearnerGroup):
    """The ranks of the actor. Batches are dealt out, and weights go from rank 0 to the engines."""

    role = "actor"

    def train(self, batch: Batch, progress: Progress = lambda _: None) -> Metrics:
        """One training step, every rank on its share of `batch`.

        Raises:
            LearnerLostError: a rank died.
            StateError: the batch was generated with other weights than the actor has.
        """
        answers = self._on_all("train", ray.put(batch))  # once for all ranks of a node
        progress(len(batch.groups))
        return self._trained(answers)

    def reference_gaps(self, batch: Batch) -> Sequence[Tensor]:
        """See `Actor.reference_gaps`; every rank scores its share."""
        return in_turn(self._accounted(self._on_all("reference_gaps", ray.put(batch))))

    def update_weights(self, engine: RolloutEngine) -> LoadReport:
        """Fill the engines with the weights as they are, from the stores of the ranks if they sleep.

        Raises:
            UnsupportedError: the engines are not on this cluster.
        """
        if not isinstance(engine, EngineGroup):
            raise UnsupportedError(f"the {engine.name} engine is not on the Ray cluster that the actor is on")
        with self._named():
            return engine.load_from(self)

    @property
    def node_id(self) -> NodeId:
        """Of rank 0, which makes the buckets; asked anew each time, for weights that fail may fail because it is gone.

        Raises:
            LearnerLostError: rank 0 is gone.
        """
        with self._named():
            found: dict[int, NodeId] = results({0: self._workers[0].node_id.remote()})
            return found[0]

    def buckets(self) -> Iterator[Any]:
        """References to buckets of whole weights, made as they are taken."""
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": _BACKPRESSURE}
        streams = {rank: worker.weights.options(**options).remote() for rank, worker in self._workers.items()}
        yield from (bucket for bucket in streams[0])  # whose own close() raises
        results({rank: stream.completed() for rank, stream in streams.items()})


class CriticGroup(LearnerGroup):
    """The ranks of the critic; what a rank appraised stays with it until it trains."""

    role = "critic"

    def appraise(self, batch: Batch, gaps: Sequence[Tensor] | None = None) -> Appraisal:
        """`batch` with advantages; the ranks keep what they will train on."""
        shares = self._accounted(self._on_all("appraise", ray.put(batch), ray.put(gaps)))
        groups = in_turn({rank: share.groups for rank, share in shares.items()})
        return Appraisal(Batch(tuple(groups), batch.weight_version), ())

    def train(self, appraisal: Appraisal, progress: Progress = lambda _: None) -> Metrics:
        """Fit the values to the returns of the batch that was appraised last."""
        answers = self._on_all("train")
        progress(len(appraisal.batch.groups))
        return self._trained(answers)


def in_turn(shares: Mapping[int, Sequence[_T]]) -> list[_T]:
    """The shares of all ranks as one: groups were dealt out to the ranks in turn."""
    whole: list[_T] = [item for share in shares.values() for item in share]
    for rank, share in shares.items():
        whole[rank :: len(shares)] = share
    return whole

"""What runs in the processes of a Ray cluster: ranks of the actor, and rollout engines. Tensors live here only."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined] # not in its __all__

from torpor.errors import StateError
from torpor.report.metrics import Metrics
from torpor.report.rundir import RunDirectory
from torpor.rl.actor import Actor
from torpor.rl.batch import Batch
from torpor.rl.build import build_model, build_task, prepare_process, warm_up
from torpor.rl.config import RunConfig
from torpor.rl.critic import Appraisal, Critic
from torpor.rl.learner import Learner
from torpor.rl.roles import build_actor, build_critic
from torpor.rl.rollout.base import (
    EngineReport,
    GenerationStats,
    LoadReport,
    Rollout,
    RolloutEngine,
    SamplingParams,
    Tag,
    WeightSpec,
)
from torpor.rl.runtimes.ray_buckets import Bucket, in_buckets
from torpor.rl.runtimes.ray_relays import NodeId, node_id

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from torpor.ledger import Ledger

_FULL_S = 0.2


def to_gpu_if_any(model: PreTrainedModel) -> PreTrainedModel:
    """`model`, moved to the GPU that this process has been given, if it has."""
    if torch.cuda.is_available():
        torch.nn.Module.to(model, "cuda")
    return model


class LearnerWorker:
    """One rank of the actor or of the critic.

    Args:
        config: of the run.
        rank, world_size: its place among the ranks.
        run: the directory of the run, which every rank sees.
    """

    def __init__(self, config: RunConfig, rank: int, world_size: int, run: Path) -> None:
        self._config, self._rank, self._world_size = config, rank, world_size
        self._run = RunDirectory(run)
        self._ledgers: list[Ledger] = []
        self._learner: Learner | None = None
        self._store: TCPStore | None = None

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Where the ranks meet: host and port of a store in this process."""
        import ray

        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._store = TCPStore(host, 0, self._world_size, True, timedelta(seconds=timeout_s), wait_for_workers=False)
        return host, self._store.port

    def node_id(self) -> NodeId:
        """Where it runs."""
        return node_id()

    def start(self, host: str, port: int, timeout_s: float, *, is_fresh: bool) -> list[float]:
        """Join the other ranks and build this rank's part; the losses of the warm start if the run is fresh."""
        os.environ |= {"RANK": str(self._rank), "WORLD_SIZE": str(self._world_size), "LOCAL_RANK": "0"}
        timeout = timedelta(seconds=timeout_s)
        store = self._store or TCPStore(host, port, self._world_size, False, timeout, wait_for_workers=False)
        kinds = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(kinds, store=store, rank=self._rank, world_size=self._world_size, timeout=timeout)
        prepare_process(self._config)
        model, tokenizer = build_model(self._config)
        losses: list[float] = []
        if is_fresh and self._config.warm_start.steps:
            if self._rank == 0:
                task = build_task(self._config.task, self._config.seed)
                losses = warm_up(self._config, model, task, tokenizer)
            for parameter in model.parameters():
                dist.broadcast(parameter.detach(), 0)
        self._learner = self._build(to_gpu_if_any(model))
        return losses

    def _build(self, model: PreTrainedModel) -> Learner:
        raise NotImplementedError

    def sleep(self) -> list[Ledger]:
        """Put this rank to sleep; the ledgers of it."""
        self._started.sleep()
        return self._take_ledgers()

    def wake_up(self) -> list[Ledger]:
        """Bring this rank back; the ledgers of it."""
        self._started.wake_up()
        return self._take_ledgers()

    def counters(self) -> tuple[int, int, bool]:
        """Weight version, optimizer steps, and whether it sleeps."""
        return self._started.weight_version, self._started.num_updates, self._started.is_asleep

    def save(self, directory: Path) -> None:
        """This rank's part of a checkpoint."""
        self._started.save(directory)

    def load(self, directory: Path) -> list[Ledger]:
        """Take this rank's part of a checkpoint; the ledgers of waking for it."""
        self._started.load(directory)
        return self._take_ledgers()

    def close(self) -> None:
        """Wake, and leave the other ranks."""
        self._started.close()
        dist.destroy_process_group()

    def process_id(self) -> int:
        """Answers while the process lives."""
        return os.getpid()

    @property
    def _started(self) -> Learner:
        if self._learner is None:
            raise StateError("a rank was asked before it was started")
        return self._learner

    def _share(self, batch: Batch) -> Batch:
        """What of `batch` this rank learns from."""
        return Batch(batch.groups[self._of_this_rank], batch.weight_version)

    @property
    def _of_this_rank(self) -> slice:
        """Which of the groups of a batch."""
        return slice(self._rank, None, self._world_size)

    def _take_ledgers(self) -> list[Ledger]:
        taken = list(self._ledgers)
        self._ledgers.clear()
        return taken


class ActorWorker(LearnerWorker):
    """One rank of the actor."""

    _learner: Actor | None

    def _build(self, model: PreTrainedModel) -> Actor:
        return build_actor(self._config, model, self._run, self._ledgers.append)

    def train(self, batch: Batch) -> tuple[Metrics, list[Ledger]]:
        """Learn from this rank's share of `batch`."""
        return self._actor.train(self._share(batch)), self._take_ledgers()

    def reference_gaps(self, batch: Batch) -> tuple[list[Tensor], list[Ledger]]:
        """Of this rank's share of `batch`."""
        return self._actor.reference_gaps(self._share(batch)), self._take_ledgers()

    def weights(self) -> Iterator[Bucket]:
        """Buckets of whole weights from rank 0, asleep or awake; the other ranks give theirs and yield nothing."""
        weights = self._actor.backend.weights(self._actor.sleeper)
        if self._rank == 0:
            yield from in_buckets(weights)
        else:
            deque(weights, maxlen=0)

    @property
    def _actor(self) -> Actor:
        if self._learner is None:
            raise StateError("a rank was asked before it was started")
        return self._learner


class CriticWorker(LearnerWorker):
    """One rank of the critic. What it appraised last is what it trains on next."""

    _learner: Critic | None
    _appraisal: Appraisal | None = None

    def _build(self, model: PreTrainedModel) -> Critic:
        return build_critic(self._config, model, self._run, self._ledgers.append)

    def appraise(self, batch: Batch, gaps: Sequence[Tensor] | None) -> tuple[Batch, list[Ledger]]:
        """This rank's share of `batch`, with advantages; `gaps` are of all groups."""
        self._appraisal = self._critic.appraise(self._share(batch), gaps and gaps[self._of_this_rank])
        return self._appraisal.batch, self._take_ledgers()

    def train(self) -> tuple[Metrics, list[Ledger]]:
        """Learn from what was appraised."""
        if self._appraisal is None:
            raise StateError("a critic trains on what it has appraised, and there is nothing")
        appraisal, self._appraisal = self._appraisal, None
        return self._critic.train(appraisal), self._take_ledgers()

    @property
    def _critic(self) -> Critic:
        if self._learner is None:
            raise StateError("a rank was asked before it was started")
        return self._learner


class EngineWorker:
    """A rollout engine in a process of its own. Weights come bucket by bucket between two calls.

    Args:
        make: makes the engine here; called once.
    """

    def __init__(self, make: Callable[[], RolloutEngine]) -> None:
        self._engine = make()
        self._loading: _Loading | None = None

    def specs(self) -> tuple[dict[str, WeightSpec], int]:
        """`weight_specs()` and `vocab_size`."""
        return dict(self._engine.weight_specs()), self._engine.vocab_size

    def sleep(self, tags: Sequence[Tag]) -> EngineReport:
        return self._engine.sleep(tags)

    def wake(self, tags: Sequence[Tag]) -> EngineReport:
        return self._engine.wake(tags)

    def held_bytes(self) -> dict[Tag, int]:
        return self._engine.held_bytes()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> tuple[list[Rollout], GenerationStats]:
        rollouts = self._engine.generate(prompts, sampling)
        if self._engine.last_generation is None:
            raise StateError("the engine generated and says nothing of it")
        return rollouts, self._engine.last_generation

    def begin_load(self, version: int) -> NodeId:
        """Weights of `version` come next; on which node they are wanted."""
        self._loading = _Loading(self._engine, version)
        return node_id()

    def take(self, bucket: Bucket) -> None:
        """The next weights; returns when there is room for more."""
        self._under_way().put(bucket)

    def end_load(self) -> LoadReport:
        """All weights were given.

        Raises:
            WeightStreamError and others: see `RolloutEngine.load_weights`.
        """
        loading, self._loading = self._under_way(), None
        return loading.finish()

    def give_up_load(self) -> None:
        """No more weights come: the load under way, if one is, ends, and the engine has no weights."""
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.give_up()

    def close(self) -> None:
        self._engine.close()

    def process_id(self) -> int:
        """Answers while the process lives."""
        return os.getpid()

    def _under_way(self) -> _Loading:
        if self._loading is None:
            raise StateError("weights came before begin_load()")
        return self._loading


class _Loading:
    """`load_weights` in a thread, fed by later calls."""

    def __init__(self, engine: RolloutEngine, version: int) -> None:
        self._buckets: queue.Queue[Bucket | None] = queue.Queue(maxsize=1)
        self._outcome: LoadReport | BaseException | None = None
        self._is_given_up = False
        self._thread = threading.Thread(target=self._run, args=(engine, version), name="torpor-load", daemon=True)
        self._thread.start()

    def _run(self, engine: RolloutEngine, version: int) -> None:
        try:
            self._outcome = engine.load_weights(self._stream(), version)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asks
            self._outcome = error

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        while (bucket := self._buckets.get()) is not None:
            yield from bucket
        if self._is_given_up:
            raise StateError("the weights stopped coming and the load was given up")

    def put(self, bucket: Bucket | None) -> None:
        while self._thread.is_alive():  # an engine that gave up takes no more
            try:
                return self._buckets.put(bucket, timeout=_FULL_S)
            except queue.Full:
                continue
        return None

    def finish(self) -> LoadReport:
        self.put(None)
        self._thread.join()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        if self._outcome is None:
            raise StateError("the engine ended a load and says nothing of it")
        return self._outcome

    def give_up(self) -> None:
        """End the thread; what the engine says of it is of no use to anyone."""
        self._is_given_up = True
        self.put(None)
        self._thread.join()

"""Ranks decide together: each stage of a sleep or a wake succeeds on all of them, or on none.

    round = agreement.begin("sleep(all)")          every rank makes the same call, or all get an error
    with round.stage("copy"):                       leaving the block casts this rank's vote and waits for the others'
        ...                                         an exception is a vote against: every rank gets a RankError

Votes are keys in the key-value store that `torch.distributed` was started with, one for each rank; no collective
can hang, and a rank that does not answer is known by the key it did not set. What a stage came to is one more key,
written once by compare-and-set: a rank that gave up at the deadline and one that votes a moment later read the
same verdict. A rank whose process has ended is named at once where it can be seen, and at the deadline elsewhere.

Keys of a round are removed as soon as the next one shows that every rank has left it.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # not in its __all__

from torpor.errors import DesyncError, RankError, UsageError
from torpor.ledger import Stopwatch

DEFAULT_TIMEOUT_S = 300.0
#: Seconds between two looks at the store: at first, and at most with few ranks; more of them ask less often.
_POLL_S, _MAX_POLL_S = 0.001, 0.005
_MAX_POLL_S_FOR_EACH_RANK = 2e-5
#: Seconds between two looks at the processes of this machine.
_LIVENESS_S = 0.5
#: Kinds of failures that are no exception of a rank.
LATE, ENDED, NO_STORE = "late", "ended", "no store"

#: Agreements of one process, in the order they were made: the same on every rank.
_numbers = itertools.count()


class Round(Protocol):
    """One call that all ranks make."""

    def stage(self, name: str, extra_s: float = 0.0) -> AbstractContextManager[None]:
        """The block is done on all ranks when it is left, or raises on all.

        Args:
            name: of the stage, once in a round.
            extra_s: how much longer than usual the others may take: they wait for something in the block.
        """


class Rounds(Protocol):
    """Starts rounds: an `Agreement`, or `Alone`."""

    def begin(self, call: str, stopwatch: Stopwatch) -> Round:
        """Start a round; see `Agreement.begin`."""


class Agreement:
    """The ranks of one group, for the calls of one sleeper. Make them in the same order on every rank.

    Args:
        group: whose ranks agree. Its store is used, its collectives are not: it may be destroyed meanwhile.
        timeout_s: how long a rank waits for the others in each stage.

    Raises:
        UsageError: a timeout that is not positive.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if timeout_s <= 0:
            raise UsageError(f"agree_timeout_s={timeout_s}: must be above 0 seconds")
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank()
        self.timeout_s = timeout_s
        self._store = PrefixStore(f"torpor/{next(_numbers)}", group.get_group_store())
        self.max_poll_s = _MAX_POLL_S + _MAX_POLL_S_FOR_EACH_RANK * len(self.ranks)
        self._rounds = itertools.count()
        self._old_keys: list[str] = []
        self._neighbours: dict[int, _Process] | None = None
        self.say(f"process/{self.rank}", asdict(_Process.this()))

    def begin(self, call: str, stopwatch: Stopwatch) -> Round:
        """Start a round: all ranks are here, and make the same call.

        Args:
            call: what is called, with its arguments. Example: `"sleep(['optimizer'])"`.
            stopwatch: adds up the seconds of waiting for other ranks, as the stage `agree`.

        Raises:
            DesyncError: another rank makes another call; both are named.
            RankError: a rank did not come.
        """
        round_ = _AgreedRound(self, next(self._rounds), stopwatch)
        old_keys, self._old_keys = self._old_keys, []
        try:
            round_.vote("begin", {"call": call})
        except RankError:
            self._old_keys += old_keys
            raise
        for key in old_keys:  # every rank has begun this round, so it has left the one before
            self._store.delete_key(key)
        return round_

    def say(self, key: str, value: Mapping[str, object]) -> None:
        """Set a key for the other ranks."""
        self._store.set(key, json.dumps(value))

    def heard(self, key: str) -> dict[str, object] | None:
        """What a key was set to; None so far."""
        if not self._store.check([key]):
            return None
        value: dict[str, object] = json.loads(self._store.get(key))
        return value

    def heard_all(self, keys: Sequence[str]) -> list[dict[str, object] | None]:
        """The same of many keys, in two questions where all are set: of a thousand ranks each would be a round trip."""
        if not (self._store.has_extended_api() and self._store.check(list(keys))):  # type: ignore[attr-defined] # no stub
            return [self.heard(key) for key in keys]
        return [json.loads(value) for value in self._store.multi_get(list(keys))]

    def count(self, key: str) -> int:
        """Add one to a counter."""
        return self._store.add(key, 1)

    def propose(self, key: str, value: Mapping[str, object]) -> None:
        """Set a key unless it is set already."""
        self._store.compare_set(key, "", json.dumps(value))

    def outdate(self, keys: list[str], shared: list[str]) -> None:
        """Keys of the round that goes on: to be removed once it is over, the shared ones by one rank."""
        self._old_keys += [*keys, *(shared if self.rank == self.ranks[0] else ())]

    def ended(self) -> list[int]:
        """Ranks of this machine whose process has ended."""
        if self._neighbours is None:
            said = zip(self.ranks, self.heard_all([f"process/{rank}" for rank in self.ranks]), strict=True)
            processes = {rank: _Process.from_json(values) for rank, values in said if values is not None}
            self._neighbours = {rank: process for rank, process in processes.items() if process.place == _place()}
        return [rank for rank, process in self._neighbours.items() if process.has_ended()]


class _AgreedRound:
    """One call of all ranks, stage after stage."""

    def __init__(self, agreement: Agreement, number: int, stopwatch: Stopwatch) -> None:
        self._agreement = agreement
        self._number = number
        self._stopwatch = stopwatch

    @contextmanager
    def stage(self, name: str, extra_s: float = 0.0) -> Iterator[None]:
        """See `Round.stage`.

        Raises:
            RankError: from the exception that this rank met, or because of another rank.
        """
        try:
            yield
        except Exception as error:
            self.vote(name, _failure(error), error=error)
            raise
        except BaseException as error:
            self._cast(name, _failure(error))  # the others need not wait, this rank must not
            raise
        self.vote(name, {}, extra_s)

    def vote(
        self, stage: str, vote: Mapping[str, object], extra_s: float = 0.0, error: Exception | None = None
    ) -> None:
        """Cast this rank's vote and act on the verdict of all.

        Raises:
            RankError, DesyncError: the verdict is no.
        """
        try:
            with self._stopwatch.stage("agree"):
                self._cast(stage, vote)
                verdict = self._wait_for_verdict(stage, self._agreement.timeout_s + extra_s)
        except dist.DistError as lost:
            first_line = str(lost).splitlines()[0]
            reason = f"the key-value store that the ranks agree through does not answer ({first_line})"
            raise RankError({self._agreement.ranks[0]: reason}, stage, NO_STORE) from (error or lost)
        if not verdict["agreed"]:
            raise _error(verdict, stage) from error

    def _cast(self, stage: str, vote: Mapping[str, object]) -> None:
        ours, verdict, total = (
            self._key(stage, self._agreement.rank),
            self._key(stage, "verdict"),
            self._key(stage, "n"),
        )
        self._agreement.outdate([ours], [verdict, total])
        self._agreement.say(ours, vote)
        is_last = self._agreement.count(total) == len(self._agreement.ranks)
        if "reason" in vote:
            self._agreement.propose(verdict, _judge({self._agreement.rank: vote}))
        elif is_last:
            self._agreement.propose(verdict, _judge(self._votes(stage)))

    def _wait_for_verdict(self, stage: str, timeout_s: float) -> dict[str, object]:
        start = time.monotonic()
        deadline, look_at_processes, pause_s = start + timeout_s, start + _LIVENESS_S, _POLL_S
        while (verdict := self._agreement.heard(self._key(stage, "verdict"))) is None:
            now = time.monotonic()
            if now >= deadline:
                self._propose_at_the_deadline(stage, timeout_s)
            elif now >= look_at_processes:
                look_at_processes = now + _LIVENESS_S
                self._propose_against_the_dead(stage)
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, self._agreement.max_poll_s)
        return verdict

    def _propose_at_the_deadline(self, stage: str, timeout_s: float) -> None:
        votes = self._votes(stage)
        late = [rank for rank in self._agreement.ranks if rank not in votes]
        verdict = _against(late, f"did not answer within {timeout_s:g} s", LATE) if late else _judge(votes)
        self._agreement.propose(self._key(stage, "verdict"), verdict)

    def _propose_against_the_dead(self, stage: str) -> None:
        ended = self._agreement.ended()
        silent = [rank for rank in ended if self._agreement.heard(self._key(stage, rank)) is None]
        if silent:
            self._agreement.propose(self._key(stage, "verdict"), _against(silent, "its process has ended", ENDED))

    def _votes(self, stage: str) -> dict[int, dict[str, object]]:
        ranks = self._agreement.ranks
        votes = zip(ranks, self._agreement.heard_all([self._key(stage, rank) for rank in ranks]), strict=True)
        return {rank: vote for rank, vote in votes if vote is not None}

    def _key(self, stage: str, what: int | str) -> str:
        return f"{self._number}/{stage}/{what}"


class Alone:
    """The agreement of a process with itself: nothing to ask, exceptions pass as they are."""

    def begin(self, call: str, stopwatch: Stopwatch) -> Alone:
        """A round of one."""
        return self

    @contextmanager
    def stage(self, name: str, extra_s: float = 0.0) -> Iterator[None]:
        """The block, and nothing else."""
        yield


def _failure(error: BaseException) -> dict[str, object]:
    return {"reason": str(error) or type(error).__name__, "kind": type(error).__name__}


def _judge(votes: Mapping[int, Mapping[str, object]]) -> dict[str, object]:
    """What votes come to."""
    against = {rank: vote for rank, vote in votes.items() if "reason" in vote}
    if against:
        failures = {rank: vote["reason"] for rank, vote in against.items()}
        return {"agreed": False, "failures": failures, "kind": next(iter(against.values()))["kind"]}
    calls = {rank: vote.get("call") for rank, vote in votes.items()}
    return {"agreed": True} if len(set(calls.values())) == 1 else {"agreed": False, "calls": calls}


def _against(ranks: list[int], reason: str, kind: str) -> dict[str, object]:
    return {"agreed": False, "failures": dict.fromkeys(ranks, reason), "kind": kind}


def _error(verdict: Mapping[str, object], stage: str) -> RankError:
    calls, failures = verdict.get("calls"), verdict.get("failures")
    if isinstance(calls, dict):
        return DesyncError({int(rank): call for rank, call in calls.items()})
    if isinstance(failures, dict):
        return RankError({int(rank): reason for rank, reason in failures.items()}, stage, str(verdict["kind"]))
    raise TypeError(f"a verdict that says neither what failed nor who disagrees: {verdict}")


@dataclass(frozen=True, slots=True)
class _Process:
    """One process as others on its machine can find it. `started` tells it from a later one with its number."""

    place: str
    pid: int
    started: int

    @classmethod
    def this(cls) -> _Process:
        return cls(_place(), os.getpid(), _started(os.getpid()) or 0)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> _Process:
        return cls(**values)

    def has_ended(self) -> bool:
        return self.place == _place() and _started(self.pid) != self.started


def _place() -> str:
    """Where process numbers mean the same: a machine, and on it a namespace."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int | None:
    """When the process was started, in clock ticks since boot; None if there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except FileNotFoundError:
        return None
    return None if fields[0] == "Z" else int(fields[19])

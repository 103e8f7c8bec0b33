"""The sleeper: one state machine from awake to asleep and back.

    awake ──sleep()──▶ asleep          each component on its own, in any order
      ▲                  │
      └──────wake()──────┘

A call plans first (inventory, one fate for each storage), reserves room in the store, copies, and only then
frees. A call that fails leaves everything where it was and can be made again. `sleep` on what sleeps and
`wake` on what is awake move nothing. While something sleeps, reading is served from the store and computing
raises `AsleepError`. A lazy wake and a sleep that does not block go on in one background thread; the next
call, or the optimizer's step, waits for it. Methods may be called from several threads: one at a time gets in.

A healthy end is `close()`, which wakes what sleeps and removes the store. After a crash the file store's
leftovers are removed by the next run.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, overload

import torch
from torch.distributed import ProcessGroup

from torpor import fingerprint, transfer_cuda
from torpor.agreement import DEFAULT_TIMEOUT_S, Agreement, Alone, Round, Rounds
from torpor.background import Handle
from torpor.books import Books
from torpor.comms import COMPONENT, CommsMode, Groups
from torpor.dormant import Dormant
from torpor.errors import GIB, AsleepError, ClosedError, UsageError
from torpor.falling import STORED, Falling, Sleeping, drop_caches
from torpor.guards import Guards
from torpor.inventory import collector_paused
from torpor.kinds import Fate, Role, State
from torpor.ledger import Ledger, Row, Stopwatch
from torpor.memory import open_backends
from torpor.memory.base import MemoryBackend
from torpor.memory.gpu import GpuBackend
from torpor.plan import Decision, add_up_decisions
from torpor.planning import Planner
from torpor.reading import Reader
from torpor.rebuilding import rebuilt_first
from torpor.rules.base import Actor, Rule
from torpor.rules.derived import Derived
from torpor.rules.fsdp import gathered_bytes, reshard
from torpor.rules.megatron_optim import MegatronOptimizer, unwrapped
from torpor.rules.standard import standard_rules
from torpor.shelf import Shelf
from torpor.stores import open_store
from torpor.stores.base import Store
from torpor.strays import Owner
from torpor.waking import wake_up

Components = str | Iterable[str] | None
_Optimizer = torch.optim.Optimizer | MegatronOptimizer
_Names = frozenset[str] | None
_T = TypeVar("_T")

#: What a lazy wake may bring later: nothing before `Optimizer.step` reads it.
_LATER = (Role.MASTER, Role.MOMENT)
#: A sleep that does not block frees at least this much at a time.
_BATCH_BYTES = 256 * 1024**2
_ALL_AT_ONCE = 2**63


class Sleeper:
    """Puts the state of a training actor to sleep and wakes it, bit for bit.

    Args:
        model: one module, a list of chunks, or modules by name.
        optimizer: one optimizer, a list, or optimizers by name: torch's or Megatron-Core's. Their state may not
            exist yet.
        extra: component name -> tensors the modules do not reach, in any nesting of containers. A plain
            list or tensor becomes the component `"extra"`.
        derived: caches that can be dropped or computed again, from `torpor.derived(...)`.
        store: where bytes wait: `"file"` (node-local disk), `"pageable"` or `"pinned"` (host memory), or a `Store`.
            Default: `"pinned"` once CUDA is in use, else `"file"`.
        store_dir: directory of the file store; private to the user, on a disk. Default: see `FileStore`.
        memory: how memory is given back: `"auto"`, the name of one backend (`"madvise"`, `"resize"`, `"vmm"`,
            `"torch_memory_saver"`), or backends. `"auto"` is `madvise` for host memory; on a GPU `vmm` for what
            `torpor.pool()` holds and `resize` for the rest. `"torch_memory_saver"` is for memory in regions of that
            library, made without a backup of its own.
        verify: compare each storage's fingerprint at wake with the one taken at sleep, and rebuild what is to be
            rebuilt once before its original is freed.
        keep: components that never sleep.
        dead_grads_after_step: after `Optimizer.step` a gradient that nothing has touched since is dead; it comes
            back as zeros. Turn off if your loop reads gradients after the step or accumulates across steps.
        clear_quantized_weight_workspaces: drop TransformerEngine's quantized copies of weights; the next forward
            of a first microbatch makes them again. Off, they are moved.
        requantize_under_cuda_graphs: where a CUDA graph was captured, and reads those copies at their addresses,
            quantize the weights again in place at wake, if that changes no state. Off, the copies are moved then.
        rematerialize_param_from_master_weight: rebuild Megatron-Core's low-precision parameters from their fp32
            masters instead of copying them; with data parallelism sleep, wake and reading are then collective
            calls of its group.
        report_leftovers: name tensors of at least 1 MiB that stay on the device in no component, and account for
            every byte that a GPU's driver counts (scans the process's Python objects once a sleep, and looks at
            torch's allocator once more a call).
        group: the ranks that sleep and wake together: a call succeeds on all of them or changes nothing on any, and
            then each gets a `RankError` that names the culprit. All make the same calls in the same order.
        agree_timeout_s: how long each step of such a call waits for the slowest rank.
        comms: process groups whose device memory goes too, as the component `comms`: last to sleep, last to wake.

    Raises:
        UsageError: an option that cannot be, with the ones that can.
        UnsafeStoreError: the file store's directory must not be trusted.
        UnsupportedError: parameters under FSDP's `CPUOffloadPolicy`.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module] | None = None,
        *,
        optimizer: _Optimizer | Sequence[_Optimizer] | Mapping[str, _Optimizer] | None = None,
        extra: Mapping[str, object] | Sequence[object] | torch.Tensor | None = None,
        derived: Sequence[Derived] = (),
        store: str | Store | None = None,
        store_dir: str | Path | None = None,
        memory: str | Sequence[MemoryBackend] = "auto",
        verify: bool = True,
        keep: Collection[str] = (),
        dead_grads_after_step: bool = True,
        clear_quantized_weight_workspaces: bool = True,
        requantize_under_cuda_graphs: bool = True,
        rematerialize_param_from_master_weight: bool = False,
        report_leftovers: bool = True,
        group: ProcessGroup | None = None,
        agree_timeout_s: float = DEFAULT_TIMEOUT_S,
        comms: Groups | None = None,
    ) -> None:
        optimizers, wrappers = unwrapped(_by_name(optimizer, "optimizer"))
        self._actor = Actor(
            models=_by_name(model, "model"),
            optimizers=optimizers,
            wrappers=wrappers,
            extra=extra if isinstance(extra, Mapping) else {} if extra is None else {"extra": extra},
            derived=tuple(derived),
        )
        self._verify = verify
        self._backends = open_backends(memory)
        self._rules: Sequence[Rule] = standard_rules(
            dead_grads_after_step=dead_grads_after_step,
            clear_quantized_weight_workspaces=clear_quantized_weight_workspaces,
            requantize_under_cuda_graphs=requantize_under_cuda_graphs,
            rematerialize_param_from_master_weight=rematerialize_param_from_master_weight,
            groups_sleep=comms is not None and comms.mode is not CommsMode.KEEP,
            graphs_may_live=self._backends.graphs_may_live,
        )
        self._keep = frozenset(self._names(keep) or ())
        self._agreement: Rounds = Alone() if group is None else Agreement(group, agree_timeout_s)
        self._comms = comms if comms is not None else Groups({}, mode="keep")
        self._store = open_store(store, store_dir)
        self._shelf = Shelf(self._store)
        self._undo = [rule.attach(self._actor) for rule in self._rules]
        self._owner = Owner(self._actor, self._rules)
        self._guards = Guards(self._actor, self._on_use)
        self._dormant = Dormant(self._store, self._guards, self._keep)
        self._books = Books(self._store, self._backends, in_full=report_leftovers)
        self._planner = Planner(
            self._owner, self._backends, self._dormant, self._books, keep=self._keep, named=self._actor.extra
        )
        self._lock = threading.RLock()
        self._background: Handle | None = None
        self._closed = False

    # ---------------------------------------------------------------- sleep and wake

    @overload
    def sleep(
        self, components: Components = None, *, need_bytes: int | None = None, blocking: Literal[True] = True
    ) -> Ledger: ...
    @overload
    def sleep(
        self, components: Components = None, *, need_bytes: int | None = None, blocking: Literal[False]
    ) -> Handle: ...

    def sleep(
        self, components: Components = None, *, need_bytes: int | None = None, blocking: bool = True
    ) -> Ledger | Handle:
        """Free the memory of `components` (all if None); what already sleeps is left alone.

        Args:
            components: a name, several, or None for all.
            need_bytes: free this many bytes of device memory, taking storages that need no copy first and as
                few bytes more as storages allow. Components may be partly asleep afterwards.
            blocking: False returns a `Handle` as soon as it is planned what sleeps, and whoever computes with that
                waits; memory is freed as the copies finish.

        Returns:
            The ledger, or the handle whose `result()` is the ledger.

        Raises:
            UsageError: an unknown component, or `need_bytes` below 1 or above what a full sleep would free.
            StoreFullError: the store has no room. Nothing was freed.
            StoreError, MemoryBackendError: the system refused. Everything is awake and intact.
            RankError: in place of all of these with `group=`; every rank is awake and intact.
        """
        names = self._names(components)
        if need_bytes is not None and need_bytes < 1:
            raise UsageError(f"need_bytes={need_bytes}: must be at least 1; leave it out to free everything")
        self._settle()
        if blocking:
            return self._sleep(names, need_bytes, _ALL_AT_ONCE)
        return self._sleep_in_the_background(names, need_bytes)

    def wake(self, components: Components = None, *, lazy: bool = False, wait_s: float = 0.0) -> Ledger:
        """Bring `components` back (all if None); what is awake is left alone.

        Args:
            components: a name, several, or None for all.
            lazy: return when everything a forward and backward pass needs is there; moments, and masters that
                nothing is rebuilt from, follow in the background, and `Optimizer.step` waits for them.
            wait_s: seconds to wait for memory that somebody promised to free.

        Returns:
            The ledger. After a lazy wake `finish()` returns the ledger of the rest.

        Raises:
            UsageError: an unknown component.
            NotEnoughMemoryError: the memory is not there. Everything still sleeps; try again.
            CorruptError: bytes came back different. Everything still sleeps.
            StoreError, MemoryBackendError: the system refused. Everything still sleeps.
            RankError: in place of all of these with `group=`; every rank still sleeps.
        """
        names = self._names(components)
        self._settle()
        with self._lock:
            chosen = self._dormant.of(names)
            later = _later(chosen) if lazy else []
            call = f"wake({_in_words(names)}, lazy={lazy})"
            comms = self._of_comms(names)
            ledger = self._wake([s for s in chosen if s not in later] if later else chosen, wait_s, call, comms)
            if later or (lazy and not isinstance(self._agreement, Alone)):  # others may have something left
                self._background = Handle("wake", lambda _: self._wake(later, wait_s, f"the rest of {call}"))
            return ledger

    def finish(self) -> Ledger | None:
        """Wait for what goes on in the background; its ledger, or None if nothing did.

        Raises what the background work raised.
        """
        handle, self._background = self._background, None
        return handle.result() if handle is not None else None

    def prewarm(self) -> int:
        """Reserve the store's room now, so that the first sleep does not pay for it; the bytes reserved.

        A pinned store page-locks here, a GPU's kernels are compiled, and its memory backends see on memory of their
        own that the driver gets back what they free.

        Raises:
            UnsupportedError: a GPU's memory is not freed here; the message has what the allocator is set to.
            MemoryBackendError: too little device memory for that test.
            StoreFullError: the store has no room. In all of these nothing was reserved.
            RankError: in place of all of these with `group=`.
        """
        self._settle()
        with self._lock, self._agreement.begin("prewarm()", Stopwatch()).stage("reserve"):
            self._require_open()
            decisions = self._planner.plan(None).decisions
            for backend, device in {(d.backend, d.entry.device) for d in decisions}:
                if isinstance(backend, GpuBackend):
                    backend.self_test(device)
            self._shelf.reserve([(d.entry.storage, d.entry.nbytes) for d in decisions if d.fate is Fate.MOVED])
            for device in _gpus(decisions):
                fingerprint.warm_up(device)
                transfer_cuda.warm_up(device)
            return self._store.reserved_bytes

    def close(self) -> None:
        """Wake what sleeps, take every hook away and give the store back. Idempotent. Asks no other rank,
        except to connect process groups that sleep; what else sleeps is awake by then.

        Raises what a `wake()` raises; the sleeper stays open then.
        """
        if self._closed:
            return
        self._settle()
        with self._lock:
            self._wake(list(self._dormant), 0.0, None)
            if self._comms.is_asleep:  # no rank can connect by itself
                self._wake([], 0.0, "close()", self._comms)
            self._closed = True
            self._owner.leave()
            self._guards.disarm()
            for undo in reversed(self._undo):
                undo()
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def asleep(self, components: Components = None) -> Iterator[Self]:
        """`components` sleep inside the block; afterwards, on exceptions too, what the block found is restored."""
        before = self._dormant.keys()
        comms = None if self._comms.is_asleep else self._of_comms(self._names(components))
        self.sleep(components)
        try:
            yield self
        finally:
            self._settle()
            with self._lock:
                names = self._names(components)
                fallen = [s for s in self._dormant.of(names) if s.storage._cdata not in before]
                self._wake(fallen, 0.0, f"the end of asleep({_in_words(names)})", comms)

    @contextmanager
    def awake(self, components: Components = None) -> Iterator[Self]:
        """`components` are awake inside the block; afterwards, on exceptions too, what slept before sleeps again."""
        names = self._names(components)
        before = {name: self._dormant.keys([name]) for name in self._dormant.components()}
        if self._comms.is_asleep:
            before[COMPONENT] = set()
        partly = self._dormant.partly
        self.wake(components)
        try:
            yield self
        finally:
            slept = [name for name in before if names is None or name in names]
            self._settle()
            self._sleep(frozenset(slept) - partly, None, _ALL_AT_ONCE)
            for name in partly.intersection(slept):
                self._sleep(frozenset([name]), None, _ALL_AT_ONCE, only=before[name])

    # ---------------------------------------------------------------- looking

    @property
    def is_asleep(self) -> bool:
        """Whether any component, or a part of one, sleeps."""
        return bool(self._dormant) or self._comms.is_asleep

    def components(self) -> dict[str, State]:
        """The state of every component that has storages, now."""
        with self._lock:
            states = dict.fromkeys(self._planner.inventory().by_component(), State.AWAKE) | self._dormant.states()
            if self._comms.names:
                states[COMPONENT] = State.ASLEEP if self._comms.is_asleep else State.AWAKE
        handle = self._background
        if handle is not None and not handle.done:
            return {name: State.WAKING if state is not State.AWAKE else state for name, state in states.items()}
        return states

    def explain(self, components: Components = None) -> str:
        """What a sleep would do now, storage group by storage group, with the reasons. Moves nothing."""
        names = self._names(components)
        self._settle()
        with self._lock:
            self._require_open()
            return "\n".join([self._planner.plan(names).table(), *self._notes(names)])

    def _notes(self, names: _Names) -> Iterator[str]:
        """What a sleep does to other things than storages as they are now."""
        nbytes = gathered_bytes(self._actor)
        if nbytes:
            yield f"first, FSDP gives up the {nbytes / GIB:.3f} GiB among these that it gathered from its shards"
        if (comms := self._of_comms(names)) is not None:
            yield f"comms: {comms.mode}, {len(comms.names)} process groups: {comms.reason}"

    def state_dict(self, name: str | None = None) -> dict[str, Any]:
        """The model's `state_dict()`: from the store, as CPU tensors, where it sleeps; wakes nothing.

        Args:
            name: which model, if there are several.

        Tensors that are awake come back as they are, detached. Ties are kept.
        """
        model = _only(self._actor.models, name, "model")
        state: dict[str, Any] = self._read(lambda: model.state_dict())
        return state

    def optimizer_state_dict(self, name: str | None = None) -> dict[str, Any]:
        """The optimizer's `state_dict()`, read as `state_dict` reads the model's."""
        optimizer = _only({**self._actor.optimizers, **self._actor.wrappers}, name, "optimizer")
        state: dict[str, Any] = self._read(lambda: optimizer.state_dict())
        return state

    def stream(self, name: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the model's `state_dict()` one after the other, the next one read ahead of its turn.

        Two host copies are held at a time: the one handed out and the next.

        Args:
            name: which model, if there are several.

        Raises:
            ClosedError, UsageError: before the first tensor.
        """
        model = _only(self._actor.models, name, "model")
        return self._stream(self.peek(model.state_dict))

    def read(self, tensors: Any) -> Any:
        """Any nesting of tensors with a host copy in the place of each that sleeps; the others pass, detached."""
        return self._read(lambda: tensors)

    @property
    def models(self) -> Mapping[str, torch.nn.Module]:
        """The modules that were handed over, by name."""
        return self._actor.models

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The optimizers that were handed over, by name; of one that wraps others, those."""
        return self._actor.optimizers

    def peek(self, look: Callable[[], _T]) -> _T:
        """What `look()` returns, with the guards off: it may call `state_dict()` of what sleeps.

        The tensors it sees are those of the actor; `read` gives the contents of those that sleep.
        """
        self._settle()
        with self._lock, self._guards.suspended():
            self._require_open()
            return look()

    # ---------------------------------------------------------------- inside

    def _sleep_in_the_background(self, names: _Names, need_bytes: int | None) -> Handle:
        """Under way, with the guards set: an optimizer's step beside the copies would be half in them."""
        guarded = threading.Event()

        def work(on_freed: Callable[[int], None]) -> Ledger:
            try:
                return self._sleep(names, need_bytes, _BATCH_BYTES, on_freed, on_guarded=guarded.set)
            finally:
                guarded.set()

        with self._lock:  # the work begins when the guards know whom to wait for
            handle = self._background = Handle("sleep", work)
        guarded.wait()
        return handle

    def _sleep(
        self,
        names: _Names,
        need_bytes: int | None,
        batch_bytes: int,
        on_freed: Callable[[int], None] = lambda _: None,
        only: Collection[int] | None = None,
        on_guarded: Callable[[], None] = lambda: None,
    ) -> Ledger:
        with self._lock, collector_paused():
            self._require_open()
            watch = Stopwatch()
            before_bytes = self._books.used_bytes()
            comms = None if need_bytes is not None or only is not None else self._of_comms(names)
            ways = "" if comms is None else f", comms={comms.mode}"
            agreed = self._agreement.begin(f"sleep({_in_words(names)}, need_bytes={need_bytes}{ways})", watch)
            with agreed.stage("plan"):
                with watch.stage("drop"):
                    rows = reshard(self._actor)
                with watch.stage("account"):  # now, before there are records of each storage to look through as well
                    candidates = self._books.candidates()
                with watch.stage("plan"):
                    plan = self._planner.plan(names, need_bytes, only)
            ledger = self._books.open("sleep")
            if ledger.counts_host:  # the host takes back at once what was resharded, a GPU's allocator keeps it
                ledger.used_before_bytes = before_bytes
            with agreed.stage("drop"), watch.stage("drop"):
                rows += drop_caches(plan.decisions)
                decisions = self._planner.left_after_drop(plan.decisions)
            dropped_bytes = sum(row.freed_bytes for row in rows)
            with watch.stage("account"):
                ledger.leftovers = self._books.leftovers(candidates)

            def begin() -> None:
                on_guarded()
                with watch.stage("drain"):  # with the guards set: what is given to a GPU before that is waited for
                    _drain(plan.decisions)
                if dropped_bytes:
                    with watch.stage("free"):  # nothing else may be about to sleep that this would take along
                        self._backends.settle()
                    on_freed(dropped_bytes)

            def rest_comms() -> None:
                rows.extend(comms.sleep(agreed, watch) if comms is not None else ())

            sleepers = self._fall(decisions, watch, agreed, batch_bytes, on_freed, begin, rest_comms)
            self._note_partial(names, need_bytes is not None or only is not None)
            with watch.stage("account"):
                self._books.close(ledger, [*rows, *_rows(sleepers)], watch, self._dormant)
            return ledger

    def _fall(
        self,
        decisions: Sequence[Decision],
        watch: Stopwatch,
        agreed: Round,
        batch_bytes: int,
        on_freed: Callable[[int], None],
        begin: Callable[[], None],
        last: Callable[[], None],
    ) -> list[Sleeping]:
        """Put `decisions` to sleep: `begin` is called once the guards are set, `last` once all of it is freed."""
        going = [d for d in decisions if d.backend is not None]
        staying = [Sleeping(d) for d in decisions if d.backend is None]
        self._dormant.guard([*going, *(s.decision for s in staying)])
        falling = Falling(
            self._store,
            self._shelf,
            watch,
            agreed,
            resolve=self._dormant.reader().tensor,
            prove_rebuilds=self._verify,
        )
        if not isinstance(agreed, Alone):
            batch_bytes = _ALL_AT_ONCE  # nothing is freed anywhere before everything is copied everywhere
        try:
            begin()
            sleepers = falling.run(going, batch_bytes, on_freed, last)
        except BaseException:
            self._dormant.adopt(falling.stuck)
            self._dormant.guard()
            raise
        self._dormant.adopt([*sleepers, *(s for s in staying if s.decision.entry.component not in self._keep)])
        return [*sleepers, *staying]

    def _wake(
        self, sleepers: Sequence[Sleeping], wait_s: float, call: str | None, comms: Groups | None = None
    ) -> Ledger:
        """`call` is what the other ranks must call as well; None: this rank wakes alone."""
        with self._lock, collector_paused():
            self._require_open()
            watch = Stopwatch()
            agreed: Round = Alone() if call is None else self._agreement.begin(call, watch)
            ledger = self._books.open("wake")
            rows: list[Row] = []

            def use_comms() -> None:
                rows.extend(comms.wake(agreed, watch) if comms is not None else ())

            @cache
            def reader() -> Reader:
                """Of what is not back yet when the first source is asked for; most wakes ask for none."""
                stored = {id(s) for s in sleepers if s.decision.fate in STORED}
                return self._dormant.reader(but=stored | {id(s) for s in rebuilt_first(sleepers)})

            wake_up(
                sleepers,
                self._store,
                watch,
                agreed,
                resolve=lambda tensor: reader().tensor(tensor),
                verify=self._verify,
                wait_s=wait_s,
                last=use_comms,
            )
            self._dormant.release(sleepers)
            self._books.note_awake(sleepers)
            with watch.stage("account"):
                read = add_up_decisions((s.decision, 0 if s.place is None else s.place.slot.nbytes) for s in sleepers)
                self._books.close(ledger, [*read, *rows], watch, self._dormant)
            return ledger

    def _on_use(self, name: str, component: str, operation: str) -> None:
        """A guarded operation: wait for a wake that is under way, refuse otherwise."""
        self._settle()
        if component in self._dormant.components():
            remedy = (
                f"Read it with the sleeper's {operation}()."
                if operation == "state_dict"
                else f"Call wake('{component}') first."
            )
            raise AsleepError(name, component, operation, remedy)

    def _settle(self) -> None:
        """Nothing goes on in the background when this returns."""
        handle, self._background = self._background, None
        if handle is not None:
            handle.settle()

    def _read(self, values: Callable[[], Any]) -> Any:
        self._settle()
        with self._lock, self._guards.suspended():
            self._require_open()
            return self._dormant.reader().tree(values())

    def _stream(self, state: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        coming: deque[tuple[str, Future[torch.Tensor]]] = deque()
        with ThreadPoolExecutor(1, thread_name_prefix="torpor-stream") as ahead:
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    coming.append((key, ahead.submit(self._read_one, value)))
                if len(coming) > 1:
                    key, tensor = coming.popleft()
                    yield key, tensor.result()
                    del tensor
            for key, tensor in coming:
                yield key, tensor.result()

    def _read_one(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self._require_open()
            return self._dormant.reader().tensor(tensor)

    def _note_partial(self, names: _Names, partial: bool) -> None:
        touched = self._dormant.components(names)
        left = self._planner.plan(frozenset(touched)).decisions if partial else []
        self._dormant.note_partly(touched, {d.entry.component for d in left if d.releasable_bytes})

    def _names(self, components: Components | Collection[str]) -> _Names:
        if components is None:
            return None
        return frozenset([components] if isinstance(components, str) else components)

    def _of_comms(self, names: _Names) -> Groups | None:
        """The process groups, if `names` asks for them, there are any, and they are not to be kept."""
        asked = (names is None or COMPONENT in names) and COMPONENT not in self._keep
        return self._comms if asked and self._comms.names else None

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this sleeper was closed; make a new one")


def _rows(sleepers: Iterable[Sleeping]) -> list[Row]:
    return add_up_decisions((sleeping.decision, sleeping.copied_bytes) for sleeping in sleepers)


def _later(chosen: Sequence[Sleeping]) -> list[Sleeping]:
    """What only the optimizer's step reads, and no rebuild: a rebuild is fast from sources that are awake."""
    sources = {
        source.untyped_storage()._cdata
        for s in chosen
        if s.fate is Fate.REBUILT and s.decision.entry.rebuild is not None
        for source in s.decision.entry.rebuild.sources
    }
    return [s for s in chosen if s.decision.entry.role in _LATER and s.storage._cdata not in sources]


def _in_words(names: _Names) -> str:
    """Components as every rank writes them."""
    return "all" if names is None else str(sorted(names))


def _drain(decisions: Sequence[Decision]) -> None:
    """Finish the work in flight on every stream of every device whose bytes are about to be read."""
    for device in _gpus(decisions):
        torch.cuda.synchronize(device)


def _gpus(decisions: Sequence[Decision]) -> set[torch.device]:
    return {device for device in {d.entry.device for d in decisions} if device.type == "cuda"}


def _by_name(things: Any, kind: str) -> dict[str, Any]:
    if things is None:
        return {}
    if isinstance(things, Mapping):
        return dict(things)
    if isinstance(things, list | tuple):
        return {f"{kind}{i}": thing for i, thing in enumerate(things)}
    return {kind: things}


def _only(things: Mapping[str, Any], name: str | None, kind: str) -> Any:
    if name is None and len(things) == 1:
        return next(iter(things.values()))
    if name is None or name not in things:
        raise UsageError(f"{kind} {name!r}: this sleeper has {sorted(things)}; name one of them")
    return things[name]

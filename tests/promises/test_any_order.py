"""Sleeps, wakes, writes and reads in any order, over tensors that share storages at random: no byte is ever wrong."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from torpor import Sleeper, State
from torpor.errors import UsageError
from zoo import bits

COMPONENTS = ("a", "b", "c")
_STORAGE_BYTES = st.sampled_from([0, 1, 100, 4096, 5000, 8192, 20_000])
_names = st.sampled_from(COMPONENTS)


class AnyOrder(RuleBasedStateMachine):
    """The model is a plain copy of every tensor's bits; the sleeper must agree with it at all times."""

    @initialize(
        sizes=st.lists(_STORAGE_BYTES, min_size=1, max_size=5),
        views=st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1), st.floats(0, 1), _names), max_size=8),
        foreign=st.booleans(),
        memory=st.sampled_from(["madvise", "resize"]),
        store=st.sampled_from(["pageable", "file"]),
    )
    def make(
        self, sizes: list[int], views: list[tuple[int, float, float, str]], foreign: bool, memory: str, store: str
    ) -> None:
        arrays = [np.random.default_rng(0).integers(256, size=n, dtype=np.uint8) for n in sizes]
        storages = [torch.from_numpy(array) if foreign else torch.from_numpy(array).clone() for array in arrays]
        self.tensors: dict[str, list[torch.Tensor]] = {name: [] for name in COMPONENTS}
        for i, storage in enumerate(storages):
            self.tensors[COMPONENTS[i % 3]].append(storage)
        for i, begin, end, name in views:
            storage, array = storages[i % len(storages)], arrays[i % len(storages)]
            low, high = sorted((int(begin * len(array)), int(end * len(array))))
            # numpy's slice becomes a storage of its own over the same memory, torch's a view of the same storage
            self.tensors[name].append(torch.from_numpy(array[low:high]) if foreign else storage[low:high])
        self.every = [tensor for tensors in self.tensors.values() for tensor in tensors]
        self.sleeper = Sleeper(extra=self.tensors, store=store, memory=memory, report_leftovers=False)

    def states(self) -> dict[str, State]:
        return self.sleeper.components()

    @rule(name=_names)
    def sleep(self, name: str) -> None:
        self.sleeper.sleep(name)

    @rule(name=_names, need_bytes=st.integers(1, 30_000))
    def sleep_partly(self, name: str, need_bytes: int) -> None:
        with contextlib.suppress(UsageError):  # more than there is
            assert self.sleeper.sleep(name, need_bytes=need_bytes).freed_bytes >= need_bytes

    @rule(name=_names)
    def wake(self, name: str) -> None:
        self.sleeper.wake(name)

    @rule()
    def sleep_and_wake_all(self) -> None:
        with self.sleeper.asleep():
            self.agree()

    @rule(name=_names)
    def work_awake(self, name: str) -> None:
        before = self.states()
        with self.sleeper.awake(name):
            pass
        assert self.states() == before

    @rule(name=_names, value=st.integers(1, 255))
    def write(self, name: str, value: int) -> None:
        self.sleeper.wake()  # no precondition: which pages a storage has depends on the address that it got
        for tensor in self.tensors[name]:
            tensor.add_(value)
        self.expected = [bits(tensor) for tensor in self.every]

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "sleeper"):
            return
        if not hasattr(self, "expected"):
            self.expected = [bits(tensor) for tensor in self.every]
        assert [bits(tensor) for tensor in self.sleeper.read(self.every)] == self.expected

    def teardown(self) -> None:
        if not hasattr(self, "sleeper"):
            return
        for name in COMPONENTS:  # most examples are too short to have written between two sleeps
            self.sleep_and_wake_all()
            self.write(name, 1)
        self.sleep_and_wake_all()
        self.sleeper.close()
        assert [bits(tensor) for tensor in self.every] == self.expected


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=50, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)

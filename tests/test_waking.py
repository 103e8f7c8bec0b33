"""Memory of GPUs that no copy fills is taken and zeroed while others are copied. No GPU here: the order is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from torpor import falling, waking
from torpor.agreement import Alone
from torpor.errors import NotEnoughMemoryError
from torpor.falling import Sleeping
from torpor.kinds import Fate
from torpor.ledger import Stopwatch
from torpor.shelf import Place
from torpor.stores.base import Store
from torpor.stores.pageable import PageableStore
from torpor.transfer import Moved, Piece, load
from torpor.waking import wake_up

GPU = torch.device("cuda", 0)
NBYTES = 1000
PLENTY = 2**40


class Machine:
    """A GPU's memory on the host: the backend of all sleepers, and what a wake does, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.store = PageableStore()
        self.free = PLENTY
        self.fail_at = ""
        self._names: dict[int, str] = {}
        monkeypatch.setattr(waking, "load", self._load)
        monkeypatch.setattr(waking, "same_streams", self._same_streams)
        monkeypatch.setattr(falling, "SMALL_BYTES", NBYTES)
        monkeypatch.setattr(waking, "_COPIED_BYTES", NBYTES)
        monkeypatch.setattr(waking, "_TAKEN_BYTES", NBYTES)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.events.append(f"wait for {device}"))

    def sleeping(self, name: str, fate: Fate, device: torch.device = GPU, nbytes: int = NBYTES) -> Sleeping:
        home = torch.full((nbytes,), 255, dtype=torch.uint8)
        self._names[home.data_ptr()] = name
        storage = home.untyped_storage()
        entry = SimpleNamespace(
            name=name, device=device, nbytes=nbytes, storage=storage, storages=(storage,), rebuild=None
        )
        place = None
        if fate is Fate.MOVED:
            place = Place(lambda: False, self.store.reserve([nbytes])[0])
            self.store.tensor(place.slot).fill_(7)
        decision = SimpleNamespace(entry=entry, fate=fate, backend=self)
        return Sleeping(cast(Any, decision), place, _home=home)

    def wake(self, sleepers: Sequence[Sleeping]) -> None:
        watch = Stopwatch()
        wake_up(sleepers, self.store, watch, Alone(), resolve=lambda tensor: tensor, verify=False, wait_s=0.0)

    def needed_bytes(self, storages: Sequence[torch.UntypedStorage]) -> int:
        return sum(storage.nbytes() for storage in storages)

    def free_bytes(self, device: torch.device) -> int:
        return self.free

    def restore(self, storages: Sequence[torch.UntypedStorage]) -> None:
        names = [self._names[storage.data_ptr()] for storage in storages]
        self.events.append("take " + " ".join(names))
        if self.fail_at in names:
            raise NotEnoughMemoryError(2, 1, str(GPU), "injected")
        for storage in storages:
            storage.fill_(255)

    def release(self, storages: Sequence[torch.UntypedStorage]) -> int:
        self.events.append("give " + " ".join(self._names[storage.data_ptr()] for storage in storages))
        return 0

    def _load(self, pieces: Iterable[Piece], store: Store) -> Moved:
        def seen() -> Iterator[Piece]:
            for piece in pieces:
                self.events.append(f"copy {self._names[piece.home.data_ptr()]}")
                yield piece

        return load(seen(), store)

    def _same_streams(self, sleepers: Sequence[Sleeping]) -> Callable[[], AbstractContextManager[None]]:
        self.events.append("note the streams")

        @contextmanager
        def current() -> Iterator[None]:
            self.events.append("(")
            yield
            self.events.append(")")

        return current


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def contents(sleepers: Sequence[Sleeping]) -> list[int]:
    """The one value that all bytes of each have."""
    values = [torch.unique(sleeping.bytes).tolist() for sleeping in sleepers]
    assert all(len(value) == 1 for value in values)
    return [value[0] for value in values]


def test_dead_memory_comes_back_between_copies(machine: Machine) -> None:
    gradients = [machine.sleeping(f"g{i}", Fate.ZEROED) for i in range(3)]
    masters = [machine.sleeping(f"m{i}", Fate.MOVED) for i in range(2)]
    machine.wake([gradients[0], *masters, *gradients[1:]])
    assert machine.events == [
        *("take m0 m1", "note the streams"),
        *("copy m0", "(", "take g0", ")"),
        *("copy m1", "(", "take g1", ")", "(", "take g2", ")"),
    ]
    assert contents([*gradients, *masters]) == [0, 0, 0, 7, 7]


def test_what_is_to_be_rebuilt_gets_its_memory_so_too(machine: Machine) -> None:
    weight, master = machine.sleeping("weight", Fate.REBUILT), machine.sleeping("master", Fate.MOVED)
    machine.wake([weight, master])
    assert [e for e in machine.events if len(e) > 1] == [
        *("take master", "note the streams", "copy master", "take weight"),
    ]
    assert contents([weight, master]) == [255, 7], "left to its rebuild, which this one has not"


def test_without_a_copy_it_comes_back_all_the_same(machine: Machine) -> None:
    gradients = [machine.sleeping(f"g{i}", Fate.ZEROED) for i in range(2)]
    machine.wake(gradients)
    assert contents(gradients) == [0, 0]


def test_where_a_transfers_buffers_may_need_the_room_memory_is_taken_first(machine: Machine) -> None:
    gradient, master = machine.sleeping("gradient", Fate.ZEROED), machine.sleeping("master", Fate.MOVED)
    machine.free = 2 * NBYTES + 2**30 - 1
    machine.wake([gradient, master])
    assert machine.events == ["take gradient master", "copy master"]
    assert contents([gradient, master]) == [0, 7]


def test_what_is_small_gets_its_memory_first(machine: Machine) -> None:
    sleepers = [machine.sleeping("small", Fate.ZEROED, nbytes=NBYTES - 1), machine.sleeping("large", Fate.ZEROED)]
    master = machine.sleeping("master", Fate.MOVED)
    machine.wake([*sleepers, master])
    assert [e for e in machine.events if len(e) > 1] == [
        *("take small master", "note the streams", "copy master", "take large"),
    ]
    assert contents([*sleepers, master]) == [0, 0, 7]


def test_memory_of_the_host_is_taken_first(machine: Machine) -> None:
    cpu = torch.device("cpu")
    gradient, master = machine.sleeping("gradient", Fate.ZEROED, cpu), machine.sleeping("master", Fate.MOVED, cpu)
    machine.wake([gradient, master])
    assert machine.events == ["take gradient master", "copy master"]
    assert contents([gradient, master]) == [0, 7]


def test_memory_that_cannot_be_taken_between_copies_gives_all_of_it_back(machine: Machine) -> None:
    gradients = [machine.sleeping(f"g{i}", Fate.ZEROED) for i in range(2)]
    master = machine.sleeping("master", Fate.MOVED)
    machine.fail_at = "g1"
    with pytest.raises(NotEnoughMemoryError, match="injected"):
        machine.wake([*gradients, master])
    assert machine.events[-2:] == ["wait for cuda:0", "give g0 g1 master"], "zeroing may be under way"
    machine.fail_at = ""
    machine.wake([*gradients, master])
    assert contents([*gradients, master]) == [0, 0, 7]

"""The store for a GPU's bytes: page-locked memory of exact size, kept from one sleep to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from torpor.errors import ClosedError, StoreFullError
from torpor.stores.arena import Arena
from torpor.stores.base import AddressableStore, Slot
from torpor.stores.slots import FreeList

#: Slots begin at cache lines: a copy engine reads and writes whole ones.
_ALIGNMENT_BYTES = 64


class Prewarming:
    """Page-locking that goes on in the background."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: StoreFullError | None = None
        self._thread = threading.Thread(target=self._run, name="torpor-prewarm", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()

    def wait(self) -> None:
        """Wait for its end; raise the `StoreFullError` it met, if it did."""
        self.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except StoreFullError as error:
            self._error = error


class PinnedStore(AddressableStore):
    """Slots in an `Arena`.

    Args:
        budget_bytes: the most this store may hold, all components together; None for the machine's limit.
        retain: keep page-locked memory that no slot needs, so that the next sleep finds it ready. If False it
            is given back as soon as a registration of it is free.
        device: the GPU whose bytes will wait here; None for the current one.

    `prewarm` page-locks in the background. A `reserve` waits for it.
    """

    name = "pinned"

    def __init__(
        self, budget_bytes: int | None = None, *, retain: bool = True, device: torch.device | None = None
    ) -> None:
        self._arena = Arena(budget_bytes, device)
        self._retain = retain
        self._free = FreeList(_ALIGNMENT_BYTES)
        self._lock = threading.RLock()
        self._prewarming: Prewarming | None = None
        self._closed = False

    def prewarm(self, nbytes: int) -> Prewarming:
        """Start to page-lock memory until `nbytes` bytes are free for slots; returns at once.

        What cannot be had is found out, and raised, by the `reserve` that needs it, or by `wait()`.
        """
        self._require_open()
        self._settle()
        self._prewarming = Prewarming(lambda: self._grow(nbytes))
        return self._prewarming

    def reserve(self, sizes_bytes: Sequence[int]) -> list[Slot]:
        self._require_open()
        self._settle()
        with self._lock:
            return self._free.take_or_grow(sizes_bytes, self._grow)

    def release(self, slots: Sequence[Slot]) -> None:
        self._require_open()
        with self._lock:
            self._free.give(slots)
        if not self._retain:
            self.give_back()

    def give_back(self) -> int:
        """Give memory that no slot uses back to the system, by whole registrations; the bytes given back."""
        self._settle()
        return self._give_back()

    def tensor(self, slot: Slot) -> torch.Tensor:
        self._require_open()
        return self._arena.tensor(slot.offset, slot.nbytes)

    def boundaries(self) -> list[int]:
        """Offsets in bytes at which one registration ends and the next begins, sorted."""
        return [begin for begin, _ in self._arena.ranges()]

    @property
    def page_lock_s(self) -> float:
        """Seconds spent on page-locking so far, in whatever thread."""
        return self._arena.seconds

    @property
    def reserved_bytes(self) -> int:
        return self._arena.held_bytes

    @property
    def host_bytes(self) -> int:
        return self._arena.held_bytes

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        if self._closed:
            return []
        # an empty one if there is none: the addresses are a storage too
        return [self._arena.tensor(begin, end - begin) for begin, end in self._arena.ranges() or [(0, 0)]]

    def close(self) -> None:
        if not self._closed:
            self._settle()
            self._closed = True
            self._free = FreeList(_ALIGNMENT_BYTES)
            self._arena.close()

    def describe(self) -> str:
        return self._arena.describe()

    def _grow(self, nbytes: int) -> None:
        """Have at least `nbytes` free side by side, with as little more memory as that takes.

        Free memory at the end of what is held is extended. Where there is no room for that, free memory
        elsewhere is given back first.
        """
        with self._lock:
            if any(end - begin >= nbytes for begin, end in self._free.extents):
                return
            if nbytes - self._tail_bytes() > self._arena.room_bytes():
                self._give_back()
            for begin, end in self._arena.take(nbytes - self._tail_bytes()):
                self._free.add(begin, end)

    def _tail_bytes(self) -> int:
        """Free bytes at the end of what is held."""
        held = self._arena.ranges()
        return next((end - begin for begin, end in self._free.extents if held and end == held[-1][1]), 0)

    def _give_back(self) -> int:
        given_bytes = 0
        with self._lock:
            for begin, end in self._arena.ranges():
                if any(first <= begin and end <= last for first, last in self._free.extents):
                    self._free.remove(begin, end)
                    self._arena.give(begin)
                    given_bytes += end - begin
        return given_bytes

    def _settle(self) -> None:
        waiting, self._prewarming = self._prewarming, None
        if waiting is not None:
            waiting.join()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this store was closed; make a new one")

"""One sleep or wake that goes on in its own thread, and the handle that waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torpor.errors import StateError, UsageError
from torpor.ledger import Ledger

#: What the thread runs; it calls back with bytes of device memory freed (sleep) or taken (wake) so far.
Work = Callable[[Callable[[int], None]], Ledger]


class Handle:
    """What `sleep(blocking=False)` returns, and what a lazy wake leaves behind."""

    def __init__(self, what: str, work: Work) -> None:
        self._what = what
        self._work = work
        self._changed = threading.Condition()
        self._freed_bytes = 0
        self._ledger: Ledger | None = None
        self._error: BaseException | None = None
        self._raised = False
        self._thread = threading.Thread(target=self._run, name=f"torpor-{what}", daemon=False)
        self._thread.start()

    @property
    def freed_bytes(self) -> int:
        """Bytes of device memory given back so far."""
        with self._changed:
            return self._freed_bytes

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        with self._changed:
            return self._ended()

    def wait_for(self, nbytes: int, timeout_s: float | None = None) -> int:
        """Return as soon as `nbytes` bytes are free, with the bytes freed by then.

        Raises:
            UsageError: the whole sleep frees less than `nbytes`.
            TimeoutError: not within `timeout_s` seconds.
            The sleep's own error, if it failed: everything is awake again then.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._freed_bytes >= nbytes or self._ended(), timeout_s):
                raise TimeoutError(f"{self._freed_bytes} of {nbytes} bytes are free after {timeout_s} s")
            if self._error is None and self._freed_bytes < nbytes:
                raise UsageError(f"the whole {self._what} freed {self._freed_bytes} bytes, {nbytes} were waited for")
        if self._error is not None:
            self.result()
        return self.freed_bytes

    def result(self, timeout_s: float | None = None) -> Ledger:
        """The ledger, once it has ended.

        Raises:
            TimeoutError: not within `timeout_s` seconds.
            Whatever the work raised.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the {self._what} goes on after {timeout_s} s")
        if self._error is not None:
            self._raised = True
            raise self._error
        if self._ledger is None:
            raise StateError(f"the {self._what} ended without a ledger")
        return self._ledger

    def settle(self) -> None:
        """Wait for the end; raise its error unless the caller has seen it already."""
        self._thread.join()
        if self._error is not None and not self._raised:
            self.result()

    def _ended(self) -> bool:
        return self._ledger is not None or self._error is not None

    def _run(self) -> None:
        ledger: Ledger | None = None
        error: BaseException | None = None
        try:
            ledger = self._work(self._report)
        except BaseException as caught:  # noqa: BLE001 - raised again where somebody waits
            error = caught
        with self._changed:
            self._ledger, self._error = ledger, error
            self._changed.notify_all()

    def _report(self, nbytes: int) -> None:
        with self._changed:
            self._freed_bytes += nbytes
            self._changed.notify_all()

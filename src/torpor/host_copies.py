"""Copies between stretches of host memory: many in one call of C, without the interpreter's lock.

A copy of 53 KiB takes about as long as the Python around it, and to get the interpreter's lock back after each costs
more. Where the package was installed without a C compiler the copies are made one by one all the same.
"""

from __future__ import annotations

import ctypes
from array import array

from torpor.compiled import copy_library

#: Copies collected before they are made.
_MOST = 1024
_MOST_BYTES = 8 * 1024**2


class HostCopies:
    """Collects copies and makes them when there are many; `finish()` makes the rest.

    The memory must be there, and not move, until then. Stretches must not overlap.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._nbytes = 0

    def add(self, to: int, source: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from address `source` to address `to`, now or a little later."""
        self._rows += (to, source, nbytes)
        self._nbytes += nbytes
        if self._nbytes >= _MOST_BYTES or len(self._rows) >= 3 * _MOST:
            self.finish()

    def finish(self) -> None:
        """Make the copies that are left."""
        if self._rows:
            rows, self._rows, self._nbytes = self._rows, [], 0
            _copy(rows)


def _copy(rows: list[int]) -> None:
    library = copy_library()
    if library is None:
        for to, source, nbytes in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
            ctypes.memmove(to, source, nbytes)
    else:
        table = array("q", rows)
        library.torpor_copy(table.buffer_info()[0], len(rows) // 3)

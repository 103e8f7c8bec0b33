"""Copies between stretches of host memory: many in one call of C, without the interpreter's lock.

A copy of 53 KiB takes about as long as the Python around it, and to get the interpreter's lock back after each costs
more. Where the package was installed without a C compiler the copies are made one by one all the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from torpor.compiled import built_library

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
            _copier()(rows)


@cache
def _copier() -> Callable[[list[int]], None]:
    path = built_library(Path(__file__).parent, "_copy")
    return _one_by_one if path is None else _in_one_call(path)


def _in_one_call(path: Path) -> Callable[[list[int]], None]:
    function = ctypes.CDLL(str(path)).torpor_copy
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    function.restype = None

    def copy(rows: list[int]) -> None:
        table = np.array(rows, np.int64)
        function(table.ctypes.data, len(rows) // 3)

    return copy


def _one_by_one(rows: list[int]) -> None:
    for to, source, nbytes in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        ctypes.memmove(to, source, nbytes)

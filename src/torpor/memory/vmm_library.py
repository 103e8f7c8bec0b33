"""The C library `_vmm.c` from Python: extents of device memory, and their pages, by the driver's codes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torpor.compiled import built_library
from torpor.errors import DriverError, UnsupportedError, gib
from torpor.memory.cuda import DRIVER_LIBRARY

#: Codes of the library itself; codes above 0 are the driver's.
_OWN_CODES = {
    -1: "the driver library cannot be opened, or is too old",
    -2: "no host memory",
    -3: "not an extent of this pool",
    -4: "no such device",
}


#: One row an extent: addresses with one set of pages, for one or more requests of torch's caching allocator.
#: A serial is never used again, unlike an address; `mapped` is 1 while the extent has pages.
EXTENT = np.dtype(
    [
        ("address", np.int64),
        ("nbytes", np.int64),
        ("serial", np.int64),
        ("device", np.int32),
        ("mapped", np.int32),
        ("handle", np.uint64),
        ("used_bytes", np.int64),
        ("shared", np.int32),
        ("sealed", np.int32),
    ]
)
Extents = npt.NDArray[np.void]


class _Failure(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_int32),
        ("call", ctypes.c_char * 28),
        ("address", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
    )


class VmmLibrary:
    """The allocator over CUDA virtual memory of this process. Calls release the GIL and are thread-safe."""

    def __init__(self, path: Path, driver: str = DRIVER_LIBRARY) -> None:
        """Load the library at `path` over the driver library `driver`.

        Raises:
            UnsupportedError: there is no driver here, or it lacks what is needed.
        """
        self.path = path
        self._library = _declare(ctypes.CDLL(str(path)))
        failure = _Failure()
        if self._library.torpor_vmm_open(driver.encode(), ctypes.byref(failure)):
            raise UnsupportedError(
                f"memory backend vmm: {self._describe(failure)}. It needs an NVIDIA driver "
                f"({driver}) for CUDA 11.2 or newer"
            )

    def extents(self, device: int | None = None) -> Extents:
        """The extents of `device` or of all devices, as rows of `EXTENT` sorted by address."""
        capacity = 0
        while True:
            table = np.zeros(capacity, EXTENT)
            num: int = self._library.torpor_vmm_extents(table.ctypes.data, capacity)
            if num <= capacity:
                return table[:num] if device is None else table[:num][table["device"][:num] == device]
            capacity = num + 64

    def seal(self, device: int, sealed: bool) -> None:
        """Keep later requests of torch out of the extents that `device` has now, or let them in again."""
        self._library.torpor_vmm_seal(device, int(sealed))

    def serial(self) -> int:
        """Grows with every new extent."""
        serial: int = self._library.torpor_vmm_serial()
        return serial

    def unmap(self, addresses: Sequence[int], device: int) -> int:
        """Give back the pages of the extents that start at `addresses`; return the bytes given back.

        Extents without pages are left as they are. The caller has waited for all work that uses them.

        Raises:
            DriverError: the driver refused. The extents have their pages, contents included, unless
                it refused the undo as well.
        """
        return self._change("give back", self._library.torpor_vmm_unmap, addresses, device)

    def map(self, addresses: Sequence[int], device: int) -> int:
        """New pages, contents undefined, for extents that have none; return the bytes taken.

        Raises:
            DriverError: the driver refused. No extent has changed.
        """
        return self._change("take", self._library.torpor_vmm_map, addresses, device)

    def background_failure(self) -> tuple[int, str]:
        """How many requests of torch failed since the start, and what the last one met."""
        failure = _Failure()
        num: int = self._library.torpor_vmm_background_failure(ctypes.byref(failure))
        return num, self._describe(failure) if num else ""

    def _change(self, verb: str, call: ctypes._NamedFuncPointer, addresses: Sequence[int], device: int) -> int:
        table = (ctypes.c_uint64 * len(addresses))(*addresses)
        nbytes = ctypes.c_uint64()
        failure = _Failure()
        if call(table, len(addresses), device, ctypes.byref(nbytes), ctypes.byref(failure)):
            raise DriverError(
                f"cannot {verb} the pages of {len(addresses)} extents on cuda:{device}: {self._describe(failure)}",
                code=failure.code,
                call=failure.call.decode(),
                device=f"cuda:{device}",
            )
        return nbytes.value

    def _describe(self, failure: _Failure) -> str:
        words = self._library.torpor_vmm_error_text(failure.code)
        reason = words.decode() if words else _OWN_CODES.get(failure.code, "unknown error")
        size = f" of {failure.nbytes} bytes ({gib(failure.nbytes)})" if failure.nbytes else ""
        return f"{failure.call.decode()}{size} failed with code {failure.code}: {reason}"


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    addresses = ctypes.POINTER(ctypes.c_uint64)
    failure = ctypes.POINTER(_Failure)
    library.torpor_vmm_open.argtypes = [ctypes.c_char_p, failure]
    for change in (library.torpor_vmm_unmap, library.torpor_vmm_map):
        change.argtypes = [addresses, ctypes.c_size_t, ctypes.c_int, addresses, failure]
    library.torpor_vmm_extents.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.torpor_vmm_extents.restype = ctypes.c_size_t
    library.torpor_vmm_serial.restype = ctypes.c_uint64
    library.torpor_vmm_error_text.restype = ctypes.c_char_p
    library.torpor_vmm_background_failure.argtypes = [failure]
    library.torpor_vmm_background_failure.restype = ctypes.c_uint64
    return library


@cache
def vmm_library() -> VmmLibrary:
    """The library, loaded once for the process.

    Raises:
        UnsupportedError: it was not built, or there is no driver.
    """
    path = built_library(Path(__file__).parent, "_vmm")
    if path is None:
        raise UnsupportedError(
            "memory backend vmm: its C part was not built when torpor was installed. Put a C compiler (cc) "
            "on PATH and reinstall: pip install --force-reinstall --no-deps --no-binary torpor torpor"
        )
    return VmmLibrary(path)

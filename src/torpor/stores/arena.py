"""Page-locked host memory of exact size, at one stretch of addresses, taken and given back in parts.

Torch's own page-locked memory comes in powers of two. Here pages are faulted by several threads, with
huge-page advice and near the GPU, and then registered with the CUDA runtime; without a GPU they are plain memory.
The arena is never inherited by a forked child: a GPU would go on writing to pages that only one of the two has.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from torpor.errors import ClosedError, StoreFullError, UsageError
from torpor.memory import kernel
from torpor.stores.slots import up

#: What is registered in one call: a registration holds locks that the driver's other calls wait for.
REGISTRATION_BYTES = 1024**3
HUGE_PAGE_BYTES = 2 * 1024**2
#: What one thread faults in one call.
_FAULT_BYTES = 64 * 1024**2
#: More threads did not make the kernel faster where it was measured.
_MAX_THREADS = 8
#: Addresses cost nothing: enough of them that none has to be used twice.
_ADDRESS_BYTES = 1024**4

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_EINVAL = errno.EINVAL
_MAP_NORESERVE = 0x4000
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_DONTDUMP = 16
_MPOL_PREFERRED = 1
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_HOST_REGISTER_PORTABLE = 1

_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """One stretch of addresses; `take` puts page-locked memory behind a part of it, `give` takes it away.

    Args:
        budget_bytes: the most it may hold; None for what the kernel says is available.
        device: the GPU that reads and writes it; None for the current one, or for none if there is none.
    """

    def __init__(self, budget_bytes: int | None = None, device: torch.device | None = None) -> None:
        if budget_bytes is not None and budget_bytes < 1:
            raise UsageError(f"budget_bytes={budget_bytes}: must be at least 1, or None for the machine's limit")
        self.registers = torch.cuda.is_available()
        self.node = numa_node(device) if self.registers else None
        self.budget_bytes = budget_bytes
        self.seconds = 0.0
        """Spent on faulting and registering so far, in whatever thread."""
        self._lock = threading.RLock()
        self._memory = _reserve_addresses(_ADDRESS_BYTES)
        self._address = self._memory.data_ptr()
        self._ranges: dict[int, int] = {}
        """Begin and end, in bytes from the start, of each range that was registered in one call."""
        self._closed = False
        # memory that goes while it is registered leaves a registration that the next mapping there runs into
        self._finalizer = weakref.finalize(self, _unregister_all, self._memory, self._ranges, self.registers)

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory behind the addresses."""
        return sum(end - begin for begin, end in self._ranges.items())

    def room_bytes(self) -> int:
        """What `take` could take now, by budget and kernel."""
        room = kernel.available_bytes()
        return room if self.budget_bytes is None else max(0, min(room, self.budget_bytes - self.held_bytes))

    def take(self, nbytes: int) -> list[tuple[int, int]]:
        """Memory behind the next `nbytes` addresses, rounded up to pages: the ranges taken, in order.

        They follow the last range that is held, so free space at its end and they are one.

        Raises:
            StoreFullError: over the budget, more than the machine has, or refused by kernel or driver. Nothing
                was taken.
            ClosedError: after `close()`.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("this arena was closed; make a new one")
            nbytes = up(nbytes, kernel.PAGE_BYTES)
            first = max(self._ranges.values(), default=0)
            room = min(self.room_bytes(), self._memory.numel() - first)
            if nbytes > room:
                remedy = "Raise budget_bytes, sleep fewer components, or use store='file'."
                raise StoreFullError(nbytes, room, self.describe(), remedy)
            start = time.perf_counter()
            taken: list[tuple[int, int]] = []
            try:
                self._fault_in(first, first + nbytes)
                for begin, end in _cut(first, first + nbytes):
                    self._register(begin, end)
                    taken.append((begin, end))
            except BaseException:
                for begin, _ in taken:
                    self._unregister(begin)
                kernel.madvise(self._address + first, nbytes, kernel.MADV_DONTNEED)
                raise
            finally:
                self.seconds += time.perf_counter() - start
            self._ranges.update(taken)
            return taken

    def give(self, begin: int) -> None:
        """Give back the memory of the range that begins at `begin`."""
        with self._lock:
            end = self._ranges.pop(begin)
            self._unregister(begin)
            kernel.madvise(self._address + begin, end - begin, kernel.MADV_DONTNEED)

    def ranges(self) -> list[tuple[int, int]]:
        """What is held, as ranges `(begin, end)` in bytes from the start, sorted. Each can be given back."""
        with self._lock:
            return sorted(self._ranges.items())

    def tensor(self, begin: int, nbytes: int) -> torch.Tensor:
        """Bytes of the arena as a `uint8` tensor of shape `[nbytes]`; it keeps the addresses, not the memory."""
        if self._closed:
            raise ClosedError("this arena was closed; make a new one")
        return self._memory[begin : begin + nbytes]

    def close(self) -> None:
        """Give everything back. Idempotent."""
        with self._lock:
            for begin, _ in self.ranges():
                self.give(begin)
            self._closed = True
            self._finalizer.detach()
            self._memory = torch.empty(0, dtype=torch.uint8)

    def describe(self) -> str:
        """In a few words."""
        kind = "page-locked host memory" if self.registers else "host memory (no GPU: not page-locked)"
        near = "" if self.node is None else f" on NUMA node {self.node}"
        return f"{kind}{near}" + ("" if self.budget_bytes is None else f", budget {self.budget_bytes} bytes")

    def _fault_in(self, begin: int, end: int) -> None:
        """Have the kernel put pages behind the addresses, in several threads."""
        address = self._address + begin
        kernel.madvise(address, end - begin, _MADV_HUGEPAGE)
        if self.node is not None:
            _prefer_node(address, end - begin, self.node)
        parts = [
            (at, min(_FAULT_BYTES, self._address + end - at))
            for at in range(address, self._address + end, _FAULT_BYTES)
        ]
        with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1, _MAX_THREADS)) as threads:
            refused = [code for code in threads.map(lambda part: _populate(*part), parts) if code]
        if refused:
            reason = f"The kernel refused: {os.strerror(refused[0])}."
            raise StoreFullError(end - begin, kernel.available_bytes(), self.describe(), reason)

    def _register(self, begin: int, end: int) -> None:
        if not self.registers:
            return
        code = _cudart().cudaHostRegister(self._address + begin, end - begin, _HOST_REGISTER_PORTABLE)
        if int(code) != 0:
            reason = f"The CUDA runtime would not page-lock it (error {int(code)}): see 'ulimit -l'."
            raise StoreFullError(end - begin, kernel.available_bytes(), self.describe(), reason)

    def _unregister(self, begin: int) -> None:
        if self.registers:
            _cudart().cudaHostUnregister(self._address + begin)


def _cut(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for at in range(begin, end, REGISTRATION_BYTES):
        yield at, min(at + REGISTRATION_BYTES, end)


def _reserve_addresses(nbytes: int) -> torch.Tensor:
    """Addresses without memory as a `uint8` tensor that begins at a huge page.

    Where the process may have fewer addresses than asked for, half as many, and so on.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    while True:
        try:
            memory = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)
            break
        except OSError as error:
            nbytes //= 2
            if nbytes < 2 * HUGE_PAGE_BYTES:
                reason = f"The kernel refused addresses: {error}."
                raise StoreFullError(nbytes, 0, "host memory", reason) from error
    for advice in (_MADV_DONTFORK, _MADV_DONTDUMP):
        kernel.madvise(memory.data_ptr(), nbytes, advice)
    return memory[-memory.data_ptr() % HUGE_PAGE_BYTES :]


def _populate(address: int, nbytes: int) -> int:
    """Write-fault every page; 0 or the errno. Kernels before 5.14 lack the advice: touch the pages instead."""
    code = kernel.madvise(address, nbytes, kernel.MADV_POPULATE_WRITE)
    if code == _EINVAL:
        ctypes.memset(address, 0, nbytes)
        return 0
    return code


def _prefer_node(address: int, nbytes: int, node: int) -> None:
    """Ask for pages on one NUMA node, others if it has none; where that cannot be asked, leave it to the kernel."""
    number = _SYS_MBIND.get(platform.machine())
    if number is not None:
        words = (ctypes.c_ulong * 16)()
        words[node // 64] = 1 << node % 64
        _libc.syscall(
            number, ctypes.c_void_p(address), ctypes.c_ulong(nbytes), _MPOL_PREFERRED, words, ctypes.c_ulong(1024), 0
        )


def _unregister_all(memory: torch.Tensor, ranges: dict[int, int], registered: bool) -> None:
    for begin in ranges if registered else ():
        _cudart().cudaHostUnregister(memory.data_ptr() + begin)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def numa_node(device: torch.device | None) -> int | None:
    """The NUMA node a GPU is attached to, by sysfs; None where the machine does not tell or has only one."""
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    properties: Any = torch.cuda.get_device_properties(index)
    name = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    with suppress(OSError, ValueError):
        node = int((_PCI_DEVICES / name / "numa_node").read_text(encoding="ascii"))
        return node if node >= 0 else None
    return None

"""The C part of `vmm` over the driver of `fake_driver.c`, and what tests do with it."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

import torpor.memory
from torpor.memory.vmm_library import VmmLibrary

SOURCE = Path(torpor.memory.__file__).with_name("_vmm.c")
MIB = 1 << 20
PAGE = 34 * MIB  # a piece too large to share its extent
SAMPLE = 4096
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def compile_c(source: Path, library: Path) -> Path:
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", str(library), str(source), "-ldl", "-lpthread"], check=True)
    return library


class Rig:
    """The library over its own copy of the fake driver: both keep state, so each test has its own files."""

    def __init__(self, library: Path, driver: Path) -> None:
        self.vmm = VmmLibrary(library, str(driver))
        self.driver = ctypes.CDLL(str(driver))
        self.driver.fake_used.restype = ctypes.c_uint64
        self.driver.fake_capacity.argtypes = [ctypes.c_uint64]
        self._library = ctypes.CDLL(str(library))
        self._library.torpor_vmm_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._library.torpor_vmm_malloc.restype = ctypes.c_void_p
        self._library.torpor_vmm_free.argtypes = [
            ctypes.c_void_p,
            ctypes.c_ssize_t,
            ctypes.c_int,
            ctypes.c_void_p,
        ]

    def malloc(self, nbytes: int, device: int = 0) -> int:
        return self._library.torpor_vmm_malloc(nbytes, device, None) or 0

    def free(self, address: int, nbytes: int = 0, device: int = 0) -> None:
        self._library.torpor_vmm_free(address, nbytes, device, None)

    def fail(self, call: str, nth: int = 1) -> None:
        self.driver.fake_fail(call.encode(), nth)

    def mapped(self) -> list[bool]:
        return [bool(row["mapped"]) for row in self.vmm.extents()]

    def held(self) -> tuple[int, int, int]:
        """What the driver says is held: bytes, handles, mappings."""
        return self.driver.fake_used(), self.driver.fake_handles(), self.driver.fake_maps()

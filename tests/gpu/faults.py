"""`vmm` over a driver whose calls fail on demand."""

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import torpor.memory
from torpor.memory.pool import Pools
from torpor.memory.vmm import VmmBackend
from torpor.memory.vmm_library import VmmLibrary

#: What a sleep or a wake calls.
CALLS = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease")


def faulty_backend() -> tuple[VmmBackend, Callable[[str, int], None]]:
    """A backend of its own, and `fail(call, nth)`: the nth of these calls from now on fails, once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = {
            "_vmm.so": Path(torpor.memory.__file__).with_name("_vmm.c"),
            "faulty.so": Path(__file__).with_name("faulty_driver.c"),
        }
        for built, source in sources.items():
            command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(folder / built), str(source), "-ldl"]
            subprocess.run(command, check=True)
        library = VmmLibrary(folder / "_vmm.so", str(folder / "faulty.so"))
        faulty = ctypes.CDLL(str(folder / "faulty.so"))
        torch.cuda.init()
        backend = VmmBackend(library, Pools(library))
    return backend, lambda call, nth: faulty.faulty_fail(call.encode(), nth)

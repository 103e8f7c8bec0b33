"""Device memory by process, from NVIDIA's management library, which comes with the driver.

Types and names: NVML API Reference, https://docs.nvidia.com/deploy/nvml-api.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

LIBRARY = "libnvidia-ml.so.1"
#: More processes than this share no GPU.
_MAX_PROCESSES = 512
#: What the library says where it cannot tell how much a process holds.
_NOT_AVAILABLE = 2**64 - 1


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def process_bytes(uuid: str) -> int | None:
    """Bytes of a GPU that this process holds; None where the library is absent or does not see this process.

    In a container that hides the host's process ids it does not.

    Args:
        uuid: of the device, as `torch.cuda.get_device_properties` has it.
    """
    handle = _handle(uuid)
    if handle is None:
        return None
    count = ctypes.c_uint(_MAX_PROCESSES)
    table = (_Process * _MAX_PROCESSES)()
    if _library().nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), table):
        return None
    mine = [row.used_bytes for row in table[: count.value] if row.pid == os.getpid()]
    return sum(mine) if mine and _NOT_AVAILABLE not in mine else None


@cache
def _handle(uuid: str) -> ctypes.c_void_p | None:
    try:
        library = _library()
    except OSError:  # no driver, or a part of it only
        return None
    handle = ctypes.c_void_p()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)):
        return None
    return handle


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(LIBRARY)

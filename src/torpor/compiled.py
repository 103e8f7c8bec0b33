"""Where the package's compiled C files lie, and the one that copies host memory."""

from __future__ import annotations

import ctypes
import importlib.machinery
from functools import cache
from pathlib import Path


def built_library(folder: Path, name: str) -> Path | None:
    """The library `name` in `folder`; None if the package was installed without a C compiler."""
    built = (folder / f"{name}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in built if path.is_file()), None)


@cache
def copy_library() -> ctypes.CDLL | None:
    """What `_copy.c` exports; None if the package was installed without a C compiler."""
    path = built_library(Path(__file__).parent, "_copy")
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    library.torpor_copy.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.torpor_copy.restype = None
    for function in (library.torpor_write_blocks, library.torpor_read_blocks):
        table, number = ctypes.c_void_p, ctypes.c_int64
        function.argtypes = [ctypes.c_int, ctypes.c_void_p, table, number, number, table]
        function.restype = ctypes.c_int64
    return library

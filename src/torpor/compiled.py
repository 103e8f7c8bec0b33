"""Where the package's compiled C files lie."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path


def built_library(folder: Path, name: str) -> Path | None:
    """The library `name` in `folder`; None if the package was installed without a C compiler."""
    built = (folder / f"{name}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in built if path.is_file()), None)

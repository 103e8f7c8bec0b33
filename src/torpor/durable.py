"""Files and directories that a crash leaves whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def sync(path: Path) -> None:
    """Bring a file or a directory to the disk: of a directory its list of names, not what they hold."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path, partial: str) -> None:
    """Remove a file or a directory; a directory takes a name that begins with `partial` first.

    So a crash leaves no half of it under a name that somebody looks for.
    """
    if not path.is_dir():
        path.unlink()
        return
    doomed = path.parent / f"{partial}doomed-{path.name.removeprefix(partial)}"
    shutil.rmtree(doomed, ignore_errors=True)  # of an earlier crash
    path.rename(doomed)
    shutil.rmtree(doomed)

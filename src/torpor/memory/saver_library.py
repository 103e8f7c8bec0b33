"""The library `torch_memory_saver` from Python: its regions, and pausing and resuming them.

Written against version 0.0.10, whose public names tell neither which memory belongs to a region nor what is paused.
So its table of memory pools is read, one for each region and device, and the driver is asked for the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from torpor.before import Before
from torpor.errors import StateError, UnsupportedError
from torpor.memory.allocator import PoolId

#: The tag of memory that the library takes over outside its regions.
DEFAULT_TAG = "default"


@dataclass(frozen=True, slots=True)
class Region:
    """What one tag allocates from on one device. Example: `Region("actor", (0, 3), keeps_backup=False)`."""

    tag: str
    pool_id: PoolId
    keeps_backup: bool
    """Whether the library copies the memory itself when it pauses it."""


class SaverLibrary:
    """The library's one object of this process.

    `pause` and `resume` end the process where they find memory in another state than they expect, or no room:
    the caller has to know better.
    """

    def __init__(self, saver: Any) -> None:
        """`saver`: `torch_memory_saver.torch_memory_saver`."""
        self._saver = saver
        self.pause: Callable[[str], None] = saver.pause
        """Take the pages of all memory with a tag. Waits for nothing, copies nothing."""
        self.resume: Callable[[str], None] = saver.resume
        """New pages, contents undefined, for all memory with a tag."""
        self._checks: list[Before] = []

    def regions(self) -> list[Region]:
        """All regions that were used so far.

        Raises:
            UnsupportedError: this version keeps its pools in another way.
        """
        implementation = self._implementation()
        if implementation is None:
            return []
        pools = implementation["_mem_pools"]
        if not isinstance(pools, dict) or any(not isinstance(key, tuple) or len(key) != 5 for key in pools):
            raise self._unknown()
        return [
            Region(tag, tuple(pool.id), keeps_backup=bool(cpu_backup or disk_backup))
            for (tag, cpu_backup, disk_backup, _, _), pool in pools.items()
        ]

    def hooks_every_thread(self) -> bool:
        """Whether memory outside its regions may be the library's too, as with `LD_PRELOAD`."""
        implementation = self._implementation()
        return implementation is not None and implementation["_hook_mode"] == "preload"

    def guard(self, asleep: Collection[str]) -> None:
        """From now on calls that would end the process, or use memory without pages, raise StateError.

        Args:
            asleep: tags whose memory has no pages; none takes the checks away.
        """
        for check in self._checks:
            check.remove()
        self._checks.clear()
        if not asleep:
            return

        def refuse(operation: str, tag: str | None) -> None:
            sleeping = [tag] if tag in asleep else sorted(asleep) if not tag else []
            if sleeping:
                raise StateError(
                    f"torch_memory_saver.{operation}: the regions {sleeping} sleep by Torpor's doing, and the "
                    "library would end the process. Call wake() of the sleeper first"
                )

        def about_tag(operation: str) -> Callable[..., None]:
            return lambda tag=None, *_, **__: refuse(f"{operation}({tag!r})", tag)

        def about_region(tag: str = DEFAULT_TAG, *_: Any, **__: Any) -> None:
            refuse(f"region({tag!r})", tag)

        def about_graph(*args: Any, tag: str = DEFAULT_TAG, **_: Any) -> None:
            refuse("cuda_graph", args[4] if len(args) > 4 else tag)

        checks: dict[str, Callable[..., None]] = {
            "pause": about_tag("pause"),
            "resume": about_tag("resume"),
            "region": about_region,
            "cuda_graph": about_graph,
        }
        self._checks += [Before(self._saver, method, check) for method, check in checks.items()]

    def _implementation(self) -> dict[str, Any] | None:
        """The attributes of what does the work; None if nobody used it yet."""
        state = vars(self._saver)
        if "_impl" not in state:
            raise self._unknown()
        if state["_impl"] is None:
            return None
        found: dict[str, Any] = vars(state["_impl"])
        if not {"_mem_pools", "_hook_mode"} <= found.keys():
            raise self._unknown()
        return found

    @staticmethod
    def _unknown() -> UnsupportedError:
        return UnsupportedError(
            f"memory backend torch_memory_saver: version {metadata.version('torch_memory_saver')} keeps its pools in "
            "another way than 0.0.10, which this was written against"
        )


def saver_library() -> SaverLibrary:
    """The installed library.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        from torch_memory_saver import torch_memory_saver
    except ImportError as error:
        raise UnsupportedError(
            "memory backend torch_memory_saver: the library is not installed. pip install torch_memory_saver, "
            "or use memory='vmm'"
        ) from error
    return SaverLibrary(torch_memory_saver)

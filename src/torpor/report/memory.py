"""Resident memory over time, with what the run was doing.

Each line of `memory.jsonl` is a reading:
`{"t_s": 12.31, "rss_bytes": 2147483648, "step": 3, "phase": "generate", "actor_asleep": true, "engine_asleep": false}`,
with `critic_asleep` too in a run that has a critic.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torpor.report.jsonl import JsonlFile, read_jsonl

_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def resident_bytes() -> int:
    """Resident memory of this process, as the kernel counts it (`/proc/self/statm`, second field)."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * _PAGE_BYTES


class MemorySampler:
    """Reads resident memory every `interval_s` seconds in a thread, and at each change of phase.

    One reading takes about 13 microseconds of a CPU. As a context manager it stops and writes out at the end.
    """

    def __init__(self, path: Path, interval_s: float) -> None:
        self._lines = JsonlFile(path)
        self._interval_s = interval_s
        self._start_s = time.perf_counter() - _last_time_s(path)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._marks: dict[str, Any] = {
            "step": None,
            "phase": "start",
            "actor_asleep": False,
            "engine_asleep": False,
        }
        self._thread = threading.Thread(target=self._sample_until_stopped, name="memory-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._lines.close()

    def mark(self, **marks: Any) -> None:
        """Change what the following readings say: `step`, `phase`, `actor_asleep` and those of others."""
        with self._lock:
            self._read()
            self._marks.update(marks)
            self._read()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Readings inside the block belong to phase `name`."""
        outer = self._marks["phase"]
        self.mark(phase=name)
        try:
            yield
        finally:
            self.mark(phase=outer)

    def _sample_until_stopped(self) -> None:
        while not self._stop.wait(self._interval_s):
            with self._lock:
                self._read()

    def _read(self) -> None:
        now_s = round(time.perf_counter() - self._start_s, 4)
        self._lines.append({"t_s": now_s, "rss_bytes": resident_bytes(), **self._marks})


def _last_time_s(path: Path) -> float:
    """Where the clock of an earlier part of the run stopped; 0.0 for a new file."""
    readings = read_jsonl(path)
    return float(readings[-1]["t_s"]) if readings else 0.0

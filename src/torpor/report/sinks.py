"""Where metrics go. A sink that cannot start stops the run; one that fails later does not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torpor.errors import UnsupportedError
from torpor.report.jsonl import JsonlFile
from torpor.report.plots import draw
from torpor.report.rundir import RunDirectory


class Sink(Protocol):
    """Takes the metrics of each step."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """Metrics as `{"step": 3, "reward/mean": 0.5, ...}` a line."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonlFile(path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._lines.append({"step": step, **values})

    def close(self) -> None:
        self._lines.close()


class TensorBoardSink:
    """Metrics as TensorBoard scalars.

    Raises:
        UnsupportedError: tensorboard is not installed.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UnsupportedError(
                "report.tensorboard is on, and tensorboard is not installed: pip install 'torpor[tensorboard]'"
            ) from error
        self._writer: Any = SummaryWriter(str(directory))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class PlotSink:
    """Draws the plots every so many steps (0: never), and at the end."""

    def __init__(self, run: RunDirectory, interval_steps: int) -> None:
        self._run, self._interval_steps = run, interval_steps

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._interval_steps and (step + 1) % self._interval_steps == 0:
            draw(self._run)

    def close(self) -> None:
        draw(self._run)


def warn_on_stderr(message: str) -> None:
    """The default way to tell of a failed sink."""
    print(f"warning: {message}", file=sys.stderr)


class Sinks:
    """Several sinks as one. A sink's failure is told once and counted; the others and the run go on."""

    def __init__(self, sinks: Iterable[Sink], warn: Callable[[str], None] = warn_on_stderr) -> None:
        self._sinks = list(sinks)
        self._warn = warn
        self.failures: dict[str, int] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            self._guard(sink, lambda sink=sink: sink.write(step, values))  # type: ignore[misc]

    def close(self) -> None:
        for sink in self._sinks:
            self._guard(sink, sink.close)
        for name, count in self.failures.items():
            self._warn(f"metrics sink {name} failed {count} times in this run")

    def _guard(self, sink: Sink, call: Callable[[], None]) -> None:
        name = type(sink).__name__
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in a sink, training is worth more
            if name not in self.failures:
                self._warn(f"metrics sink {name} failed, the run goes on: {error!r}")
            self.failures[name] = self.failures.get(name, 0) + 1

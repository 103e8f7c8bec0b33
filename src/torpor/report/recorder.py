"""One run's records: phases, ledgers, samples and metrics on their way to files, bars and lines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torpor.kinds import Fate
from torpor.report.console import Counter, RunConsole, step_line
from torpor.report.jsonl import JsonlFile
from torpor.report.memory import MemorySampler, resident_bytes
from torpor.report.metrics import Max, Metrics, Sum
from torpor.report.rundir import RunDirectory
from torpor.report.sinks import JsonlSink, PlotSink, Sink, Sinks, TensorBoardSink

if TYPE_CHECKING:
    from torpor.ledger import Ledger

SHOWN_FATES = (Fate.MOVED, Fate.CLEAN, Fate.DROPPED)


class Recorder:
    """Writes a run directory while the run goes on. A context manager around the whole run.

    with Recorder(run, ...) as recorder:
        with recorder.step(3):
            with recorder.phase("generate"):
                ...
            recorder.metrics.record("reward/mean", Mean(0.5))
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        total_steps: int,
        first_step: int = 0,
        memory_interval_s: float = 0.05,
        plot_interval_steps: int | None = 0,
        tensorboard: bool = False,
    ) -> None:
        """
        Args:
            plot_interval_steps: see `PlotSink`; None draws nothing.

        Raises:
            UnsupportedError: TensorBoard was asked for and is not installed.
            OSError: the run directory cannot be written.
        """
        run.create()
        self.run = run
        self.metrics = Metrics()
        self.console = RunConsole(total_steps, first_step)
        self._total_steps = total_steps
        sinks: list[Sink] = [JsonlSink(run.metrics)]
        if plot_interval_steps is not None:
            sinks.append(PlotSink(run, plot_interval_steps))
        if tensorboard:
            sinks.append(TensorBoardSink(run.tensorboard))
        self._sinks = Sinks(sinks, warn=lambda message: self.console.say(f"warning: {message}"))
        self._ledgers, self._samples = JsonlFile(run.ledgers), JsonlFile(run.samples)
        self._memory = MemorySampler(run.memory, memory_interval_s)
        self._step = first_step
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        for close in (self._ledgers.close, self._samples.close, self._sinks.close):
            self._exit.callback(close)
        self._exit.enter_context(self._memory)
        self._exit.enter_context(self.console)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """One step: its metrics are written and its line is printed at the end of the block."""
        self._step = step
        self._memory.mark(step=step)
        self.console.step_begins()
        start = time.perf_counter()
        yield
        self.metrics.record("time/step_s", Sum(time.perf_counter() - start))
        values = self._flush()
        self.console.step_done(step_line(step, self._total_steps, values))

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Counter]:
        """Seconds of the block under `time/NAME_s`, readings of memory under its name, a bar if it is long."""
        start = time.perf_counter()
        with self._memory.phase(name), self.console.phase(name, total, unit) as counter:
            yield counter
        self.metrics.record(f"time/{name}_s", Sum(time.perf_counter() - start))

    def asleep(self, *, actor: bool, engine: bool, **others: bool) -> None:
        """Who sleeps from now on; `others` are those that not every run has, such as a critic."""
        who = {"actor": actor, "engine": engine, **others}
        self._memory.mark(**{f"{name}_asleep": sleeps for name, sleeps in who.items()})
        if actor:
            self.metrics.record("memory/rss_actor_asleep_bytes", Max(resident_bytes()))

    def ledger(self, ledger: Ledger, learner: str = "actor") -> None:
        """Keep a ledger of `learner`'s, and add its bytes to the step's metrics."""
        self._ledgers.append({"step": self._step, "learner": learner, **ledger.to_json()})
        if ledger.kind == "wake":
            self.metrics.record("bytes/read", Sum(ledger.copied_bytes))
            return
        by_fate = ledger.bytes_by_fate()
        for fate in SHOWN_FATES:
            self.metrics.record(f"bytes/{fate}", Sum(by_fate.get(fate, 0)))
        self.metrics.record("bytes/written", Sum(ledger.copied_bytes))
        self.metrics.record("bytes/freed", Sum(ledger.freed_bytes))

    def samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Keep some answers of this step."""
        for sample in samples:
            self._samples.append({"step": self._step, **sample})

    def summary(self, step: int) -> dict[str, float]:
        """Write metrics recorded outside a step under `step`; returns them."""
        self._step = step
        return self._flush()

    def _flush(self) -> dict[str, float]:
        values = self.metrics.values()
        self.metrics = Metrics()
        self._sinks.write(self._step, values)
        return values

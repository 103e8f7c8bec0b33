"""What a run shows while it goes on: bars with rates and time left, and one line a step.

On a terminal there are two bars: the steps of the run, and the phase that is going on. A phase that nothing
counts fills up at the pace it had last time. Elsewhere (a pipe, a log) only the lines are printed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from torpor.errors import GIB

MIN_SHOWN_S = 2.0
"""A phase that took less last time gets no bar."""


class RunConsole:
    """Bars and lines on a terminal, lines elsewhere. A context manager: the bars go away at its end."""

    def __init__(self, total_steps: int, first_step: int = 0, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._bars = _Bars(
            TextColumn("{task.description:<24}"),
            BarColumn(bar_width=30),
            _Count(),
            _Pace(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._run = self._bars.add_task(
            "step", start=False, total=total_steps, completed=first_step, first=first_step, unit="steps"
        )
        self._last_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        self._console.print(line, markup=False, soft_wrap=True)

    def step_begins(self) -> None:
        """The clock of the run's bar starts with its first step, not with what is set up before."""
        self._bars.start_task(self._run)

    def step_done(self, line: str) -> None:
        """Print the line of a step and move the bar of the run."""
        self.say(line)
        self._bars.advance(self._run)

    def refresh(self) -> None:
        """Draw the bars now; a terminal's are drawn ten times a second anyway."""
        self._bars.refresh()

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Counter]:
        """A bar while the block runs, unless it was short last time: over `total` units, or at last time's pace."""
        start = time.perf_counter()
        expected_s = self._last_s.get(name)
        task = self._bars.add_task(
            name.replace("_", " "),
            total=total if total is not None else expected_s,
            unit=unit,
            timed=total is None,
            visible=expected_s is None or expected_s >= MIN_SHOWN_S,
        )
        try:
            yield Counter(self._bars, task)
        finally:
            self._bars.remove_task(task)
            self._last_s[name] = time.perf_counter() - start


class Counter:
    """Moves the bar of one phase."""

    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars, self._task = bars, task

    def advance(self, count: int = 1) -> None:
        self._bars.advance(self._task, count)


class _Bars(Progress):
    """Bars of phases that nothing counts move with the clock."""

    def get_renderables(self) -> Iterator[RenderableType]:
        for task in self.tasks:
            if task.fields.get("timed") and task.total and task.elapsed:
                task.completed = min(task.elapsed, task.total)
        yield from super().get_renderables()


class _Count(ProgressColumn):
    """`12/40 steps`, or seconds for a phase that nothing counts."""

    def render(self, task: Task) -> Text:
        if task.fields.get("timed"):
            return Text(f"{task.elapsed or 0.0:.0f} s")
        return Text(f"{task.completed:.0f}/{task.total or 0:.0f} {task.fields['unit']}")


class _Pace(ProgressColumn):
    """Rate and time left."""

    def render(self, task: Task) -> Text:
        elapsed_s = task.elapsed or 0.0
        if task.fields.get("timed"):
            return Text(f"{max(0.0, task.total - elapsed_s):.0f} s left" if task.total else "")
        done = task.completed - task.fields.get("first", 0)
        if not done or not elapsed_s or task.total is None:
            return Text("")
        pace_s = elapsed_s / done
        rate = f"{pace_s:.1f} s each" if pace_s > 1 else f"{1 / pace_s:.1f}/s"
        return Text(f"{rate}, {_clock((task.total - task.completed) * pace_s)} left")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


_PHASES = {
    "weights": ("engine_wake", "update_weights"),
    "evaluate": ("evaluate",),
    "generate": ("generate",),
    "critic": ("reference", "critic_wake", "values", "critic_train", "critic_sleep"),
    "wake": ("engine_sleep", "actor_wake"),
    "train": ("train",),
    "sleep": ("actor_sleep",),
    "save": ("checkpoint",),
}
_LOSSES = (("loss", "policy/loss", "{:+.4f}"), ("value loss", "critic/loss", "{:.4f}"))
_FATES = ("moved", "clean", "dropped", "freed")


def step_line(step: int, total_steps: int, values: Mapping[str, float]) -> str:
    """One line for one step, from its metrics.

    Example: `step   3/40  reward 0.531  loss +0.0124  1843 tokens  7.91 s: weights 0.31 generate 3.10 wake 0.21
    train 3.92 sleep 0.37  GiB: moved 1.503 clean 0.501 dropped 0 freed 2.004`.
    """
    parts = [
        f"step {step + 1:>3}/{total_steps}",
        f"reward {values['reward/mean']:.3f}",
        *(f"{name} {form.format(values[key])}" for name, key, form in _LOSSES if key in values),
        f"{values['rollout/tokens']:.0f} tokens",
        f"{values['time/step_s']:.2f} s: {_seconds(values)}",
    ]
    if "bytes/freed" in values:
        parts.append("GiB: " + " ".join(f"{fate} {_gib(values[f'bytes/{fate}'])}" for fate in _FATES))
    if "eval/reward" in values:
        parts.append(f"held-out {values['eval/reward']:.3f}")
    return "  ".join(parts)


def _seconds(values: Mapping[str, float]) -> str:
    sums = {name: sum(values.get(f"time/{phase}_s", 0.0) for phase in phases) for name, phases in _PHASES.items()}
    return " ".join(f"{name} {seconds:.2f}" for name, seconds in sums.items() if seconds >= 0.005)


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.3f}" if nbytes else "0"

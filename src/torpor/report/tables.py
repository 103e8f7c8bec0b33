"""A run in figures: what it learned, where its seconds and its bytes went."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from torpor.errors import GIB, UsageError
from torpor.report.jsonl import read_jsonl
from torpor.report.rundir import RunDirectory

_SHOWN_STEPS = 12
_STEP_COLUMNS = {
    "reward": ("reward/mean", "{:.3f}"),
    "loss": ("policy/loss", "{:+.4f}"),
    "entropy": ("policy/entropy", "{:.3f}"),
    "clipped": ("policy/clip_fraction", "{:.3f}"),
    "grad norm": ("optimizer/grad_norm", "{:.3f}"),
    "tokens": ("rollout/tokens", "{:.0f}"),
    "seconds": ("time/step_s", "{:.2f}"),
    "held-out": ("eval/reward", "{:.3f}"),
}

Records = Sequence[Mapping[str, Any]]


def report(run: RunDirectory, width: int = 110) -> str:
    """The tables of a run as text.

    Raises:
        UsageError: the directory holds no run, or one without a finished step.
    """
    metrics = by_step(read_jsonl(run.metrics))
    steps = [record for record in metrics if "reward/mean" in record]
    if not steps:
        raise UsageError(f"{run.path} holds no run with a finished step", path=str(run.path))
    text = io.StringIO()
    console = Console(file=text, width=width, highlight=False)
    console.print(_headline(steps, metrics))
    for table in (_steps(metrics), _seconds(steps), _sleeps(read_jsonl(run.ledgers)), _memory(read_jsonl(run.memory))):
        if table is not None:
            console.print()
            console.print(table)
    return text.getvalue().rstrip("\n")


def by_step(records: Records) -> list[dict[str, Any]]:
    """One record a step, in order; where a resumed run did a step again, its figures replace the older ones."""
    merged: dict[int, dict[str, Any]] = {}
    for record in records:
        merged.setdefault(record["step"], {}).update(record)
    return [merged[step] for step in sorted(merged)]


def quarter_means(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean of the first and of the last quarter (at least one value each)."""
    size = max(1, len(rewards) // 4)
    return sum(rewards[:size]) / size, sum(rewards[-size:]) / size


def _headline(steps: Records, metrics: Records) -> str:
    first, last = quarter_means([record["reward/mean"] for record in steps])
    seconds = sum(record["time/step_s"] for record in steps)
    line = (
        f"{len(steps)} steps in {seconds:.1f} s; mean reward {first:.3f} in the first quarter, {last:.3f} in the last"
    )
    held_out = [record["eval/reward"] for record in metrics if "eval/reward" in record]
    return line + (f"; held-out {held_out[0]:.3f} -> {held_out[-1]:.3f}" if held_out else "")


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _steps(metrics: Records) -> Table:
    stride = -(-len(metrics) // _SHOWN_STEPS)
    shown = [record for i, record in enumerate(metrics) if i % stride == 0 or record is metrics[-1]]
    table = _table("Steps" if stride == 1 else f"Every {stride}th step", ["step", *_STEP_COLUMNS])
    for record in shown:
        cells = (form.format(record[key]) if key in record else "" for key, form in _STEP_COLUMNS.values())
        table.add_row(str(record["step"]), *cells)
    return table


def _seconds(steps: Records) -> Table:
    # The first step is left out where it can be: it pays for what is set up once.
    counted = steps[1:] or steps
    keys = dict.fromkeys(key for record in counted for key in record if key.startswith("time/"))
    whole = _mean(counted, "time/step_s")
    table = _table("Seconds a step, without the first", ["phase", "mean", "share"])
    for key in sorted(keys, key=lambda key: -_mean(counted, key)):
        mean = _mean(counted, key)
        name = key.removeprefix("time/").removesuffix("_s").replace("_", " ")
        table.add_row(name, f"{mean:.3f}", f"{mean / whole:.0%}")
    return table


def _mean(records: Records, key: str) -> float:
    return float(sum(record.get(key, 0.0) for record in records) / len(records))


def _sleeps(ledgers: Records) -> Table | None:
    sleeps = [ledger for ledger in ledgers if ledger["kind"] == "sleep"]
    if not sleeps:
        return None
    table = _table(
        f"Last of {len(sleeps)} sleeps, GiB; store: {sleeps[-1]['store']}",
        ["component", "role", "fate", "storages", "size", "written", "freed", "why"],
    )
    for row in sleeps[-1]["rows"]:
        sizes = (f"{row[key] / GIB:.3f}" for key in ("nbytes", "copied_bytes", "freed_bytes"))
        table.add_row(row["component"], row["role"], row["fate"], str(row["storages"]), *sizes, row["reason"])
    table.columns[-1].justify = "left"
    return table


def _memory(readings: Records) -> Table | None:
    states = {
        "actor awake": [r["rss_bytes"] for r in readings if not r["actor_asleep"] and r["step"] is not None],
        "actor asleep": [r["rss_bytes"] for r in readings if r["actor_asleep"]],
    }
    if not states["actor asleep"]:
        return None
    table = _table("Resident memory of the process, GiB", ["while", "median", "highest"])
    for name, resident in states.items():
        if resident:
            table.add_row(name, f"{sorted(resident)[len(resident) // 2] / GIB:.3f}", f"{max(resident) / GIB:.3f}")
    return table

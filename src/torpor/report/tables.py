"""A run in figures: what it learned, where its seconds and its bytes went."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
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
    "value loss": ("critic/loss", "{:.4f}"),
    "explained": ("critic/explained_variance", "{:.3f}"),
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
    tables = [_steps(metrics), _seconds(steps), *_sleeps(read_jsonl(run.ledgers)), *_memory(read_jsonl(run.memory))]
    for table in tables:
        console.print("\n", table.title, sep="", soft_wrap=True)  # as a part of the table it would wrap at its width
        table.title = None
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
    present = {key for record in metrics for key in record}
    columns = {name: column for name, column in _STEP_COLUMNS.items() if column[0] in present}
    table = _table("Steps" if stride == 1 else f"Every {stride}th step", ["step", *columns])
    for record in shown:
        cells = (form.format(record[key]) if key in record else "" for key, form in columns.values())
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


def _sleeps(ledgers: Records) -> Iterator[Table]:
    """The last sleep of each learner."""
    sleeps = [ledger for ledger in ledgers if ledger["kind"] == "sleep"]
    for learner in dict.fromkeys(_learner(ledger) for ledger in sleeps):
        yield _last_sleep(learner, [ledger for ledger in sleeps if _learner(ledger) == learner])


def _learner(ledger: Mapping[str, Any]) -> str:
    return str(ledger.get("learner", "actor"))  # runs from before there were critics do not say


def _last_sleep(learner: str, sleeps: Records) -> Table:
    last = sleeps[-1]
    table = _table(
        f"Last of {len(sleeps)} sleeps of the {learner}, GiB; store: {last['store']}",
        ["component", "role", "fate", "storages", "size", "written", "freed", "why"],
    )
    for row in last["rows"]:
        sizes = (f"{row[key] / GIB:.3f}" for key in ("nbytes", "copied_bytes", "freed_bytes"))
        table.add_row(row["component"], row["role"], row["fate"], str(row["storages"]), *sizes, row["reason"])
    table.columns[-1].justify = "left"
    return table


def _memory(readings: Records) -> Iterator[Table]:
    in_steps = [reading for reading in readings if reading["step"] is not None]
    learners = [name for name in ("actor", "critic") if any(f"{name}_asleep" in reading for reading in in_steps)]
    states = {f"{name} awake": [r for r in in_steps if not r.get(f"{name}_asleep", True)] for name in learners}
    asleep = [r for r in in_steps if all(r.get(f"{name}_asleep", True) for name in learners)]
    if not asleep:
        return
    states[f"{' and '.join(learners)} asleep"] = asleep
    table = _table("Resident memory of the process, GiB", ["while", "median", "highest"])
    for name, during in states.items():
        if during:
            resident = sorted(reading["rss_bytes"] / GIB for reading in during)
            table.add_row(name, f"{resident[len(resident) // 2]:.3f}", f"{resident[-1]:.3f}")
    yield table

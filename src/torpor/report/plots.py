"""The two pictures of a run: what it learned, and what its memory did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from torpor.errors import GIB
from torpor.report.jsonl import read_jsonl
from torpor.report.rundir import RunDirectory

_REWARD, _EVALUATION, _MEMORY = "#1f5a99", "#c4501b", "#2b2b2b"
_ACTOR_ASLEEP = "#9ec9e8"
_PHASES = {
    "generate": "#3b8f5a",
    "evaluate": "#7cc08f",
    "values": "#e8b08f",
    "critic_train": "#e08040",
    "critic_sleep": "#8d80c0",
    "critic_wake": "#bcb4dd",
    "train": "#c4501b",
    "actor_sleep": "#6a51a3",
    "actor_wake": "#9e8cc7",
    "update_weights": "#d9a520",
    "checkpoint": "#777777",
}
_OTHER_PHASE = "#cccccc"
_DETAIL_STEPS = 3


def draw(run: RunDirectory) -> list[Path]:
    """Draw what the run directory has records for; return the files written."""
    written = []
    metrics, readings = read_jsonl(run.metrics), read_jsonl(run.memory)
    if any("reward/mean" in record for record in metrics):
        _draw_reward(metrics, run.reward_plot)
        written.append(run.reward_plot)
    if readings:
        _draw_memory(readings, run.memory_plot)
        written.append(run.memory_plot)
    return written


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and up to `window - 1` values before it."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(window, i + 1) for i in range(len(values))]


def spans(readings: Iterable[dict[str, Any]], key: str) -> list[tuple[float, float, Any]]:
    """Stretches of equal `key`: (first second, last second, value)."""
    stretches = []
    for value, group in groupby(readings, key=lambda reading: reading.get(key)):
        times = [reading["t_s"] for reading in group]
        stretches.append((times[0], times[-1], value))
    return stretches


def _figure(height_inches: float, rows: int, ratios: Sequence[float]) -> tuple[Any, Any]:
    # Objects instead of pyplot: no global figure list, and no display is looked for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, height_inches), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 1, squeeze=False, height_ratios=ratios)[:, 0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def _draw_reward(metrics: Sequence[dict[str, Any]], path: Path) -> None:
    figure, (axis,) = _figure(4.6, 1, [1])
    train = [(record["step"], record["reward/mean"]) for record in metrics if "reward/mean" in record]
    steps, rewards = [step for step, _ in train], [reward for _, reward in train]
    window = max(1, min(10, len(rewards) // 5))
    axis.plot(steps, rewards, ".", color=_REWARD, alpha=0.35, markersize=6, label="one step")
    axis.plot(
        steps,
        moving_mean(rewards, window),
        color=_REWARD,
        linewidth=2,
        label=f"mean of the last {window} steps",
    )
    held_out = [(record["step"], record["eval/reward"]) for record in metrics if "eval/reward" in record]
    if held_out:
        axis.plot(*zip(*held_out, strict=True), "o-", color=_EVALUATION, label="held-out questions, greedy")
    axis.set(xlabel="step", ylabel="mean reward", title="Reward")
    axis.set_ylim(min(0.0, *rewards) - 0.02, max(1.0, *rewards) + 0.02)
    axis.legend(frameon=False, loc="best")
    figure.savefig(path)


def _draw_memory(readings: Sequence[dict[str, Any]], path: Path) -> None:
    parties = [name for name in ("actor", "critic", "engine") if f"{name}_asleep" in readings[-1]]
    figure, (whole, detail, awake, phases) = _figure(8.8, 4, [3, 3, 0.25 * len(parties), 0.5])
    recent = _last_steps(readings, _DETAIL_STEPS)
    _draw_resident(whole, readings, linewidth=0.8)
    _draw_resident(detail, recent, linewidth=1.4)
    whole.set_title("Resident memory of the process; shaded: the actor sleeps")
    whole.legend(frameon=True, framealpha=0.9, edgecolor="none", loc="lower right")
    if recent[0]["step"] is not None:
        detail.set_title(f"Steps {recent[0]['step']} to {recent[-1]['step']}, with their phases", fontsize=10)
    _draw_awake(awake, recent, parties)
    _draw_phases(phases, recent)
    phases.set_xlabel("seconds since the start")
    for axis in (awake, phases):
        axis.set_xlim(detail.get_xlim())
    figure.savefig(path)


def _last_steps(readings: Sequence[dict[str, Any]], count: int) -> Sequence[dict[str, Any]]:
    steps = sorted({reading["step"] for reading in readings if reading["step"] is not None})
    recent = [reading for reading in readings if reading["step"] in steps[-count:]]
    return recent or readings


def _draw_resident(axis: Any, readings: Sequence[dict[str, Any]], linewidth: float) -> None:
    times = [reading["t_s"] for reading in readings]
    resident = [reading["rss_bytes"] / GIB for reading in readings]
    for first_s, last_s, asleep in spans(readings, "actor_asleep"):
        if asleep:
            axis.axvspan(first_s, last_s, color=_ACTOR_ASLEEP, alpha=0.45, linewidth=0, zorder=0)
    axis.plot(times, resident, color=_MEMORY, linewidth=linewidth, label="resident, GiB")
    axis.set_ylabel("GiB")
    axis.set_ylim(0, 1.08 * max(resident))
    axis.set_xlim(times[0], max(times[-1], times[0] + 0.1))


def _draw_awake(axis: Any, readings: Sequence[dict[str, Any]], parties: Sequence[str]) -> None:
    """A bar while each is awake."""
    for row, name in enumerate(parties):
        stretches = spans(readings, f"{name}_asleep")
        bars = [(first_s, last_s - first_s) for first_s, last_s, asleep in stretches if not asleep]
        axis.broken_barh(bars, (row - 0.36, 0.72), color=_MEMORY, linewidth=0)
    axis.set_yticks(range(len(parties)), [f"{name} awake" for name in parties], fontsize=8)
    axis.set_ylim(len(parties) - 0.5, -0.5)
    axis.grid(visible=False)
    axis.tick_params(labelbottom=False)


def _draw_phases(axis: Any, readings: Sequence[dict[str, Any]]) -> None:
    from matplotlib.patches import Patch

    seen: dict[str, str] = {}
    for first_s, last_s, phase in spans(readings, "phase"):
        colour = _PHASES.get(phase, _OTHER_PHASE)
        seen[phase if phase in _PHASES else "other"] = colour
        axis.axvspan(first_s, last_s, color=colour, linewidth=0)
    axis.set_yticks([])
    axis.grid(visible=False)
    patches = [Patch(color=colour, label=name.replace("_", " ")) for name, colour in seen.items()]
    axis.legend(
        handles=patches,
        ncols=len(patches),
        frameon=False,
        fontsize=8,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        handlelength=1.0,
        columnspacing=1.2,
    )

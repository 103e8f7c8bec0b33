"""A forecast as tables for a person, and as JSON for a program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from torpor.forecast.actor import HOST_FACTOR, Forecast, RankForecast
from torpor.forecast.fates import Line
from torpor.forecast.link import Link
from torpor.forecast.segments import RoleSegments, segment_view

GB = 1e9
GIB = 1024**3


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Columns padded to their widest cell, the first `left` of them aligned to the left."""
    grid = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in grid) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(grid[0]), rule, *map(line, grid[1:])])


def gb(nbytes: float) -> str:
    """Bytes in GB (1e9)."""
    return f"{nbytes / GB:.3f}"


def gib(nbytes: float) -> str:
    """Bytes in GiB (1024**3)."""
    return f"{nbytes / GIB:.3f}"


def report(forecast: Forecast, link: Link, host_gib: float | None, *, segments: bool = False) -> str:
    """Everything about one forecast."""
    parts = [
        _title(forecast),
        _account(forecast),
        _savings(forecast),
        _times(forecast, link),
        host(forecast, host_gib),
    ]
    if segments:
        parts.append(_segments(forecast))
    return "\n\n".join(parts)


def _title(forecast: Forecast) -> str:
    rank = forecast.fullest
    model, layout = forecast.model, forecast.layout
    experts = f", expert dp{layout.expert_dp}" if layout.ep > 1 else ""
    return (
        f"{model.name} ({model.architecture}), {model.parameters / 1e9:.3f}e9 parameters, "
        f"{forecast.recipe.label} on {forecast.recipe.architecture}, {forecast.optimizer.label}\n"
        f"{layout.label}, dp{layout.dp}{experts}; "
        f"the fullest rank is one of {rank.ranks} on pipeline stage {rank.stage}"
        + "".join(f"\nnote: {note}" for note in model.notes)
    )


def _account(forecast: Forecast) -> str:
    rank = forecast.fullest
    rows = [
        [
            line.component,
            line.role,
            line.fate,
            gb(line.nbytes),
            gib(line.nbytes),
            *_job(forecast, line),
            line.reason,
        ]
        for line in rank.lines
    ]
    rows += [
        _sum("held awake", rank.awake_bytes, forecast.awake_bytes),
        _sum("copied by a sleep", rank.copied_bytes, forecast.copied_bytes),
        _sum("copied by a wake", rank.restored_bytes, forecast.restored_bytes),
    ]
    head = ["component", "role", "fate", "rank GB", "rank GiB", "job GB", "job GiB", "why"]
    return _with_reasons(head, rows)


def _with_reasons(head: list[str], rows: list[list[str]]) -> str:
    widest = max(len(row[-1]) for row in rows)
    padded = [[*row[:-1], row[-1].ljust(widest)] for row in rows]
    return table([*head[:-1], head[-1].ljust(widest)], padded, left=3)


def _sum(words: str, rank_bytes: int, job_bytes: int) -> list[str]:
    return [words, "", "", gb(rank_bytes), gib(rank_bytes), gb(job_bytes), gib(job_bytes), ""]


def _job(forecast: Forecast, line: Line) -> list[str]:
    same = (line.component, line.role, line.fate, line.reason)
    total = sum(
        rank.ranks * other.nbytes
        for rank in forecast.ranks
        for other in rank.lines
        if (other.component, other.role, other.fate, other.reason) == same
    )
    return [gb(total), gib(total)]


def _savings(forecast: Forecast) -> str:
    rows = [
        [
            saving.option,
            gb(saving.rank_bytes),
            gib(saving.rank_bytes),
            gb(saving.job_bytes),
            gib(saving.job_bytes),
            f"{saving.share:.1%}",
        ]
        for saving in forecast.savings()
    ]
    head = ["a sleep copies less by", "rank GB", "rank GiB", "job GB", "job GiB", "of a copy of all"]
    return table(head, rows)


def _times(forecast: Forecast, link: Link) -> str:
    rate = f"{link.d2h_bytes_per_s / GB:.1f} GB/s out, {link.h2d_bytes_per_s / GB:.1f} GB/s back"
    everything = forecast.with_options(forecast.options.off())
    rows = [
        [
            words,
            f"{link.sleep_s(which.most_copied_bytes):.2f} s",
            f"{link.wake_s(which.most_restored_bytes):.2f} s",
        ]
        for words, which in (("this forecast", forecast), ("a copy of everything", everything))
    ]
    return f"link of one GPU: {rate} ({link.source})\n" + table(["at that rate", "sleep", "wake"], rows)


def host(forecast: Forecast, host_gib: float | None) -> str:
    """Host memory of the fullest node, against what a node has."""
    need = max(forecast.host_bytes_by_node())
    ranks = min(forecast.layout.gpus_per_node, forecast.layout.gpus)
    words = (
        f"host memory: the fullest node needs {gb(need)} GB ({gib(need)} GiB): "
        f"{HOST_FACTOR} times what its {ranks} ranks store, and optimizer state that lives there"
    )
    if host_gib is None:
        return words
    verdict = "fits" if fits(forecast, host_gib) else "does NOT fit; use more nodes, or a file store"
    return f"{words}\n{verdict}: a node has {host_gib:g} GiB"


def fits(forecast: Forecast, host_gib: float) -> bool:
    """Whether the fullest node's share is within `host_gib` GiB."""
    return max(forecast.host_bytes_by_node()) <= host_gib * GIB


def _segments(forecast: Forecast) -> str:
    view = segment_view(forecast)
    total = sum(role.segment_bytes for role in view)
    rows = [_segment_row(role) for role in view]
    rows.append(["all of it", "", "", gb(total), gib(total), ""])
    copied = forecast.fullest.copied_bytes
    head = ["role", "tensors GB", "tensors GiB", "segments GB", "segments GiB", "ratio"]
    return (
        "an allocator-level saver copies whole segments (a fresh pool; one rank of the fullest stage):\n"
        + table(head, rows)
        + f"\nTorpor copies {gb(copied)} GB ({gib(copied)} GiB) of that rank"
    )


def _segment_row(role: RoleSegments) -> list[str]:
    return [
        role.role,
        gb(role.tensor_bytes),
        gib(role.tensor_bytes),
        gb(role.segment_bytes),
        gib(role.segment_bytes),
        f"{role.segment_bytes / role.tensor_bytes:.3f}",
    ]


def compare(forecasts: Sequence[tuple[str, Forecast]], link: Link) -> str:
    """Several forecasts side by side, one line each."""
    rows = []
    for name, each in forecasts:
        everything = each.with_options(each.options.off())
        rows.append(
            [
                name,
                gb(each.fullest.awake_bytes),
                gib(each.fullest.awake_bytes),
                gb(everything.most_copied_bytes),
                gb(each.most_copied_bytes),
                gb(each.copied_bytes),
                f"{link.sleep_s(each.most_copied_bytes):.2f} s",
                f"{link.wake_s(each.most_restored_bytes):.2f} s",
                gib(max(each.host_bytes_by_node())),
            ]
        )
    head = [
        "plan",
        "held GB/rank",
        "held GiB/rank",
        "all copied GB/rank",
        "copied GB/rank",
        "copied GB/job",
        "sleep",
        "wake",
        "host GiB/node",
    ]
    return table(head, rows)


def as_json(forecast: Forecast, link: Link, host_gib: float | None, *, segments: bool = False) -> dict[str, Any]:
    """The same as plain values; every number of bytes is a whole number of bytes."""
    need = max(forecast.host_bytes_by_node())
    found: dict[str, Any] = {
        "model": {
            "name": forecast.model.name,
            "architecture": forecast.model.architecture,
            "parameters": forecast.model.parameters,
            "notes": forecast.model.notes,
        },
        "layout": asdict(forecast.layout) | {"dp": forecast.layout.dp, "expert_dp": forecast.layout.expert_dp},
        "recipe": asdict(forecast.recipe),
        "optimizer": asdict(forecast.optimizer),
        "options": asdict(forecast.options),
        "ranks": [_rank_json(rank) for rank in forecast.ranks],
        "fullest_stage": forecast.fullest.stage,
        "job": {
            "awake_bytes": forecast.awake_bytes,
            "copied_bytes": forecast.copied_bytes,
            "restored_bytes": forecast.restored_bytes,
        },
        "savings": [asdict(saving) for saving in forecast.savings()],
        "link": asdict(link),
        "sleep_s": link.sleep_s(forecast.most_copied_bytes),
        "wake_s": link.wake_s(forecast.most_restored_bytes),
        "host_bytes_per_node": need,
    }
    if host_gib is not None:
        found["host_fits"] = fits(forecast, host_gib)
    if segments:
        found["segments"] = [asdict(role) for role in segment_view(forecast)]
    return found


def _rank_json(rank: RankForecast) -> dict[str, Any]:
    return {
        "stage": rank.stage,
        "ranks": rank.ranks,
        "parameters": rank.parameters,
        "awake_bytes": rank.awake_bytes,
        "copied_bytes": rank.copied_bytes,
        "restored_bytes": rank.restored_bytes,
        "stored_bytes": rank.stored_bytes,
        "freed_bytes": rank.freed_bytes,
        "optimizer_host_bytes": rank.optimizer_host_bytes,
        "lines": [
            {
                "component": line.component,
                "role": line.role,
                "fate": line.fate,
                "nbytes": line.nbytes,
                "reason": line.reason,
            }
            for line in rank.lines
        ],
    }

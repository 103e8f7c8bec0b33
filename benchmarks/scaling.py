"""A sharded actor on more and more ranks of one machine: bytes and seconds of a rank, and what agreeing costs.

    python benchmarks/scaling.py [--out benchmarks/results/scaling.json] [--ranks 1,2,4] [--agreeing 2,4,8,16,32]

Sleep: an actor of 67 million fp32 parameters and Adam moments under FSDP2 (gloo, CPU), the same on any number of ranks.
Its sleeps and wakes from the second on, medians over cycles, of the slowest rank.

Agreement: a call with the six stages of a sleep, in which nobody has anything to do: what the votes cost alone.

Forecast, named as such: bytes of a rank are those of one rank divided by their number; seconds are those bytes at the
rate of one rank alone, and the agreement's, by a straight line through what was measured. Ranks of one machine share
its processors and its memory, ranks of several do not: the line is steeper than it will be on a cluster.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from torpor import Sleeper
from torpor.agreement import Agreement
from torpor.ledger import Ledger, Stopwatch

Json = dict[str, Any]
WIDTH, LAYERS, CYCLES, CALLS = 2048, 16, 5, 20
STAGES = ("plan", "drop", "reserve", "copy", "free")
"""After `begin`."""
FORECAST_RANKS = (8, 64, 512, 1024)
RANKS_OF_A_NODE = 8


def asleep(rank: int) -> Json:
    """Cycles of the sharded actor on this rank, the first left out."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cycles: list[tuple[Ledger, float, Ledger, float]] = []
    group = dist.group.WORLD
    with Sleeper(model, optimizer=optimizer, store="pageable", group=group, report_leftovers=False) as sleeper:
        for _ in range(CYCLES + 1):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            dist.barrier()
            cycles.append((*timed(sleeper.sleep), *timed(sleeper.wake)))
    del cycles[0]
    return {
        "copied_bytes": cycles[-1][0].copied_bytes,
        "sleep_s": statistics.median(cycle[1] for cycle in cycles),
        "wake_s": statistics.median(cycle[3] for cycle in cycles),
        "agree_s": statistics.median(cycle[0].stages["agree"] for cycle in cycles),
    }


def agreeing(rank: int) -> Json:
    """Calls with nothing to do on this rank, the first left out."""
    agreement = Agreement(dist.group.WORLD)

    def call() -> None:
        stages = agreement.begin("sleep(None)", Stopwatch())
        for name in STAGES:
            with stages.stage(name):
                pass

    seconds = [timed(call)[1] for _ in range(CALLS + 1)]
    return {"call_s": statistics.median(seconds[1:])}


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    found = call()
    return found, time.perf_counter() - start


def on_ranks(work: Callable[[int], Json], num_ranks: int) -> Json:
    """The largest of each number over processes of their own, joined by gloo."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor", "torpor.sleeper"])
    with context.Pool(num_ranks, maxtasksperchild=1) as pool:
        arguments = [(work, rank, num_ranks, server.port) for rank in range(num_ranks)]
        found = pool.starmap(run_rank, arguments, chunksize=1)
    return {key: max(one[key] for one in found) for key in found[0]}


def run_rank(work: Callable[[int], Json], rank: int, num_ranks: int, port: int) -> Json:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    try:
        return work(rank)
    finally:
        dist.destroy_process_group()


def line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Offset and slope of the straight line of least squares."""
    slope, offset = statistics.linear_regression(*zip(*points, strict=True))
    return offset, slope


def forecast(sleeps: dict[int, Json], calls: dict[int, Json]) -> dict[int, Json]:
    """For more ranks than were measured."""
    alone = sleeps[min(sleeps)]
    offset, slope = line([(ranks, one["call_s"]) for ranks, one in calls.items()])
    whole_bytes = alone["copied_bytes"] * min(sleeps)
    rate = alone["copied_bytes"] / (alone["sleep_s"] - alone["agree_s"])
    return {
        ranks: {
            "copied_bytes": whole_bytes // ranks,
            "node_bytes": whole_bytes // ranks * RANKS_OF_A_NODE,
            "agree_s": offset + slope * ranks,
            "sleep_s": whole_bytes / ranks / rate + offset + slope * ranks,
        }
        for ranks in FORECAST_RANKS
    }


def table(run: Json) -> str:
    lines = [f"{'ranks':>6} {'GB a rank':>10} {'sleep s':>9} {'wake s':>9} {'agree ms':>9}"]
    for ranks, one in run["sleep"].items():
        lines.append(
            f"{ranks:>6} {one['copied_bytes'] / 1e9:>10.4f} {one['sleep_s']:>9.3f} {one['wake_s']:>9.3f} "
            f"{one['agree_s'] * 1e3:>9.1f}"
        )
    lines += ["", f"{'ranks':>6} {'a call that only agrees, ms':>28}"]
    lines += [f"{ranks:>6} {one['call_s'] * 1e3:>28.1f}" for ranks, one in run["agreement"].items()]
    lines += ["", "forecast", f"{'ranks':>6} {'GB a rank':>10} {'sleep s':>9} {'agree ms':>9}"]
    for ranks, one in run["forecast"].items():
        lines.append(
            f"{ranks:>6} {one['copied_bytes'] / 1e9:>10.6f} {one['sleep_s']:>9.3f} {one['agree_s'] * 1e3:>9.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scaling.json"))
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--agreeing", default="2,4,8,16,32")
    options = parser.parse_args()
    sleeps = {ranks: on_ranks(asleep, ranks) for ranks in map(int, options.ranks.split(","))}
    calls = {ranks: on_ranks(agreeing, ranks) for ranks in map(int, options.agreeing.split(","))}
    run = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {"processors": os.cpu_count(), "kernel": platform.release()},
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "params": LAYERS * WIDTH * WIDTH,
        "sleep": sleeps,
        "agreement": calls,
        "forecast": forecast(sleeps, calls),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    print(table(run))


if __name__ == "__main__":
    main()

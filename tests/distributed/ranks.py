"""Several ranks on one machine: a function runs in each of `world_size` fresh processes, joined by gloo.

The processes are forked from a server that has imported torch and started no thread, so that a test costs less
than a second. The test's own process hosts the key-value store, and outlives every rank.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 30


def run_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    world_size: int = 2,
    dying: Collection[int] = (),
    timeout_s: float = 60,
) -> list[Any]:
    """What `function(*arguments)` returned on each rank; None for the ranks in `dying`, which must not return.

    A rank that raises fails the test with its traceback.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = _context()
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(theirs, server.port, rank, world_size, function, arguments))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        answers = _answers(pipes, timeout_s)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    failed = [f"rank {r}: {answer[1]}" for r, answer in enumerate(answers) if answer[0] == "error" and r not in dying]
    failed += [f"rank {r} came back alive" for r in dying if answers[r][0] == "value"]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)
    return [answer[1] if answer[0] == "value" else None for answer in answers]


def _answers(pipes: list[Connection], timeout_s: float) -> list[tuple[str, Any]]:
    answers: dict[int, tuple[str, Any]] = {}
    while len(answers) < len(pipes):
        open_pipes = [pipe for i, pipe in enumerate(pipes) if i not in answers]
        ready = wait(open_pipes, timeout_s)
        if not ready:
            break
        for pipe in ready:
            try:
                answers[pipes.index(pipe)] = pipe.recv()
            except EOFError:
                answers[pipes.index(pipe)] = ("error", "it died")
    return [answers.get(i, ("error", f"no answer within {timeout_s} s")) for i in range(len(pipes))]


@functools.cache
def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint", "torpor.sleeper"]
    )
    return context


def _rank(
    report: Connection, port: int, rank: int, world_size: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
        )
        with tempfile.TemporaryDirectory(prefix="torpor-test-") as directory:
            os.environ["TORPOR_DIR"] = directory
            value = function(*arguments)
    except BaseException:  # noqa: BLE001 - the parent raises it
        report.send(("error", traceback.format_exc()))
    else:
        report.send(("value", value))
    finally:
        report.close()
        if dist.is_initialized():
            dist.destroy_process_group()

"""GPU tests: skipped without a GPU, and each in a process of its own, so that no state is left to the next."""

import functools
import importlib
import multiprocessing
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

_TIMEOUT_S = 120

for folder in (Path(__file__).parent, Path(__file__).parents[1]):
    sys.path.insert(0, str(folder))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "exclusive: takes all of the GPU, or times it: not beside other tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests of this folder in a process forked from one that has imported torch and not touched the GPU."""
    if Path(__file__).parent not in pyfuncitem.path.parents:
        return None
    callspec = getattr(pyfuncitem, "callspec", None)
    arguments = dict(callspec.params) if callspec is not None else {}
    run_fresh(pyfuncitem.module.__name__, pyfuncitem.originalname, arguments)
    return True


def run_fresh(module: str, function: str, arguments: dict[str, object]) -> None:
    """Call `module.function(**arguments)` in a fresh process; fail with its traceback, its exit code or its silence."""
    context = _context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, module, function, arguments))
    process.start()
    theirs.close()
    text = None
    if ours.poll(_TIMEOUT_S):
        try:
            text = ours.recv()
        except EOFError:
            text = "it died"
    process.join(10)
    if process.is_alive():
        process.kill()
        pytest.fail(f"{function} did not end", pytrace=False)
    if text or process.exitcode:
        pytest.fail(f"{text or ''}\nexit code {process.exitcode}", pytrace=False)


@functools.cache
def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton", "torpor.memory.vmm"])
    return context


def _child(report: Connection, module: str, function: str, arguments: dict[str, object]) -> None:
    target: Callable[..., None] = getattr(importlib.import_module(module), function)
    try:
        target(**arguments)
    except BaseException:  # noqa: BLE001 - the parent raises it
        report.send(traceback.format_exc())
    else:
        report.send("")

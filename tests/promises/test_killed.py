"""A run that is killed leaves files that the next run recognizes as dead and removes; a live one's are not touched."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from torpor import Sleeper

_VICTIM = """
import sys, torch
from torpor import Sleeper
tensors = [torch.randn(1 << 20) for _ in range(16)]
sleeper = Sleeper(extra={"params": tensors}, store_dir=sys.argv[1])
print("ready", flush=True)
while True:
    tensors[0].add_(1)
    sleeper.sleep()
    sleeper.wake()
"""


def _start_victim(directory: Path) -> subprocess.Popen[str]:
    victim = subprocess.Popen(
        [sys.executable, "-c", _VICTIM, str(directory)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert victim.stdout is not None
    assert victim.stdout.readline() == "ready\n"
    return victim


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 4096]


@pytest.mark.slow
def test_killed_at_random_moments_then_a_clean_start(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(4):
        victim = _start_victim(tmp_path)
        time.sleep(rng.uniform(0.0, 0.3))  # the random moment is the input of this test
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    tensor = torch.randn(1 << 20)
    before = tensor.clone()
    with Sleeper(extra={"params": [tensor]}, store_dir=tmp_path) as sleeper:
        sleeper.sleep()
        assert len(_files(tmp_path)) == 1  # ours; those of the dead are gone
        sleeper.wake()
    assert torch.equal(tensor, before)
    assert _files(tmp_path) == []


def test_a_live_neighbour_keeps_its_file(tmp_path: Path) -> None:
    first, second = torch.randn(1 << 18), torch.randn(1 << 18)
    before = first.clone()
    with Sleeper(extra={"params": [first]}, store_dir=tmp_path) as one:
        one.sleep()
        with Sleeper(extra={"params": [second]}, store_dir=tmp_path) as two:
            two.sleep()
            two.wake()
        one.wake()
    assert torch.equal(first, before)

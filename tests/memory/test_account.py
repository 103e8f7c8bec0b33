"""Every byte of a GPU under one line, over an allocator and a driver that say what the test sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torpor.ledger import TOLERANCE_BYTES, DeviceAccount, Ledger
from torpor.memory import account, allocator, cuda
from torpor.memory.account import Accountant, Addresses, cublas_workspace_bytes
from torpor.memory.allocator import BLOCK, SEGMENT, Int64s, Rows, Snapshot
from torpor.memory.gpu import GpuBackend

GPU = torch.device("cuda", 0)
OTHER = torch.device("cuda", 1)
MIB = 1024**2
WORKSPACE = 32 * MIB
COMMON, GRAPH, OURS = range(3)


class Backend(GpuBackend):
    """Its own allocator made everything in `OURS`; segments in `gone` have no memory now."""

    name = "test"
    keeps_address = True
    gone = frozenset({3000})

    def states_of(self, segments: Rows) -> Int64s:
        state = np.where(segments["pool"] == OURS, 1, -1)
        state[np.isin(segments["address"], list(self.gone))] = 0
        return state

    def idle_bytes(self, device: torch.device) -> int:
        return 7 if device == GPU else 0

    refusal = releasable_bytes = release = restore = None  # type: ignore[assignment]


Backend.__abstractmethods__ = frozenset()


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, int]:
    """Bytes by device as the driver counts them; to be set by the test."""
    segments = [
        (1000, 500, 0, COMMON),
        (2000, 400, 0, OURS),
        (3000, 900, 0, OURS),
        (4000, 300, 0, GRAPH),
        (5000, 100, 1, COMMON),
        (6000, WORKSPACE, 0, COMMON),
    ]
    blocks = [
        (1000, 200, 150, 0),  # known and awake
        (1300, 40, 40, 0),  # nobody's
        (2000, 100, 100, 1),  # sleeps, beside something that is awake
        (2100, 250, 250, 1),  # awake
        (3000, 900, 900, 2),  # sleeps
        (4000, 300, 300, 3),
        (5000, 60, 60, 4),
        (6000, WORKSPACE, WORKSPACE, 5),
    ]
    snapshot = Snapshot(np.array(segments, SEGMENT), np.array(blocks, BLOCK), [(0, 0), (1, 0), (0, 1)])
    counted = {GPU: 0, OTHER: 0}
    monkeypatch.setattr(allocator, "look", lambda: snapshot)
    monkeypatch.setattr(cuda, "used_bytes", counted.__getitem__)
    monkeypatch.setattr(cuda, "tells_processes_apart", lambda device: device == GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return counted


KNOWN = Addresses(frozenset({1000, 2100, 5000}), frozenset({2000, 3000}))


def test_each_byte_is_under_one_line(used: dict[torch.device, int]) -> None:
    used[GPU] = 10_000 + 500 + 400 + 300 + 7 + WORKSPACE
    (found,) = Accountant([Backend()]).accounts([GPU], KNOWN)
    assert found.lines == {
        account.CONTEXT: 10_000,
        account.AWAKE: 450,
        account.HELD: 100,
        account.LEFT: 40,
        account.WORKSPACES: WORKSPACE,
        account.GRAPHS: 300,
        account.SLACK: 260 + 50,
        account.IDLE: 7,
    }
    assert (found.unexplained_bytes, found.closes, found.is_own) == (0, True, True)


def test_what_grows_outside_the_allocator_is_unexplained(used: dict[torch.device, int]) -> None:
    accountant = Accountant([Backend()])
    used[GPU] = used[OTHER] = 2**30
    first = accountant.accounts([OTHER, GPU], KNOWN)
    assert [(a.device, a.unexplained_bytes) for a in first] == [("cuda:0", 0), ("cuda:1", 0)]
    used[GPU] += TOLERANCE_BYTES + 1
    used[OTHER] += TOLERANCE_BYTES
    ledger = Ledger("sleep", "test", devices=accountant.accounts([OTHER, GPU], KNOWN))
    assert [a.closes for a in ledger.devices] == [False, True]
    assert ledger.unexplained_bytes == 2 * TOLERANCE_BYTES + 1
    assert "cuda:0, of this process" in ledger.table()
    assert "cuda:1, of all processes" in ledger.table()
    assert "more than" in ledger.table().splitlines()[-2]
    plain = ledger.to_json()["devices"]
    assert [(entry["closes"], entry["unexplained_bytes"]) for entry in plain] == [
        (False, TOLERANCE_BYTES + 1),
        (True, TOLERANCE_BYTES),
    ]


def test_what_the_caller_gave_back_itself_is_explained(used: dict[torch.device, int]) -> None:
    accountant = Accountant([Backend()])
    used[GPU] = 2**30
    accountant.accounts([GPU], KNOWN)
    used[GPU] -= 300
    accountant.outside(-300)
    (found,) = accountant.accounts([GPU], KNOWN)
    assert found.unexplained_bytes == 0
    assert accountant.accounts([], KNOWN) == []
    assert Accountant([]).accounts([GPU], KNOWN) == [], "an actor on a GPU that no backend treats"


@pytest.mark.parametrize(
    ("setting", "capability", "expected"),
    [
        ("", (9, 0), 32 * MIB),
        ("", (8, 0), 4096 * 1024 * 2 + 16 * 1024 * 8),
        (":4096:8", (8, 0), 32 * MIB),
        (":16:8:4096:2", (9, 0), 16 * 1024 * 8 + 4096 * 1024 * 2),
        ("nonsense", (9, 0), 32 * MIB),
    ],
)
def test_the_workspace_that_torch_takes(
    monkeypatch: pytest.MonkeyPatch, setting: str, capability: tuple[int, int], expected: int
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", setting)
    assert cublas_workspace_bytes(capability) == expected


def test_an_account_says_what_it_leaves_open() -> None:
    found = DeviceAccount("cuda:0", 900, True, {"a": 300, "b": 500})
    assert found.unexplained_bytes == 100
    assert found.closes

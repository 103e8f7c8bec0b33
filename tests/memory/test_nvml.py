"""Where NVML is absent, or says nothing of this process, nothing is made up."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from torpor.memory import nvml


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    nvml._handle.cache_clear()
    nvml._library.cache_clear()
    yield
    nvml._handle.cache_clear()
    nvml._library.cache_clear()


class Library:
    """Answers as NVML does, for rows of (pid, bytes)."""

    def __init__(self, rows: list[tuple[int, int]], code: int = 0) -> None:
        self.rows, self.code = rows, code

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: object) -> int:
        return 0 if uuid == b"GPU-1234" else 6

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: object, count: object, table: object) -> int:
        found = ctypes.cast(table, ctypes.POINTER(nvml._Process))
        for i, (pid, used) in enumerate(self.rows):
            found[i].pid, found[i].used_bytes = pid, used
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = len(self.rows)
        return self.code


@pytest.mark.parametrize(
    ("rows", "code", "expected"),
    [
        ([(1, 500), (77, 300), (77, 20)], 0, 320),
        ([(1, 500)], 0, None),
        ([(77, 2**64 - 1)], 0, None),
        ([(77, 300)], 3, None),
    ],
)
def test_the_rows_of_this_process_are_added_up(
    monkeypatch: pytest.MonkeyPatch, rows: list[tuple[int, int]], code: int, expected: int | None
) -> None:
    monkeypatch.setattr(nvml.os, "getpid", lambda: 77)
    monkeypatch.setattr(nvml, "_library", lambda: Library(rows, code))
    assert nvml.process_bytes("1234") == expected
    assert nvml.process_bytes("5678") is None


def test_without_the_library_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", "libnothing.so.1")
    assert nvml.process_bytes("1234") is None

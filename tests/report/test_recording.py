"""What a run leaves behind: metrics, sinks that fail, readings of memory, lines and bars."""

from __future__ import annotations

import io
import itertools
import mmap
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from torpor.errors import GIB, UnsupportedError
from torpor.kinds import Fate, Role
from torpor.ledger import Ledger, Row
from torpor.report.console import RunConsole, step_line
from torpor.report.jsonl import JsonlFile, read_jsonl
from torpor.report.memory import MemorySampler, resident_bytes
from torpor.report.metrics import Last, Max, Mean, Metrics, Sum
from torpor.report.recorder import Recorder
from torpor.report.rundir import RunDirectory
from torpor.report.sinks import JsonlSink, Sinks, TensorBoardSink


def test_each_metric_reduces_in_its_own_way() -> None:
    metrics, other = Metrics(), Metrics()
    for mean, count, largest, last in ((3.0, 2, 1.0, 5.0), (9.0, 4, 7.0, 6.0)):
        metrics.record("a/mean", Mean(mean, count))
        metrics.record("a/sum", Sum(count))
        metrics.record("a/max", Max(largest))
        metrics.record("a/last", Last(last))
    other.record("a/sum", Sum(10))
    metrics.update(other)
    assert metrics.values() == {"a/mean": 2.0, "a/sum": 16, "a/max": 7.0, "a/last": 6.0}
    with pytest.raises(TypeError, match="a/sum is a Sum, not a Max"):
        metrics.record("a/sum", Max(1.0))


class FailingSink:
    def __init__(self) -> None:
        self.calls = 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.calls += 1
        raise OSError("no space left")

    def close(self) -> None:
        self.calls += 1


def test_a_sink_that_fails_stops_neither_the_run_nor_the_others(tmp_path: Path) -> None:
    warnings: list[str] = []
    failing, good = FailingSink(), JsonlSink(tmp_path / "m.jsonl")
    sinks = Sinks([failing, good], warn=warnings.append)
    for step in range(3):
        sinks.write(step, {"x": 1.0})
    sinks.close()
    assert [record["step"] for record in read_jsonl(tmp_path / "m.jsonl")] == [0, 1, 2]
    assert failing.calls == 4
    assert [("no space left" in line, "3 times" in line) for line in warnings] == [(True, False), (False, True)]


def test_a_sink_that_cannot_start_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(UnsupportedError, match=r"torpor\[tensorboard\]"):
        TensorBoardSink(tmp_path)
    with pytest.raises(UnsupportedError):
        Recorder(RunDirectory(tmp_path), total_steps=1, tensorboard=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="exists"):
        Recorder(RunDirectory(tmp_path / "file"), total_steps=1)


def test_tensorboard_gets_every_figure(tmp_path: Path) -> None:
    """What was written is read back by TensorBoard's own reader."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunDirectory(tmp_path)
    with Recorder(run, total_steps=3, tensorboard=True) as recorder:
        for step in range(3):
            with recorder.step(step):
                for key in ("reward/mean", "rollout/tokens"):
                    recorder.metrics.record(key, Mean(step / 4))
    events = EventAccumulator(str(run.tensorboard)).Reload()
    assert set(events.Tags()["scalars"]) == {"reward/mean", "rollout/tokens", "time/step_s"}
    for key in events.Tags()["scalars"]:
        found = [(event.step, event.value) for event in events.Scalars(key)]
        assert found == [(record["step"], pytest.approx(record[key])) for record in read_jsonl(run.metrics)]


def test_a_torn_last_line_is_skipped_and_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert [record["a"] for record in read_jsonl(path)] == [1, 2]
    lines = JsonlFile(path)
    lines.append({"a": 3})
    lines.close()
    assert [record["a"] for record in read_jsonl(path)] == [1, 2, 3]
    assert read_jsonl(tmp_path / "absent.jsonl") == []


def test_resident_memory_is_what_the_kernel_counts() -> None:
    before = resident_bytes()
    with mmap.mmap(-1, 64 * 1024**2) as block:  # pages of its own: an allocator may have some that are touched already
        block[::4096] = b"x" * len(block[::4096])
        assert resident_bytes() - before == pytest.approx(len(block), rel=0.1)


def test_readings_carry_phase_step_and_who_sleeps(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    with MemorySampler(path, interval_s=60) as sampler:
        sampler.mark(step=4, actor_asleep=True)
        with sampler.phase("generate"):
            pass
    readings = read_jsonl(path)
    assert [(r["step"], r["phase"], r["actor_asleep"]) for r in readings] == [
        (None, "start", False),
        (4, "start", True),
        (4, "start", True),
        (4, "generate", True),
        (4, "generate", True),
        (4, "start", True),
    ]
    assert all(earlier["t_s"] <= later["t_s"] for earlier, later in itertools.pairwise(readings))


def test_a_reading_is_cheap(tmp_path: Path) -> None:
    with MemorySampler(tmp_path / "memory.jsonl", interval_s=60) as sampler:
        start_s = time.thread_time()
        for step in range(100):
            sampler.mark(step=step)
        assert (time.thread_time() - start_s) / 200 < 500e-6  # 1% of a core at the default interval


def test_the_clock_goes_on_where_a_resumed_run_stopped(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    path.write_text('{"t_s": 100.0}\n')
    with MemorySampler(path, interval_s=60) as sampler:
        sampler.mark(step=9)
    assert 100.0 <= read_jsonl(path)[-1]["t_s"] < 110.0


def test_the_thread_reads_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    with MemorySampler(path, interval_s=0.001):
        while len(path.read_text().splitlines()) < 5:
            threading.Event().wait(0.001)
    assert not [thread for thread in threading.enumerate() if thread.name == "memory-sampler"]


VALUES = {
    "reward/mean": 0.53125,
    "policy/loss": 0.01239,
    "rollout/tokens": 1843.0,
    "time/step_s": 7.914,
    "time/update_weights_s": 0.3,
    "time/engine_wake_s": 0.01,
    "time/generate_s": 3.1,
    "time/train_s": 3.92,
    "time/evaluate_s": 0.001,
    "bytes/moved": 1.5 * GIB,
    "bytes/clean": 0.5 * GIB,
    "bytes/dropped": 0,
    "bytes/freed": 2 * GIB,
}


def test_one_line_a_step() -> None:
    assert step_line(2, 40, VALUES) == (
        "step   3/40  reward 0.531  loss +0.0124  1843 tokens  7.91 s: weights 0.31 generate 3.10 train 3.92"
        "  GiB: moved 1.500 clean 0.500 dropped 0 freed 2.000"
    )


def test_the_line_of_a_step_with_a_critic() -> None:
    seconds = {"time/critic_wake_s": 0.1, "time/values_s": 0.2, "time/critic_train_s": 0.5, "time/critic_sleep_s": 0.1}
    line = step_line(2, 40, {**VALUES, **seconds, "critic/loss": 0.03125})
    assert "  loss +0.0124  value loss 0.0312  1843 tokens" in line
    assert " critic 0.90 train 3.92" in line
    without = {key: value for key, value in VALUES.items() if key != "policy/loss"}
    warming_up = step_line(2, 40, {**without, "critic/loss": 0.03125})
    assert "reward 0.531  value loss 0.0312  1843 tokens" in warming_up


def test_a_run_that_never_sleeps_shows_no_bytes() -> None:
    awake = {key: value for key, value in VALUES.items() if not key.startswith("bytes/")}
    assert "GiB" not in step_line(2, 40, awake)
    assert step_line(2, 40, {**awake, "eval/reward": 0.75}).endswith("held-out 0.750")


def _terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, height=40)


def test_bars_show_rate_and_time_left() -> None:
    console = _terminal()
    with RunConsole(total_steps=10, console=console) as shown:
        shown.step_begins()
        shown.step_done("step 1")
        with shown.phase("train", total=4, unit="groups") as counter:
            counter.advance(3)
            threading.Event().wait(0.02)
            shown.refresh()
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1/10 steps" in printed
    assert "3/4 groups" in printed
    assert "left" in printed


def test_a_pipe_gets_lines_only() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with RunConsole(total_steps=2, console=console) as shown, shown.phase("generate"):
        shown.say("a line that is [not] markup")
        shown.step_done("step 1")
    assert console.file.getvalue() == "a line that is [not] markup\nstep 1\n"  # type: ignore[attr-defined]


def _ledger(kind: str) -> Ledger:
    rows = [
        Row("params", Role.PARAM, Fate.MOVED, storages=2, nbytes=100, copied_bytes=100, freed_bytes=96),
        Row("reference", Role.PARAM, Fate.CLEAN, storages=1, nbytes=50, copied_bytes=0, freed_bytes=48),
    ]
    return Ledger(kind, "file", rows=rows)  # type: ignore[arg-type]


def test_ledgers_become_bytes_of_the_step(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with Recorder(run, total_steps=1) as recorder, recorder.step(0):
        recorder.ledger(_ledger("sleep"))
        recorder.ledger(_ledger("wake"))
        recorder.samples([{"answer": "a"}])
        for key in ("reward/mean", "policy/loss", "rollout/tokens"):
            recorder.metrics.record(key, Mean(1.0))
        with recorder.phase("train"):
            pass
    (record,) = read_jsonl(run.metrics)
    assert {key: value for key, value in record.items() if key.startswith("bytes/")} == {
        "bytes/moved": 100,
        "bytes/clean": 50,
        "bytes/dropped": 0,
        "bytes/written": 100,
        "bytes/freed": 144,
        "bytes/read": 100,
    }
    assert record["time/step_s"] >= record["time/train_s"] > 0
    ledgers = read_jsonl(run.ledgers)
    assert [(ledger["learner"], ledger["kind"]) for ledger in ledgers] == [("actor", "sleep"), ("actor", "wake")]
    assert read_jsonl(run.samples) == [{"step": 0, "answer": "a"}]

"""`torpor report`: tables and plots from the files of a run alone."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from torpor.errors import GIB, UsageError
from torpor.report.command import register
from torpor.report.plots import draw, moving_mean, spans
from torpor.report.rundir import RunDirectory
from torpor.report.tables import by_step, quarter_means, report


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    """Eight steps of one second, the first with a slow start: the actor sleeps in the first half of each."""
    run = RunDirectory(tmp_path)
    metrics, readings = [], []
    for step in range(8):
        record = {"step": step, "reward/mean": step / 10, "policy/loss": 0.5, "time/step_s": 1.0}
        record["time/train_s"] = 0.5 if step else 0.9
        metrics.append(record if step % 4 else {**record, "eval/reward": 0.25 + step / 10})
        for tenth in range(10):
            asleep = tenth < 5
            readings.append(
                {
                    "t_s": step + tenth / 10,
                    "rss_bytes": (1 if asleep else 3) * GIB,
                    "step": step,
                    "phase": "generate" if asleep else "train",
                    "actor_asleep": asleep,
                    "engine_asleep": not asleep,
                }
            )
    row = {"component": "params", "role": "param", "fate": "moved", "storages": 7, "reason": ""}
    row |= {"nbytes": 2 * GIB, "copied_bytes": GIB, "freed_bytes": GIB // 2}
    ledgers = [{"step": 0, "kind": kind, "store": "file /d", "rows": [row]} for kind in ("sleep", "wake")]
    for path, records in ((run.metrics, metrics), (run.memory, readings), (run.ledgers, ledgers)):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def test_the_tables_say_what_the_files_say(run_dir: RunDirectory) -> None:
    text = report(run_dir)
    assert "8 steps in 8.0 s; mean reward 0.050 in the first quarter, 0.650 in the last" in text
    assert "held-out 0.250 -> 0.650" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["7", "0.700", "+0.5000", "1.00"] in lines
    assert ["train", "0.500", "50%"] in lines
    assert ["params", "param", "moved", "7", "2.000", "1.000", "0.500"] in lines
    assert ["actor", "asleep", "1.000", "1.000"] in lines
    assert ["actor", "awake", "3.000", "3.000"] in lines
    assert "Last of 1 sleeps of the actor" in text
    assert "value loss" not in text


def test_a_critic_has_its_own_figures(run_dir: RunDirectory) -> None:
    """The actor sleeps in the first half of each second; the critic is awake in the second fifth of it."""
    metrics = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    for record in metrics:
        record |= {"critic/loss": 0.125, "critic/explained_variance": 0.75, "time/critic_train_s": 0.1}
        if record["step"] == 0:
            del record["policy/loss"]  # a step of warming the critic up
    readings = [json.loads(line) for line in run_dir.memory.read_text().splitlines()]
    for reading in readings:
        reading["critic_asleep"] = not 0.2 <= reading["t_s"] % 1 < 0.4
        reading["rss_bytes"] += 0 if reading["critic_asleep"] else GIB
        reading["phase"] = reading["phase"] if reading["critic_asleep"] else "critic_train"
    (ledger,) = [json.loads(line) for line in run_dir.ledgers.read_text().splitlines()][:1]
    critics = {**ledger, "learner": "critic", "rows": [{**ledger["rows"][0], "storages": 9}]}
    for path, records in (
        (run_dir.metrics, metrics),
        (run_dir.memory, readings),
        (run_dir.ledgers, [{**ledger, "learner": "actor"}, critics]),
    ):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    text = report(run_dir)
    lines = [line.split() for line in text.splitlines()]
    assert ["0", "0.000", "0.1250", "0.750", "1.00", "0.250"] in lines
    assert ["7", "0.700", "+0.5000", "0.1250", "0.750", "1.00"] in lines
    assert ["critic", "train", "0.100", "10%"] in lines
    for learner, storages in (("actor", "7"), ("critic", "9")):
        assert f"Last of 1 sleeps of the {learner}" in text
        assert ["params", "param", "moved", storages, "2.000", "1.000", "0.500"] in lines
    assert ["critic", "awake", "2.000", "2.000"] in lines
    assert ["actor", "and", "critic", "asleep", "1.000", "1.000"] in lines
    assert draw(run_dir) == [run_dir.reward_plot, run_dir.memory_plot]


def test_a_directory_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        report(RunDirectory(tmp_path))
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    arguments = parser.parse_args(["report", str(tmp_path)])
    assert arguments.run(arguments) == 2
    assert "holds no run" in capsys.readouterr().err


def test_the_command_prints_and_draws_again(run_dir: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    arguments = parser.parse_args(["report", str(run_dir.path)])
    assert arguments.run(arguments) == 0
    assert "mean reward" in capsys.readouterr().out
    for plot in (run_dir.reward_plot, run_dir.memory_plot):
        assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_sleeps_has_fewer_tables(run_dir: RunDirectory) -> None:
    run_dir.ledgers.unlink()
    run_dir.memory.unlink()
    text = report(run_dir)
    assert "sleeps" not in text
    assert "Resident" not in text
    assert draw(run_dir) == [run_dir.reward_plot]


def test_a_step_done_again_counts_once() -> None:
    records = [{"step": 1, "x": 1}, {"step": 2, "x": 2}, {"step": 1, "x": 3, "y": 4}]
    assert by_step(records) == [{"step": 1, "x": 3, "y": 4}, {"step": 2, "x": 2}]


def test_quarter_means() -> None:
    assert quarter_means([0.0, 2.0, 5.0, 5.0, 5.0, 5.0, 3.0, 5.0]) == (1.0, 4.0)
    assert quarter_means([2.0]) == (2.0, 2.0)


def test_moving_mean_looks_back_only() -> None:
    assert moving_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]


def test_spans_are_stretches_of_equal_value() -> None:
    readings = [{"t_s": t, "on": on} for t, on in ((0, 1), (1, 1), (2, 0), (3, 1))]
    assert spans(readings, "on") == [(0, 1, 1), (2, 2, 0), (3, 3, 1)]


def test_reporting_imports_no_torch(run_dir: RunDirectory) -> None:
    code = (
        "import argparse, sys\n"
        "from torpor.report.command import register\n"
        "parser = argparse.ArgumentParser()\n"
        "register(parser.add_subparsers())\n"
        "assert not {'rich', 'matplotlib'} & sys.modules.keys()\n"
        f"arguments = parser.parse_args(['report', {str(run_dir.path)!r}])\n"
        "arguments.run(arguments)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

"""`torpor train` from the outside: a whole run, and the mistakes it answers with one line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from small_jobs import SMALL, small_config

from torpor.errors import StoreFullError, UsageError
from torpor.report.jsonl import read_jsonl
from torpor.report.metrics import Metrics
from torpor.rl.actor import Actor
from torpor.rl.batch import Batch
from torpor.rl.build import build_model, build_task, prepare_run_directory
from torpor.rl.command import register
from torpor.rl.config import JsonlTask, ReasoningGymTask
from torpor.rl.config_cli import config_from_mapping, load_config, save_config
from torpor.rl.tasks.base import Split


def _torpor_train(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    parsed = parser.parse_args(["train", *map(str, arguments)])
    status: int = parsed.run(parsed)
    return status


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "small.json"
    file.write_text(json.dumps({**SMALL, "steps": 1, "warm_start": {"steps": 2, "batch_size": 4}}))
    return file


def test_a_run_leaves_everything_behind(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    flags = ["--run-dir", run_dir, "--checkpoint.interval-steps", "1", "--evaluation.interval-steps", "1"]
    flags += ["--report.plots"]
    assert _torpor_train(config_file, *flags) == 0
    printed = capsys.readouterr().out
    for part in ("warm start: 2 steps", "step   1/1  reward", "held-out reward after 1 steps", "torpor report"):
        assert part in printed
    assert {path.name for path in run_dir.iterdir()} >= {
        "config.json", "metrics.jsonl", "ledgers.jsonl", "samples.jsonl", "memory.jsonl",
        "reward.png", "memory.png", "checkpoints",
    }  # fmt: skip
    assert load_config(run_dir / "config.json").checkpoint.interval_steps == 1
    sample = read_jsonl(run_dir / "samples.jsonl")[0]
    assert sample.keys() >= {"step", "question", "answer", "reward", "weight_version"}

    assert _torpor_train(config_file, *flags, "--resume", "--steps", "2") == 0
    steps = [record["step"] for record in read_jsonl(run_dir / "metrics.jsonl") if "policy/loss" in record]
    assert steps == [0, 1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--run-dir", "{run}"], "holds a run already"),
        (["--run-dir", "{run}", "--resume", "--seed", "5"], "was started with another seed"),
        (["--run-dir", "{run}", "--resume"], "no checkpoint in"),
        (["--run-dir", "{new}", "--model.num-heads", "3"], "hidden_size 64 is no multiple of num_heads 3"),
    ],
)
def test_mistakes_get_one_line(
    config_file: Path, tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    save_config(load_config(config_file), run_dir / "config.json")
    (run_dir / "metrics.jsonl").write_text('{"step": 0}\n')
    arguments = [flag.format(run=run_dir, new=tmp_path / "new") for flag in flags]
    assert _torpor_train(config_file, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("torpor train: ")
    assert message in error
    assert error.count("\n") == 1


def test_an_attempt_that_failed_early_is_no_run(config_file: Path, tmp_path: Path) -> None:
    flags = ["--run-dir", tmp_path / "run"]
    assert _torpor_train(config_file, *flags, "--model.num-heads", "3") == 2
    assert _torpor_train(config_file, *flags) == 0
    assert read_jsonl(tmp_path / "run" / "memory.jsonl")[0]["phase"] == "start"
    assert not list(tmp_path.glob("run/*.png"))


def test_a_missing_file_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert _torpor_train("nowhere.toml") == 2
    assert "cannot read the config nowhere.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("checkpoints", "told"),
    [(["--checkpoint.interval-steps", "1"], "go on after step 1 with: torpor train "), ([], "no checkpoint in")],
)
def test_an_interrupted_run_says_how_to_go_on(
    config_file: Path,
    tmp_path: Path,
    checkpoints: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(self: Actor, batch: Batch, progress: object) -> Metrics:
        if self.weight_version == 1:
            raise KeyboardInterrupt
        return train(self, batch)

    train = Actor.train
    monkeypatch.setattr(Actor, "train", interrupt)
    flags = ["--run-dir", tmp_path / "run", "--steps", "3", *checkpoints]
    assert _torpor_train(config_file, *flags) == 130
    printed = capsys.readouterr()
    assert told in printed.out
    assert printed.err == "torpor train: interrupted\n"
    assert not list(tmp_path.glob("run/store/**/*.torpor"))
    monkeypatch.undo()
    if checkpoints:
        command = printed.out.split("with: torpor train ")[1].split()
        assert _torpor_train(*command) == 0
        steps = [record["step"] for record in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in record]
        assert steps == [0, 1, 2]


def test_a_machine_without_room_gets_one_line(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Actor) -> None:
        raise StoreFullError(5, 3, "/disk", "Free disk space.")

    monkeypatch.setattr(Actor, "sleep", full)
    assert _torpor_train(config_file, "--run-dir", tmp_path / "run") == 1
    error = capsys.readouterr().err
    assert error.startswith("torpor train: ")
    assert "/disk" in error
    assert error.count("\n") == 1


def test_runs_of_one_name_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = small_config(tmp_path).model_copy(update={"run_dir": None, "name": "same"})
    paths = [str(prepare_run_directory(config).path) for _ in range(3)]
    assert paths == ["runs/same", "runs/same-2", "runs/same-3"]


def test_a_jsonl_task_is_built_as_configured(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    config = JsonlTask(path=tmp_path / "q.jsonl", reward="builtins:len", stop=(".",))
    task = build_task(config, seed=0)
    assert task.stop == (".",)
    assert {task.sample(0).prompt, task.sample(0, Split.EVAL).prompt} == {"a", "b"}


def test_a_reasoning_gym_task_is_built_as_configured() -> None:
    parameters = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config = ReasoningGymTask(parameters=parameters, num_examples=1, style="text")
    prompt = build_task(config, seed=0).sample(0).prompt
    assert isinstance(prompt, str)
    assert prompt.count("arithmetic problem") == 2


def test_a_pretrained_directory_is_loaded(tmp_path: Path) -> None:
    model, tokenizer = build_model(small_config(tmp_path))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")  # type: ignore[attr-defined]
    pretrained = {**SMALL, "model": {"kind": "pretrained", "path": tmp_path / "model"}}
    again, again_tokenizer = build_model(config_from_mapping(pretrained, "test"))
    assert again_tokenizer.encode("ab=") == tokenizer.encode("ab=")
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in model.parameters())
    with pytest.raises(UsageError, match="nowhere"):
        build_model(config_from_mapping({**pretrained, "model": {"kind": "pretrained", "path": "nowhere"}}, "test"))

"""The configuration: what it refuses and in which words, where it comes from, and what it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torpor.errors import UsageError
from torpor.rl import config as cfg
from torpor.rl.command import read_config
from torpor.rl.config_cli import (
    changed_for_resume,
    config_from_mapping,
    known_keys,
    load_config,
    parse_run_config,
    save_config,
)

DISK = {"offload_train_disk_dir": "/d"}
CHUNK = {"offload_train_disk_chunk_mb": 8}
GAE = {"algorithm": {"advantages": "gae"}}
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_config_of_the_repository_parses(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"optimizer": {"max_norm": 1}}, "unknown key optimizer.max_norm (did you mean optimizer.max_grad_norm?)"),
        ({"group_size": 4}, "unknown key group_size (did you mean rollout.group_size?)"),
        ({"task": {"kind": "reasoning_gym", "datset": "x"}}, "unknown key task.datset (did you mean task.dataset?)"),
        ({"task": {"kind": "jsonl", "min_length": 1}}, "task.min_length belongs to another task.kind"),
        ({"qqq": 1}, "unknown key qqq; `--help` lists the known ones"),
        ({"optimizer": {"learning_rate": -1}}, "optimizer.learning_rate = -1"),
        ({"steps": "many"}, "steps = 'many'"),
        ({"rollout": {"group_size": 0}}, "rollout.group_size = 0"),
        ({"critic": {"gamma": 1}}, "unknown key critic.gamma"),
        ({"critic": {"optimizer": {"rate": 1}}}, "unknown key critic.optimizer.rate"),
        ({"model": {"kind": "huge"}}, "'tiny', 'smollm2', 'pretrained'"),
    ],
)  # fmt: skip
def test_refuses_by_name(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        config_from_mapping(raw, "a.toml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("a.toml: ")


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        ({"algorithm": {"importance_cap": 2.0}}, ("algorithm.importance_cap", "algorithm.old_log_probs")),
        ({"algorithm": {"updates_per_rollout": 3}}, ("rollout.prompts_per_step", "algorithm.updates_per_rollout")),
        ({**GAE, "critic": {"updates_per_rollout": 3}}, ("rollout.prompts_per_step", "critic.updates_per_rollout")),
        ({"rollout": {"group_size": 1}}, ("rollout.group_size", "algorithm.advantages")),
        ({"critic": {"discount": 0.9}}, ("critic.discount", "algorithm.advantages")),
        ({"critic": {"optimizer": {"learning_rate": 1}}}, ("critic.optimizer", "algorithm.advantages")),
        ({"algorithm": {"kl_in": "reward", "kl_coefficient": 1}}, ("algorithm.kl_in", "algorithm.advantages")),
        ({"algorithm": {**GAE["algorithm"], "kl_in": "reward"}}, ("algorithm.kl_in", "algorithm.kl_coefficient")),
        ({"resume": True}, ("resume", "run_dir")),
        ({"memory": {**DISK, "offload_train": False}}, ("offload_train =", "offload_train_disk_dir")),
        ({"memory": {**DISK, "offload_train_target": "cpu"}}, ("offload_train_target", "offload_train_disk_dir")),
        ({"memory": {**DISK, "colocate": False}}, ("colocate =", "offload_train_disk_dir")),
        ({"memory": {**CHUNK, "colocate": False}}, ("colocate =", "offload_train_disk_chunk_mb")),
        ({"memory": {**CHUNK, "offload_train": False}}, ("offload_train =", "offload_train_disk_chunk_mb")),
        ({"memory": {**CHUNK, "offload_train_target": "cpu"}}, ("offload_train_target", "offload_train_disk_chunk_mb")),
        ({"task": {"kind": "string", "min_length": 5, "max_length": 2}}, ("task.min_length", "task.max_length")),
    ],
)  # fmt: skip
def test_refuses_clashes_naming_both(raw: dict[str, Any], names: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match="clash") as caught:
        config_from_mapping(raw, "a.toml")
    assert all(name in str(caught.value) for name in names)


def test_a_critic_lets_every_answer_stand_alone() -> None:
    config = config_from_mapping({**GAE, "rollout": {"group_size": 1}, "critic": {"discount": 0.9}}, "a")
    assert (config.rollout.group_size, config.critic.discount) == (1, 0.9)


def test_validation_never_writes() -> None:
    config = config_from_mapping({"algorithm": {"kl_coefficient": 0.5}}, "a")
    assert config.algorithm == cfg.AlgorithmConfig(kl_coefficient=0.5)
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 3  # type: ignore[misc]


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('steps = 7\n[task]\nkind = "reasoning_gym"\n[memory]\noffload_train_target = "cpu"\n')
    flags = "--no-offload-train --offload-rollout --task.dataset spell_backward --optimizer.learning-rate 0.5"
    config = parse_run_config(file, flags.split())
    assert config.steps == 7
    assert config.memory == cfg.MemoryConfig(offload_train=False, offload_train_target="cpu")
    assert config.task == cfg.ReasoningGymTask(dataset="spell_backward")
    assert config.optimizer.learning_rate == 0.5


@pytest.mark.parametrize(
    ("flags", "learners_sleep", "engine_sleeps"),
    [
        ("", True, True),
        ("--colocate", True, True),
        ("--no-colocate", False, False),
        ("--no-offload-train", False, True),
        ("--no-offload-rollout", True, False),
    ],
)
def test_colocate_is_both_offload_flags(flags: str, learners_sleep: bool, engine_sleeps: bool) -> None:
    memory = parse_run_config(None, flags.split()).memory
    assert (memory.learners_sleep, memory.engine_sleeps) == (learners_sleep, engine_sleeps)


def test_the_command_line_takes_a_file_or_none(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("steps = 7")
    assert read_config([str(file), "--seed", "3"]) == cfg.RunConfig(steps=7, seed=3)
    assert read_config(["--seed", "3"]) == cfg.RunConfig(seed=3)
    assert read_config([]) == cfg.RunConfig()


def test_an_unknown_flag_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_run_config(None, ["--optimizer.learning-rat", "1"])
    assert stopped.value.code == 2
    assert "--optimizer.learning-rate" in capsys.readouterr().err


def test_clashing_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_run_config(None, ["--offload-train-target", "cpu", "--offload-train-disk-dir", "/d"])
    printed = capsys.readouterr().err
    assert "offload_train_disk_dir" in printed
    assert "offload_train_target" in printed


@pytest.mark.parametrize("path", [None, *EXAMPLES], ids=str)
def test_help_explains_every_field(path: Path | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_run_config(path, ["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    for key in ("--optimizer.learning-rate", "--offload-train, --no-offload-train", "--rollout.kv-cache-mib"):
        assert key in printed
    assert "MiB (1024**2 bytes)" in printed


def _sections() -> list[type[cfg.Section]]:
    return [value for value in vars(cfg).values() if isinstance(value, type) and issubclass(value, cfg.Section)]


@pytest.mark.parametrize("section", _sections(), ids=lambda section: section.__name__)
def test_every_field_is_documented(section: type[cfg.Section]) -> None:
    tables = {name for name in cfg.RunConfig.model_fields if f"{name}." in "".join(f"{k} " for k in known_keys())}
    undocumented = [
        name
        for name, field in section.model_fields.items()
        if not field.description and not (section is cfg.RunConfig and name in tables)
    ]
    assert not undocumented
    assert section.__doc__


@pytest.mark.parametrize("text", ["steps = ", "\x00"])
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"bad\.toml"):
        load_config(file)
    with pytest.raises(UsageError, match=r"missing\.toml"):
        load_config(tmp_path / "missing.toml")


def test_a_resumed_run_may_change_only_what_does_not_touch_the_past() -> None:
    before = cfg.RunConfig(steps=4)
    after = cfg.RunConfig(
        steps=8, seed=1, optimizer=cfg.OptimizerConfig(name="sgd"), memory=cfg.MemoryConfig(verify=False)
    )
    assert changed_for_resume(before, after) == ["optimizer.name", "seed"]


def test_parsing_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("steps = 2")
    code = (
        "import argparse, json, sys\n"
        "from torpor.rl.command import read_config, register\n"
        "register(argparse.ArgumentParser().add_subparsers())\n"
        "early = [m for m in ('torch', 'pydantic', 'tyro', 'transformers') if m in sys.modules]\n"
        f"read_config([{str(tmp_path / 'c.toml')!r}, '--steps', '3'])\n"
        "print(json.dumps([early, 'torch' in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], False]

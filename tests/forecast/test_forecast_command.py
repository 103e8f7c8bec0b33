"""`torpor plan` as a user runs it."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torpor.forecast import command, link
from torpor.forecast.config import built_in_names, read_config
from torpor.forecast.families import build_model, known_architectures
from torpor.kinds import Fate, Role

ANCHOR = str(Path(__file__).parent / "data" / "anchor_8_layers.sh")


@pytest.fixture(autouse=True)
def empty_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def plan_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert command.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert command.main(argv) == command.EXIT_REFUSED
    return capsys.readouterr().err


def test_table_names_both_units_and_every_component(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["qwen3-4b", "--tp", "2", "--gpus", "8", "--recipe", "fp8-blockwise"]) == 0
    shown = capsys.readouterr().out
    head = next(line for line in shown.splitlines() if line.startswith("component"))
    assert [word in head for word in ("rank GB", "rank GiB", "job GB", "job GiB")] == [True] * 4
    cache = next(line.split() for line in shown.splitlines() if "quantized_cache" in line)
    assert cache[:7] == ["caches", "quantized_cache", "dropped", "3.634", "3.385", "29.074", "27.077"]
    for words in ("params", "grads", "optimizer", "copied by a sleep", "together", "host memory"):
        assert words in shown


def test_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_json(capsys, "glm-4.7", "--pp", "4", "--ep", "8", "--gpus", "64", "--recipe", "mxfp8", "--segments")
    ranks = found["ranks"]
    assert sum(rank["ranks"] for rank in ranks) == 64
    for name in ("awake_bytes", "copied_bytes", "restored_bytes"):
        assert found["job"][name] == sum(rank["ranks"] * rank[name] for rank in ranks)
    for rank in ranks:
        assert rank["awake_bytes"] == sum(line["nbytes"] for line in rank["lines"])
        assert {line["fate"] for line in rank["lines"]} <= set(Fate)
    assert found["layout"]["dp"] == 16
    assert {role["role"] for role in found["segments"]} > {Role.PARAM, Role.QUANTIZED_CACHE}
    assert found["recipe"]["architecture"] == "blackwell"


def test_seconds_at_a_given_rate(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_json(capsys, "qwen3-4b", "--link-gbps", "10")
    assert found["sleep_s"] == pytest.approx(12 * found["model"]["parameters"] / 10e9, rel=1e-3)
    assert found["link"]["source"] == "given"


def test_seconds_at_the_measured_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert "assumed" in plan_json(capsys, "qwen3-4b")["link"]["source"]
    link.write_link(link.Link(40e9, 20e9, device="a GPU", measured_at="2026-01-02"))
    found = plan_json(capsys, "qwen3-4b")
    assert found["link"]["source"] == "measured 2026-01-02 on a GPU"
    assert found["wake_s"] == pytest.approx(2 * found["sleep_s"])


def test_a_measurement_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    link.link_file().parent.mkdir(parents=True)
    link.link_file().write_text('{"d2h_bytes_per_s": 1}', encoding="utf-8")
    assert "no link measurement" in refused(capsys, "qwen3-4b")
    link.link_file().write_text('{"d2h_bytes_per_s": 0, "h2d_bytes_per_s": 1}', encoding="utf-8")
    assert "0.0 bytes/s" in refused(capsys, "qwen3-4b")
    assert "positive" in refused(capsys, "qwen3-4b", "--link-gbps", "0")


def test_host_memory_decides_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    # 12 bytes for each of 4.02e9 parameters, times 1.03: 46.3 GiB for the job.
    assert command.main(["qwen3-4b", "--gpus", "8", "--host-gib", "47"]) == 0
    assert "fits" in capsys.readouterr().out
    assert command.main(["qwen3-4b", "--gpus", "8", "--host-gib", "46"]) == command.EXIT_DOES_NOT_FIT
    assert "does NOT fit" in capsys.readouterr().out
    # Two nodes halve what each needs.
    assert command.main(["qwen3-4b", "--gpus", "8", "--gpus-per-node", "4", "--host-gib", "24"]) == 0


def test_compare_layouts_and_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("qwen3-30b-a3b", "--gpus", "8", "--tp", "4", "--ep", "8", "--recipe", "fp8-blockwise")
    found = plan_json(capsys, *argv, "--compare", "ep=4", "recipe=nvfp4,scope=experts,backward-override=dequantized")
    assert [each["plan"] for each in found][1:] == ["ep=4", "recipe=nvfp4,scope=experts,backward-override=dequantized"]
    caches = [
        line["nbytes"] for each in found for line in each["ranks"][0]["lines"] if line["role"] == "quantized_cache"
    ]
    assert [f"{nbytes / 1e9:.3f}" for nbytes in caches] == ["7.703", "14.952", "2.038"]
    assert command.main([*argv, "--compare", "ep=4", "primary-weights"]) == 0
    rows = capsys.readouterr().out.splitlines()[-3:]
    assert [row.split("  ")[0] for row in rows] == ["as given", "ep=4", "primary-weights"]


def test_what_is_given_wins_over_an_argument_file(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_json(capsys, ANCHOR, "--tp", "2", "--recipe", "bf16")
    layout = found["layout"]
    assert (layout["tp"], layout["etp"], layout["gpus"], found["recipe"]["format"]) == (2, 2, 2, "bf16")
    assert plan_json(capsys, ANCHOR, "--tp", "2", "--etp", "1")["layout"]["etp"] == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["no-such-model"], "no built-in model of that name. Built in: deepseek-v3"),
        (["qwen3-4b", "--tp", "3"], "decoder.layers.0: self_attention.linear_qkv has 32 heads"),
        (["qwen3-4b", "--recipe", "mxfp8", "--architecture", "hopper"], "Hopper"),
        (["qwen3-4b", "--lora-targets", "linear_qkv"], "give a rank"),
        (["qwen3-4b", "--freeze", "*vision*"], "no weight of qwen3-4b matches"),
        ([ANCHOR, "--mtp", "1"], "--mtp-num-layers"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    assert words in refused(capsys, *argv)


def test_unknown_architectures_are_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "brand_new", "hidden_size": 64}', encoding="utf-8")
    message = refused(capsys, str(config))
    assert "unknown architecture 'brand_new'" in message
    assert all(known in message for known in known_architectures())


def test_a_config_by_path_directory_or_name_is_the_same(tmp_path: Path) -> None:
    values = dict(read_config("qwen3-4b").values)
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    by_name = build_model(read_config("qwen3-4b"))
    for source in (tmp_path, tmp_path / "config.json"):
        assert build_model(read_config(str(source))).layers == by_name.layers


def test_the_language_model_of_a_multi_modal_config(tmp_path: Path) -> None:
    text = dict(read_config("qwen3.5-4b").values)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}), encoding="utf-8")
    found, known = build_model(read_config(str(path))), build_model(read_config("qwen3.5-4b"))
    assert found.parameters == known.parameters
    assert "language model only" in found.notes[0]
    assert known.notes == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "a JSON object is needed"),
        ("{", "not JSON"),
        ('{"model_type": "llama", "vocab_size": 8}', "'hidden_size' is None"),
        ('{"model_type": "llama", "hidden_size": "big"}', "'hidden_size' is 'big'"),
    ],
)
def test_configs_that_cannot_be_read(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    assert words in refused(capsys, str(path))


@pytest.mark.parametrize("name", built_in_names())
def test_every_built_in_model_can_be_planned(name: str) -> None:
    argv = [name, "--recipe", "fp8-blockwise", "--scope", "all"]
    plan = command.make_plan(name, command.given_by(_parsed(argv)))
    assert plan.forecast().copied_bytes == pytest.approx(12 * plan.model.parameters, rel=0.02)


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(argv)


def test_registers_itself_as_a_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    args = parser.parse_args(["plan", "qwen3-0.6b"])
    assert args.run(args) == 0
    assert "qwen3-0.6b" in capsys.readouterr().out


def test_the_whole_process_is_quick_and_light() -> None:
    """The largest built-in split, in a fresh process; processor time, so that a busy machine does not matter."""
    code = (
        "import sys; from torpor.forecast.command import main; status = main(sys.argv[1:]);"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules), sys.modules; sys.exit(status)"
    )
    argv = [
        "glm-5.2",
        *["--tp", "4", "--pp", "8", "--ep", "32", "--gpus", "256", "--first-layers", "14", "--last-layers", "16"],
        "--recipe",
        "nvfp4",
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, *argv], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert spent_s < 0.3

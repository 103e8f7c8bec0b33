"""The guide's samples are what the command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from torpor.forecast import command

GUIDE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
# Refusals start with "torpor plan:", samples with the command.
FENCE = re.compile(r"^```\w*\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
BLOCKS = FENCE.findall(GUIDE)
SAMPLES = [
    (block.replace("\\\n", " "), BLOCKS[place + 1])
    for place, block in enumerate(BLOCKS)
    if block.startswith("torpor plan ")
]
PLAIN = "torpor plan qwen3-30b-a3b --gpus 8 --tp 4 --ep 8 --recipe fp8-blockwise --segments"
SEGMENTS = next(block for block in BLOCKS if block.startswith("role "))


@pytest.fixture(autouse=True)
def no_measured_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_all_samples_were_found() -> None:
    assert len(SAMPLES) == 4


@pytest.mark.parametrize(("typed", "shown"), [*SAMPLES, (PLAIN, SEGMENTS)], ids=lambda text: text[12:60])
def test_each_line_of_a_sample_is_printed(typed: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(shlex.split(typed)[2:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in shown.splitlines() if line not in printed] == []


@pytest.mark.parametrize(
    "argv",
    [
        ["glm-4.7", "--tp", "32", "--etp", "32", "--recipe", "mxfp8"],
        ["qwen2.5-14b", "--tp", "5"],
        ["glm-5.2", "--pp", "4"],
    ],
)
def test_each_refusal_is_printed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(argv) == command.EXIT_REFUSED
    assert capsys.readouterr().err in GUIDE


def test_python_sample() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    names: dict[str, object] = {}
    exec(code.replace("account.fullest.bytes_of", "cache = account.fullest.bytes_of"), names)
    assert f"{names['cache']:_}" in code

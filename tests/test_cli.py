"""The command line: commands, and one line with status 2 for what a user can mend."""

from __future__ import annotations

import sys

import pytest
import torch

from torpor import cli


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "report", "bench"):
        with pytest.raises(SystemExit) as caught:
            cli.main([command, "--help"])
        assert caught.value.code == 0
        assert f"torpor {command}" in capsys.readouterr().out


def test_an_unknown_command_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["dream"])
    assert caught.value.code == 2
    assert "train" in capsys.readouterr().err


def test_a_users_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "no-such-model"]) == 2
    err = capsys.readouterr().err
    assert "no-such-model" in err
    assert "Traceback" not in err


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for module in [name for name in sys.modules if name == "rich" or name.startswith(("rich.", "torpor.report."))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "rich", None)  # as Python marks a package that cannot be imported
    assert cli.main(["report", "no-such-run"]) == 2
    assert "pip install 'torpor[rl]'" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a link to measure here")
def test_measuring_a_link_without_a_gpu_names_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--link"]) == 2
    assert "--link-gbps" in capsys.readouterr().err

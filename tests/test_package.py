"""Importing torpor defines names and does nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

import torpor


def _modules_after(statement: str) -> set[str]:
    code = f"import sys; before = set(sys.modules); {statement}; print('\\n'.join(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines())


HEAVY = {"torch", "numpy", "pydantic", "tyro", "transformers", "matplotlib", "rich"}


_HELP = """
import contextlib, io, torpor.cli
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    torpor.cli.main(["--help"])
"""


@pytest.mark.parametrize(
    "statement",
    [
        "import torpor",
        "import torpor.cli",
        _HELP,
    ],
    ids=["package", "cli", "help"],
)
def test_importing_is_light(statement: str) -> None:
    if "\n" in statement:
        code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert not HEAVY & set(done.stdout.splitlines())
    else:
        assert not HEAVY & _modules_after(statement)


def test_every_public_name_is_there() -> None:
    for name in torpor.__all__:
        assert getattr(torpor, name) is not None
    assert set(dir(torpor)) == set(torpor.__all__)
    with pytest.raises(AttributeError, match="Sleeper"):
        torpor.Slepper  # noqa: B018 - the access is the test

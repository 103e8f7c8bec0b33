"""`torpor train | plan | report | bench`. Imports torch only in the command that needs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torpor
from torpor import bench
from torpor.errors import TorporError
from torpor.forecast import command as plan
from torpor.report import command as report
from torpor.rl import command as train


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is its result. User mistakes exit with 2 and one line, no traceback."""
    parser = argparse.ArgumentParser(prog="torpor", description=torpor.__doc__, formatter_class=_Formatter)
    parser.add_argument("--version", action="version", version=f"torpor {torpor.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (train, plan, report, bench):
        command.register(commands)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        message = f"needs {error.name}, which the extra '{extra}' brings: pip install 'torpor[{extra}]'"
        print(f"torpor {arguments.command}: {message}", file=sys.stderr)
        return 2
    except TorporError as error:
        print(f"torpor {arguments.command}: {error}", file=sys.stderr)
        return 2
    return status


#: Package -> the extra of ours that installs it.
_EXTRA_OF = {
    **dict.fromkeys(("matplotlib", "pydantic", "rich", "safetensors", "transformers", "tyro"), "rl"),
    **dict.fromkeys(("accelerate", "gguf"), "gguf"),
    "reasoning_gym": "tasks",
    "peft": "peft",
    "tensorboard": "tensorboard",
}


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the package's docstring."""


if __name__ == "__main__":
    sys.exit(main())

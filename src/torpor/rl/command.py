"""`torpor train CONFIG [flags]`. Registering it imports neither torch nor pydantic."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torpor.rl.config import RunConfig

_USAGE = "torpor train [CONFIG] [FLAGS ...]"
_HELP = "run a colocated GRPO job; `torpor train CONFIG --help` explains every setting"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `train` to the commands."""
    # Flags belong to the configuration, `--help` too: with no prefix character argparse leaves them alone.
    parser = subparsers.add_parser("train", help=_HELP, usage=_USAGE, prefix_chars="\0", add_help=False)
    parser.add_argument("arguments", nargs="*", metavar="CONFIG FLAGS")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Parse, train, and leave a run directory; 2 for a mistake of the user's, 130 for an interrupt."""
    from torpor.errors import UnsupportedError, UsageError

    try:
        train(read_config(arguments.arguments))
    except (UsageError, UnsupportedError) as error:
        print(f"torpor train: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("torpor train: interrupted", file=sys.stderr)
        return 130
    return 0


def read_config(arguments: Sequence[str]) -> RunConfig:
    """The configuration of `[CONFIG] [FLAGS ...]`.

    Raises:
        UsageError, SystemExit: see `parse_run_config`.
    """
    from torpor.rl.config_cli import parse_run_config

    has_file = bool(arguments) and not arguments[0].startswith("-")
    return parse_run_config(Path(arguments[0]) if has_file else None, arguments[1 if has_file else 0 :])


def train(config: RunConfig) -> None:
    """One run from start to end.

    Raises:
        UsageError, UnsupportedError: see `open_job`.
    """
    from torpor.rl.build import open_job
    from torpor.rl.loop import run_loop

    with open_job(config) as job:
        job.recorder.console.say(f"run directory: {job.recorder.run.path}")
        run_loop(job)
    print(f"`torpor report {job.recorder.run.path}` shows it again")

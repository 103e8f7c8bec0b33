"""`torpor train CONFIG [flags]`. Registering it imports neither torch nor pydantic."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torpor.rl.config import RunConfig
    from torpor.rl.loop import Job

_USAGE = "torpor train [CONFIG] [FLAGS ...]"
_HELP = "run a colocated job of GRPO or PPO; `torpor train CONFIG --help` explains every setting"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `train` to the commands."""
    # Flags belong to the configuration, `--help` too: with no prefix character argparse leaves them alone.
    parser = subparsers.add_parser("train", help=_HELP, usage=_USAGE, prefix_chars="\0", add_help=False)
    parser.add_argument("arguments", nargs="*", metavar="CONFIG FLAGS")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Parse, train, and leave a run directory.

    Returns:
        0, or 2 for a mistake of the user's, 1 for a machine without the room, 130 for an interrupt.
    """
    from torpor.errors import NotEnoughMemoryError, StoreError, UnsupportedError, UsageError

    try:
        train(read_config(arguments.arguments))
    except (UsageError, UnsupportedError) as error:
        print(f"torpor train: {error}", file=sys.stderr)
        return 2
    except (StoreError, NotEnoughMemoryError) as error:
        print(f"torpor train: {error}", file=sys.stderr)
        return 1
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
        with _telling_how_to_go_on(job):
            run_loop(job)
    print(f"`torpor report {job.recorder.run.path}` shows it again")


@contextmanager
def _telling_how_to_go_on(job: Job) -> Iterator[None]:
    """Whatever ends the block early, the user reads which checkpoint is left."""
    from torpor.rl.checkpoint import find_latest, step_of

    try:
        yield
    except BaseException:
        run = job.recorder.run
        checkpoint = find_latest(run.checkpoints)
        job.recorder.console.say(
            f"ended early; no checkpoint in {run.path}"
            if checkpoint is None
            else f"ended early; go on after step {step_of(checkpoint)} with: "
            f"torpor train {run.config} --run-dir {run.path} --resume"
        )
        raise

"""`torpor report RUN`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `report` to the commands."""
    parser = subparsers.add_parser("report", help="print a run's figures and draw its plots again")
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the directory of a run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the tables, redraw the plots; 2 if there is no run."""
    from torpor.errors import UsageError
    from torpor.report.plots import draw
    from torpor.report.rundir import RunDirectory
    from torpor.report.tables import report

    directory = RunDirectory(arguments.run_dir)
    try:
        print(report(directory))
    except UsageError as error:
        print(f"torpor report: {error}", file=sys.stderr)
        return 2
    for path in draw(directory):
        print(f"drew {path}")
    return 0

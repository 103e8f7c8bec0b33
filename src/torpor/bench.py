"""`torpor bench`: measure what forecasts assume."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from torpor.errors import UnsupportedError
from torpor.forecast.link import Link, write_link

if TYPE_CHECKING:
    import torch

_REPEATS = 7


def register(subparsers: Any) -> None:
    """Add `bench` to the command line. Imports no torch."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="measure the link between GPU and host, for `torpor plan`",
        description="Measure one large page-locked copy each way and keep the rates for `torpor plan`.",
    )
    parser.add_argument("--link", action="store_true", required=True, help="measure the link and keep the result")
    parser.add_argument("--mib", type=int, default=2048, metavar="N", help="size of the copy in MiB (default 2048)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, keep.

    Raises:
        UnsupportedError: no NVIDIA GPU.
    """
    link = measure_link(arguments.mib * 1024**2)
    path = write_link(link)
    print(
        f"{link.device}: to the host {link.d2h_bytes_per_s / 1e9:.1f} GB/s, back {link.h2d_bytes_per_s / 1e9:.1f} GB/s"
    )
    print(f"kept in {path}")
    return 0


def measure_link(nbytes: int) -> Link:
    """Median rates of one copy of `nbytes` bytes between page-locked memory and the current GPU, both ways.

    Raises:
        UnsupportedError: no NVIDIA GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(
            "no NVIDIA GPU here: there is no link to measure. Give `torpor plan --link-gbps` instead."
        )
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return Link(
        d2h_bytes_per_s=_rate(lambda: host.copy_(device, non_blocking=True), nbytes),
        h2d_bytes_per_s=_rate(lambda: device.copy_(host, non_blocking=True), nbytes),
        device=torch.cuda.get_device_name(),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _rate(copy: Callable[[], torch.Tensor], nbytes: int) -> float:
    import torch

    copy()
    seconds = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return nbytes / statistics.median(seconds)

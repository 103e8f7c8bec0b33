"""How fast bytes move between device and host: what was measured on this machine, else an assumption.

The measurement is a JSON object in the user's cache directory:

    {"device": "NVIDIA H200", "d2h_bytes_per_s": 5.5e10, "h2d_bytes_per_s": 5.4e10, "measured_at": "…"}
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from torpor.errors import UsageError

#: One large pinned copy over PCIe 5.0 x16; each GPU has a link of its own.
ASSUMED_BYTES_PER_S = 50e9


@dataclass(frozen=True, slots=True)
class Link:
    """Rates of one GPU's link to the host."""

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    device: str = ""
    measured_at: str = ""
    source: str = "given"

    def sleep_s(self, nbytes: int) -> float:
        """Seconds to copy bytes out."""
        return nbytes / self.d2h_bytes_per_s

    def wake_s(self, nbytes: int) -> float:
        """Seconds to copy bytes back."""
        return nbytes / self.h2d_bytes_per_s


def link_file() -> Path:
    """Where the measurement lies: `$XDG_CACHE_HOME/torpor/link.json`, by default under `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "torpor" / "link.json"


def write_link(link: Link) -> Path:
    """Keep a measurement for later forecasts; returns where."""
    path = link_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in asdict(link).items() if key != "source"}
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return path


def current_link(given_gb_per_s: float | None = None) -> Link:
    """The rate given (GB/s, decimal), else the one measured here, else the assumption.

    Raises `UsageError` for a rate that is not positive, and for a measurement that cannot be read.
    """
    if given_gb_per_s is not None:
        if given_gb_per_s <= 0:
            raise UsageError(f"a link of {given_gb_per_s} GB/s moves nothing; give a positive rate.")
        return Link(given_gb_per_s * 1e9, given_gb_per_s * 1e9)
    path = link_file()
    if not path.is_file():
        return Link(ASSUMED_BYTES_PER_S, ASSUMED_BYTES_PER_S, source="assumed: PCIe 5.0 x16, one pinned copy")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        rates = float(values["d2h_bytes_per_s"]), float(values["h2d_bytes_per_s"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is no link measurement ({error!r}). Run `torpor bench --link` again, or give --link-gbps.",
            path=str(path),
        ) from error
    if min(rates) <= 0:
        raise UsageError(f"{path} holds a rate of {min(rates)} bytes/s. Run `torpor bench --link` again.")
    device, when = str(values.get("device", "")), str(values.get("measured_at", ""))
    return Link(*rates, device, when, source=" ".join(filter(None, ("measured", when, "on", device))))

"""How near the file store comes to the disk: `transfer.save` and `load` against plain direct I/O.

    python benchmarks/file_store.py [--directory DIR] [--gib 1] [--rounds 7]

Both sides move the same bytes in blocks of the same size, into blocks that were written before, and take turns in
each round, because a disk's rate drifts. The roof is the better of one and two plain reads or writes in flight,
from and to one resident buffer each; `load` also pays for the page faults of memory that was given back. No side
computes fingerprints. Plain I/O needs next to no processor and page faults do: on a machine busy with other work
the ratios are lower, and the processor times beside them say by how much it was that work.
"""

from __future__ import annotations

import argparse
import datetime
import json
import mmap
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from torpor.memory import kernel
from torpor.memory.base import byte_view
from torpor.memory.madvise import MadviseBackend
from torpor.stores.file import FileStore
from torpor.transfer import Piece, load, save

RESULT = Path(__file__).parent / "results" / "file_store.json"
GIB = 1024**3
COUNTS = (2, 20_000)
BLOCK_BYTES = 8 * 1024**2
BAR = 0.85


class PlainDirect:
    """One preallocated file, written and read in aligned blocks with direct I/O by `flights` threads."""

    def __init__(self, directory: Path, nbytes: int, flights: int) -> None:
        self._fd = os.open(directory / f"plain-{flights}", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, nbytes)
        self._nbytes, self._flights = nbytes, flights
        self._buffers = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(flights)]
        for buffer in self._buffers:
            buffer.write(os.urandom(BLOCK_BYTES))

    def write(self) -> None:
        self._run(lambda buffer, offset: os.pwrite(self._fd, buffer, offset))

    def read(self) -> None:
        self._run(lambda buffer, offset: os.preadv(self._fd, [buffer], offset))

    def _run(self, move: Callable[[mmap.mmap, int], int]) -> None:
        def stripe(k: int) -> None:
            for offset in range(k * BLOCK_BYTES, self._nbytes, self._flights * BLOCK_BYTES):
                if move(self._buffers[k], offset) != BLOCK_BYTES:
                    raise OSError(f"a short transfer at {offset}")

        with ThreadPoolExecutor(self._flights) as threads:
            list(threads.map(stripe, range(self._flights)))


class Storages:
    """`count` storages of `nbytes` in all, a file store with their bytes, and their memory given back at will."""

    def __init__(self, directory: Path, nbytes: int, count: int) -> None:
        each = nbytes // count
        self._storages = [torch.randint(0, 256, (each,), dtype=torch.uint8).untyped_storage() for _ in range(count)]
        self.store = FileStore(directory, chunk_bytes=BLOCK_BYTES)
        slots = self.store.reserve([each] * count)
        self._pieces = [Piece(byte_view(s), slot) for s, slot in zip(self._storages, slots, strict=True)]
        self._backend = MadviseBackend()
        self.payload_bytes = each * count

    def save(self) -> None:
        save(self._pieces, self.store)

    def release(self) -> None:
        self._backend.release(self._storages)

    def load(self) -> None:
        load(self._pieces, self.store)


def seconds(work: Callable[[], None]) -> tuple[float, float]:
    """Wall time of one call, and processor time of all threads in it."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(directory: Path, nbytes: int, count: int, rounds: int) -> dict[str, object]:
    """Rates of one number of storages, in bytes a second, and their ratios to the roof."""
    ours = Storages(directory, nbytes, count)
    plain = {flights: PlainDirect(directory, nbytes, flights) for flights in (1, 2)}
    times: dict[str, list[float]] = {}
    cpu_times: dict[str, list[float]] = {}
    for turn in range(rounds + 1):  # the first writes fresh blocks everywhere, and is not counted
        took = {f"plain_write_{flights}": seconds(one.write) for flights, one in plain.items()}
        took["save"] = seconds(ours.save)
        ours.release()
        took |= {f"plain_read_{flights}": seconds(one.read) for flights, one in plain.items()}
        took["load"] = seconds(ours.load)
        for name, (wall, cpu) in took.items() if turn else ():
            times.setdefault(name, []).append(wall)
            cpu_times.setdefault(name, []).append(cpu)
    ours.store.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    rates = {f"{name}_bytes_per_s": nbytes / value for name, value in medians.items()}
    rates["save_bytes_per_s"] = ours.payload_bytes / medians["save"]
    rates["load_bytes_per_s"] = ours.payload_bytes / medians["load"]
    save_roof = max(rates["plain_write_1_bytes_per_s"], rates["plain_write_2_bytes_per_s"])
    load_roof = max(rates["plain_read_1_bytes_per_s"], rates["plain_read_2_bytes_per_s"])
    return {
        "storages": count,
        "payload_bytes": ours.payload_bytes,
        "block_bytes": BLOCK_BYTES,
        "save_ratio": rates["save_bytes_per_s"] / save_roof,
        "load_ratio": rates["load_bytes_per_s"] / load_roof,
        **rates,
        "save_cpu_s": statistics.median(cpu_times["save"]),
        "load_cpu_s": statistics.median(cpu_times["load"]),
        "seconds": times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; default: /var/tmp")
    parser.add_argument("--gib", type=float, default=1.0, help="bytes moved each way, in GiB")
    parser.add_argument("--rounds", type=int, default=7, help="rounds counted")
    parser.add_argument("--output", type=Path, default=RESULT, help="where the numbers go, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory or "/var/tmp") as scratch:
        nbytes = int(args.gib * GIB) // (2 * BLOCK_BYTES) * (2 * BLOCK_BYTES)
        results = [measure(Path(scratch), nbytes, count, args.rounds) for count in COUNTS]
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "available_bytes": kernel.available_bytes(),
            "load_average_1min": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "bar": BAR,
        "results": results,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for r in results:
        print(
            f"{r['storages']:>6} storages  save {r['save_bytes_per_s']:.3g} B/s = {r['save_ratio']:.2f} of the roof   "
            f"load {r['load_bytes_per_s']:.3g} B/s = {r['load_ratio']:.2f} of the roof   "
            f"processor {r['save_cpu_s']:.2f} and {r['load_cpu_s']:.2f} s"
        )


if __name__ == "__main__":
    main()

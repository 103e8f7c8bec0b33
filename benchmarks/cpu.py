"""What the sleeper does on a machine without a GPU, against what the machine can do in the same run.

    python benchmarks/cpu.py [--directory DIR] [--gib 1] [--rounds 8] [--only disk own ...]

One table, and every number with machine, versions and date in `results/cpu.json`. Rates are medians over rounds, and
each round takes turns with plain direct I/O of the same bytes in blocks of the same size, because a disk's rate
drifts and other work comes and goes: the ratio is what counts. Own time is processor time, wall time stands beside it.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import mmap
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from torpor import Sleeper
from torpor.fingerprint import fingerprints
from torpor.ledger import Ledger
from torpor.memory import kernel
from torpor.memory.madvise import MadviseBackend
from torpor.stores.base import Slot
from torpor.stores.file import FileStore
from torpor.transfer import Moved, Piece, load, save

RESULT = Path(__file__).parent / "results" / "cpu.json"
#: `transfer.save` or `transfer.load`.
Mover: TypeAlias = Callable[[list[Piece], FileStore], Moved]

MIB, GIB = 1024**2, 1024**3
MANY = 20_000
BLOCK_BYTES = 8 * MIB
SEGMENT_BYTES = 128 * MIB
RESIDUE_CYCLES = 20


@dataclass
class Figure:
    """One line of the table."""

    group: str
    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def verdict(self) -> str:
        """Whether the bar is met, if there is one."""
        if self.at_least is None and self.at_most is None:
            return ""
        met = (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )
        return "met" if met else "MISSED"

    def line(self) -> str:
        """For a person."""
        bar = f">= {self.at_least:g}" if self.at_least is not None else ""
        bar = f"<= {self.at_most:g}" if self.at_most is not None else bar
        return f"{self.group:<12} {self.name:<54} {self.value:>10.3f} {self.unit:<8} {bar:<8} {self.verdict}".rstrip()


class Medians:
    """Named seconds of several rounds."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        self._seconds.setdefault(name, []).append(seconds)

    def __getitem__(self, name: str) -> float:
        return statistics.median(self._seconds[name])

    def roof(self, direction: str) -> float:
        """Seconds of plain I/O: the better of one and two in flight."""
        return min(self[f"{direction} 1"], self[f"{direction} 2"])


class PlainDirect:
    """One preallocated file, written and read in aligned blocks with direct I/O, one or two in flight."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._fd = os.open(directory / "plain", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, nbytes)
        self._buffers = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(2)]
        for buffer in self._buffers:
            buffer.write(os.urandom(BLOCK_BYTES))
        self.write(1, 0, nbytes)  # blocks that were never written are slower

    def close(self) -> None:
        os.close(self._fd)

    def write(self, flights: int, begin: int, end: int) -> float:
        """Seconds to write these bytes of the file; they are on the device then."""
        start = time.perf_counter()
        self._run(flights, begin, end, lambda buffer, offset: os.pwrite(self._fd, buffer, offset))
        os.fdatasync(self._fd)
        return time.perf_counter() - start

    def read(self, flights: int, begin: int, end: int) -> float:
        """Seconds to read these bytes of the file."""
        start = time.perf_counter()
        self._run(flights, begin, end, lambda buffer, offset: os.preadv(self._fd, [buffer], offset))
        return time.perf_counter() - start

    def measure(self, took: Medians, direction: str, turn: int, begin: int, end: int) -> None:
        """Once, with one or two in flight, which take turns."""
        flights = 1 + turn // 2 % 2
        took.add(f"{direction} {flights}", (self.write if direction == "write" else self.read)(flights, begin, end))

    def _run(self, flights: int, begin: int, end: int, move: Callable[[mmap.mmap, int], int]) -> None:
        def stripe(k: int) -> None:
            for offset in range(begin + k * BLOCK_BYTES, end, flights * BLOCK_BYTES):
                if move(self._buffers[k], offset) != BLOCK_BYTES:
                    raise OSError(f"a short transfer at {offset}")

        with ThreadPoolExecutor(flights) as threads:
            list(threads.map(stripe, range(flights)))


def randoms(count: int, nbytes: int) -> list[torch.Tensor]:
    """`count` tensors of `nbytes` in all."""
    whole = torch.randint(0, 256, (nbytes // count,), dtype=torch.uint8)
    return [whole.clone() for _ in range(count)]


def in_turns(turn: int, one: Callable[[], None], other: Callable[[], None]) -> None:
    """Both; in every second turn the other first: a virtual disk's host may cache what was written last."""
    for call in (one, other) if turn % 2 == 0 else (other, one):
        call()


def moved_in(took: Medians, move: Mover, pieces: list[Piece], store: FileStore) -> None:
    """One transfer."""
    took.add(move.__name__, move(pieces, store).seconds)


def timed(call: Callable[[], Ledger], took: Medians) -> None:
    """One sleep or wake: the whole call, and its copy."""
    start = time.perf_counter()
    ledger = call()
    took.add(ledger.kind, time.perf_counter() - start)
    took.add(f"{ledger.kind} copy", ledger.stages["copy"])


def segments(pieces: list[Piece]) -> list[list[Piece]]:
    """The same pieces in groups of `SEGMENT_BYTES`, large ones cut."""
    groups: list[list[Piece]] = []
    for home, slot in pieces:
        for start in range(0, slot.nbytes, SEGMENT_BYTES):
            nbytes = min(SEGMENT_BYTES, slot.nbytes - start)
            if not groups or sum(piece.slot.nbytes for piece in groups[-1]) + nbytes > SEGMENT_BYTES:
                groups.append([])
            groups[-1].append(Piece(home[start : start + nbytes], Slot(slot.offset + start, nbytes)))
    return groups


def transfers(directory: Path, nbytes: int, rounds: int) -> Iterator[Figure]:
    """`transfer.save` and `load` alone, into memory that was given back, segment by segment beside plain I/O.

    A virtual disk may serve a second of work fast and throttle the next, so the two take turns every few hundredths
    of a second. Each segment of ours pays for threads and a sync of its own.
    """
    plain = PlainDirect(directory, nbytes)
    for count in (2, MANY):
        tensors = randoms(count, nbytes)
        storages = [tensor.untyped_storage() for tensor in tensors]
        store, backend, took = FileStore(directory), MadviseBackend(), Medians()
        slots = store.reserve([tensor.nbytes for tensor in tensors])
        pieces = [Piece(tensor, slot) for tensor, slot in zip(tensors, slots, strict=True)]
        save(pieces, store)  # the first time into blocks that were never written
        groups = segments(pieces)[: nbytes // SEGMENT_BYTES]
        for turn in range(rounds):
            for direction, move in (("write", save), ("read", load)):
                for k, group in enumerate(groups):
                    begin = k * SEGMENT_BYTES
                    plainly = partial(plain.measure, took, direction, turn + k, begin, begin + SEGMENT_BYTES)
                    in_turns(turn + k, plainly, partial(moved_in, took, move, group, store))
                if move is save:
                    backend.release(storages)
                    backend.restore(storages)
        store.close()
        moved = statistics.mean(sum(piece.slot.nbytes for piece in group) for group in groups) / SEGMENT_BYTES
        for direction, move in (("write", save), ("read", load)):
            roof = took.roof(direction)
            yield Figure(
                "disk", f"plain direct {direction} beside {count} storages", SEGMENT_BYTES / roof / 1e9, "GB/s"
            )
            ratio = moved * roof / took[move.__name__]
            yield Figure("disk", f"{move.__name__} of {count} storages, of direct", ratio, "", 0.85)
    plain.close()


def through_a_sleeper(directory: Path, nbytes: int, rounds: int) -> Iterator[Figure]:
    """The same through `sleep()` and `wake()`: the copy alone, and the whole call with its fingerprints.

    Whole calls cannot take turns as often, so these ratios follow a throttled disk's moods far more.
    """
    plain = PlainDirect(directory, nbytes)
    for count in (2, MANY):
        tensors, took = randoms(count, nbytes), Medians()
        with Sleeper(extra={"params": tensors}, store_dir=directory, report_leftovers=False) as sleeper:
            with sleeper.asleep():  # the first sleep pays for the reservation
                pass
            for turn in range(rounds):
                torch._foreach_add_(tensors, 1)
                for direction, call in (("write", sleeper.sleep), ("read", sleeper.wake)):
                    in_turns(turn, partial(plain.measure, took, direction, turn, 0, nbytes), partial(timed, call, took))
        moved = sum(tensor.nbytes for tensor in tensors) / nbytes
        for kind, direction in (("sleep", "write"), ("wake", "read")):
            roof = moved * took.roof(direction)
            yield Figure(
                "sleeper", f"copy of a {kind}, {count} storages, of direct", roof / took[f"{kind} copy"], "", 0.85
            )
            yield Figure("sleeper", f"whole {kind}, {count} storages, of direct", roof / took[kind], "")
    plain.close()


def trained_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Layers of a small transformer with AdamW after one step: weights, gradients, moments."""
    layers = [nn.Linear(768, 3072) if k % 2 == 0 else nn.Linear(3072, 768) for k in range(12)]
    model = nn.Sequential(*layers, nn.LayerNorm(768))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 768)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def resident() -> int:
    """Resident bytes of the process, with what the heap could give back given back."""
    gc.collect()
    kernel.trim_heap()
    return kernel.process_resident_bytes()


def written_bytes() -> int:
    """Bytes this process sent towards a disk so far. Source: /proc/self/io, `write_bytes`."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(fields["write_bytes"])


def memory(directory: Path, nbytes: int, rounds: int) -> Iterator[Figure]:
    """Resident memory asleep and awake, what cycles leave behind, and a second sleep of an unchanged model."""
    model, optimizer = trained_model()
    tensors = [t for s in optimizer.state.values() for t in s.values()] + list(model.parameters())
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    payload = sum(tensor.nbytes for tensor in tensors)
    addresses = [tensor.data_ptr() for tensor in tensors]
    with Sleeper(model, optimizer=optimizer, store_dir=directory) as sleeper:
        with sleeper.asleep():
            pass
        awake = resident()
        sleeper.sleep()
        asleep = resident()
        sleeper.wake()
        written = written_bytes()
        again = sleeper.sleep().copied_bytes
        written = written_bytes() - written
        sleeper.wake()
        after_three = resident()
        for _ in range(RESIDUE_CYCLES):
            sleeper.sleep()
            sleeper.wake()
        residue = resident() - after_three
    kept = sum(a == tensor.data_ptr() for a, tensor in zip(addresses, tensors, strict=True))
    yield Figure("memory", "components awake", payload / MIB, "MiB")
    yield Figure("memory", "of them resident asleep", 100 * (payload - (awake - asleep)) / payload, "%", at_most=3)
    yield Figure("memory", "addresses kept", 100 * kept / len(tensors), "%", 100)
    yield Figure("memory", f"residue of {RESIDUE_CYCLES} cycles", residue / MIB, "MiB", at_most=1)
    yield Figure("memory", "written by a second sleep, by the ledger", again, "bytes", at_most=0)
    yield Figure("memory", "written by a second sleep, by the kernel", written, "bytes", at_most=0)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch's own threads do not help."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fingerprint_rates(directory: Path, nbytes: int, rounds: int) -> Iterator[Figure]:
    """GB/s of processor time on one core."""
    for count in (2, MANY):
        blocks, seconds = randoms(count, min(nbytes, GIB)), []
        with one_thread():
            for _ in range(rounds):
                start = time.process_time()
                fingerprints(blocks)
                seconds.append(time.process_time() - start)
        rate = sum(block.nbytes for block in blocks) / statistics.median(seconds)
        yield Figure("fingerprint", f"{count} storages, one core", rate / 1e9, "GB/s", 5)


def own_time(directory: Path, nbytes: int, rounds: int) -> Iterator[Figure]:
    """Processor seconds of a sleep and a wake of 20,000 storages of 1 KiB, every one changed in between."""
    for backend, fate in (("madvise", "kept"), ("resize", "moved")):
        for leftovers in (False, True):
            tensors = [torch.randn(256) for _ in range(MANY)]
            wall, processor = [], []
            with (
                one_thread(),
                Sleeper(
                    extra={"params": tensors}, store_dir=directory, memory=backend, report_leftovers=leftovers
                ) as sleeper,
            ):
                with sleeper.asleep():
                    pass
                for _ in range(rounds):
                    torch._foreach_add_(tensors, 1.0)
                    start, start_processor = time.perf_counter(), time.process_time()
                    sleeper.sleep()
                    sleeper.wake()
                    wall.append(time.perf_counter() - start)
                    processor.append(time.process_time() - start_processor)
            name = f"{MANY} of 1 KiB, {fate}, leftovers {'named' if leftovers else 'not named'}"
            yield Figure("own time", name, statistics.median(processor), "s", at_most=0.5)
            yield Figure("own time", f"{name}, wall", statistics.median(wall), "s")


PARTS = {
    "disk": transfers,
    "sleeper": through_a_sleeper,
    "memory": memory,
    "fingerprint": fingerprint_rates,
    "own": own_time,
}


def circumstances() -> dict[str, object]:
    """Machine, versions and date."""
    models = [line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if "model name" in line]
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {
            "cpu": models[0].split(": ")[1] if models else platform.machine(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * kernel.PAGE_BYTES,
            "load_average_1min": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "xxhash", "torpor")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the disk to measure")
    parser.add_argument("--gib", type=float, default=1.0, help="bytes moved each way, in GiB")
    parser.add_argument("--rounds", type=int, default=8, help="rounds counted, at least 4")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="some parts; writes no result")
    parser.add_argument("--output", type=Path, default=RESULT, help="where the numbers go, as JSON")
    args = parser.parse_args()
    nbytes = max(1, int(args.gib * GIB) // SEGMENT_BYTES) * SEGMENT_BYTES
    report, figures = circumstances(), []
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="torpor-bench-") as scratch:
        for part in args.only:
            for figure in PARTS[part](Path(scratch), nbytes, max(4, args.rounds)):
                print(figure.line(), flush=True)
                figures.append(figure)
    if list(args.only) == list(PARTS):
        report["payload_bytes"], report["rounds"] = nbytes, args.rounds
        report["figures"] = [asdict(figure) | {"verdict": figure.verdict} for figure in figures]
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

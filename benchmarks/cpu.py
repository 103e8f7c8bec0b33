"""What the sleeper does on a machine without a GPU, against what the machine can do in the same run.

    python benchmarks/cpu.py [--directory DIR] [--gib 1] [--rounds 8] [--only disk own ...]

One table, and every number with machine, versions and date in `results/cpu.json`.

Disk. `transfer.save` and `load` of 1 GiB against plain direct I/O: the same stretch of the same file, written or read
from and into a few buffers on huge pages that stay in the processor's cache, so that a plain run has no copy to make
and no storage to find. Of 16 combinations of request size and number in flight plain I/O has the one that was the
fastest just before, in each direction; beside it stands how much faster that is than plain I/O with the size and number
of ours. Both end a write with one fdatasync. The two take turns every 128 MiB, each as often first as the other,
because a virtual disk's host caches and throttles; a figure is the median over all turns of the seconds of plain over
those of ours, one ratio for each turn. Padding between slots, of less than 4 KiB each, lies in that stretch too; how
much of it there is stands beside. A load goes once into memory that is there, and once into memory that was given back,
whose pages the kernel brings while the load goes on. "Memory of that size" is plain I/O with 1 GiB of memory in place
of its few buffers: nothing is copied nor looked at there either, and what it loses is the price of memory that is not
in a cache.

Sleeper. The same through `sleep()` and `wake()`: the stage in which bytes are copied (on the way down fingerprints are
taken in it, on the way back pages are brought) and the whole call. Whole calls cannot take turns as often, so these
ratios follow a throttled disk's moods far more.

Other work on the machine slows ours and spares plain I/O, which needs no processor. So only rounds count in which other
processes took less than 5% of the processors, or, if four times as many rounds had too few of those, the quietest; the
largest share that others had in a round that counted is recorded.

Own time is processor time, medians over rounds; wall time stands beside it. Residue is what resident memory gained
from the first third of the cycles to the last, by medians, in a process of its own and after a few cycles that are not
counted: somewhere in those, CPython's table of interned strings doubles, once, by 1.8 MiB.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import nn
from typing_extensions import Buffer

from torpor import Sleeper
from torpor.fingerprint import fingerprints
from torpor.memory import kernel
from torpor.memory.madvise import MadviseBackend
from torpor.stores.base import Slot
from torpor.stores.file import FileStore
from torpor.stores.pages import huge_pages
from torpor.stores.slots import up
from torpor.transfer import Moved, Piece, load, save

RESULT = Path(__file__).parent / "results" / "cpu.json"
#: `transfer.save` or `transfer.load`.
Mover: TypeAlias = Callable[[list[Piece], FileStore], Moved]
#: Seconds of ours and of plain I/O, for each turn.
Pairs: TypeAlias = list[tuple[float, float]]
#: `os.pwritev` or `os.preadv`.
PlainMove: TypeAlias = Callable[[int, list[memoryview], int], int]

KIB, MIB, GIB = 1024, 1024**2, 1024**3
MANY = 20_000
#: What plain I/O tries: bytes of a request, requests in flight.
WAYS_BYTES = (512 * KIB, MIB, 2 * MIB, 4 * MIB)
WAYS_FLIGHTS = (2, 4, 8, 16)
SEGMENT_BYTES = 128 * MIB
WARM_UP_CYCLES = 10
#: What other processes may take of the processors while a round counts as quiet.
QUIET_SHARE = 0.05
PATIENCE = 4
T = TypeVar("T")
#: Of each figure's rounds, the share that others had in the noisiest that counted.
shares: list[float] = []
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


class Way(NamedTuple):
    """How plain I/O goes. Example: `Way(1048576, 4)`."""

    block_bytes: int
    flights: int

    def __str__(self) -> str:
        return f"{self.block_bytes // KIB} KiB, {self.flights} in flight"


class Kind(NamedTuple):
    """What plain I/O does: with its few buffers, or straight with memory as large as the payload."""

    writes: bool
    straight: bool = False

    def __str__(self) -> str:
        where = "memory of that size" if self.straight else "few buffers"
        return f"plain write from {where}" if self.writes else f"plain read into {where}"


class PlainDirect:
    """Direct I/O on an open store's file, which loses its contents: large requests, several in flight, no copies."""

    def __init__(self, store: FileStore, rounds: int) -> None:
        """Each kind tries every way so many times, before it is used first."""
        self._fd = os.open(store.path, os.O_RDWR | os.O_DIRECT)
        buffers = huge_pages(max(WAYS_BYTES), max(WAYS_FLIGHTS))
        for buffer in buffers:
            buffer.random_(0, 256)
        self._views = [memoryview(cast(Buffer, buffer.numpy())) for buffer in buffers]
        self._payload_bytes = up(store.reserved_bytes, kernel.HUGE_PAGE_BYTES)
        self._of_store = Way(store.chunk_bytes, len(store.buffers()))
        self._rounds = rounds
        self._ways: dict[Kind, Way] = {}
        self.figures: list[Figure] = []

    def close(self) -> None:
        os.close(self._fd)

    @cached_property
    def _payload(self) -> memoryview:
        return memoryview(cast(Buffer, huge_pages(self._payload_bytes)[0].fill_(1).numpy()))

    def run(self, kind: Kind, begin: int, end: int) -> float:
        """Seconds to move these bytes of the file; what is written is on the device then."""
        if kind not in self._ways:
            self._ways[kind] = self._fastest(kind)
        return self._run(kind, begin, end, self._ways[kind])

    def _fastest(self, kind: Kind) -> Way:
        ways = list(dict.fromkeys([self._of_store, *(Way(*way) for way in product(WAYS_BYTES, WAYS_FLIGHTS))]))
        seconds: dict[Way, list[float]] = {way: [] for way in ways}
        for _ in range(self._rounds):
            for way in ways:
                seconds[way].append(self._run(kind, 0, SEGMENT_BYTES, way))
        medians = {way: statistics.median(found) for way, found in seconds.items()}
        best = min(medians, key=medians.__getitem__)
        ratio = medians[self._of_store] / medians[best]
        self.figures.append(Figure("disk", f"{kind}, {best}, of {self._of_store}", ratio, ""))
        return best

    def _run(self, kind: Kind, begin: int, end: int, way: Way) -> float:
        shared = iter(range(begin, end, way.block_bytes))  # the interpreter's lock makes each step one thread's
        move: PlainMove = os.pwritev if kind.writes else os.preadv

        def work(view: memoryview) -> None:
            for offset in shared:
                nbytes = min(way.block_bytes, end - offset)
                part = self._payload[offset : offset + nbytes] if kind.straight else view[:nbytes]
                if move(self._fd, [part], offset) != nbytes:
                    raise OSError(f"a short transfer at {offset}")

        start = time.perf_counter()
        with ThreadPoolExecutor(way.flights) as threads:
            list(threads.map(work, self._views[: way.flights]))
        if kind.writes:
            os.fdatasync(self._fd)
        return time.perf_counter() - start


def randoms(count: int, nbytes: int) -> list[torch.Tensor]:
    """`count` tensors of `nbytes` in all."""
    whole = torch.randint(0, 256, (nbytes // count,), dtype=torch.uint8)
    return [whole.clone() for _ in range(count)]


def segments(pieces: list[Piece]) -> list[list[Piece]]:
    """The same pieces in groups of `SEGMENT_BYTES`, large ones cut; what is left over at the end is left out."""
    groups: list[list[Piece]] = [[]]
    room = SEGMENT_BYTES
    for home, slot in pieces:
        start = 0
        while start < slot.nbytes:
            nbytes = min(room, slot.nbytes - start)
            if nbytes < slot.nbytes - start:
                nbytes -= nbytes % FileStore.alignment_bytes  # a piece begins where a block may
            groups[-1].append(Piece(home[start : start + nbytes], Slot(slot.offset + start, nbytes)))
            start += nbytes
            room -= nbytes
            if room < FileStore.alignment_bytes:
                groups.append([])
                room = SEGMENT_BYTES
    return groups[:-1]


def others_s() -> float:
    """Seconds that the processors worked for other processes so far. Source: /proc/stat, in ticks."""
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = Path("/proc/stat").read_text("ascii").split()[1:]
    ticks = sum(map(int, (user, nice, system, irq, softirq, steal)))
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def quietest(rounds: int, one: Callable[[int], T]) -> list[T]:
    """What `one(number of the round)` returns in so many rounds while other processes did little, in order.

    Goes on until there are enough of those, or `PATIENCE` times as many as asked for; then the quietest ones count.
    """
    found: list[tuple[float, int, T]] = []
    for turn in range(PATIENCE * rounds):
        start, others = time.perf_counter(), others_s()
        result = one(turn)
        share = (others_s() - others) / (time.perf_counter() - start) / (os.cpu_count() or 1)
        found.append((max(share, QUIET_SHARE), turn, result))
        if sum(share <= QUIET_SHARE for share, _, _ in found) == rounds:
            break
    found = sorted(found, key=lambda item: item[:2])[:rounds]
    shares.append(found[-1][0])
    return [result for _, turn, result in sorted(found, key=lambda item: item[1])]


def taken(move: Mover, pieces: list[Piece], store: FileStore) -> float:
    """Seconds of one transfer of ours."""
    return move(pieces, store).seconds


def in_turns(turn: int, ours: Callable[[], float], plain: Callable[[], float]) -> tuple[float, float]:
    """Seconds of ours and of plain; in every second turn plain goes first."""
    if turn % 2:
        reference = plain()
        return ours(), reference
    return ours(), plain()


def stretch(group: list[Piece]) -> tuple[int, int]:
    """Where in the file a group of pieces begins and ends."""
    last = group[-1].slot
    return group[0].slot.offset, last.offset + up(last.nbytes, FileStore.alignment_bytes)


def transfers(directory: Path, nbytes: int, rounds: int) -> Iterator[Figure]:
    """`transfer.save` and `load` alone beside plain I/O: see above."""
    for count in (2, MANY):
        yield from transfers_of(count, directory, nbytes, rounds)


def transfers_of(count: int, directory: Path, nbytes: int, rounds: int) -> Iterator[Figure]:
    """The same for so many storages."""
    tensors = randoms(count, nbytes)
    storages = [tensor.untyped_storage() for tensor in tensors]
    store, backend = FileStore(directory), MadviseBackend()
    slots = store.reserve([tensor.nbytes for tensor in tensors])
    pieces = [Piece(tensor, slot) for tensor, slot in zip(tensors, slots, strict=True)]
    save(pieces, store)  # the first time into blocks that were never written
    plain, groups = PlainDirect(store, rounds), segments(pieces)

    def one(move: Mover, kind: Kind, given_back: bool, turn: int) -> Pairs:
        if given_back:
            backend.release(storages)
            backend.restore(storages)
        return [
            in_turns(turn + k, partial(taken, move, group, store), partial(plain.run, kind, *stretch(group)))
            for k, group in enumerate(groups)
        ]

    for way, move, kind, given_back in (
        (f"save of {count} storages", save, Kind(writes=True), False),
        (f"load of {count} storages", load, Kind(writes=False), False),
        (f"load of {count}, memory given back", load, Kind(writes=False), True),
    ):
        pairs = [pair for turn in quietest(rounds, partial(one, move, kind, given_back)) for pair in turn]
        rate = SEGMENT_BYTES / statistics.median(reference for _, reference in pairs)
        ratio = statistics.median(reference / ours for ours, reference in pairs)
        yield Figure("disk", f"plain direct I/O beside {way}", rate / 1e9, "GB/s")
        yield Figure("disk", f"{way}, of direct", ratio, "", None if given_back else 0.85)
    padding = 1 - sum(slot.nbytes for slot in slots) / store.reserved_bytes
    yield Figure("disk", f"padding of {count} storages", 100 * padding, "%")
    if count == 2:
        yield from straight(plain, store.reserved_bytes, rounds)
    yield from plain.figures
    plain.close()
    store.close()


def straight(plain: PlainDirect, nbytes: int, rounds: int) -> Iterator[Figure]:
    """What plain I/O reaches with the memory that the bytes come from or go to in place of its few buffers."""

    def one(writes: bool, turn: int) -> Pairs:
        return [
            in_turns(
                turn + k,
                *(partial(plain.run, Kind(writes, way), begin, begin + SEGMENT_BYTES) for way in (True, False)),
            )
            for k, begin in enumerate(range(0, nbytes - SEGMENT_BYTES + 1, SEGMENT_BYTES))
        ]

    for writes in (True, False):
        pairs = [pair for turn in quietest(rounds, partial(one, writes)) for pair in turn]
        ratio = statistics.median(reference / seconds for seconds, reference in pairs)
        yield Figure("disk", f"{Kind(writes, straight=True)}, of direct", ratio, "")


def through_a_sleeper(directory: Path, nbytes: int, rounds: int) -> Iterator[Figure]:
    """The same through `sleep()` and `wake()`: see above."""
    for count in (2, MANY):
        for name, ratio in sleeper_of(count, directory, nbytes, rounds).items():
            yield Figure("sleeper", f"{name}, {count} storages, of direct", ratio, "")


def sleeper_of(count: int, directory: Path, nbytes: int, rounds: int) -> dict[str, float]:
    """The same for so many storages. Plain I/O writes while nothing sleeps."""
    tensors, store = randoms(count, nbytes), FileStore(directory)
    with Sleeper(extra={"params": tensors}, store=store, report_leftovers=False) as sleeper:
        with sleeper.asleep():  # the first sleep pays for the reservation
            pass
        plain, end = PlainDirect(store, rounds), store.reserved_bytes

        def one(turn: int) -> dict[str, float]:
            torch._foreach_add_(tensors, 1)
            write = plain.run(Kind(writes=True), 0, end) if turn % 2 else None
            start = time.perf_counter()
            down = sleeper.sleep()
            slept = time.perf_counter()
            read = plain.run(Kind(writes=False), 0, end) if turn % 2 else None
            resumed = time.perf_counter()
            back = sleeper.wake()
            woken = time.perf_counter()
            write, read = write or plain.run(Kind(writes=True), 0, end), read or plain.run(Kind(writes=False), 0, end)
            return {
                "copy of a sleep": write / down.stages["copy"],
                "whole sleep": write / (slept - start),
                "copy of a wake": read / back.stages["copy"],
                "whole wake": read / (woken - resumed),
            }

        found = quietest(rounds, one)
        plain.close()
    return {name: statistics.median(ratios[name] for ratios in found) for name in found[0]}


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


def residents(directory: Path, cycles: int) -> list[int]:
    """Resident bytes after each of so many cycles."""
    model, optimizer = trained_model()
    found = []
    with Sleeper(model, optimizer=optimizer, store_dir=directory) as sleeper:
        for _ in range(cycles):
            sleeper.sleep()
            sleeper.wake()
            found.append(resident())
    return found


def residue(directory: Path) -> float:
    """Bytes that `RESIDUE_CYCLES` leave behind: see above."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        found = other.submit(residents, directory, WARM_UP_CYCLES + RESIDUE_CYCLES).result()[WARM_UP_CYCLES:]
    return statistics.median(found[-RESIDUE_CYCLES // 3 :]) - statistics.median(found[: RESIDUE_CYCLES // 3])


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
    kept = sum(a == tensor.data_ptr() for a, tensor in zip(addresses, tensors, strict=True))
    yield Figure("memory", "components awake", payload / MIB, "MiB")
    yield Figure("memory", "of them resident asleep", 100 * (payload - (awake - asleep)) / payload, "%", at_most=3)
    yield Figure("memory", "addresses kept", 100 * kept / len(tensors), "%", 100)
    yield Figure("memory", f"residue of {RESIDUE_CYCLES} cycles", residue(directory) / MIB, "MiB", at_most=1)
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
        blocks = randoms(count, min(nbytes, GIB))

        def one(_: int, blocks: list[torch.Tensor] = blocks) -> float:
            start = time.process_time()
            fingerprints(blocks)
            return time.process_time() - start

        with one_thread():
            seconds = quietest(rounds, one)
        rate = sum(block.nbytes for block in blocks) / statistics.median(seconds)
        yield Figure("fingerprint", f"{count} storages, one core", rate / 1e9, "GB/s", 5)


def own_time(directory: Path, nbytes: int, rounds: int) -> Iterator[Figure]:
    """Processor seconds of a sleep and a wake of 20,000 storages of 1 KiB, every one changed in between."""
    for backend, fate in (("madvise", "kept"), ("resize", "moved")):
        for leftovers in (False, True):
            tensors = [torch.randn(256) for _ in range(MANY)]
            with (
                one_thread(),
                Sleeper(
                    extra={"params": tensors}, store_dir=directory, memory=backend, report_leftovers=leftovers
                ) as sleeper,
            ):
                with sleeper.asleep():
                    pass

                def one(_: int, tensors: list[torch.Tensor] = tensors) -> tuple[float, float]:
                    torch._foreach_add_(tensors, 1.0)
                    start, start_processor = time.perf_counter(), time.process_time()
                    sleeper.sleep()
                    sleeper.wake()
                    return time.perf_counter() - start, time.process_time() - start_processor

                wall, processor = zip(*quietest(rounds, one), strict=True)
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
        report["largest_share_of_others"] = max(shares)
        report["figures"] = [asdict(figure) | {"verdict": figure.verdict} for figure in figures]
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

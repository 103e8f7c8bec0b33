"""What the parts below the sleeper cost on one GPU: pages, page-locking, copies, fingerprints, the allocator's view.

    python benchmarks/micro_cuda.py --out benchmarks/results/micro_cuda.json [--only vmm,copies]

Bytes are bytes, rates are 10^9 bytes a second, medians of the repeats unless a list says otherwise.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torpor.fingerprint import fingerprints
from torpor.memory import allocator
from torpor.memory.base import byte_view
from torpor.memory.kernel import available_bytes
from torpor.memory.vmm import pool, vmm_backend
from torpor.memory.vmm_library import vmm_library
from torpor.stores import arena as arena_module
from torpor.stores.arena import Arena
from torpor.stores.pinned import PinnedStore
from torpor.transfer import Piece
from torpor.transfer_cuda import load_to_cuda, save_from_cuda

MIB, GIB = 1024**2, 1024**3
DEVICE = torch.device("cuda", 0)


def seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """Median of synchronised wall-clock seconds."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def rate(nbytes: int, spent_s: float) -> float:
    return round(nbytes / spent_s / 1e9, 2)


def storages(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tensors]


def measure_vmm() -> dict[str, Any]:
    """Unmap and map many segments; look at the allocator's account of many blocks."""
    found: dict[str, Any] = {}
    backend, library = vmm_backend(), vmm_library()
    for num, nbytes in ((60, 20 * MIB), (4, 2 * GIB), (4096, 2 * MIB), (20_000, 429_496)):
        with pool():
            tensors = [torch.empty(nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(num)]
        table = library.extents(0)
        addresses = table["address"].tolist()
        row: dict[str, Any] = {"extents": len(addresses), "bytes": int(table["nbytes"].sum())}
        unmap, mapped = [], []
        for _ in range(3):
            torch.cuda.synchronize()
            t0 = time.perf_counter()
            library.unmap(addresses, 0)
            t1 = time.perf_counter()
            library.map(addresses, 0)
            t2 = time.perf_counter()
            unmap.append(t1 - t0)
            mapped.append(t2 - t1)
        row["unmap_s"], row["map_s"] = [round(s, 5) for s in unmap], [round(s, 5) for s in mapped]
        t0 = time.perf_counter()
        allocator.look()
        t1 = time.perf_counter()
        backend.refresh()
        t2 = time.perf_counter()
        held = storages(tensors)
        t3 = time.perf_counter()
        for storage in held:
            backend.refusal(storage)
        t4 = time.perf_counter()
        backend.release(held)
        t5 = time.perf_counter()
        backend.restore(held)
        t6 = time.perf_counter()
        times = {
            "look": t1 - t0,
            "refresh": t2 - t1,
            "refusals": t4 - t3,
            "release": t5 - t4,
            "restore": t6 - t5,
        }
        row |= {f"{name}_s": round(value, 5) for name, value in times.items()}
        found[f"{num} x {nbytes}"] = row
        del tensors, held
        torch.cuda.empty_cache()
        _drop_pools()
    return found


def _drop_pools() -> None:
    """Let go of the idle pools, so that the next measurement starts without segments."""
    pools = vmm_backend().pools
    pools._usable.clear()
    pools._aside.clear()
    torch.cuda.empty_cache()


def measure_pinning(nbytes: int = 6 * GIB) -> dict[str, Any]:
    """Page-lock in several ways; the first pass also makes the machine's memory exist, where it is virtual."""
    found: dict[str, Any] = {"available_before": available_bytes()}
    found["memory_info"] = Path("/proc/meminfo").read_text().splitlines()[:3]
    for turn in range(2):
        for name, chunk, fault, threads in (
            ("1 GiB chunks, 8 threads", GIB, 64 * MIB, 8),
            ("one registration, 8 threads", nbytes, 64 * MIB, 8),
            ("1 GiB chunks, 16 threads", GIB, 64 * MIB, 16),
            ("256 MiB chunks, 8 threads", 256 * MIB, 32 * MIB, 8),
        ):
            arena_module.REGISTRATION_BYTES, arena_module._FAULT_BYTES = chunk, fault
            arena_module._MAX_THREADS = threads
            arena = Arena(device=DEVICE)
            faults: list[float] = []
            _time_method(arena, "_fault_in", faults)
            start = time.perf_counter()
            arena.take(nbytes)
            took = time.perf_counter() - start
            start = time.perf_counter()
            arena.close()
            close_s = time.perf_counter() - start
            found[f"{name}, pass {turn}"] = {
                "s": round(took, 3),
                "fault_s": round(sum(faults), 3),
                "close_s": round(close_s, 3),
            }
    arena_module.REGISTRATION_BYTES, arena_module._FAULT_BYTES, arena_module._MAX_THREADS = GIB, 64 * MIB, 8
    start = time.perf_counter()
    held = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    found["torch pin_memory"] = {"s": round(time.perf_counter() - start, 3), "asked": held.numel()}
    del held
    torch._C._host_emptyCache()
    return found


def _time_method(arena: Arena, name: str, times: list[float]) -> None:
    method = getattr(arena, name)

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args)
        finally:
            times.append(time.perf_counter() - start)

    setattr(arena, name, timed)


def roof() -> tuple[float, float]:
    """Rates of one large copy from and to torch's page-locked memory: device to host, host to device."""
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(GIB, dtype=torch.uint8, device=DEVICE)
    out = seconds(lambda: host.copy_(device, non_blocking=True), 7)
    back = seconds(lambda: device.copy_(host, non_blocking=True), 7)
    return rate(GIB, out), rate(GIB, back)


def measure_copies(total: int = 8 * GIB) -> dict[str, Any]:
    """Transfers of the same bytes in 2 and in 20,000 storages, against the roof, in one run."""
    found: dict[str, Any] = {}
    store = PinnedStore(device=DEVICE)
    for num in (2, 200, 20_000):
        tensors = [torch.randint(0, 255, (total // num,), dtype=torch.uint8, device=DEVICE) for _ in range(num)]
        homes = [byte_view(s) for s in storages(tensors)]
        start = time.perf_counter()
        slots = store.reserve([h.numel() for h in homes])
        pieces = [Piece(h, s) for h, s in zip(homes, slots, strict=True)]
        row: dict[str, Any] = {"reserve_s": round(time.perf_counter() - start, 3)}
        nbytes = sum(h.numel() for h in homes)
        row["host_bytes_over_payload"] = round(store.host_bytes / nbytes, 5)
        roof_out, roof_back = roof()
        save_s = seconds(partial(save_from_cuda, pieces, store), 5)
        load_s = seconds(partial(load_to_cuda, pieces, store), 5)
        row |= {
            "roof_out": roof_out,
            "roof_back": roof_back,
            "save": rate(nbytes, save_s),
            "load": rate(nbytes, load_s),
        }
        row["save_ratio"], row["load_ratio"] = round(row["save"] / roof_out, 3), round(row["load"] / roof_back, 3)
        found[f"{num} storages"] = row
        store.release(slots)
        del tensors, homes, pieces
        torch.cuda.empty_cache()
    store.close()
    return found


def measure_fingerprint(total: int = 8 * GIB) -> dict[str, Any]:
    """Fingerprints of the same bytes in 2 and in 20,000 storages, launch, table and read-back included."""
    found: dict[str, Any] = {}
    for num in (2, 200, 20_000):
        homes = [torch.randint(0, 255, (total // num,), dtype=torch.uint8, device=DEVICE) for _ in range(num)]
        fingerprints(homes)
        spent = seconds(partial(fingerprints, homes), 5)
        found[f"{num} storages"] = {"s": round(spent, 5), "rate": rate(total, spent)}
        del homes
    x = torch.randint(0, 255, (total,), dtype=torch.uint8, device=DEVICE)
    y = torch.empty_like(x)
    copy_s = seconds(lambda: y.copy_(x), 5)
    found["device copy, bytes read plus written"] = rate(2 * total, copy_s)
    found["one storage, kernel shapes"] = _kernel_shapes(x)
    return found


def _kernel_shapes(x: torch.Tensor) -> dict[str, float]:
    from torpor import fingerprint_cuda as kernel

    rates: dict[str, float] = {}
    sums = torch.zeros(1, 2, dtype=torch.uint64, device=DEVICE)
    chunk_before = kernel.CHUNK_BYTES
    for chunk_kib in (128, 256, 1024):
        kernel.CHUNK_BYTES = chunk_kib * 1024
        rows = kernel._chunks(np.array([x.data_ptr()]), np.array([x.numel()]))
        table = torch.from_numpy(rows).to(DEVICE)
        for tile in (512, 1024, 2048):
            for warps in (4, 8):

                def launch(table: torch.Tensor = table, tile: int = tile, warps: int = warps) -> None:
                    kernel._add_chunks[(len(table),)](table, sums, TILE=tile, num_warps=warps)

                launch()
                rates[f"{chunk_kib} KiB, tile {tile}, {warps} warps"] = rate(x.numel(), seconds(launch, 5))
    kernel.CHUNK_BYTES = chunk_before
    return rates


def measure_fresh(total: int = 4 * GIB) -> dict[str, Any]:
    """Copies into newly mapped pages, 256 MiB at a time, after large memory was freed before or after the mapping."""
    backend = vmm_backend()
    with pool():
        home = torch.empty(total, dtype=torch.uint8, device=DEVICE)
    host = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    host.fill_(1)
    target = [home.untyped_storage()]
    cases = {
        "new pages, nothing freed": (0, True, False, 0.0),
        "40 GiB written and freed, then mapped": (40 * GIB, True, False, 0.0),
        "40 GiB never written, freed, then mapped": (40 * GIB, False, False, 0.0),
        "110 GiB written and freed, then mapped": (110 * GIB, True, False, 0.0),
        "mapped, then 110 GiB written before freed": (110 * GIB, True, True, 0.0),
        "110 GiB written and freed, then mapped, 2 s later": (110 * GIB, True, False, 2.0),
    }
    found: dict[str, Any] = {"pages that were always there": _chunk_rates(home, host)}
    for name, (freed_bytes, written, mapped_first, pause_s) in cases.items():
        backend.release(target)
        if mapped_first:
            backend.restore(target)
        _take_and_free(freed_bytes, written)
        time.sleep(pause_s)
        backend.restore(target)
        found[name] = [_chunk_rates(home, host) for _ in range(2)]
        time.sleep(1.5)
    return found


def _take_and_free(nbytes: int, written: bool) -> None:
    held = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    if written:
        held.fill_(255)
    torch.cuda.synchronize()
    del held
    torch.cuda.empty_cache()


def _chunk_rates(home: torch.Tensor, host: torch.Tensor) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True)]
    events[0].record()
    for to, source in zip(home.split(256 * MIB), host.split(256 * MIB), strict=True):
        to.copy_(source, non_blocking=True)
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
    torch.cuda.synchronize()
    return [round(256 * MIB / begin.elapsed_time(end) / 1e6, 1) for begin, end in pairwise(events)]


def measure_engines(total: int = 4 * GIB) -> dict[str, Any]:
    """Rates of copies by the copy engines and by kernels, undisturbed and right after 110 GiB were freed."""
    from torpor.gather_cuda import launch
    from torpor.transfer_cuda import chunks

    device = torch.randint(0, 255, (total,), dtype=torch.uint8, device=DEVICE)
    host = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    host.fill_(1)
    ends = [np.array([t.data_ptr()]) for t in (host, device)]
    size = np.array([total])
    into, out_of = (torch.from_numpy(chunks(a, b, size)).to(DEVICE) for a, b in (ends, ends[::-1]))
    half = total // 2
    side = torch.cuda.Stream()

    def two_streams() -> None:
        side.wait_stream(torch.cuda.current_stream())
        device[:half].copy_(host[:half], non_blocking=True)
        with torch.cuda.stream(side):
            device[half:].copy_(host[half:], non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    def engine_and_kernel() -> None:
        side.wait_stream(torch.cuda.current_stream())
        device[:half].copy_(host[:half], non_blocking=True)
        with torch.cuda.stream(side):
            launch(into[len(into) // 2 :])
        torch.cuda.current_stream().wait_stream(side)

    ways = {
        "engine, host to device": lambda: device.copy_(host, non_blocking=True),
        "engine, device to host": lambda: host.copy_(device, non_blocking=True),
        "kernel, host to device": lambda: launch(into),
        "kernel, device to host": lambda: launch(out_of),
        "engine on two streams, host to device": two_streams,
        "engine and kernel, host to device": engine_and_kernel,
    }
    store = PinnedStore(device=DEVICE)
    pieces = [Piece(device, store.reserve([total])[0])]
    save_from_cuda(pieces, store)
    ways["load_to_cuda"] = lambda: load_to_cuda(pieces, store)
    found: dict[str, Any] = {}
    for name, way in ways.items():
        way()
        quiet = rate(total, seconds(way, 3))
        found[name] = {"undisturbed": quiet, "right after 110 GiB were freed": _after_a_thief(way, total)}
    return found


def _after_a_thief(way: Callable[[], Any], total: int) -> list[float]:
    """Rates of two copies in a row, begun as soon as a large allocation has been freed."""
    _take_and_free(110 * GIB, written=True)
    rates = [rate(total, seconds(way, 1)) for _ in range(2)]
    time.sleep(1.5)
    return rates


MEASUREMENTS = {
    "engines": measure_engines,
    "vmm": measure_vmm,
    "fingerprint": measure_fingerprint,
    "copies": measure_copies,
    "fresh": measure_fresh,
    "pinning": measure_pinning,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(MEASUREMENTS))
    options = parser.parse_args()
    properties = torch.cuda.get_device_properties(0)
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "card": properties.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    for name in options.only.split(","):
        start = time.perf_counter()
        results[name] = MEASUREMENTS[name]()
        results[name]["seconds"] = round(time.perf_counter() - start, 1)
        print(name, json.dumps(results[name], indent=1), flush=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""An actor hands its GPU over and takes it back: Torpor beside four other ways, interleaved in one run.

    python benchmarks/handoff.py --out benchmarks/results/handoff.json [--params 2000000000] [--cycles 3]

The actor: bf16 parameters, fp32 masters, gradient buffers and Adam moments; a LoRA variant: a frozen bf16 base and
fp32 adapters with moments; and an FSDP2 variant: fp32 shards, their gradients and Adam moments, half as many
parameters. Each way has a process of its own, all alive at once in groups that fit the host, and they take turns.
Bytes are bytes, rates are 10^9 bytes a second, seconds are wall-clock; medians of the cycles.
Without torch_memory_saver its two ways are left out, and the figures against them are not measured.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import platform
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined] # not in its __all__
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torpor
from torpor.kinds import Role

MIB, GIB = 1024**2, 1024**3
DEVICE = torch.device("cuda", 0)
_BUCKETS = 16
_ADAPTER_SHARE = 1000
"""Adapter parameters are one in so many of the base's."""
_SETTLE_S = 0.5
"""The driver wipes freed memory for some tenths of a second, with the engine that brings bytes to the device."""
_SLOW, _SLOW_CYCLES = ("saver", "to_cpu"), 2
"""Ways that take seconds a gigabyte, and the most cycles that they are given."""
FAST_GROUP, SLOW_GROUP = ("torpor", "saver", "saver_retained"), ("torpor", "to_cpu", "by_hand")
_FORWARD_WAYS = ("torpor", "saver_retained")
"""The ways whose wake until the first forward pass is compared."""
LABELS = {
    "torpor": "(a) Torpor",
    "saver": "(b) torch_memory_saver",
    "saver_retained": "(c) torch_memory_saver, retained",
    "to_cpu": '(d) .to("cpu") and back',
    "by_hand": "(e) pinned copies by hand",
}

Json = dict[str, Any]


class Actor:
    """Flat buffers as distributed optimizers have them, `_BUCKETS` of each kind.

    Adam: `params` are bf16 copies of `masters`, which the optimizer steps. LoRA: `params` are frozen, `masters`
    are the adapters. FSDP2: `masters` are the local shards of a sharded `model`, and there is nothing else.
    """

    model: nn.Module | None = None

    def __init__(self, variant: str, num_params: int) -> None:
        size = num_params // _BUCKETS
        trained = size if variant == "adam" else size // _ADAPTER_SHARE
        torch.manual_seed(0)
        self.params = [torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for _ in range(_BUCKETS)]
        self.masters = [nn.Parameter(torch.randn(trained, device=DEVICE)) for _ in range(_BUCKETS)]
        for master in self.masters:
            master.grad = torch.full_like(master, 0.01)
        self.is_lora = variant == "lora"
        self.num_params = size * _BUCKETS
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-3, fused=True)
        self.step()

    @torch.no_grad()
    def step(self) -> None:
        """One optimizer step; the parameters are cast from the masters again."""
        for gradient in self.gradients():
            gradient.fill_(0.01)
        self.optimizer.step()
        for param, master in self.casts():
            param.copy_(master)
        torch.cuda.synchronize()

    def forward(self) -> None:
        """The least of a forward pass: reads a parameter, and waits."""
        x = self.params[0][: MIB // 16].view(256, -1)
        (x @ x.t()).sum().item()

    def tensors(self) -> list[torch.Tensor]:
        moments = [local(v) for state in self.optimizer.state.values() for v in state.values()]
        return [*self.params, *map(local, self.masters), *self.gradients(), *moments]

    def gradients(self) -> list[torch.Tensor]:
        return [local(master.grad) for master in self.masters if master.grad is not None]

    def casts(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters that are a cast of a master, each with it."""
        return [] if self.is_lora or not self.params else list(zip(self.params, self.masters, strict=True))

    def payload_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def checksums(self) -> list[int]:
        """Of everything but the gradients, which are dead after a step."""
        live = [*self.params, *map(local, self.masters)]
        live += [local(state["exp_avg"]) for state in self.optimizer.state.values()]
        return [int(t.detach().view(torch.int16).sum(dtype=torch.int64).item()) for t in live]


class ShardedActor(Actor):
    """`_BUCKETS` linear layers under FSDP2 on one rank; the optimizer steps the fp32 shards."""

    def __init__(self, num_params: int) -> None:
        dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1, device_id=DEVICE)
        width = math.isqrt(num_params // _BUCKETS) // 128 * 128
        layers = (nn.Linear(width, width, bias=False, device=DEVICE) for _ in range(_BUCKETS))
        self.model = nn.Sequential(*layers)
        for module in (*self.model, self.model):
            fully_shard(module)
        self.params = []
        self.masters = list(self.model.parameters())
        self.is_lora, self.num_params = False, _BUCKETS * width * width
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-3, fused=True)
        self.model(torch.randn(64, width, device=DEVICE)).square().mean().backward()
        self.step()

    def forward(self) -> None:
        x = local(self.masters[0].detach()).view(-1)[: MIB // 16].view(256, -1)
        (x @ x.t()).sum().item()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Way(ABC):
    """One way of putting the actor to sleep. `sleep` and `wake` return with all of it done."""

    def memory(self) -> AbstractContextManager[None]:
        """What the actor is allocated in."""
        return nullcontext()

    @abstractmethod
    def start(self, actor: Actor) -> None: ...

    @abstractmethod
    def sleep(self) -> Json:
        """Put it to sleep; what there is to say about it."""

    @abstractmethod
    def wake(self) -> Json: ...

    def wake_for_forward(self) -> None:
        """Return as soon as a forward pass can start."""
        self.wake()

    def finish(self) -> None:  # noqa: B027 - an optional step, not a missing one
        """Wait for the rest."""


class Torpor(Way):
    def memory(self) -> AbstractContextManager[None]:
        return torpor.pool()

    def start(self, actor: Actor) -> None:
        def cast(out: torch.Tensor, master: torch.Tensor) -> None:
            out.copy_(master)

        derived = [
            torpor.derived(f"bf16 {i}", p, rebuild=cast, sources=[m], component="params", role=Role.PARAM)
            for i, (p, m) in enumerate(actor.casts())
        ]
        base = nn.ParameterList(nn.Parameter(p, requires_grad=False) for p in actor.params) if actor.is_lora else None
        self.sleeper = torpor.Sleeper(
            actor.model if base is None else base,
            optimizer=actor.optimizer,
            derived=derived,
            memory="auto",
            store="pinned",
            report_leftovers=False,
        )
        actor.step()  # after a step that the sleeper saw, gradients are dead and need no room
        self.sleeper.prewarm()

    def sleep(self) -> Json:
        ledger = self.sleeper.sleep()
        kept = sum(row.nbytes for row in ledger.rows if row.fate == "kept")
        return {
            "copied_bytes": ledger.copied_bytes,
            "host_bytes": ledger.host_bytes,
            "rate": ledger.bytes_per_s / 1e9,
            "stages": ledger.stages,
            "kept_bytes": kept,
            "payload_bytes": ledger.nbytes - kept,
            "by_fate": {str(fate): nbytes for fate, nbytes in ledger.bytes_by_fate().items()},
        }

    def wake(self) -> Json:
        ledger = self.sleeper.wake()
        return {"rate": ledger.bytes_per_s / 1e9, "stages": ledger.stages}

    def wake_for_forward(self) -> None:
        self.sleeper.wake(lazy=True)

    def finish(self) -> None:
        self.sleeper.finish()


class Saver(Way):
    """torch_memory_saver in its torch mode: regions with its own backup on the host."""

    def __init__(self, retain: bool) -> None:
        from torch_memory_saver import torch_memory_saver  # a comparison's library, not one of ours

        self._saver = torch_memory_saver
        self._saver.hook_mode = "torch"
        self._retain = retain

    @contextmanager
    def memory(self) -> Iterator[None]:
        with self._saver.region(enable_cpu_backup=True):
            yield

    def start(self, actor: Actor) -> None:
        self._saver.retain_cpu_backup = self._retain
        self._payload_bytes = actor.payload_bytes()

    def sleep(self) -> Json:
        torch.cuda.synchronize()
        self._saver.pause()
        return {"copied_bytes": self._payload_bytes}

    def wake(self) -> Json:
        self._saver.resume()
        return {}


class ToCpu(Way):
    def start(self, actor: Actor) -> None:
        self._tensors = actor.tensors()

    def sleep(self) -> Json:
        for tensor in self._tensors:
            tensor.data = tensor.data.to("cpu")
        torch.cuda.empty_cache()
        return {"copied_bytes": sum(tensor.nbytes for tensor in self._tensors)}

    def wake(self) -> Json:
        for tensor in self._tensors:
            tensor.data = tensor.data.to(DEVICE)
        torch.cuda.synchronize()
        return {}


class ByHand(Way):
    """Page-locked copies made once; all copies queued, then one wait, then storages freed."""

    def start(self, actor: Actor) -> None:
        self._pairs = [(t.detach(), torch.empty_like(t, device="cpu", pin_memory=True)) for t in actor.tensors()]

    def sleep(self) -> Json:
        for tensor, host in self._pairs:
            host.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
        for tensor, _ in self._pairs:
            tensor.untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        return {"copied_bytes": sum(host.nbytes for _, host in self._pairs)}

    def wake(self) -> Json:
        for tensor, host in self._pairs:
            tensor.untyped_storage().resize_(host.nbytes)
            tensor.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        return {}


WAYS: dict[str, Callable[[], Way]] = {
    "torpor": Torpor,
    "saver": lambda: Saver(retain=False),
    "saver_retained": lambda: Saver(retain=True),
    "to_cpu": ToCpu,
    "by_hand": ByHand,
}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    found = call()
    torch.cuda.synchronize()
    return time.perf_counter() - start, found


def free_bytes() -> int:
    return torch.cuda.mem_get_info(DEVICE)[0]


class Worker:
    """One way and its actor, in a process of its own; each public method answers one request."""

    def __init__(self, way: str, variant: str, num_params: int) -> None:
        self._way = WAYS[way]()
        torch.cuda.init()  # type: ignore[no-untyped-call]
        with self._way.memory():
            self._actor = ShardedActor(num_params // 2) if variant == "fsdp" else Actor(variant, num_params)
        self._actor.forward()
        torch.cuda.empty_cache()
        self._start_s, _ = timed(lambda: self._way.start(self._actor))

    def about(self) -> Json:
        payload_bytes, num_params = self._actor.payload_bytes(), self._actor.num_params
        return {"payload_bytes": payload_bytes, "num_params": num_params, "start_s": self._start_s}

    def cycle(self, lazy: bool) -> Json:
        """Step, sleep, wake; the wake that begins with a forward pass, or the whole one."""
        self._actor.step()
        before = self._actor.checksums()
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        awake_bytes = free_bytes()
        sleep_s, sleep = timed(self._way.sleep)
        asleep_bytes = free_bytes()
        time.sleep(_SETTLE_S)
        found: Json = {"sleep_s": sleep_s, "sleep": sleep}
        found |= {"driver_freed_bytes": asleep_bytes - awake_bytes, "cached_bytes": cached}
        if lazy:
            found["forward_s"] = self._until_forward()
            self._way.finish()
        else:
            found["wake_s"], found["wake"] = timed(self._way.wake)
        if self._actor.checksums() != before:
            raise RuntimeError(f"{type(self._way).__name__} brought other bytes back")
        return found

    def _until_forward(self) -> float:
        """Seconds until the first forward pass is done, whatever still comes after."""
        start = time.perf_counter()
        self._way.wake_for_forward()
        self._actor.forward()
        return time.perf_counter() - start

    def residue(self, cycles: int) -> Json:
        """The driver's free bytes asleep and awake, cycle by cycle."""
        asleep, awake = [], []
        for _ in range(cycles):
            self._actor.step()
            self._way.sleep()
            asleep.append(free_bytes())
            self._way.wake()
            torch.cuda.empty_cache()
            awake.append(free_bytes())
        return {"free_asleep_bytes": asleep, "free_awake_bytes": awake}


class Links:
    """The rates of one large page-locked copy, and of 20,000 small storages through Torpor, in one process."""

    def __init__(self, nbytes: int, num: int) -> None:
        self._device = torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)
        self._host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        self._num = num
        self._sleeper: torpor.Sleeper | None = None

    def roof(self) -> Json:
        found: Json = {"nbytes": self._device.numel()}
        for name, to, source in (("down", self._host, self._device), ("up", self._device, self._host)):
            spent = [timed(partial(to.copy_, source, non_blocking=True))[0] for _ in range(7)]
            found[name] = self._device.numel() / statistics.median(spent) / 1e9
        return found

    def right_after_a_free(self, nbytes: int) -> Json:
        """The rate to the device just after another allocation was freed, and a second later."""
        other = torch.ones(nbytes, dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize()
        del other
        torch.cuda.empty_cache()
        first, _ = timed(lambda: self._device.copy_(self._host, non_blocking=True))
        time.sleep(1)
        later, _ = timed(lambda: self._device.copy_(self._host, non_blocking=True))
        size = self._device.numel()
        return {"freed_bytes": nbytes, "at_once": size / first / 1e9, "later": size / later / 1e9}

    def small(self, settle_s: float) -> Json:
        """One sleep and wake of all small storages, every one of them changed."""
        if self._sleeper is None:
            with torpor.pool():
                size = self._device.numel() // self._num
                self._tensors = [torch.zeros(size, dtype=torch.uint8, device=DEVICE) for _ in range(self._num)]
            self._sleeper = torpor.Sleeper(extra=self._tensors, report_leftovers=False)
            self._sleeper.prewarm()
        torch._foreach_add_(self._tensors, 1)
        down = self._sleeper.sleep()
        time.sleep(settle_s)
        up = self._sleeper.wake()
        if down.copied_bytes < sum(t.nbytes for t in self._tensors):
            raise RuntimeError("not every small storage was copied")
        return {
            "down": down.bytes_per_s / 1e9,
            "up": up.bytes_per_s / 1e9,
            "down_stages": down.stages,
            "up_stages": up.stages,
        }


def serve(pipe: Connection, kind: str, arguments: Sequence[Any]) -> None:
    """Answer requests until there are no more."""
    subject: Worker | Links = Worker(*arguments) if kind == "worker" else Links(*arguments)
    pipe.send({})
    while request := pipe.recv():
        name, *values = request
        pipe.send(getattr(subject, name)(*values))


class Child:
    """A process with a `Worker` or `Links`, and the questions to it."""

    def __init__(self, kind: str, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, kind, arguments))
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def ask(self, name: str, *values: Any) -> Json:
        self._pipe.send((name, *values))
        answer: Json = self._pipe.recv()
        return answer

    def end(self) -> None:
        self._pipe.send(())
        self._process.join()


def race(variant: str, ways: Sequence[str], num_params: int, cycles: int, residue_cycles: int = 0) -> Json:
    """Ways side by side, taking turns in each cycle."""
    present = [way for way in ways if has_saver() or not way.startswith("saver")]
    children = {way: Child("worker", way, variant, num_params) for way in present}
    found: Json = {way: {"about": child.ask("about"), "cycles": [], "forwards": []} for way, child in children.items()}
    for i in range(cycles):
        for way, child in children.items():
            if way not in _SLOW or i < _SLOW_CYCLES:
                found[way]["cycles"].append({"first": i == 0} | child.ask("cycle", False))
                print(variant, way, "cycle", found[way]["cycles"][-1]["sleep_s"], flush=True)
    for way, child in children.items():
        if way in _FORWARD_WAYS:
            found[way]["forwards"] = [child.ask("cycle", True) for _ in range(cycles)]
    if residue_cycles:
        found["torpor"]["residue"] = children["torpor"].ask("residue", residue_cycles)
    for child in children.values():
        child.end()
    return found


def has_saver() -> bool:
    return importlib.util.find_spec("torch_memory_saver") is not None


def links(nbytes: int, num: int, cycles: int) -> Json:
    child = Child("links", nbytes, num)
    found: Json = {"roof": child.ask("roof"), "right_after_a_free": child.ask("right_after_a_free", 4 * nbytes)}
    found["small"] = [{"first": i == 0} | child.ask("small", _SETTLE_S) for i in range(cycles + 1)]
    found["small_at_once"] = [child.ask("small", 0.0) for _ in range(cycles)]
    found["roof_again"] = child.ask("roof")
    child.end()
    return found


@dataclass(frozen=True)
class Figure:
    """One line of the table; `measured` is None where a way that it needs was left out."""

    name: str
    bar: float
    at_most: bool
    measured: float | None

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        met = self.measured <= self.bar if self.at_most else self.measured >= self.bar
        return "met" if met else "not met"


def median_of(rows: Sequence[Json], *path: str) -> float:
    """Of all rows but the first cycle of each process."""
    values = []
    for row in (row for row in rows if not row.get("first")):
        value: Any = row
        for key in path:
            value = value[key]
        values.append(value)
    return float(statistics.median(values))


def ratio(results: Json, way: str, field: str) -> float | None:
    """How many times longer another way takes than Torpor."""
    if way not in results:
        return None
    if field == "forward_s":
        mine = median_of(results["torpor"]["forwards"], "forward_s")
        return median_of(results[way]["forwards"], "forward_s") / mine
    return median_of(results[way]["cycles"], field) / median_of(results["torpor"]["cycles"], field)


def share_of_fingerprints(row: Json) -> float:
    """Of the seconds of one sleep and one wake."""
    return float(
        (row["sleep"]["stages"]["fingerprint"] + row["wake"]["stages"]["verify"]) / (row["sleep_s"] + row["wake_s"])
    )


def later_share(lora: Json) -> float:
    """Of the bf16 base, what sleeps after the first one copied at most."""
    later = max(c["sleep"]["copied_bytes"] for c in lora["cycles"] if not c["first"])
    return float(later / (2 * lora["about"]["num_params"]))


def growth(free: Sequence[int]) -> int:
    """Bytes lost from the second cycle to the last."""
    return free[1] - free[-1]


def figures(adam: Json, link: Json, lora: Json | None) -> list[Figure]:
    """The table, by the definitions in its own lines. Without the LoRA race its line is not measured."""
    mine = adam["torpor"]
    cycles, about, roof, residue = mine["cycles"], mine["about"], link["roof"], mine["residue"]
    first, second = cycles[0]["sleep_s"], cycles[1]["sleep_s"]
    moved = median_of(cycles, "sleep", "copied_bytes")
    freed = min(c["driver_freed_bytes"] / (c["sleep"]["payload_bytes"] + c["cached_bytes"]) for c in cycles)
    grown = max(growth(residue["free_asleep_bytes"]), growth(residue["free_awake_bytes"]))
    return [
        Figure("copied to the host per parameter, Adam, bytes", 12.1, True, moved / about["num_params"]),
        Figure("sleep, times faster than (b)", 25, False, ratio(adam, "saver", "sleep_s")),
        Figure("sleep, times faster than (c)", 1.4, False, ratio(adam, "saver_retained", "sleep_s")),
        Figure(
            "lazy wake to first forward, times faster than (c)", 4, False, ratio(adam, "saver_retained", "forward_s")
        ),
        Figure("rate down, of one large copy", 0.95, False, median_of(cycles, "sleep", "rate") / roof["down"]),
        Figure("rate up, of one large copy", 0.95, False, median_of(cycles, "wake", "rate") / roof["up"]),
        Figure("rate down, small storages", 0.9, False, median_of(link["small"], "down") / roof["down"]),
        Figure("rate up, small storages", 0.9, False, median_of(link["small"], "up") / roof["up"]),
        Figure("first sleep after prewarm, of the second", 1.05, True, first / second),
        Figure("host bytes asleep, of the payload moved", 1.03, True, cycles[0]["sleep"]["host_bytes"] / moved),
        Figure(
            "fingerprints, share of the cycle", 0.03, True, statistics.median(map(share_of_fingerprints, cycles[1:]))
        ),
        Figure(
            "LoRA, copied from the second sleep on, of the base",
            0.01,
            True,
            None if lora is None else later_share(lora["torpor"]),
        ),
        Figure("driver's freed bytes, of payload and cached", 0.995, False, freed),
        Figure(f"growth over {len(residue['free_awake_bytes'])} cycles, bytes", 0, True, grown),
    ]


def table(found: Sequence[Figure], races: dict[str, Json]) -> str:
    lines = [f"{'figure':<52} {'bar':>8} {'measured':>10}  verdict"]
    for figure in found:
        measured = "-" if figure.measured is None else f"{figure.measured:.4g}"
        bar = ("<= " if figure.at_most else ">= ") + f"{figure.bar:g}"
        lines.append(f"{figure.name:<52} {bar:>8} {measured:>10}  {figure.verdict}")
    for title, results in races.items():
        lines.append(f"{title + ', medians in seconds':<52} {'sleep':>8} {'wake':>10} {'to forward':>11}")
        for way, rows in results.items():
            sleep, wake = (median_of(rows["cycles"], key) for key in ("sleep_s", "wake_s"))
            forward = f"{median_of(rows['forwards'], 'forward_s'):11.3f}" if rows["forwards"] else f"{'-':>11}"
            lines.append(f"{LABELS[way]:<52} {sleep:8.3f} {wake:10.3f} {forward}")
    return "\n".join(lines)


def about_the_run() -> Json:
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    if has_saver():
        versions["torch_memory_saver"] = _version("torch_memory_saver")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "card": torch.cuda.get_device_name(DEVICE),
        "versions": versions,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def write(path: Path, run: Json) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/handoff.json"))
    parser.add_argument("--params", type=int, default=2_000_000_000)
    parser.add_argument("--cycles", type=int, default=3, help="of each way in each group, at least 2")
    parser.add_argument("--residue-cycles", type=int, default=20)
    parser.add_argument("--link-bytes", type=int, default=8 * GIB)
    parser.add_argument("--small-storages", type=int, default=20_000)
    parser.add_argument("--parts", help="some of link,adam,lora,fsdp,adam_slow: the others stay as the file has them")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs an NVIDIA GPU")
    run = {} if options.parts is None else json.loads(options.out.read_text(encoding="utf-8"))
    run |= about_the_run() | {"params": options.params, "cycles": options.cycles}
    parts: dict[str, Callable[[], Json]] = {
        "link": lambda: links(options.link_bytes, options.small_storages, options.cycles),
        "adam": lambda: race("adam", FAST_GROUP, options.params, options.cycles, options.residue_cycles),
        "lora": lambda: race("lora", ("torpor", "saver_retained"), options.params, options.cycles),
        "fsdp": lambda: race("fsdp", ("torpor", "saver_retained", "by_hand"), options.params, options.cycles),
        "adam_slow": lambda: race("adam", SLOW_GROUP, options.params, options.cycles),
    }
    found: list[Figure] = []
    for name in parts if options.parts is None else options.parts.split(","):
        run[name] = parts[name]()
        if "adam" in run:
            found = figures(run["adam"], run["link"], run.get("lora"))
            run["figures"] = [asdict(figure) | {"verdict": figure.verdict} for figure in found]
        write(options.out, run)  # what is measured stays, whatever becomes of the rest
    titles = {"Adam": "adam", "Adam, other ways": "adam_slow", "LoRA": "lora", "FSDP2": "fsdp"}
    print(table(found, {title: run[name] for title, name in titles.items() if name in run}))


if __name__ == "__main__":
    main()

"""A Megatron-Core actor with TransformerEngine asleep between its steps: its bits, its bytes, its seconds.

    python benchmarks/megatron_actor.py --out benchmarks/results/megatron_actor.json [--parts bits,bytes] [--layers 8]

The actor: a model with the layers of Llama 3 8B, 8 of them, and a vocabulary of 32,768: 2.0e9 parameters, bf16 with
fp32 gradients, masters and Adam moments; linear layers in the recipe that a case names. Every case has a process of
its own; the file is written anew after each. Bytes are bytes, seconds are wall-clock.

    bits     12 steps with a sleep before each against 12 without, which run twice: losses, parameters, masters, moments
    bytes    copied and dropped by one sleep against the forecast of the same configuration
    caches   what the quantized copies of weights hold, at several moments, against the forecast
    graphs   a captured layer asleep between its replays, its caches moved or quantized again, against one always awake
    times    sleep and wake of the warm actor; torch_memory_saver's pause and resume of the same actor
    loop     30 colocated steps of examples/megatron.toml: reward, and memory in use while the actor sleeps
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

import captured_layer
from torpor.fingerprint import fingerprints
from torpor.forecast import (
    Forecast,
    Format,
    Kind,
    Layout,
    Moment,
    Optimizer,
    Options,
    Recipe,
    Recompute,
    build_model,
    forecast,
    read_config,
)
from torpor.kinds import Fate, Role
from torpor.ledger import Ledger
from torpor.rl.backends.base import Score
from torpor.rl.backends.megatron import MegatronBackend
from torpor.rl.config import MegatronConfig, OptimizerConfig
from torpor.rl.packing import Group
from torpor.rules.transformer_engine import inner_tensors

Json = dict[str, Any]
DEVICE = torch.device("cuda", 0)
ROOT = Path(__file__).parents[1]
STEPS, PROMPT_TOKENS, ANSWER_TOKENS, ANSWERS = 12, 64, 193, 2
FORMATS = {
    "bf16": Format.BF16,
    "blockwise": Format.FP8_BLOCKWISE,
    "current": Format.FP8_CURRENT,
    "delayed": Format.FP8_DELAYED,
}
AMAX_HISTORY = 1024
"""What the backend sets for delayed scaling."""


def llama(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32768,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


class Actor:
    """The backend with batches of random tokens, two microbatches a step."""

    def __init__(
        self,
        layers: int,
        precision: str,
        optimizer: str = "adamw",
        memory: Callable[[], AbstractContextManager[None]] | None = None,
        **megatron: Any,
    ) -> None:
        torch.manual_seed(0)
        torch.cuda.manual_seed(0)
        self.config = llama(layers)
        self.backend = MegatronBackend(
            self.config,
            # The gradients of other attention kernels differ from run to run by themselves.
            megatron=MegatronConfig.model_validate(
                {"precision": precision, "attention_backend": "unfused", **megatron}
            ),
            optimizer=OptimizerConfig.model_validate({"name": optimizer, "weight_decay": 0.01}),
            temperature=1.0,
            logit_chunk_tokens=256,
            memory=memory,
        )
        self.losses: list[tuple[float, float]] = []

    def groups(self, step: int) -> list[Group]:
        generator = torch.Generator().manual_seed(step)

        def tokens(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(32768, (count,), generator=generator).tolist())

        return [Group(tokens(PROMPT_TOKENS), [tokens(ANSWER_TOKENS) for _ in range(ANSWERS)]) for _ in range(2)]

    def accumulate(self, step: int) -> float:
        num_tokens = 2 * ANSWERS * ANSWER_TOKENS

        def loss_of(index: int, scores: list[Score]) -> torch.Tensor:
            return -torch.cat([log_prob_T for log_prob_T, _ in scores]).sum() / num_tokens

        return self.backend.accumulate([[group] for group in self.groups(step)], loss_of)

    def train(self, step: int) -> None:
        loss = self.accumulate(step)
        self.losses.append((loss, self.backend.step(1e-4, 1.0)))

    def score(self) -> None:
        list(self.backend.score([self.groups(0)]))

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.backend.chunk.parameters())

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, buffers, masters and moments."""
        yield from self.backend.chunk.named_parameters()
        yield from self.backend.chunk.named_buffers()
        for name, optimizer in self.backend.optimizers.items():
            for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                yield f"{name}.{index}.master", parameter
                for key, value in optimizer.state[parameter].items():
                    if isinstance(value, torch.Tensor):
                        yield f"{name}.{index}.{key}", value

    def digests(self) -> dict[str, str]:
        """Fingerprints of the exact bits, and the losses."""
        named = {name: tensor.detach() for name, tensor in self.state() if tensor.numel()}
        blocks = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in named.values()]
        found = {name: digest.hex() for name, digest in zip(named, fingerprints(blocks), strict=True)}
        return found | {"losses": repr(self.losses)}

    def cache_bytes(self) -> int:
        """Of the quantized copies of weights, as they lie in TransformerEngine's modules."""
        return sum(
            tensor.nbytes
            for module in self.backend.chunk.modules()
            for workspace in vars(module).get("_fp8_workspaces", {}).values()
            for _, tensor in inner_tensors(workspace)
        )


def plan(
    actor: Actor,
    precision: str,
    options: Options | None = None,
    *,
    optimizer: str = "adamw",
    moment: Moment = Moment.TRAIN,
    recompute: Recompute = Recompute.NONE,
    cache: bool = True,
) -> Forecast:
    """The forecast of the same configuration."""
    with tempfile.TemporaryDirectory() as directory:
        actor.config.save_pretrained(directory)
        model = build_model(read_config(directory))
    recipe = Recipe(
        format=FORMATS[precision], moment=moment, recompute=recompute, cache=cache, amax_history=AMAX_HISTORY
    )
    kind = Kind.MUON if optimizer == "muon" else Kind.ADAM
    return forecast(model, Layout(), recipe, Optimizer(kind=kind), options or Options())


# --- cases -----------------------------------------------------------------------------------------------


def bits(layers: int, precision: str, optimizer: str) -> Json:
    """Three runs in one process, the last one with sleeps; the first two show what a run changes by itself."""
    found = []
    for sleeps in (False, False, True):
        actor = Actor(layers, precision, optimizer)
        found.append(_digests_after_steps(actor, sleeps))
        parameters = actor.num_parameters
        del actor
        gc.collect()  # Megatron-Core's wrappers refer to each other
        torch.cuda.empty_cache()
    without, control, with_sleeps = found
    return {
        "parameters": parameters,
        "steps": STEPS,
        "tensors": len(without) - 1,
        "different_without_sleeps": _different(without, control),
        "different": _different(without, with_sleeps),
        "equal": without == with_sleeps,
        "losses": json.loads(without["losses"].replace("(", "[").replace(")", "]")),
    }


def _digests_after_steps(actor: Actor, sleeps: bool) -> dict[str, str]:
    options = {"rematerialize_param_from_master_weight": True, "report_leftovers": False}
    with actor.backend.open_sleeper(**options) as sleeper:
        for step in range(STEPS):
            if sleeps:
                sleeper.sleep()
                sleeper.wake()
            actor.train(step)
        return actor.digests()


def _different(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(name for name in one if one[name] != other.get(name))


WAYS: dict[str, tuple[dict[str, bool], Options]] = {
    "all off": (
        {"clear_quantized_weight_workspaces": False, "dead_grads_after_step": False},
        Options.off(),
    ),
    "caches dropped": ({"dead_grads_after_step": False}, Options.off().only("drop_caches")),
    "gradients and parameters too": ({"rematerialize_param_from_master_weight": True}, Options()),
}


def count_bytes(layers: int, precision: str) -> Json:
    """One sleep each way after a training step whose gradients are still there, as frameworks leave them."""
    actor = Actor(layers, precision)
    actor.train(0)
    ways: Json = {}
    for index, (name, (options, forecast_options)) in enumerate(WAYS.items()):
        with actor.backend.open_sleeper(**options) as sleeper:
            actor.accumulate(index + 1)
            success, _, _ = actor.backend.optimizer.step()
            held = actor.cache_bytes()
            ledger = sleeper.sleep()
            sleeper.wake()
        actor.backend.chunk.zero_grad_buffer()
        expected = plan(actor, precision, forecast_options)
        copied = sum(row.copied_bytes for row in ledger.rows)
        ways[name] = {
            "copied_bytes": copied,
            "forecast_bytes": expected.copied_bytes,
            "error": copied / expected.copied_bytes - 1,
            "copied_per_parameter": copied / actor.num_parameters,
            "stepped": bool(success),
            "cache_bytes": held,
            "dropped_cache_bytes": _dropped(ledger),
            "forecast_cache_bytes": expected.total(Role.QUANTIZED_CACHE),
            "rows": [{**_row(row), "reason": row.reason} for row in ledger.rows],
        }
    return {"parameters": actor.num_parameters, "ways": ways}


def caches(layers: int, precision: str) -> Json:
    """At each of `STATES`, an actor of its own."""
    return {"layers": layers} | {state: caches_at(layers, precision, state) for state in STATES}


def caches_at(layers: int, precision: str, state: str) -> Json:
    """Bytes of the caches at one moment, held and forecast."""
    settings: Json = {}
    moment, recompute, cache = Moment.TRAIN, Recompute.NONE, True
    if state == "full recompute":
        settings, recompute = {"recompute_granularity": "full"}, Recompute.FULL
    if state == "no transpose cache":
        settings, cache = {"disable_parameter_transpose_cache": True}, False
    actor = Actor(layers, precision, **settings)
    match state:
        case "before the first step":
            moment = Moment.INIT
        case "no-grad forward only":
            moment = Moment.NO_GRAD
            actor.score()
        case "no-grad forward, then a step":
            actor.score()
            actor.train(0)
        case _:
            actor.train(0)
            actor.train(1)
    held = actor.cache_bytes()
    with actor.backend.open_sleeper() as sleeper:
        ledger = sleeper.sleep()
        sleeper.wake()
        before = actor.losses[-1:]
        actor.train(2)
    expected = plan(actor, precision, moment=moment, recompute=recompute, cache=cache).total(Role.QUANTIZED_CACHE)
    return {
        "cache_bytes": held,
        "dropped_bytes": _dropped(ledger),
        "forecast_bytes": expected,
        "equal": held == expected == _dropped(ledger),
        "loss_before_and_after": [*before, actor.losses[-1]],
    }


def times_torpor(layers: int, precision: str) -> Json:
    """Everything on; the first cycle reserves, so it is left out."""
    actor = Actor(layers, precision)
    actor.train(0)
    cycles = []
    with actor.backend.open_sleeper(rematerialize_param_from_master_weight=True, report_leftovers=False) as sleeper:
        prewarm_s, _ = timed(sleeper.prewarm)
        for step in range(4):
            used = used_bytes()
            sleep_s, ledger = timed(sleeper.sleep)
            asleep = used_bytes()
            wake_s, _ = timed(sleeper.wake)
            actor.train(step + 1)
            cycles.append({"sleep_s": sleep_s, "wake_s": wake_s, "used_bytes": used, "asleep_bytes": asleep})
    return {"prewarm_s": prewarm_s, "copied_bytes": sum(r.copied_bytes for r in ledger.rows), **medians(cycles[1:])}


def times_saver(layers: int, precision: str, drop: bool, retain: bool) -> Json:
    """The actor, its activations and caches in one region with the library's own backup."""
    # It sets the library's hook_mode, which is refused once the library is in use: so it comes first.
    import megatron.core.inference.contexts.dynamic_context  # noqa: F401
    from torch_memory_saver import torch_memory_saver as saver

    saver.hook_mode = "torch"
    cycles = []
    region = partial(saver.region, enable_cpu_backup=True)
    with region():
        actor = Actor(layers, precision, memory=nullcontext)
        actor.train(0)
    saver.retain_cpu_backup = retain
    for step in range(4):
        used = used_bytes()
        sleep_s, _ = timed(partial(_pause, saver, actor, drop))
        asleep = used_bytes()
        wake_s, _ = timed(saver.resume)
        with region():
            actor.train(step + 1)
        cycles.append({"sleep_s": sleep_s, "wake_s": wake_s, "used_bytes": used, "asleep_bytes": asleep})
    return medians(cycles[1:])


def _pause(saver: Any, actor: Actor, drop: bool) -> None:
    if drop:
        for module in actor.backend.chunk.modules():
            vars(module).get("_fp8_workspaces", {}).clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    saver.pause()


def loop(steps: int) -> Json:
    """`torpor train` on the example; what its run directory says."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        command = ["train", str(ROOT / "examples" / "megatron.toml"), "--run-dir", str(run), "--steps", str(steps)]
        program = "import sys; from torpor.cli import main; sys.exit(main(sys.argv[1:]))"
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", program, *command], check=True, cwd=directory)
        total_s = time.perf_counter() - start
        metrics, ledgers = (_lines(run / f"{name}.jsonl") for name in ("metrics", "ledgers"))
    rewards = [line["reward/mean"] for line in metrics if "reward/mean" in line]
    quarter = max(1, len(rewards) // 4)
    return {
        "total_s": total_s,
        "reward": rewards,
        "reward_first_quarter": statistics.fmean(rewards[:quarter]),
        "reward_last_quarter": statistics.fmean(rewards[-quarter:]),
        "held_out_reward": {line["step"]: line["eval/reward"] for line in metrics if "eval/reward" in line},
        "sleeps": [_of_sleep(line) for line in ledgers if line["kind"] == "sleep"],
    }


def _of_sleep(ledger: Json) -> Json:
    """Memory in use by all afterwards, and what the sleep did with the actor's."""
    by_fate: dict[str, int] = {}
    for row in ledger["rows"]:
        by_fate[row["fate"]] = by_fate.get(row["fate"], 0) + row["nbytes"]
    return {"used_after_bytes": ledger["used_after_bytes"], "bytes_by_fate": by_fate}


def _lines(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- running -----------------------------------------------------------------------------------------------


def cases(layers: int) -> dict[str, Callable[[], Json]]:
    """By name `PART/...`."""
    found: dict[str, Callable[[], Json]] = {}
    for precision, optimizer in [*((p, "adamw") for p in FORMATS), ("bf16", "muon"), ("blockwise", "muon")]:
        found[f"bits/{precision}/{optimizer}"] = partial(bits, layers, precision, optimizer)
    for precision in ("blockwise", "bf16", "current", "delayed"):
        found[f"bytes/{precision}"] = partial(count_bytes, layers, precision)
    for precision in ("blockwise", "current", "delayed"):
        found[f"caches/{precision}"] = partial(caches, 2, precision)
    for precision in ("blockwise", "current", "delayed"):
        found[f"graphs/{precision}"] = partial(captured_layer.replays, precision)
    found["times/blockwise/torpor"] = partial(times_torpor, layers, "blockwise")
    for drop in (False, True):
        for retain in (False, True):
            name = f"saver{', caches dropped' if drop else ''}{', retained' if retain else ''}"
            found[f"times/blockwise/{name}"] = partial(times_saver, layers, "blockwise", drop, retain)
    found["loop"] = partial(loop, 30)
    return found


STATES = (
    "before the first step",
    "no-grad forward only",
    "no-grad forward, then a step",
    "after a step",
    "full recompute",
    "no transpose cache",
)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    found = call()
    torch.cuda.synchronize()
    return time.perf_counter() - start, found


def used_bytes() -> int:
    """What the driver counts as used."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(DEVICE)
    return total - free


def medians(cycles: list[Json]) -> Json:
    return {"cycles": cycles} | {key: statistics.median(cycle[key] for cycle in cycles) for key in cycles[0]}


def _dropped(ledger: Ledger) -> int:
    rows = [row for row in ledger.rows if row.role is Role.QUANTIZED_CACHE and row.fate is Fate.DROPPED]
    return sum(row.nbytes for row in rows)


def _row(row: Any) -> Json:
    keys = ("component", "role", "fate", "storages", "nbytes", "copied_bytes")
    return {key: getattr(row, key) for key in keys}


def about() -> Json:
    packages = ("torch", "megatron-core", "transformer-engine", "torch_memory_saver", "transformers")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "card": torch.cuda.get_device_name(DEVICE) if torch.cuda.is_available() else None,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextmanager
def recording(path: Path) -> Iterator[Json]:
    """The run so far; written when the block ends."""
    run: Json = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cases": {}}
    yield run
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def run_case(name: str, layers: int, out: Path) -> None:
    """In this process; a failure is recorded as such."""
    start = time.perf_counter()
    try:
        found = cases(layers)[name]()
    except Exception:  # noqa: BLE001 - the other cases go on, and the file says what went wrong
        found = {"failed": traceback.format_exc()}
        print(found["failed"], file=sys.stderr, flush=True)
    with recording(out) as run:
        run["cases"][name] = about() | {"layers": layers, "seconds": time.perf_counter() - start} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/megatron_actor.json"))
    parser.add_argument("--parts", default="bits,bytes,caches,graphs,times,loop", help="parts, or whole names of cases")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--case", help="run this one alone, in this process")
    arguments = parser.parse_args()
    if arguments.case is not None:
        run_case(arguments.case, arguments.layers, arguments.out)
        return
    wanted = arguments.parts.split(",")
    for name in cases(arguments.layers):
        if name in wanted or name.split("/")[0] in wanted:
            print(name, flush=True)
            options = ["--case", name, "--layers", str(arguments.layers), "--out", str(arguments.out)]
            subprocess.run([sys.executable, __file__, *options], check=False)


if __name__ == "__main__":
    main()
